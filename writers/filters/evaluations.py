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
_EXCERPT = 400  # characters of a span that are reported
_MAX_ITEM_BYTES = 1 << 26  # a line of an evaluation file; the largest items are books of a few MB
_ROWS = 1024  # of a Parquet file that are read at once
_ROLES = ("question", "answer", "passage")


class EvaluationConfig(StrictModel):
    """One file of evaluation items."""

    path: FieldName = Field(
        description="JSONL, or text with one item per line, both plain or .gz; or Parquet."
    )
    name: str | None = Field(default=None, description="Name in reports; null: the name of the file.")
    fields: Listed[FieldName] = Field(
        default=("text",), min_length=1, description="JSONL, Parquet: fields whose texts make an item."
    )
    question: FieldName | None = Field(
        default=None,
        description="With `questions`: the field of the question, such as `question`, which null means, or "
        "`data.question` inside of another one.",
    )
    answer: FieldName | None = Field(
        default=None,
        description="With `questions`: the field of the answer, a text or number, or of a list of answers "
        "or choices, any of which counts. null: `answer`, where items have it.",
    )
    passage: FieldName | None = Field(
        default=None,
        description="With `questions`: the field of the text that is asked about. null: `passage`, where "
        "items have it.",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys that older versions do not have, if they are not given."""
        return {key: value for key, value in handler(self).items() if key not in _ROLES or value is not None}

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.name or Path(self.path).name

    def roles(self) -> tuple[str, ...]:
        """Keys that name fields of questions, among those that are given."""
        return tuple(role for role in _ROLES if getattr(self, role) is not None)


class EvaluationRecord(NamedTuple):
    """A record of a file: its number (line or row, from 0), text or fields, and where it is, for errors."""

    number: int
    content: str | dict[str, Any]
    where: str


def read_records(config: EvaluationConfig, path: Path) -> Iterator[EvaluationRecord]:
    """The records of a file: rows of Parquet, values of JSON lines, or lines of text, without blank ones.

    RecipeError for a file or a line that cannot be read.
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
    """Whether the lines of a file are JSON."""
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _decoded(line: bytes, where: str) -> str:
    if len(line) == _MAX_ITEM_BYTES and not line.endswith(b"\n"):
        raise RecipeError(f"{where} is longer than {_MAX_ITEM_BYTES:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is not UTF-8: {error}") from None


def _parsed(line: str, where: str) -> dict[str, Any]:
    """The fields of a JSON object; none of another value."""
    try:
        record = load_json(line)
    except ValueError as error:
        raise RecipeError(f"{where} is not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def field_value(record: object, name: str) -> object:
    """The value under a name, or under the parts of a name with dots; None if there is none."""
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
    """For each (begin, end, facts) where the document is from, the facts, and its text of these words.

    The text is in normalization form C.
    """
    [row] = batch.documents.select(["document_id", "file", "record"]).slice(number, 1).to_pylist()
    where = row | {"document_id": row["document_id"].hex()}
    text = unicodedata.normalize("NFC", batch.texts[number].as_py())
    edges = [match.span() for match in words.finditer(text)]
    for first, last, facts in spans:
        begin, end = edges[first][0], edges[last - 1][1]
        yield where | facts | {"text": text[begin : min(end, begin + _EXCERPT)]}


def joined(value: object) -> str | None:
    """A string, or the strings of a list such as choices, one a line; None if it is neither."""
    if isinstance(value, list):
        return "\n".join(one for one in value if isinstance(one, str))
    return value if isinstance(value, str) else None


def plain_text(text: str) -> str:
    """The text with ? for each half of a surrogate pair that JSON may have left alone."""
    return text.encode(errors="replace").decode()
