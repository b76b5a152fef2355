"""Converts documents that a caller of `build` gives in Python to JSON lines.

Sources are iterables of dicts, DataFrames of pandas, datasets of Hugging Face, and whatever Arrow reads:
tables, batches, readers, datasets, and objects with the Arrow PyCapsule interface, such as a DataFrame of
polars.

A line has the fields that the input's settings name, in their order; a missing field is null. So equal
documents have equal lines wherever they came from, and a column that the recipe does not name may have any
type. Values are converted as the readers of files convert them (fields.py). What is bad in one document only,
such as a text that is null or not UTF-8, is written as it is: the reader counts it as a bad record. Memory is
a batch of rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from shardkit.errors import BuildError, RecipeError
from shardkit.tokens.chat import without_nulls
from shardkit.writers.inputs.fields import (
    MISSING,
    NamedFields,
    column_at,
    field_at,
    is_null,
    json_of,
    type_at,
)
from shardkit.writers.inputs.read_columnar import python_values
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.rows.documents import BATCH_DOCUMENTS, BATCH_TEXT_BYTES

if TYPE_CHECKING:
    import pyarrow.dataset as pds

_LOOKED = 1000  # number of documents after which it is an error if none had a text
_SHOWN = 40  # maximum number of field names in an error message
_JSON_KINDS = (
    int,
    float,
    dict,
    list,
    tuple,
)  # besides text and null; the reader refuses such texts one by one
_WANTED = "give dicts such as {'text': …}, a DataFrame, an Arrow table or a dataset"


class Line(NamedTuple):
    """A document as a line of JSON, which ends with a newline; `key` are the bytes with its text."""

    key: bytes
    json: bytes


class _Source(NamedTuple):
    rows: Iterable[Mapping[str, Any]]
    columns: Sequence[str] | None = None  # the names of all columns, if the source is a table


class _Paths(NamedTuple):
    """Paths of fields in the recipe: of texts, of other fields, and those that must occur, by recipe key."""

    texts: tuple[str, ...]
    carried: tuple[str, ...]
    named: frozenset[str]  # of `carried`, those in the recipe; `id` and `url` are read without being named
    required: Mapping[str, str]

    @classmethod
    def of(cls, config: InputConfig) -> _Paths:
        if config.is_masked:
            asked = {name: getattr(config, name) for name in ("messages", "prompt", "completion")}
        else:
            asked = {"text": config.text}
        required = {key: path for key, path in asked.items() if path is not None}
        texts = dict.fromkeys(required.values())
        if config.messages is not None:
            texts |= dict.fromkeys((config.tools, config.chat_template_kwargs))
        carried = (config.id or "id", config.url or "url", config.document_id, *config.metadata)
        others = [path for path in dict.fromkeys(carried) if path is not None and path not in texts]
        named = {path for path in (config.id, config.url, config.document_id, *config.metadata) if path}
        required |= NamedFields(config).missing
        return cls(tuple(texts), tuple(others), frozenset(named.intersection(others)), required)

    @property
    def all(self) -> tuple[str, ...]:
        return self.texts + self.carried


def json_lines(documents: object, config: InputConfig, limit: int | None = None) -> Iterator[Line]:
    """Yield one line per document, for the first `limit` documents.

    Raises RecipeError if `documents` is no source, or if no document has a field that the recipe names, and
    BuildError for a row that is not a dict and if there is no row. Errors of the source itself pass.
    """
    paths = _Paths.of(config)
    missing, seen = dict(paths.required), set[str]()
    source = _open(documents, paths)
    number = -1
    for number, row in enumerate(islice(source.rows, limit)):
        if missing:
            missing = {key: path for key, path in missing.items() if field_at(row, path) is MISSING}
            seen.update(map(str, row))
            if source.columns is not None and not number:
                absent = {key: path for key, path in missing.items() if not _roots(source.columns, [path])}
                _check_missing(absent, source.columns)
            if number + 1 == _LOOKED:
                texts = {key: path for key, path in missing.items() if path in paths.texts}
                _check_missing(texts, source.columns or sorted(seen))
        yield _line(number, row, config, paths)
    if number < 0:
        raise BuildError("documents: there are none; an iterator that was read before has nothing left")
    _check_missing(missing, source.columns or sorted(seen))


def _check_missing(missing: Mapping[str, str], names: Iterable[str]) -> None:
    if missing:
        key, path = next(iter(missing.items()))
        known = ", ".join(list(names)[:_SHOWN]).encode("utf-8", "backslashreplace").decode() or "none"
        raise RecipeError(
            f"inputs[0].{key}: no document has a field {path!r}; their fields: {known}; set this key to the "
            f"right name"
        )


def _line(number: int, row: Mapping[str, Any], config: InputConfig, paths: _Paths) -> Line:
    texts: dict[str, object] = {}
    for path in paths.texts:
        value = field_at(row, path)
        if config.is_masked:
            if value is not MISSING and not is_null(value):
                texts[path] = without_nulls(_as_lists(value))
        elif value is MISSING:  # the reader's message lists the names of fields
            texts = {str(name): None for name in islice(row, _SHOWN)}
        else:
            texts[path] = _text(value, number, path)
    others: dict[str, object] = {}
    for path in paths.carried:
        value = field_at(row, path)
        value = None if value is MISSING else value
        if value is not None or path in paths.named:
            others[path] = value
    if config.document_id is not None and isinstance(own := others.get(config.document_id), bytes):
        others[config.document_id] = own.hex()
    key = json_of(texts)
    rest = json_of({path: value for path, value in others.items() if path not in texts})
    return Line(key, b"%b%b%b\n" % (key[:-1], b"," if len(key) > 2 and len(rest) > 2 else b"", rest[1:]))


def _as_lists(value: Any) -> Any:
    """Return the value with lists in place of arrays and tuples, in which DataFrames have lists."""
    if isinstance(value, dict):
        return {key: _as_lists(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_as_lists(one) for one in value]
    return value


def _text(value: object, number: int, path: str) -> object:
    """Return a text, or what the reader refuses: null, numbers, dicts, lists; raise BuildError for others."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "surrogateescape")
    if is_null(value) or isinstance(value, _JSON_KINDS):
        return value
    raise BuildError(f"documents: row {number:,}: field {path!r} holds a {_kind(value)}, not text")


def _kind(value: object) -> str:
    kind = type(value)
    return (
        kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
    )


def _open(documents: Any, paths: _Paths) -> _Source:
    """Return the rows of the documents; raise RecipeError if they are no source of documents."""
    # Only a caller who has imported these modules, which take long, has objects of them.
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("pyarrow.dataset")
    if isinstance(documents, str | bytes | os.PathLike):
        raise RecipeError(
            f"documents: {documents!r} is a path; files are named by inputs[].path of the recipe"
        )
    if isinstance(documents, Mapping):
        names = ", ".join(map(str, islice(documents, _SHOWN)))
        raise RecipeError(
            f"documents: type {_kind(documents)} is not a list of documents; {_WANTED}, or one of its "
            f"values: {names}"
        )
    if pandas is not None and isinstance(documents, pandas.DataFrame):
        return _of_frame(documents, paths)
    if isinstance(documents, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return _of_batches(documents.schema, _batches_of(documents), paths)
    if datasets is not None and isinstance(documents, datasets.Dataset | datasets.Scanner):
        is_scanner = isinstance(documents, datasets.Scanner)
        schema = documents.projected_schema if is_scanner else documents.schema
        batches = documents.to_batches() if is_scanner else _scanned(documents, paths)
        return _of_batches(schema, batches, paths)
    if callable(getattr(documents, "with_format", None)):  # of Hugging Face
        return _of_hugging_face(documents, paths)
    if hasattr(documents, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(documents)
        return _of_batches(reader.schema, reader, paths)
    if not (hasattr(documents, "__iter__") or hasattr(documents, "__getitem__")):
        raise RecipeError(f"documents: type {_kind(documents)} cannot be iterated; {_WANTED}")
    return _Source(_dicts(iter(documents)))


def _dicts(rows: Iterator[object]) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BuildError(f"documents: row {number:,} is a {_kind(row)}; {_WANTED}")
        yield row


def _batches_of(table: pa.Table | pa.RecordBatch | pa.RecordBatchReader) -> Iterable[pa.RecordBatch]:
    if isinstance(table, pa.RecordBatch):
        return [table]
    batches: Iterable[pa.RecordBatch] = table.to_batches() if isinstance(table, pa.Table) else table
    return batches


def _roots(names: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return the names of the columns that hold the fields at `paths`."""
    roots = dict.fromkeys(path if path in names else path.split(".")[0] for path in paths)
    return [root for root in roots if root in names]


def _check_once(names: Sequence[str], roots: Iterable[str]) -> None:
    for root in roots:
        if list(names).count(root) > 1:
            raise RecipeError(f"documents: more than one column is called {root!r}; rename one")


def _scanned(dataset: pds.Dataset, paths: _Paths) -> Iterator[pa.RecordBatch]:
    columns = _roots(dataset.schema.names, paths.all)
    scanner = dataset.scanner(
        columns=columns, batch_size=BATCH_DOCUMENTS, batch_readahead=4, fragment_readahead=1
    )
    yield from scanner.to_batches()


def _of_batches(schema: pa.Schema, batches: Iterable[pa.RecordBatch], paths: _Paths) -> _Source:
    _check_once(schema.names, _roots(schema.names, paths.all))
    found = [path for path in paths.all if type_at(schema, path) is not None]

    def rows() -> Iterator[dict[str, Any]]:
        for batch in batches:
            whole = batch.select(_roots(batch.schema.names, paths.all))
            size = max(1, min(BATCH_DOCUMENTS, BATCH_TEXT_BYTES * whole.num_rows // max(1, whole.nbytes)))
            for start in range(0, whole.num_rows, size):
                part = whole.slice(start, size)
                columns = [python_values(column_at(part, path)) for path in found]
                yield from (dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True))

    if not found:  # rows without any value
        return _Source(({} for batch in batches for _ in range(batch.num_rows)), schema.names)
    return _Source(rows(), schema.names)


def _of_frame(frame: Any, paths: _Paths) -> _Source:
    names = [str(name) for name in frame.columns]
    roots = _roots(names, paths.all)
    _check_once(names, roots)
    places = [names.index(root) for root in roots]

    def rows() -> Iterator[dict[str, Any]]:
        for start in range(0, len(frame), BATCH_DOCUMENTS):
            part = frame.iloc[start : start + BATCH_DOCUMENTS]
            columns = []
            for place in places:
                column = part.iloc[:, place]
                columns.append(column.astype(object).where(column.notna(), None).tolist())
            for row in range(len(part)):
                yield {root: column[row] for root, column in zip(roots, columns, strict=True)}

    return _Source(rows(), names)


def _of_hugging_face(dataset: Any, paths: _Paths) -> _Source:
    """Read a `Dataset` as Arrow tables, and an `IterableDataset`, which has no length, as dicts."""
    names = dataset.column_names
    if names and callable(getattr(dataset, "select_columns", None)) and (roots := _roots(names, paths.all)):
        dataset = dataset.select_columns(roots)  # others, such as images, are not decoded
    if not hasattr(dataset, "__len__"):
        return _Source(_dicts(iter(dataset.with_format(None))))
    tables = dataset.with_format("arrow").iter(batch_size=BATCH_DOCUMENTS)
    batches = (batch for table in tables for batch in table.to_batches())
    schema = dataset.features.arrow_schema
    return _of_batches(schema, batches, paths)._replace(columns=names)
