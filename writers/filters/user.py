"""Steps that users write: a function or a class that judges documents, edits them, and adds fields to them.

The name of the first parameter says what a function is called with, for the documents that are left:

- `document` (or `doc`): one `Document`. It returns whether the document stays: a bool, or (bool, reason).
  It may assign to `document.text`, and to `document.metadata["name"]`, if the recipe allows it (below).
- `text`: the text of one document; it returns the same.
- any other name: an Arrow record batch of up to `batch_documents` rows with the columns of DOCUMENT_SCHEMA
  (rows/documents.py). It returns for each row whether the document stays, as a boolean Arrow array, NumPy
  array or list without nulls; or a mapping, such as a dict or a record batch, of such arrays: `keep`,
  `reason` (null for documents that stay), `text` (new texts), and fields by name.

If the recipe lists `reasons`, the function returns one of them, or null or "" if the document stays, instead
of a bool. Without them, documents are dropped under the function's name. `edits: true` allows new texts;
`columns` names the fields that are added to the documents' metadata. An `async` function of one document runs
concurrently for all documents of a batch.

A class is created once per worker process with the recipe's `parameters` and `data`; its method `setup`, if
it has one, is called once, and then its instances like functions. Subclasses of datatrove's BaseFilter and
BaseFormatter run as they are, as does a class that implements `Filter` or `Editor` (base.py).

The result for a document must not depend on other documents or calls, because batch boundaries are
arbitrary. The digests of the source file and of `data` are part of a task's identity, so changing them runs
the task again; changes to modules that the file imports do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shardkit.errors import BuildError, RecipeError
from shardkit.settings import FieldName, Listed, Size
from shardkit.writers.execution.resources import Resources
from shardkit.writers.filters.base import Edit, Editor, Filter, FilterSettings, Rule
from shardkit.writers.filters.user_code import UserCode

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch

_KEY = "filters: python"
_RESERVED = frozenset({"keep", "reason", "text"})


class PythonConfig(UserCode, FilterSettings):
    """Settings of `python`: a function or class of the user, its arguments, and what it may do."""

    omitted_at_default: ClassVar[frozenset[str]] = UserCode.omitted_at_default | {
        "edits",
        "columns",
        "batch_documents",
    }
    not_content: ClassVar[frozenset[str]] = frozenset({"cpus", "gpus", "memory"})

    reasons: Listed[FieldName] = Field(
        default=(), description="Reasons that the function may return; none: it returns what to keep."
    )
    edits: bool = Field(default=False, description="Whether the function may return new texts.")
    columns: Listed[FieldName] = Field(
        default=(),
        description="Fields that the function adds to the documents' metadata, for `output.where`, "
        "`buckets`, `group`, `dedup.near.scope` and the provenance.",
        examples=[["topic", "topic_score"]],
    )
    batch_documents: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=4096, description="Maximum number of documents in a batch, or awaited together if `async`."
    )
    cpus: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="CPU cores that a task with this step takes."
    )
    gpus: Annotated[float, Field(ge=0, le=64)] = Field(
        default=0.0,
        description="GPUs that a task with this step takes, the only ones that it sees; 0.5: two tasks "
        "share one.",
    )
    memory: Size | None = Field(
        default=None, description="Memory that a task with this step takes; null: the recipe's `memory`."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for key, names in (("reason", self.reasons), ("column", self.columns)):
            if len(set(names)) < len(names):
                raise ValueError(f"a {key} is listed twice: {', '.join(names)}")
        if taken := sorted(_RESERVED.intersection(self.columns)):
            raise ValueError(f"columns: {taken[0]!r} has another meaning in a function's result; rename it")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus: {self.gpus:g}: give a whole number, or a fraction of one GPU")
        return self

    @property
    def may_edit(self) -> bool:
        """See FilterSettings.may_edit."""
        return self.edits

    @property
    def added_fields(self) -> Sequence[str]:
        """See FilterSettings.added_fields."""
        return self.columns

    @property
    def resources(self) -> Resources:
        """See FilterSettings.resources."""
        return Resources(self.cpus, self.gpus, self.memory or 0)

    def build(self, folder: Path) -> Filter | Editor:
        """See FilterSettings.build."""
        made: Any = self.make(_KEY, folder)
        if isinstance(made, Filter | Editor):
            return made
        self._check_arguments(made)
        return UserEditor(self, made) if self.edits else UserFilter(self, made)

    def _check_arguments(self, made: Any) -> None:
        """Raise RecipeError if the function cannot be called with one argument besides `parameters`."""
        function, given = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # not callable, or without a signature
            return
        try:
            signature.bind(None, **given)
        except TypeError as error:
            if not hasattr(made, "filter"):
                raise RecipeError(f"{_KEY}: {self.function}: {error}; see `parameters`") from None

    def files(self) -> tuple[str, ...]:
        """Return the function's source file and data, whose digests are part of the identity of a task."""
        return self.code_files(_KEY)


@dataclass(slots=True)
class Document:
    """A document as a user's function gets it.

    `id` is the user's own id, or else the document id as 32 hexadecimal digits. `file` and `record` say where
    the document was read. `metadata` has the fields that the recipe keeps.
    """

    text: str
    id: str
    url: str | None
    metadata: dict[str, Any]
    file: str
    record: int
    given: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.given = frozenset(self.metadata)


@dataclass(slots=True)
class _Answers:
    """The results of the user's code for n documents: outcomes [n], new texts [n] or None, fields by name."""

    outcomes: Sequence[Any]
    texts: Any = None
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class UserStep:
    """Runs the user's code on the wanted documents of a batch, and checks what it returns."""

    def __init__(self, config: PythonConfig, made: Any) -> None:
        self._config = config
        self._name = f"{_KEY}: {config.function}"
        self.reasons = config.reasons or (config.function.partition(":")[2],)
        self._call = self._caller(made)

    def _decide(self, batch: TextBatch) -> tuple[list[Rule], dict[int, str]]:
        """Return the rules, and the new texts by row. Adds fields to the batch.

        Raises BuildError if the user's code fails or returns something else than it may.
        """
        import pyarrow as pa

        chosen, documents = np.flatnonzero(batch.wanted), batch.documents
        if len(chosen) < len(batch):
            documents = documents.take(pa.array(chosen))
        codes, labels = np.zeros(len(batch), np.int64), np.full(len(batch), None, np.object_)
        texts: dict[int, str] = {}
        fields: dict[str, list[Any]] = {name: [None] * len(batch) for name in self._config.columns}
        size = self._config.batch_documents
        for start in range(0, len(chosen), size):
            rows, piece = chosen[start : start + size], documents.slice(start, size)
            answers = self._call(piece)
            codes[rows], labels[rows] = self._codes(answers.outcomes, piece)
            for name, values in answers.fields.items():
                for row, value in zip(rows.tolist(), values, strict=True):
                    fields[name][row] = value
            texts |= self._changed(rows.tolist(), piece, answers.texts)
        if fields:
            self._add_fields(batch, fields)
        has_labels = any(one is not None for one in labels)
        rules = [
            Rule(name, codes == number, labels=labels if has_labels else None)
            for number, name in enumerate(self.reasons, 1)
        ]
        return rules, texts

    def _add_fields(self, batch: TextBatch, fields: Mapping[str, Sequence[Any]]) -> None:
        try:
            batch.add_fields(fields)
        except TypeError as error:
            raise BuildError(f"{self._name}: a field has a value that is not JSON: {error}") from None

    def _changed(self, rows: Sequence[int], documents: pa.RecordBatch, texts: Any) -> dict[int, str]:
        """Return the texts that differ, by row of the batch. Raises BuildError if there may be none."""
        if texts is None:
            return {}
        new = self._listed(texts, "text", len(rows))
        before = documents.column("text").to_pylist()
        changed = {row: text for row, text, old in zip(rows, new, before, strict=True) if text != old}
        if changed and not self._config.edits:
            raise BuildError(f"{self._name}: it changed a text; set `edits: true` to allow that")
        for text in changed.values():
            if not isinstance(text, str):
                raise BuildError(f"{self._name}: it returned {text!r:.60} as a text; expected a string")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise BuildError(f"{self._name}: it returned a text that is not valid: {error}") from None
        return changed

    def _codes(
        self, outcomes: Sequence[Any], batch: pa.RecordBatch
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.object_]]:
        """Return int64[n], 0 where a document stays, else 1 + the index of its reason; and labels [n]."""
        documents = batch.num_rows
        if len(outcomes) != documents:
            raise BuildError(
                f"{self._name}: the function returned {len(outcomes)} values for {documents} documents"
            )
        reasons = self._config.reasons
        known: dict[Any, int] = {None: 0, "": 0} if reasons else {True: 0, False: 1}
        known |= {reason: number for number, reason in enumerate(reasons, 1)}
        codes, labels = np.zeros(documents, np.int64), np.full(documents, None, np.object_)
        for row, value in enumerate(outcomes):
            answer, label = value, None
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], bool | np.bool_):
                stays, label = bool(value[0]), None if value[1] is None else str(value[1])
                answer = stays if not reasons else None if stays else label
                label = None if stays or reasons else label
            if isinstance(answer, np.bool_):
                answer = bool(answer)
            code = known.get(answer, -1) if isinstance(answer, bool | str | None) else -1
            if code < 0:
                wanted = "true or false, or (whether it stays, reason)"
                if reasons:
                    wanted = f"null, or one of `reasons`: {', '.join(reasons)}"
                raise BuildError(
                    f"{self._name}: the function returned {value!r:.80} for {_place(batch, row)}; expected "
                    f"{wanted}"
                )
            codes[row], labels[row] = code, label
        return codes, labels

    def _caller(self, made: Any) -> Callable[[pa.RecordBatch], _Answers]:
        """Return the function that calls the user's code for a batch of documents."""
        peers = {base.__module__.partition(".")[0] for base in type(made).__mro__}
        if "datatrove" in peers and getattr(made, "batch_size", 1) > 1:
            return partial(self._in_batches, made)
        if callable(judge := getattr(made, "filter", None)):
            make = _datatrove_documents if "datatrove" in peers else _documents
            return partial(self._each, judge, make)
        if "datatrove" in peers and callable(edit := getattr(made, "format", None)):
            return partial(self._texts, edit)
        if not callable(made):
            raise RecipeError(f"{self._name}: it can be neither called nor has it a method `filter`")
        match _first_parameter(made):
            case "document" | "doc":
                return partial(self._each, made, _documents)
            case "text":
                return partial(self._each, made, lambda documents: documents.column("text").to_pylist())
        return partial(self._batch, made)

    def _each(
        self,
        function: Callable[[Any], Any],
        make: Callable[[pa.RecordBatch], list[Any]],
        batch: pa.RecordBatch,
    ) -> _Answers:
        """Call `function` for each document that `make` returns."""
        documents = make(batch)
        outcomes = []
        for row, document in enumerate(documents):
            try:
                outcomes.append(function(document))
            except Exception as error:  # the user's code may raise anything
                raise self._failed(error, batch, row) from error
        if outcomes and inspect.isawaitable(outcomes[0]):
            outcomes = self._awaited(outcomes, batch)
        if not documents or isinstance(documents[0], str):
            return _Answers(outcomes)
        return self._found(outcomes, documents)

    def _found(self, outcomes: Sequence[Any], documents: Sequence[Any]) -> _Answers:
        """Return the outcomes with what the user's code assigned to the documents."""
        names = self._config.columns
        for document in documents:
            if isinstance(document, Document) and (
                unlisted := sorted(document.metadata.keys() - document.given - {*names})
            ):
                raise BuildError(f"{self._name}: it added a field {unlisted[0]!r}; list it in `columns`")
        fields = {name: [document.metadata.get(name) for document in documents] for name in names}
        return _Answers(outcomes, [document.text for document in documents], fields)

    def _in_batches(self, peer: Any, batch: pa.RecordBatch) -> _Answers:
        """Call `filter_batch` of a filter of datatrove for batches of the size that it asks for."""
        documents, outcomes = _datatrove_documents(batch), list[Any]()
        for start in range(0, len(documents), peer.batch_size):
            try:
                outcomes += peer.filter_batch(documents[start : start + peer.batch_size])
            except Exception as error:  # the user's code may raise anything
                raise self._failed(error, batch, start) from error
        return self._found(outcomes, documents)

    def _texts(self, edit: Callable[[str], str], batch: pa.RecordBatch) -> _Answers:
        """Call `edit` for each text."""
        texts = []
        for row, text in enumerate(batch.column("text").to_pylist()):
            try:
                texts.append(edit(text))
            except Exception as error:  # the user's code may raise anything
                raise self._failed(error, batch, row) from error
        return _Answers([None if self._config.reasons else True] * len(texts), texts)

    def _batch(self, function: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch) -> _Answers:
        """Call `function` for the whole batch."""
        try:
            answer = function(batch)
        except Exception as error:  # the user's code may raise anything
            raise self._failed(error, batch) from error
        if inspect.isawaitable(answer):
            [answer] = self._awaited([answer], batch)
        if not (isinstance(answer, Mapping) or hasattr(answer, "schema")):
            return _Answers(self._listed(answer, "", batch.num_rows))
        given = _columns(answer)
        wanted = {*_RESERVED, *self._config.columns}
        if unknown := sorted(given.keys() - wanted):
            raise BuildError(f"{self._name}: it returned a field {unknown[0]!r}; list it in `columns`")
        if missing := sorted({*self._config.columns} - given.keys()):
            raise BuildError(f"{self._name}: it returned no field {missing[0]!r}, which `columns` lists")
        listed = {name: self._listed(values, name, batch.num_rows) for name, values in given.items()}
        keep, reason = listed.get("keep"), listed.get("reason")
        if reason is None:
            reason = [None] * batch.num_rows
        if keep is None:
            keep = [one is None or one == "" for one in reason]
        outcomes = [
            (stays, None if stays else why) if isinstance(stays, bool | np.bool_) else stays
            for stays, why in zip(keep, reason, strict=True)
        ]
        return _Answers(outcomes, listed.get("text"), {name: listed[name] for name in self._config.columns})

    def _listed(self, values: Any, name: str, documents: int) -> list[Any]:
        """Return an array of the user as a list of `documents` values. Raises BuildError if it is none."""
        import pyarrow as pa

        what = f"array {name!r}" if name else "an array"
        try:
            if not hasattr(values, "to_pylist"):
                values = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            if isinstance(values, list | tuple):
                return list(values)
            raise BuildError(f"{self._name}: the function did not return {what}: {error}") from None
        found: list[Any] = values.to_pylist()
        if len(found) != documents:
            raise BuildError(
                f"{self._name}: the function returned {len(found)} values for {documents} documents"
                + (f" ({name})" if name else "")
            )
        return found

    def _awaited(self, answers: list[Any], batch: pa.RecordBatch) -> list[Any]:
        """Run coroutines concurrently and return their results. The first error cancels the others."""
        import asyncio

        async def one(row: int, answer: Awaitable[Any]) -> Any:
            try:
                return await answer
            except Exception as error:
                raise self._failed(error, batch, row if len(answers) > 1 else None) from error

        async def together() -> list[Any]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(row, answer)) for row, answer in enumerate(answers)]
            except* BuildError as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        found: list[Any] = _finished(together())
        return found

    def _failed(self, error: Exception, batch: pa.RecordBatch, row: int | None = None) -> BuildError:
        """Return the error of a build in which the user's code raised `error`, for one row or a batch."""
        place, hint = f"a batch of {batch.num_rows} documents, first {_place(batch, 0)}", ""
        if row is not None:
            place = _place(batch, row)
        elif isinstance(error, AttributeError | TypeError) and "RecordBatch" in str(error):
            hint = "; to get one document at a time, call the first parameter `document`, or `text`"
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = "" if trace is None else f" in line {trace.tb_lineno} of {trace.tb_frame.f_code.co_filename}"
        return BuildError(f"{self._name}: {type(error).__name__}: {error}{hint} ({place}){line}")


class UserFilter(UserStep):
    """A user's step that leaves texts unchanged."""

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        return self._decide(batch)[0]


class UserEditor(UserStep):
    """A user's step that may change texts."""

    edits = ("text",)

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        from shardkit.kernels.text_arrays import replace_texts

        rules, changed = self._decide(batch)
        cut = np.zeros(len(batch), np.int64)
        for row, text in changed.items():
            cut[row] = int(batch.sizes[row]) - len(text.encode())
        return Edit(replace_texts(batch.texts, changed), rules, {"text": cut})


def _place(batch: pa.RecordBatch, row: int) -> str:
    """Return where a document was read, and how it begins, for messages."""
    text, file, record = (batch.column(name)[row].as_py() for name in ("text", "file", "record"))
    return f"{file}, record {record:,}, which begins {text[:60]!r}"


def _first_parameter(function: Callable[..., Any]) -> str:
    """Return the name of the first parameter, or "" if it is not known."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def _columns(answer: Any) -> dict[str, Any]:
    """Return the columns of a dict, or of a record batch or table, by name."""
    if isinstance(answer, Mapping):
        return dict(answer)
    return {name: answer.column(name) for name in answer.schema.names}


def _values_of(batch: pa.RecordBatch) -> zip[tuple[Any, ...]]:
    """Return (text, id, url, metadata, file, record) of each document."""
    import orjson

    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    own, ids = columns["id"], columns["document_id"]
    named = [one if one is not None else document_id.hex() for one, document_id in zip(own, ids, strict=True)]
    fields = [{} if one is None else orjson.loads(one) for one in columns["metadata"]]
    return zip(
        columns["text"], named, columns["url"], fields, columns["file"], columns["record"], strict=True
    )


def _documents(batch: pa.RecordBatch) -> list[Any]:
    return [Document(*values) for values in _values_of(batch)]


def _datatrove_documents(batch: pa.RecordBatch) -> list[Any]:
    """Return the documents as datatrove's filters expect them: the URL is a field of the metadata."""
    from datatrove.data import Document as DatatroveDocument

    return [
        DatatroveDocument(text=text, id=id, metadata=fields if url is None else {"url": url} | fields)
        for text, id, url, fields, _, _ in _values_of(batch)
    ]


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in another thread if this one has a running event loop (notebooks)."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop().run_until_complete(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_loop().run_until_complete, coroutine).result()


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop for users' functions, which keeps their connections open."""
    import asyncio

    return asyncio.new_event_loop()
