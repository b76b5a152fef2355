"""Finds the fields with text, ids, URLs and conversations in files' first records, to draft a recipe."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.encodings import to_utf8
from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.writers.inputs.decompress import ContainerError, decompressed, with_head
from shardkit.writers.inputs.files import InputFile, open_input
from shardkit.writers.inputs.first_bytes import compression_of, look
from shardkit.writers.inputs.read_csv import first_rows
from shardkit.writers.inputs.read_shards import first_samples
from shardkit.writers.inputs.read_tfrecord import first_examples
from shardkit.writers.inputs.scan import guess_format

_SAMPLED_FILES = 3  # number of files to read per extension: the first, one in the middle, and the last


_SAMPLED_RECORDS = 100


_SAMPLE_BYTES = 1 << 20


SHOWN_FIELDS = 20


_BEGINNING_CHARACTERS = 70


_TEXT_NAMES = ("text", "content", "body", "document", "raw_content", "markdown", "code")


_ID_NAME = re.compile(r"(?:.*[._-])?(?:u?uid|guid|id|hash|sha\d*|digest)|\w*Id", re.IGNORECASE)


_URL = re.compile(r"https?://\S+")


_COMMENTS = r"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*"
_HTML = re.compile(rf"{_COMMENTS}<(?:!doctype html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_MARKUP = re.compile(r"\s*<(?:!--|[!?/a-z])", re.IGNORECASE)


LEAST_WORDS = 10


# Formats whose readers know where the text is, with fields of metadata that a draft shows.
_FIELDS_OF_FORMATS: dict[str, tuple[str, ...]] = {
    "warc": (),
    "text": (),
    "html": (),
    "epub": ("title", "author", "language", "chapters"),
    "pdf": ("title", "author", "pages"),
    "mediawiki": ("title", "revision", "timestamp", "wiki"),
    "stackexchange": ("thread", "rank", "type", "score", "tags", "license"),
}


_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an input's records, under the recipe's keys for them, and facts about the sample."""

    text: str = "text"
    id: str | None = None
    url: str | None = None
    html: bool = False
    lines: bool = False
    format: str | None = None  # the format, if file names do not show it
    encoding: str | None = None  # the encoding, if it is UTF-16 without a byte order mark
    messages: str | None = None  # field with a conversation, instead of `text`
    prompt: str | None = None  # field with a prompt, with `completion` instead of `text`
    completion: str | None = None

    others: Sequence[str] = field(default=(), compare=False)
    beginning: str = field(default="", compare=False)
    """The beginning of the first text."""
    short: float = field(default=0.0, compare=False)
    """Share of texts in the sample with fewer than `LEAST_WORDS` words."""
    markup: float = field(default=0.0, compare=False)
    """Share of texts in the sample that begin with a tag or a comment of HTML."""

    @property
    def named(self) -> str:
        """The names of the fields with text, for messages."""
        return self.messages or (f"{self.prompt}, {self.completion}" if self.prompt else self.text)


def fields_of(files: Sequence[InputFile], given: str | None, encoding: str | None = None) -> Fields | str:
    """Return the fields of files with one extension, or a message why they have no usable fields.

    `given` is the format if file names do not show it, `encoding` the encoding if no byte order mark does.
    """
    format, compression = guess_format(files[0].name) or ("", None)
    format = given or format
    if format in _FIELDS_OF_FORMATS:
        long = format == "text" and any(file.bytes > 1 << 26 for file in files)
        first = next(first_lines(files[0], compression), "") if format == "text" else ""
        others, beginning = _FIELDS_OF_FORMATS[format], readable_text(first)
        return Fields(lines=long, format=given, encoding=encoding, others=others, beginning=beginning)
    chosen = {0: files[0], len(files) // 2: files[len(files) // 2], len(files) - 1: files[-1]}
    samples = [first_records(file, format, compression) for file in list(chosen.values())[:_SAMPLED_FILES]]
    samples = [sample for sample in samples if sample]
    values: dict[str, list[list[object]]] = defaultdict(list)  # by field, one list of values per file
    for sample in samples:
        for name in dict.fromkeys(name for record in sample for name in record):
            values[name].append([record.get(name) for record in sample])
    in_all = {name: lists for name, lists in values.items() if len(lists) == len(samples)}
    everywhere = {name: [value for found in lists for value in found] for name, lists in in_all.items()}
    fields = _dialogue(everywhere) or _choose(everywhere)
    if fields is None:
        shared = next((name for name, found in everywhere.items() if _turns(found, "from", "value")), None)
        if shared is None:
            return "has no field with text"
        return f"has conversations of ShareGPT in {shared}: rename their keys from, value to role, content"
    return replace(fields, format=given, encoding=encoding)


def _dialogue(values: Mapping[str, list[object]]) -> Fields | None:
    """Return the fields with conversations, or with prompts and completions; None if there are none."""
    others = [name for name in values if name not in ("id", "url")]
    lengths = {name: sum(map(len, _strings(found))) for name, found in values.items()}
    for name, found in values.items():
        if _turns(found, "role", "content"):
            return Fields(messages=name, others=[other for other in others if other not in (name, "tools")])
    for prompt, completion in _PAIRS:
        rest = [other for other in others if other not in (prompt, completion)]
        pair = [lengths.get(name, 0) for name in (prompt, completion)]
        # Choose a pair only if no other field is as long, or is `input`, a part of the prompt: its text would
        # be lost.
        is_whole = all(lengths.get(name, 0) < sum(pair) for name in rest) and not any(values.get("input", []))
        if all(pair) and is_whole:
            first = readable_text(_strings(values[prompt])[0])
            return Fields(prompt=prompt, completion=completion, others=rest, beginning=first)
    return None


def _turns(values: Sequence[object], *keys: str) -> bool:
    """Return whether all values, except nulls, are lists of objects with these keys."""
    lists = [value for value in values if value is not None]
    return bool(lists) and all(
        isinstance(value, list)
        and value
        and all(isinstance(turn, dict) and turn.keys() >= {*keys} for turn in value)
        for value in lists
    )


def _choose(values: Mapping[str, list[object]]) -> Fields | None:
    """Choose the fields with text, id and URL by the `values` of each field; return None without text."""
    texts = {name: strings for name, found in values.items() if (strings := _strings(found))}
    urls = [name for name, strings in texts.items() if all(map(_URL.fullmatch, strings))]
    ids = [name for name, found in values.items() if _ID_NAME.fullmatch(name) and _distinct(found)]
    lengths = {name: fmean(map(len, texts[name])) for name in texts if name not in (*urls, *ids)}
    if not lengths:
        return None
    longest = max(lengths, key=lambda name: lengths[name])
    usual = [name for name in _TEXT_NAMES if lengths.get(name, 0) > lengths[longest] / 3]
    text = (usual or [longest])[0]
    url = "url" if "url" in values else next(iter(urls), None)
    id = "id" if "id" in values else next((name for name in ids if name != url), None)
    return Fields(
        text,
        None if id == "id" else id,
        None if url == "url" else url,
        html=sum(map(bool, map(_HTML.match, texts[text]))) > len(texts[text]) / 2,
        others=[name for name in values if name not in (text, id, url)],
        beginning=readable_text(texts[text][0]),
        short=fmean(len(string.split()) < LEAST_WORDS for string in texts[text]),
        markup=fmean(_MARKUP.match(string) is not None for string in texts[text]),
    )


def _strings(values: Sequence[object]) -> list[str]:
    """Return the values that are text; [] if they are fewer than half, or if others are not null."""
    strings = [value for value in values if isinstance(value, str) and value]
    others = [value for value in values if value is not None and not isinstance(value, str)]
    return strings if not others and 2 * len(strings) >= len(values) else []


def _distinct(values: Sequence[object]) -> bool:
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == len(values)


def first_records(file: InputFile, format: str, compression: str | None) -> list[dict[str, object]]:
    """Return the first records of a file, with nested fields as "a.b"; [] if the file cannot be read."""
    try:
        if format == "jsonl":
            parsed = (parsed_json(line) for line in first_lines(file, compression))
            found = [record for record in parsed if isinstance(record, dict)]
        elif format == "json":
            found = list(islice(_array(file, compression), _SAMPLED_RECORDS))
        elif format == "csv":
            found = list(first_rows(file.name, _first_pieces(file, compression), _SAMPLED_RECORDS))
        elif format in ("mds", "wds"):
            found = first_samples(file, format, compression, _SAMPLED_RECORDS)
        elif format == "tfrecord":
            found = first_examples(_first_pieces(file, compression), _SAMPLED_RECORDS)
        else:
            found = _rows(file, format)
    except (OSError, ValueError, csv.Error, pa.ArrowException, ContainerError, ShardError):
        return []
    return [_flat(record) for record in found[:_SAMPLED_RECORDS]]


def _rows(file: InputFile, format: str) -> list[dict[str, Any]]:
    with open_input(file) as stored:
        if format == "parquet":
            batches: Iterator[pa.RecordBatch] = pq.ParquetFile(stored).iter_batches(_SAMPLED_RECORDS)
        else:
            try:
                batches = iter([pa.ipc.open_file(stored).get_batch(0)])
            except pa.ArrowInvalid:
                stored.seek(0)
                batches = iter(pa.ipc.open_stream(stored))
        first = next(batches, None)
        rows: list[dict[str, Any]] = [] if first is None else first.slice(0, _SAMPLED_RECORDS).to_pylist()
        return rows


def first_lines(file: InputFile, compression: str | None) -> Iterator[str]:
    """Yield the complete lines in the first `_SAMPLE_BYTES` of a file; of a shorter file, all lines."""
    held, size = b"", 0
    for piece in _first_pieces(file, compression):
        size += len(piece)
        *lines, held = (held + piece).split(b"\n")
        yield from (line.decode("utf-8-sig", "replace") for line in lines if line.strip())
    if held.strip() and size < _SAMPLE_BYTES:
        yield held.decode("utf-8-sig", "replace")


def _first_pieces(file: InputFile, compression: str | None) -> Iterator[bytes]:
    """Yield about the first `_SAMPLE_BYTES` of a file's decompressed content as UTF-8; stops at damage."""
    size = 0
    try:
        with open_input(file) as stored:
            compression = compression_of(stored, compression)
            head, content = with_head(decompressed(stored, compression, file.bytes))
            encoding = look(head).encoding
            for piece in content if encoding == "utf-8" else to_utf8(content, encoding):
                yield piece
                size += len(piece)
                if size >= _SAMPLE_BYTES:
                    return
    except (ContainerError, OSError):
        return


def _array(file: InputFile, compression: str | None) -> Iterator[dict[str, Any]]:
    """Yield the objects at the beginning of a JSON file, which is an array or concatenated objects."""
    text, decoder = "\n".join(first_lines(file, compression)).strip(), json.JSONDecoder()
    at = 1 if text.startswith("[") else 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            yield value


def parsed_json(line: str) -> object:
    try:
        return load_json(line)
    except ValueError:
        return None


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in record.items():
        inner = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {}
        made |= inner or {name: value}
    return made


def readable_text(text: str) -> str:
    """Return the beginning of a text on one line, without line breaks or control characters."""
    line = "".join(filter(str.isprintable, " ".join(text[: 4 * _BEGINNING_CHARACTERS].split())))
    return line if len(line) <= _BEGINNING_CHARACTERS else f"{line[:_BEGINNING_CHARACTERS]}…"
