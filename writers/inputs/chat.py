"""Conversations and prompts as documents: rendered by a chat template, with a mask of what is trained on.

    messages -> the tokenizer's chat template -> text and marks -> (stage `tokenize`) ids and their loss mask

A document of a conversation has *marks* (MARK): for each part of its text how many bytes it has, whether it
is a special token that the template wrote, and whether its tokens are trained on. Specials become their one
id. What a user wrote never does: text that spells a special token stays text, because it is told apart while
the template runs (a noncharacter inside of it, taken out afterwards).

What is trained on comes from `{% generation %}` blocks where the template has them, as in transformers.
Without them it is proved by rendering: a template is *prefix-stable* for a conversation if the text of its
first k messages, and that with the prompt of the next answer, are beginnings of the whole; then an answer is
what the whole has between the two. If they are not, because the template rewrites earlier turns, the record
is refused: training on all or none of it would be a guess. Nothing is trained on beyond the token that ends
the answer.

The environment is that of transformers: Jinja2 sandboxed, with its options, `raise_exception` and `tojson`.
`strftime_now` is refused, since the same build on another day would have other bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.files import load_json
from shardkit.hashing import digest_of
from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.recipe import InputConfig, Recipe
from shardkit.writers.tokenizer_file import find_tokenizer

__all__ = [
    "MARK",
    "SPECIAL",
    "TRAINED",
    "ChatError",
    "ChatFormat",
    "Masking",
    "Rendered",
    "pair_of",
    "parts_of",
    "render_chat",
    "without_nulls",
]

MARK = np.dtype([("bytes", "<u4"), ("flags", "u1")])
SPECIAL, TRAINED = 1, 2

_OPEN, _CLOSE, _INSIDE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters: no text should have them
_MARKERS = frozenset((_OPEN, _CLOSE, _INSIDE))
_MAX_TEMPLATE_BYTES = 1 << 20
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatError(Exception):
    """A record that cannot be rendered, or whose mask cannot be proved; `reason` is for the quarantine."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True)
class ChatFormat:
    """A chat template and the special tokens of its tokenizer; plain data, an argument of tasks.

    `tokens` are what the template may name, such as bos_token; `eos` and `bos` are those of the recipe.
    """

    template: str
    specials: tuple[str, ...]
    tokens: Mapping[str, str] = field(default_factory=dict)
    eos: str = ""
    bos: str | None = None

    @property
    def digest(self) -> str:
        """Names all that decides what a conversation becomes."""
        return digest_of([self.template, self.specials, dict(self.tokens), self.eos, self.bos])

    @classmethod
    def of(cls, recipe: Recipe) -> ChatFormat | None:
        """That of the recipe's tokenizer; None if no input has conversations. RecipeError without one."""
        if not any(config.messages for config in recipe.inputs):
            return None
        assert recipe.tokenizer is not None
        path = find_tokenizer(recipe.folder, recipe.tokenizer.path)
        if path.suffix != ".json":
            raise RecipeError(f"tokenizer.path: conversations need a tokenizer.json; {path} is none")
        facts = _json(path.with_name("tokenizer_config.json")) or {}
        special = [t["content"] for t in (_json(path) or {}).get("added_tokens") or () if t.get("special")]
        tokens = {name: _content(facts[name]) for name in _TOKENS if facts.get(name)}
        template = _template(recipe, path, facts)
        return cls(template, tuple(special), tokens, recipe.tokenizer.eos, recipe.tokenizer.bos)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = load_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _template(recipe: Recipe, tokenizer: Path, facts: Mapping[str, Any]) -> str:
    assert recipe.tokenizer is not None
    named = recipe.tokenizer.chat_template
    file = tokenizer.with_name("chat_template.jinja") if named is None else recipe.resolve(named)
    if file.is_file() and file.stat().st_size <= _MAX_TEMPLATE_BYTES:
        return file.read_text()
    if named is not None:
        raise RecipeError(
            f"tokenizer.chat_template: {file} is no file of at most {_MAX_TEMPLATE_BYTES:,} bytes"
        )
    found = facts.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise RecipeError(
            f"tokenizer.chat_template: neither {file} is there, nor chat_template in tokenizer_config.json; "
            f"name a file with the Jinja template"
        )
    return found


@dataclass(frozen=True, slots=True)
class Rendered:
    """A document's text, and the bytes of its marks (MARK)."""

    text: str
    marks: bytes

    @property
    def trained_bytes(self) -> int:
        """UTF-8 bytes of the parts that are trained on."""
        marks = np.frombuffer(self.marks, MARK)
        return int(marks["bytes"][marks["flags"] & TRAINED != 0].sum())


def render_chat(
    chat: ChatFormat, messages: Any, tools: Any = None, *, train_on: str = "assistant"
) -> Rendered:
    """The text of a conversation with its marks; ChatError if it cannot be rendered, or its mask not proved.

    `train_on`: "assistant" (all answers), "last_assistant" or "all".
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("bad_messages", "a conversation is a list of messages, and this is none")
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise ChatError("bad_messages", "each message is an object with a role")
    pattern = _pattern(chat.specials)
    messages, tools = _escaped(messages, pattern), _escaped(tools, pattern)
    run = _renderer(chat)
    whole = run(messages, tools, False)
    text, spans = _generations(whole)
    if train_on == "all":
        spans = [(0, len(text))]
    elif not spans:
        spans = _answers(run, text, messages, tools, pattern)
    if train_on == "last_assistant":
        spans = spans[-1:]
    return _marked(chat, text, spans, pattern)


def pair_of(prompt: str, completion: str) -> Rendered:
    """A prompt and its completion, which alone is trained on."""
    marks = np.zeros(2, MARK)
    marks["bytes"] = [len(prompt.encode()), len(completion.encode())]
    marks["flags"] = [0, TRAINED]
    return Rendered(prompt + completion, marks[marks["bytes"] > 0].tobytes())


def _pattern(specials: Sequence[str]) -> re.Pattern[str]:
    """Finds special tokens, longer ones first."""
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")


def _escaped(value: Any, pattern: re.Pattern[str]) -> Any:
    """The same with a noncharacter in every text that spells a special token."""
    match value:
        case str():
            if not _MARKERS.isdisjoint(value):
                raise ChatError("bad_messages", "a text has a noncharacter (U+FDD0 to U+FDD2)")
            return pattern.sub(lambda found: f"{found[0][0]}{_INSIDE}{found[0][1:]}", value)
        case list() | tuple():
            return [_escaped(one, pattern) for one in value]
        case dict():
            return {key: _escaped(one, pattern) for key, one in value.items()}
    return value


_Run = Callable[[Sequence[Any], Any, bool], str]


def _renderer(chat: ChatFormat) -> _Run:
    template = _compiled(chat.template)

    def run(messages: Sequence[Any], tools: Any, prompt: bool) -> str:
        import jinja2

        try:
            return str(
                template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **chat.tokens)
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ChatError("bad_messages", f"the chat template refuses it: {error}") from error

    return run


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", "chat", "chat templates") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`: what a template says is generated."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def no_time(_: str) -> None:
        raise jinja2.TemplateError("it asks for today's date, with which a build could not be repeated")

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": no_time}
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"tokenizer.chat_template: line {error.lineno}: {error.message}") from error


def _generations(whole: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text without markers, the spans that lie in generation blocks)."""
    spans: list[tuple[int, int]] = []
    parts, at, length, begin = [], 0, 0, 0
    for found in re.finditer(f"[{_OPEN}{_CLOSE}]", whole):
        parts.append(whole[at : found.start()])
        length += found.start() - at
        at = found.end()
        if found[0] == _OPEN:
            begin = length
        elif length > begin:
            spans.append((begin, length))
    return "".join([*parts, whole[at:]]), spans


def _answers(
    run: _Run, text: str, messages: Sequence[Any], tools: Any, pattern: re.Pattern[str]
) -> list[tuple[int, int]]:
    """The spans of the assistant's messages, each up to the token that ends it; ChatError if unproved."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = run(messages[:number], tools, True) if number else ""
        after = run(messages[: number + 1], tools, False)
        if not (text.startswith(after) and after.startswith(before)):
            problem = (
                f"does not begin message {number} with the prompt it writes for it"
                if text.startswith(after)
                else f"writes message {number} in another way once others follow"
            )
            raise ChatError(
                "unproved_mask",
                f"the chat template {problem}, and has no generation blocks, so what to train on is not "
                f"known; add the blocks (TRL has such templates of many models), or set train_on: all",
            )
        end = len(after)
        ends = [found.end() for found in pattern.finditer(after, len(before))]
        if ends and not after[ends[-1] :].strip():
            end = ends[-1]
        if end > len(before):
            spans.append((len(before), end))
    return spans


def _marked(
    chat: ChatFormat, text: str, spans: Sequence[tuple[int, int]], pattern: re.Pattern[str]
) -> Rendered:
    """The parts of the text; the recipe's bos at its beginning and eos at its end go, as they are added."""
    start, stop = 0, len(text.rstrip()) if text.rstrip().endswith(chat.eos) else len(text)
    if chat.bos is not None and text.startswith(chat.bos):
        start = len(chat.bos)
    if text[:stop].endswith(chat.eos):
        stop -= len(chat.eos)
    parts: list[tuple[str, int]] = []
    cuts = sorted({edge for span in spans for edge in span})
    at = start
    for found in [*pattern.finditer(text, start, stop), None]:
        plain_end = stop if found is None else found.start()
        edges = [at, *(cut for cut in cuts if at < cut < plain_end), plain_end]
        for a, b in pairwise(edges):
            if plain := text[a:b].replace(_INSIDE, ""):
                parts.append((plain, _trained(a, b, spans)))
        if found is not None:
            if found[0] == chat.eos:
                raise ChatError(
                    "eos_inside",
                    f"the chat template writes {chat.eos} inside of a conversation, where it would end the "
                    f"document; set tokenizer.eos to another special token",
                )
            parts.append((found[0], SPECIAL | _trained(*found.span(), spans)))
            at = found.end()
    marks = np.zeros(len(parts), MARK)
    marks["bytes"] = [len(part.encode()) for part, _ in parts]
    marks["flags"] = [flags for _, flags in parts]
    return Rendered("".join(part for part, _ in parts), marks.tobytes())


def _trained(start: int, stop: int, spans: Sequence[tuple[int, int]]) -> int:
    return TRAINED if any(a <= start and stop <= b for a, b in spans) else 0


def parts_of(text: str, marks: bytes) -> list[tuple[str, int]]:
    """(text, flags) of each part of a document; one plain part that is trained on without marks."""
    if not marks:
        return [(text, TRAINED)]
    data, at, parts = text.encode(), 0, []
    for size, flags in np.frombuffer(marks, MARK).tolist():
        parts.append((data[at : at + size].decode(), flags))
        at += size
    assert at == len(data), "marks of another text"
    return parts


def without_nulls(value: Any) -> Any:
    """The same without keys whose value is null: tables have every key in every message."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Masking:
    """How records become documents with marks, in a build that has any; plain data, an argument of tasks."""

    chat: ChatFormat | None = None

    @property
    def digest(self) -> str:
        """Names all that decides texts and marks."""
        return "" if self.chat is None else self.chat.digest

    @classmethod
    def of(cls, recipe: Recipe) -> Masking | None:
        """That of a recipe; None if its rows have no loss mask. RecipeError without a chat template."""
        return cls(ChatFormat.of(recipe)) if recipe.is_masked else None

    def render(self, config: InputConfig, fields: Mapping[str, Any]) -> Rendered:
        """The document in a record's fields; ChatError."""
        if config.messages is not None:
            assert self.chat is not None
            messages, tools = field_at(fields, config.messages), field_at(fields, config.tools)
            if messages is MISSING:
                raise ChatError("no_text", f"no field {config.messages!r}; its fields: {', '.join(fields)}")
            given = None if tools is MISSING or not tools else tools
            return render_chat(self.chat, messages, given, train_on=config.train_on)
        assert config.prompt is not None
        assert config.completion is not None
        texts = [field_at(fields, path) for path in (config.prompt, config.completion)]
        for path, text in zip((config.prompt, config.completion), texts, strict=True):
            if not isinstance(text, str):
                raise ChatError("no_text", f"field {path!r} is not text; its fields: {', '.join(fields)}")
        return pair_of(str(texts[0]), str(texts[1]))
