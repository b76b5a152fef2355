"""Evaluation sets for decontamination: files of items, and reports of where documents repeat them."""

from __future__ import annotations

import gzip
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from shardkit.errors import RecipeError
from shardkit.files import load_json
from shardkit.settings import FieldName, Listed, StrictModel

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


WORDS = re.compile(r"\w+")
_EXCERPT = 400  # maximum number of characters of a span in a report
_MAX_ITEM_BYTES = 1 << 26  # maximum size of a line in an evaluation file; known sets have up to a few MB
_ROWS = 1024  # number of rows that are read from a Parquet file at a time
_ROLES = ("question", "answer", "passage")


class EvaluationConfig(StrictModel):
    """One file of evaluation items."""

    path: FieldName = Field(
        description="JSONL, or text with one item per line, both plain or .gz; or Parquet."
    )
    name: str | None = Field(default=None, description="Name in reports; null: the name of the file.")
    fields: Listed[FieldName] = Field(
        default=("text",), min_length=1, description="JSONL, Parquet: fields whose joined texts are an item."
    )
    question: FieldName | None = Field(
        default=None,
        description="With `questions`: the field with the question; null: `question`. Dots separate nested "
        "fields, as in `data.question`.",
    )
    answer: FieldName | None = Field(
        default=None,
        description="With `questions`: the field with the answer (a text or number), or with a list of "
        "answers or choices, any of which counts; null: `answer`, if items have this field.",
    )
    passage: FieldName | None = Field(
        default=None,
        description="With `questions`: the field with the text that the question is about; null: `passage`, "
        "if items have this field.",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys for `questions` if they are not given, as recipes of older versions do."""
        return {key: value for key, value in handler(self).items() if key not in _ROLES or value is not None}

    @property
    def label(self) -> str:
        """The name of the evaluation set in reports."""
        return self.name or Path(self.path).name

    def roles(self) -> tuple[str, ...]:
        """Return which of the keys question, answer and passage are given."""
        return tuple(role for role in _ROLES if getattr(self, role) is not None)


class EvaluationRecord(NamedTuple):
    """A record of an evaluation file: its line or row number from 0, its text or its fields.

    `where`: file and line for error messages.
    """

    number: int
    content: str | dict[str, Any]
    where: str


def read_records(config: EvaluationConfig, path: Path) -> Iterator[EvaluationRecord]:
    """Yield the records of a file: rows of Parquet, objects of JSON lines, or non-blank lines of text.

    Raises RecipeError if the file or a line cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            yield from _read_rows(path)
        else:
            with path.open("rb") as raw:
                file = cast(BinaryIO, gzip.open(raw)) if path.suffix == ".gz" else raw  # noqa: SIM115
                yield from _read_lines(file, path)
    except (OSError, EOFError) as error:
        raise RecipeError(f"decontamination: {path}: {error}") from None


def _read_rows(path: Path) -> Iterator[EvaluationRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield EvaluationRecord(number, row, f"decontamination: {path}: row {number:,}")
    except pa.ArrowException as error:
        raise RecipeError(f"decontamination: {path}: not a Parquet file that can be read: {error}") from None


def _read_lines(file: BinaryIO, path: Path) -> Iterator[EvaluationRecord]:
    number = 0
    while line := file.readline(_MAX_ITEM_BYTES):
        where = f"decontamination: {path}: line {number + 1:,}"
        text = _decoded(line, where)
        if text.strip():
            yield EvaluationRecord(number, _parsed(text, where) if _is_jsonl(path) else text, where)
        number += 1


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _decoded(line: bytes, where: str) -> str:
    if len(line) == _MAX_ITEM_BYTES and not line.endswith(b"\n"):
        raise RecipeError(f"{where} is longer than the limit of {_MAX_ITEM_BYTES:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is not UTF-8: {error}") from None


def _parsed(line: str, where: str) -> dict[str, Any]:
    """Return the fields of a JSON object, or no fields for any other JSON value."""
    try:
        record = load_json(line)
    except ValueError as error:
        raise RecipeError(f"{where} is not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def field_value(record: object, name: str) -> object:
    """Return a field of a record, named `name` or nested (`data.question`); None if it is missing."""
    if not isinstance(record, Mapping):
        return None
    if name in record or "." not in name:
        return cast(object, record.get(name))
    first, rest = name.split(".", 1)
    return field_value(record.get(first), rest)


def report_rows(
    batch: TextBatch,
    number: int,
    spans: Iterable[tuple[int, int, Mapping[str, Any]]],
    words: re.Pattern[str] = WORDS,
) -> Iterator[dict[str, Any]]:
    """Yield a report row for each span (first word, end word, facts) of document `number` of a batch.

    A row has the document's origin, the facts, and the beginning of the span's text in Unicode form NFC.
    """
    [row] = batch.documents.select(["document_id", "file", "record"]).slice(number, 1).to_pylist()
    where = row | {"document_id": row["document_id"].hex()}
    text = unicodedata.normalize("NFC", batch.texts[number].as_py())
    edges = [match.span() for match in words.finditer(text)]
    for first, last, facts in spans:
        begin, end = edges[first][0], edges[last - 1][1]
        yield where | facts | {"text": text[begin : min(end, begin + _EXCERPT)]}


def joined(value: object) -> str | None:
    """Return a string as it is, and a list's strings joined by newlines; None for other values."""
    if isinstance(value, list):
        return "\n".join(one for one in value if isinstance(one, str))
    return value if isinstance(value, str) else None


def plain_text(text: str) -> str:
    """Return the text with ? in place of each unpaired surrogate, which JSON escapes may contain."""
    return text.encode(errors="replace").decode()
