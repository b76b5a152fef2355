"""Conversations and prompts as documents: rendered by a chat template, with a mask of what is trained on.

    messages -> the tokenizer's chat template -> text and marks -> (stage `tokenize`) ids and their loss mask

The document of a conversation has *marks* (MARK), one for each part of its text: the length of the part in
bytes, whether it is a special token that the template wrote, and whether its tokens are trained on. A special
token becomes its one id. Text of a message never does, even if it spells a special token: a noncharacter is
inserted into such text before the template runs and removed afterwards.

The parts to train on come from `{% generation %}` blocks if the template has them, as in transformers.
Without them, they are proved by rendering: a template is *prefix-stable* for a conversation if the text of
its first k messages, both with and without the prompt of the next answer, is a prefix of the whole text. Then
an answer begins where the prefix that ends with its prompt ends, and it ends where the prefix that includes
its message ends. If the template rewrites earlier turns, the record is refused: training on all or none of it
would be a guess. Nothing is trained on after the token that ends the answer.

Templates run in the environment of transformers: Jinja2's sandbox with the same options, `raise_exception`
and `tojson`. `strftime_now` is refused, because a build on another day would produce other bytes.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.files import load_json
from shardkit.formats.tokenizer_file import special_tokens, tokenizer_config
from shardkit.hashing import digest_of

if TYPE_CHECKING:
    from shardkit.tokens.chat_prefixes import Prefixes


MARK = np.dtype([("bytes", "<u4"), ("flags", "u1")])
SPECIAL, TRAINED = 1, 2  # bits of the field "flags" of MARK

_OPEN, _CLOSE, _INSIDE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters; messages may not have them
_MARKERS = frozenset((_OPEN, _CLOSE, _INSIDE))
_MAX_TEMPLATE_BYTES = 1 << 20
_OF_CONVERSATIONS = ("messages", "tools", "add_generation_prompt")
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatError(Exception):
    """A record cannot be rendered, or its loss mask cannot be proved; `reason` is its quarantine reason."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True)
class ChatFormat:
    """A chat template and the special tokens of its tokenizer; plain data that can be passed to tasks.

    `tokens` are the tokens that the template may use by name, such as bos_token. `eos`, `bos` and `variables`
    (the template's own variables, chat_template_kwargs) come from the recipe.
    """

    template: str
    specials: tuple[str, ...]
    tokens: Mapping[str, str] = field(default_factory=dict)
    eos: str = ""
    bos: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """The digest of everything that decides how a conversation is rendered."""
        facts = [self.template, self.specials, dict(self.tokens), self.eos, self.bos, dict(self.variables)]
        return digest_of(facts)

    @classmethod
    def of(
        cls,
        path: Path,
        eos: str,
        *,
        bos: str | None = None,
        template: Path | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """Return the chat format of a tokenizer.json. `template` is a Jinja file.

        Without one, it is chat_template.jinja or in tokenizer_config.json, in the tokenizer's folder. Raises
        RecipeError if there is no template, or the files cannot be used.
        """
        if path.suffix != ".json":
            raise RecipeError(f"tokenizer.path: conversations need a tokenizer.json, but {path} is not one")
        try:
            special = special_tokens(tokenizer_config(path, path.read_bytes()))
        except OSError as error:
            raise RecipeError(f"tokenizer.path: {path} cannot be read ({error.strerror or error})") from error
        beside = path.with_name("tokenizer_config.json")
        facts = _facts(beside)
        tokens = {name: _content(facts[name], name, beside) for name in _TOKENS if facts.get(name)}
        source = _template(path, template, facts)
        compile_template(source)
        return cls(source, tuple(special), tokens, eos, bos, variables or {})


def compile_template(source: str) -> None:
    """Raise RecipeError unless `source` compiles as a chat template, or MissingExtraError without Jinja2."""
    try:
        from shardkit.tokens.chat_template import ChatTemplate
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", "chat", "chat templates") from error
    ChatTemplate(source)


def _facts(path: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, {} if it is missing; raise RecipeError if damaged."""
    try:
        found = load_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RecipeError(f"tokenizer.path: {path}, in the same folder, cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise RecipeError(f"tokenizer.path: {path}, in the same folder, is not a JSON object")
    return found


def _content(token: object, name: str, path: Path) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise RecipeError(f"tokenizer.path: {path}, in the same folder: {name} is not text: {str(text)[:80]}")
    return text


def _template(tokenizer: Path, named: Path | None, facts: Mapping[str, Any]) -> str:
    file = tokenizer.with_name("chat_template.jinja") if named is None else named
    if file.is_file() and file.stat().st_size <= _MAX_TEMPLATE_BYTES:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"tokenizer.chat_template: {file} cannot be read as UTF-8: {error}") from error
    if named is not None:
        raise RecipeError(
            f"tokenizer.chat_template: {file} is not a file, or is larger than {_MAX_TEMPLATE_BYTES:,} bytes"
        )
    found = facts.get("chat_template")
    if isinstance(found, list):  # a list of templates, each with a name
        named_so = (one for one in found if isinstance(one, Mapping) and one.get("name") == "default")
        found = next((one.get("template") for one in named_so), None)
    if not isinstance(found, str):
        raise RecipeError(
            f"tokenizer.chat_template: there is no file {file}, and no chat_template in "
            f"tokenizer_config.json; set tokenizer.chat_template to a file with the Jinja template"
        )
    return found


@dataclass(frozen=True, slots=True)
class Rendered:
    """A document's text and its marks, the bytes of an array of dtype MARK."""

    text: str
    marks: bytes

    @property
    def trained_bytes(self) -> int:
        """The total UTF-8 length of the parts that are trained on, in bytes."""
        marks = np.frombuffer(self.marks, MARK)
        return int(marks["bytes"][marks["flags"] & TRAINED != 0].sum())


def render_chat(
    chat: ChatFormat,
    messages: Any,
    tools: Any = None,
    variables: Any = None,
    *,
    train_on: str = "assistant",
) -> Rendered:
    """Render a conversation to its text and marks.

    `variables` are the template variables of the record, which override those of the recipe. `train_on` is
    "assistant" (all answers), "last_assistant" or "all". Raises ChatError if the conversation cannot be
    rendered or its mask cannot be proved, and RecipeError if the template cannot be compiled or takes minutes
    for one record.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("bad_messages", "the conversation is not a list with at least one message")
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise ChatError("bad_messages", "a message is not an object with a role")
    pattern = _pattern(chat.specials)
    messages = _escaped(messages, pattern)
    given = {"documents": None, **chat.tokens, **chat.variables, **_variables(_escaped(variables, pattern))}
    given["tools"] = _escaped(tools, pattern)
    with _refusals():
        prefixes = _prefixes(chat, messages, given)
        text, spans = _generations(prefixes.text)
        if train_on == "all":
            spans = [(0, len(text))]
        elif not spans:
            spans = _answers(prefixes, messages, pattern, only_last=train_on == "last_assistant")
        if train_on == "last_assistant":
            spans = spans[-1:]
        return _marked(chat, text, spans, pattern)


def pair_of(prompt: str, completion: str) -> Rendered:
    """Return the document of a prompt and its completion; only the completion is trained on."""
    marks = np.zeros(2, MARK)
    marks["bytes"] = [len(prompt.encode()), len(completion.encode())]
    marks["flags"] = [0, TRAINED]
    return Rendered(prompt + completion, marks[marks["bytes"] > 0].tobytes())


def _pattern(specials: Sequence[str]) -> re.Pattern[str]:
    """Compile a regular expression that finds special tokens; where several begin, it finds the longest."""
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")


def _escaped(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return the value with a noncharacter inserted wherever a text in it spells a special token."""
    match value:
        case str():
            if not _MARKERS.isdisjoint(value):
                raise ChatError("bad_messages", "a text contains a noncharacter (U+FDD0 to U+FDD2)")
            return pattern.sub(lambda found: f"{found[0][0]}{_INSIDE}{found[0][1:]}", value)
        case list() | tuple():
            return [_escaped(one, pattern) for one in value]
        case dict():
            return {key: _escaped(one, pattern) for key, one in value.items()}
    return value


def _prefixes(chat: ChatFormat, messages: list[Any], variables: Mapping[str, Any]) -> Prefixes:
    """Render the conversation with a limit of steps that grows with the size of the record."""
    from shardkit.tokens.chat_prefixes import Prefixes
    from shardkit.tokens.chat_template import date_of
    from shardkit.tokens.chat_work import Work

    if "strftime_now" in variables:
        variables = {**variables, "strftime_now": date_of(variables["strftime_now"])}
    given = [messages, {name: value for name, value in variables.items() if name != "strftime_now"}]
    return Prefixes(chat.template, messages, variables, Work(len(json.dumps(given, default=str))))


@contextmanager
def _refusals() -> Iterator[None]:
    """Context manager that turns an exception of the chat template into a ChatError for the record."""
    from jinja2 import TemplateError

    from shardkit.tokens.chat_work import TemplateLimitError

    try:
        yield
    except (ChatError, RecipeError):
        raise
    except TemplateLimitError as error:
        raise ChatError("template_limit", str(error)) from error
    except Exception as error:
        what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ChatError("bad_messages", f"the chat template refuses the conversation: {what}") from error


def misused_variables(given: Mapping[str, Any]) -> str | None:
    """Return a message if variables of a chat template, from a recipe or record, are invalid; else None."""
    if taken := [name for name in _OF_CONVERSATIONS if name in given]:
        return f"{taken[0]} cannot be set here: it comes from the conversation"
    if "strftime_now" in given:
        try:
            date.fromisoformat(given["strftime_now"])
        except (TypeError, ValueError):
            return f"strftime_now is not a date such as 2026-01-31: {given['strftime_now']!r}"
    return None


def _variables(given: Any) -> dict[str, Any]:
    """Return the template variables of a record, {} for None; raise ChatError if they are unusable."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ChatError("bad_messages", "chat_template_kwargs is not an object of template variables")
    if problem := misused_variables(given):
        raise ChatError("bad_messages", f"chat_template_kwargs: {problem}")
    return given


def _generations(whole: str) -> tuple[str, list[tuple[int, int]]]:
    """Return (the text without markers, (begin, end) of each generation block in this text)."""
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
    prefixes: Prefixes, messages: Sequence[Any], pattern: re.Pattern[str], *, only_last: bool
) -> list[tuple[int, int]]:
    """Return (begin, end) of each answer with its end token; raise ChatError if these cannot be proved."""
    text, spans = prefixes.text, []
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    closing = [found for found in pattern.finditer(text) if found.end() == len(text)]
    # Some templates write a token after the last message only, such as Phi-3's end of text.
    tail = closing[0][0] if closing else ""
    for number in numbers[-1:] if only_last else numbers:
        start = prefixes.length_of(number, prompt=True) if number else 0
        stop = prefixes.length_of(number + 1, prompt=False, tail=tail)
        if stop is None or start is None or start > stop:
            problem = (
                f"writes message {number} differently when other messages follow it"
                if stop is None
                else f"does not begin message {number} with the generation prompt"
            )
            raise ChatError(
                "unproved_mask",
                f"the chat template {problem}, and has no generation blocks, so the text to train on is "
                f"unknown; add the blocks (TRL has such templates for many models), or set train_on: "
                f"last_assistant (needs no proof of earlier answers) or all",
            )
        ends = [found.end() for found in pattern.finditer(text, start, stop)]
        end = ends[-1] if ends and not text[ends[-1] : stop].strip() else stop
        if end > start:
            spans.append((start, end))
    return spans


def _marked(
    chat: ChatFormat, text: str, spans: Sequence[tuple[int, int]], pattern: re.Pattern[str]
) -> Rendered:
    """Divide a text into parts with marks; leave out the recipe's bos and eos, which are added later."""
    start, stop = 0, len(text.rstrip()) if text.rstrip().endswith(chat.eos) else len(text)
    if chat.bos is not None and text.startswith(chat.bos):
        start = len(chat.bos)
    if text[:stop].endswith(chat.eos):
        stop -= len(chat.eos)
    parts: list[tuple[str, int]] = []
    cuts = sorted({edge for span in spans for edge in span})
    begins = sorted(begin for begin, _ in spans)
    reach = [*accumulate((end for _, end in sorted(spans)), max)]  # [i]: largest end of the first i + 1 spans

    def trained(a: int, b: int) -> int:
        number = bisect_right(begins, a) - 1
        return TRAINED if number >= 0 and b <= reach[number] else 0

    at = start
    for found in [*pattern.finditer(text, start, stop), None]:
        plain_end = stop if found is None else found.start()
        inside = cuts[bisect_right(cuts, at) : bisect_left(cuts, plain_end)]
        for a, b in pairwise([at, *inside, plain_end]):
            if plain := text[a:b].replace(_INSIDE, ""):
                parts.append((plain, trained(a, b)))
        if found is not None:
            if found[0] == chat.eos:
                raise ChatError(
                    "eos_inside",
                    f"the chat template writes {chat.eos} inside a conversation, where it would end the "
                    f"document; set tokenizer.eos to another special token",
                )
            parts.append((found[0], SPECIAL | trained(*found.span())))
            at = found.end()
    marks = np.zeros(len(parts), MARK)
    marks["bytes"] = [len(part.encode()) for part, _ in parts]
    marks["flags"] = [flags for _, flags in parts]
    return Rendered("".join(part for part, _ in parts), marks.tobytes())


def parts_of(text: str, marks: bytes) -> list[tuple[str, int]]:
    """Return (text, flags) for each part of a document; without marks, one part that is trained on."""
    if not marks:
        return [(text, TRAINED)]
    data, at, parts = text.encode(), 0, []
    for size, flags in np.frombuffer(marks, MARK).tolist():
        parts.append((data[at : at + size].decode(), flags))
        at += size
    assert at == len(data), "the marks belong to another text"
    return parts


def without_nulls(value: Any) -> Any:
    """Return the value without null fields: in a table, a message has null for the keys that it lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
