"""`ask`: an OpenAI-compatible endpoint (vLLM, SGLang, OpenAI, …) scores, labels or rewrites documents.

A prompt is made from each document and sent as a chat completion. With `score` or `label`, a rule judges what
the answer says; `buckets` can use the score. With `rewrite`, the answer replaces the text; the document keeps
its id, so provenance leads to the source, and rewritten.jsonl has the model, the prompt and its version.

Answers are kept in a folder (answers.py) by a digest of the request, without its URL, and of `version`: the
same request is paid for once, in whichever build. The answers and these settings decide the result; the
folder decides only what it costs. Requests are sent by endpoint.py. Only documents that no earlier rule
dropped are sent; the sample that is judged by all rules is not.

An answer is *unusable* if the model refused, if it has no score or label where the settings look for it, or
if a rewritten text is empty or was cut at `max_tokens`. A request *failed* if it has no answer after all
retries.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import numpy as np
from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from shardkit.errors import RecipeError
from shardkit.settings import Bounds, FieldName, Listed, LocalPath, StrictModel
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.resources import UnavailableError
from shardkit.writers.filters.answers import Answer, Failure, Meter, Rates, open_answers
from shardkit.writers.filters.base import Edit, FilterSettings, Rule

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


FAILED, UNUSABLE = "failed", "unusable"  # names of rules
_FIELD = re.compile(r"\{(text|url|id|metadata(?:\.\w+)+)\}")
_OURS = ("messages", "model", "n", "stream", "max_tokens", "temperature", "seed")


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a base URL; write it like http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("the URL has a user or password; name a variable with the key in `api_key_env`")
    return url.rstrip("/").removesuffix("/chat/completions")


def _regular_expression(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if groups > 1:
        raise ValueError(f"{pattern!r} has {groups} groups; write (?:…) for all but the one that is wanted")
    return pattern


class Extract(StrictModel):
    """The part of an answer that is wanted: all of it, a key of a JSON object, or a match."""

    key: FieldName | None = Field(
        default=None, description="Key of the JSON object in the answer; a.b is key b inside a."
    )
    pattern: Annotated[str, AfterValidator(_regular_expression)] | None = Field(
        default=None, description="Regular expression, whose last match counts: its group, or all of it."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.key is not None and self.pattern is not None:
            raise ValueError("give key or pattern, not both")
        return self

    def found(self, text: str) -> Any:
        """Return what is wanted in an answer; None if it is not there."""
        if self.pattern is not None:
            matches = [*re.finditer(self.pattern, text)]
            return matches[-1][1 if matches[-1].re.groups else 0] if matches else None
        if self.key is None:
            return text.strip()
        try:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
            for name in self.key.split("."):
                found = found[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return found


class ScoreConfig(Extract, Bounds):
    """A number in the answer, and its bounds."""

    name: FieldName = Field(default="score", description="Name of the score, for `buckets` and reasons.")

    @model_validator(mode="after")
    def _is_no_rule(self) -> Self:
        if self.name in (FAILED, UNUSABLE):
            raise ValueError(f"a score cannot be called {self.name!r}, the name of a rule; rename it")
        return self

    def number(self, text: str) -> float:
        """Return the score in an answer; NaN if it has none."""
        found = self.found(text)
        if not isinstance(found, str | int | float) or isinstance(found, bool):
            return math.nan
        try:
            number = float(found)
        except (ValueError, OverflowError):
            return math.nan
        return number if math.isfinite(number) else math.nan


class LabelConfig(Extract):
    """A label in the answer, and the labels that stay."""

    keep: Listed[FieldName] = Field(
        default=(), description="Labels of the documents that stay; empty: all, if `field` stores the label."
    )


class RewriteConfig(Extract):
    """The text in the answer, which replaces the document's."""


class BudgetConfig(StrictModel):
    """The most that all builds together spend on one model and prompt."""

    requests: int | None = Field(default=None, ge=1, description="Requests; null: any number.")
    tokens: int | None = Field(default=None, ge=1, description="Tokens in and out; null: any number.")


class AskConfig(FilterSettings):
    """Settings of `ask`: where and what is asked, and what an answer means."""

    omitted_at_default: ClassVar = frozenset({"field"})
    not_content: ClassVar = frozenset(
        {
            *("url", "api_key_env", "answers", "concurrency", "requests_per_minute", "tokens_per_minute"),
            *("budget", "timeout_seconds", "retries"),
        }
    )

    url: Annotated[str, AfterValidator(_base_url), DecidesNoByte("the model is named by `model`")] = Field(
        description="Base URL of the endpoint, to which /chat/completions is added.",
        examples=["http://localhost:8000/v1"],
    )
    model: FieldName = Field(description="Name of the model.")
    api_key_env: Annotated[FieldName | None, DecidesNoByte("a secret")] = Field(
        default=None, description="Environment variable with the API key; null: none is sent."
    )
    prompt: FieldName | None = Field(
        default=None,
        description="Template of the user's message, with {text}, {url}, {id} or {metadata.field}.",
    )
    prompt_file: FieldName | None = Field(default=None, description="UTF-8 file with the template, instead.")
    system: FieldName | None = Field(default=None, description="System message.")
    version: FieldName = Field(
        default="1", description="Version of prompt and model: another one asks all documents anew."
    )
    characters: int | None = Field(
        default=None, ge=1, description="First characters of the text that are sent; null: all."
    )
    max_tokens: int | None = Field(
        default=1024, ge=1, description="Most tokens of an answer; null: not sent."
    )
    temperature: float | None = Field(default=0.0, ge=0, description="Temperature; null: not sent.")
    seed: int | None = Field(default=None, description="Seed of the endpoint's sampling; null: not sent.")
    body: dict[str, JsonValue] = Field(
        default={},
        description="Further keys of the request.",
        examples=[{"response_format": {"type": "json_object"}}],
    )
    score: ScoreConfig | None = Field(default=None, description="The answer has a score.")
    label: LabelConfig | None = Field(default=None, description="The answer has a label.")
    rewrite: RewriteConfig | None = Field(default=None, description="The answer is the new text; or true.")
    field: FieldName | None = Field(
        default=None,
        description="Metadata field in which the score or the label is stored, for later steps and "
        "output.where; null: none.",
        examples=["topic"],
    )
    unusable: Literal["drop", "keep"] = Field(
        default="drop",
        description="A document whose answer is unusable: drop it, or keep it as it is, without a score.",
    )
    on_error: Literal["stop", "drop", "keep"] = Field(
        default="stop", description="A document whose request failed: stop the build, drop it, or keep it."
    )
    concurrency: Annotated[int, DecidesNoByte("a rate")] = Field(
        default=16, ge=1, le=1024, description="Requests that each worker has in flight."
    )
    requests_per_minute: Annotated[float | None, DecidesNoByte("a rate")] = Field(
        default=None, gt=0, description="Limit for all workers that share `answers`; null: none."
    )
    tokens_per_minute: Annotated[float | None, DecidesNoByte("a rate")] = Field(
        default=None, gt=0, description="The same for tokens, estimated before a request; null: none."
    )
    budget: Annotated[BudgetConfig | None, DecidesNoByte("stops a build")] = Field(
        default=None, description="What may be spent; a build that reaches it stops, and can be continued."
    )
    timeout_seconds: Annotated[float, DecidesNoByte("a request is sent again")] = Field(
        default=300.0, gt=0, le=86400, description="Longest time until an answer is whole."
    )
    retries: Annotated[int, DecidesNoByte("a request is sent again")] = Field(
        default=6, ge=0, le=100, description="Most times that a request is sent again after an error."
    )
    answers: Annotated[LocalPath, DecidesNoByte("a kept answer equals the endpoint's")] = Field(
        default="answers",
        validate_default=True,
        description="Folder of kept answers; for several machines, on a shared file system.",
    )

    @field_validator("answers")
    @classmethod
    def _in_the_recipes_folder(cls, path: str, info: ValidationInfo) -> str:
        """Make the path absolute: on other machines, filters have another folder than the recipe's."""
        folder = (info.context or {}).get("folder")
        return path if folder is None else str(Path(folder).absolute() / path)

    @field_validator("rewrite", mode="before")
    @classmethod
    def _switch(cls, given: object) -> object:
        return {} if given is True else None if given is False else given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("give prompt or prompt_file")
        if self.prompt is not None:
            _check_template(self.prompt)
        given = [name for name in ("score", "label", "rewrite") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of score, label and rewrite; got {', '.join(given) or 'none'}")
        if self.label is not None and not self.label.keep and self.field is None:
            raise ValueError("label: nothing would come of it; give keep, or a field in which it is stored")
        if self.field is not None and self.rewrite is not None:
            raise ValueError("field: a rewritten text has no score or label; leave out field")
        if taken := [name for name in _OURS if name in self.body]:
            raise ValueError(f"body: {taken[0]} is not set here")
        return self

    @property
    def added_fields(self) -> Sequence[str]:
        """See FilterSettings.added_fields."""
        return () if self.field is None else (self.field,)

    @property
    def may_edit(self) -> bool:
        """See FilterSettings.may_edit."""
        return self.rewrite is not None

    @property
    def is_costly(self) -> bool:
        """See FilterSettings.is_costly."""
        return True

    @property
    def can_wait(self) -> bool:
        """See FilterSettings.can_wait.

        Of a prompt with nothing but the text, equal texts make the same request, whose one answer is kept
        for all of them. A failure is not kept: with `on_error` drop or keep, it would decide for one of them.
        A `field` may be read by filters that follow.
        """
        fields = {match[1] for match in _FIELD.finditer(self.prompt or "")}
        if self.rewrite is not None or self.field is not None:
            return False
        return fields == {"text"} and self.on_error == "stop"

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return () if self.prompt_file is None else (self.prompt_file,)

    def build(self, folder: Path) -> AskFilter | AskEditor:
        """See FilterSettings.build. The key is not needed before a request is sent."""
        asker = Asker(self, folder)
        return AskFilter(self, asker) if self.rewrite is None else AskEditor(self, self.rewrite, asker)


def _check_template(template: str) -> None:
    if not _FIELD.search(template):
        raise ValueError("the prompt has no {text}; write where the document goes")


class Asker:
    """Makes requests of documents and finds their answers: kept ones, or new ones from the endpoint."""

    def __init__(self, config: AskConfig, folder: Path) -> None:
        self._config = config
        self._template = self._load(folder)
        self._uses = {match[1] for match in _FIELD.finditer(self._template)}
        self._folder = folder / config.answers
        named = [config.model, config.version, self._template, config.system, self._sampling()]
        self.prompt_digest = sha256(json.dumps(named).encode()).hexdigest()[:16]
        self._spent: defaultdict[str, float] = defaultdict(float)

    def _load(self, folder: Path) -> str:
        config = self._config
        if config.prompt_file is None:
            assert config.prompt is not None
            return config.prompt
        path = folder / config.prompt_file
        try:
            template = path.read_text(encoding="utf-8-sig")
            _check_template(template)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            raise RecipeError(f"ask.prompt_file: {path}: {problem}") from None
        return template

    def _sampling(self) -> dict[str, Any]:
        """Return the keys of a request that set how an answer is made."""
        config = self._config
        ours = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed}
        return {**{name: value for name, value in ours.items() if value is not None}, **config.body}

    def ask(self, batch: TextBatch) -> tuple[list[Answer | Failure | None], list[bytes]]:
        """Return the answer for each wanted document, and the 16-byte key of its request.

        Raises UnavailableError if a request fails with `on_error: stop`, or if the endpoint cannot be used.
        """
        began = time.monotonic()
        rows = np.flatnonzero(batch.wanted).tolist()
        keys = [b""] * len(batch)
        found: dict[bytes, Answer | Failure] = {}
        missing: dict[bytes, bytes] = {}
        if rows:
            answers = open_answers(self._folder)
            answers.refresh()
            for row, body in zip(rows, self._bodies(batch, rows), strict=True):
                keys[row] = key = self._key(body)
                if key not in found and key not in missing:
                    kept = answers.find(key)
                    if kept is None:
                        missing[key] = body
                    else:
                        found[key] = kept
        try:
            if missing:
                found |= self._send(missing)
        finally:
            self._spent["seconds"] += time.monotonic() - began
        self._spent["documents"] += len(rows)
        self._spent["reused"] += sum(1 for key in keys if key) - len(missing)
        if self._config.on_error == "stop":
            for row in rows:
                if isinstance(result := found.get(keys[row]), Failure):
                    file, record = batch.column("file")[row], batch.column("record")[row]
                    raise UnavailableError(
                        f"{file}: record {record:,}: ask: {self._config.url}: {result.problem}; the answers "
                        "so far are kept: run the same command again, or set on_error"
                    )
        results = [found[key] if key else None for key in keys]
        return results, keys

    def _send(self, requests: Mapping[bytes, bytes]) -> dict[bytes, Answer | Failure]:
        from shardkit.writers.filters.endpoint import Endpoint, EndpointSettings

        config, answers = self._config, open_answers(self._folder)
        budget = config.budget or BudgetConfig()
        rates = Rates(config.requests_per_minute, config.tokens_per_minute, budget.requests, budget.tokens)
        endpoint = Endpoint(
            EndpointSettings(
                *(config.url, config.concurrency, config.timeout_seconds, config.retries),
                stops=config.on_error == "stop",
            ),
            self._api_key(),
            lambda key, answer, model: answers.keep(key, answer, self.prompt_digest, model),
        )
        path = self._folder / f"{self.prompt_digest}.meter"
        with closing(Meter(path, rates)) if rates.is_limited else nullcontext() as meter:
            try:
                return endpoint.ask(requests, answers, meter)
            finally:
                for name, count in endpoint.counts.items():
                    self._spent[name] += count

    def _api_key(self) -> str | None:
        name = self._config.api_key_env
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key:
            raise RecipeError(f"ask.api_key_env: the environment variable {name} is not set in this process")
        if not (key.isascii() and key.isprintable()):
            raise RecipeError(f"ask.api_key_env: the value of {name} has characters that no key has")
        return key

    def _bodies(self, batch: TextBatch, rows: Sequence[int]) -> list[bytes]:
        """Return the request for each of the rows, as JSON."""
        import orjson

        columns = {name: batch.column(name) for name in ("url", "id") if name in self._uses}
        fields = {name.partition(".")[2] for name in self._uses if name.startswith("metadata.")}
        metadata = batch.column("metadata") if fields else []
        texts = batch.texts
        system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
        rest, pieces = self._sampling(), _FIELD.split(self._template)
        bodies = []
        for row in rows:
            values = {name: str(column[row] or "") for name, column in columns.items()}
            values["text"] = texts[row].as_py()[: self._config.characters]
            if fields:
                kept = orjson.loads(metadata[row] or "{}")
                values |= {f"metadata.{name}": _at(kept, name) for name in fields}
            # Every second piece is a name; a text that holds {url} is not a template.
            content = "".join(values[piece] if at % 2 else piece for at, piece in enumerate(pieces))
            messages = [*system, {"role": "user", "content": content}]
            bodies.append(orjson.dumps({"model": self._config.model, "messages": messages, **rest}))
        return bodies

    def _key(self, body: bytes) -> bytes:
        return sha256(b"%s\0%s" % (self._config.version.encode(), body)).digest()[:16]

    def take_spent(self) -> Mapping[str, float]:
        """See Paid.take_spent."""
        spent, self._spent = self._spent, defaultdict(float)
        return spent


def _at(metadata: Any, name: str) -> str:
    """Return a field of metadata as text; a.b is field b inside a; "" if there is none."""
    for part in name.split("."):
        metadata = metadata.get(part) if isinstance(metadata, dict) else None
    if metadata is None:
        return ""
    return metadata if isinstance(metadata, str) else json.dumps(metadata, ensure_ascii=False)


class _Outcomes:
    """The results of a batch as arrays: which documents failed, and why others have no usable answer."""

    def __init__(self, count: int) -> None:
        self.failed = np.zeros(count, np.bool_)
        self.why = np.full(count, "", np.object_)

    def rules(self, config: AskConfig) -> list[Rule]:
        """Return the rules `failed` and `unusable`."""
        unusable = np.asarray(self.why != "", np.bool_)
        return [
            Rule(FAILED, self.failed if config.on_error == "drop" else None),
            Rule(UNUSABLE, unusable if config.unusable == "drop" else None, self.why),
        ]


class AskFilter:
    """Drops documents by the score or label that a model gives them."""

    def __init__(self, config: AskConfig, asker: Asker) -> None:
        self._config, self._asker = config, asker
        self.reasons = (FAILED, UNUSABLE, "label" if config.score is None else config.score.name)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Stores a score in `batch.scores` for later filters."""
        outcomes = _Outcomes(len(batch))
        scores, labels = np.full(len(batch), np.nan), np.full(len(batch), "", np.object_)
        fails = np.zeros(len(batch), np.bool_)
        score, label = self._config.score, self._config.label
        results, _ = self._asker.ask(batch)
        for row, result in enumerate(results):
            if not isinstance(result, Answer):
                outcomes.failed[row] = result is not None
            elif result.refused:
                outcomes.why[row] = "refused"
            elif score is not None:
                scores[row] = score.number(result.text)
                outcomes.why[row] = "no score" if math.isnan(scores[row]) else ""
            elif label is not None:
                found = label.found(result.text)
                labels[row] = found.strip() if isinstance(found, str) else ""
                outcomes.why[row] = "" if labels[row] else "no label"
                fails[row] = bool(labels[row] and label.keep) and labels[row] not in label.keep
        if self._config.field is not None:
            values = labels if score is None else scores
            known = [None if value == "" or value != value else value for value in values.tolist()]
            batch.add_fields({self._config.field: known})
        if score is None:
            return [*outcomes.rules(self._config), Rule("label", fails, labels)]
        batch.scores[score.name] = scores
        return [*outcomes.rules(self._config), Rule(score.name, score.fails(scores), scores, score.only)]

    def take_spent(self) -> Mapping[str, float]:
        """See Paid.take_spent."""
        return self._asker.take_spent()


class AskEditor:
    """Replaces texts by a model's answers, and lists the documents in rewritten.jsonl."""

    reasons = (FAILED, UNUSABLE)
    edits = ("rewrite",)
    side_file = "rewritten.jsonl"

    def __init__(self, config: AskConfig, rewrite: RewriteConfig, asker: Asker) -> None:
        self._config, self._rewrite, self._asker = config, rewrite, asker
        self._rows: list[dict[str, Any]] = []

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit. Counts: the documents that were rewritten."""
        from shardkit.kernels.text_arrays import replace_texts

        outcomes, new = _Outcomes(len(batch)), {}
        results, keys = self._asker.ask(batch)
        for row, result in enumerate(results):
            if not isinstance(result, Answer):
                outcomes.failed[row] = result is not None
                continue
            found = self._rewrite.found(result.text)
            text = found.strip() if isinstance(found, str) else ""
            outcomes.why[row] = "refused" if result.refused else "" if text else "empty"
            if result.finish == "length":
                outcomes.why[row] = "cut"
            if not outcomes.why[row]:
                new[row] = text
        cut, count = np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64)
        for row, text in new.items():
            cut[row], count[row] = batch.sizes[row] - len(text.encode()), 1
        self._rows = [] if not new else self._described(batch, new, keys)
        texts = replace_texts(batch.texts, new)
        return Edit(texts, outcomes.rules(self._config), {"rewrite": cut}, {"rewrite": count})

    def _described(
        self, batch: TextBatch, new: Mapping[int, str], keys: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        ids, files, records = (batch.column(name) for name in ("document_id", "file", "record"))
        made = {
            "model": self._config.model,
            "version": self._config.version,
            "prompt": self._asker.prompt_digest,
        }
        return [
            {
                "document_id": ids[row].hex(),
                "file": files[row],
                "record": records[row],
                **made,
                "request": keys[row].hex(),
                "bytes_before": int(batch.sizes[row]),
                "bytes_after": len(text.encode()),
            }
            for row, text in new.items()
        ]

    def take_rows(self) -> list[dict[str, Any]]:
        """Return and clear the rows of the last `edit`. See SideOutput.take_rows."""
        rows, self._rows = self._rows, []
        return rows

    def take_spent(self) -> Mapping[str, float]:
        """See Paid.take_spent."""
        return self._asker.take_spent()
