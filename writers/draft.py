"""Drafts a recipe from a look at data: formats, fields and sizes of files, and a sample of their records.

    files of each argument -> by ending: format, records of a few files, fields
    -> endings with the same fields are one input, whose `exclude` has all other files

Fields are found by content. The text is the field with the longest values, or one with a usual name if its
values are nearly as long. A URL field holds http(s) addresses only; an id field has a name for that and no
value twice. Of plain and compressed files with JSON lines the first line is tried, so that a MANIFEST.json is
left out. Nothing else is read but the first MiB of a few files of each ending.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from shardkit.errors import RecipeError, ShardError
from shardkit.files import load_json
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.units import format_bytes
from shardkit.writers.inputs.decompress import COMPRESSIONS, ContainerError, decompressed
from shardkit.writers.inputs.files import InputFile, find_files, open_input
from shardkit.writers.inputs.read_shards import first_samples
from shardkit.writers.inputs.scan import guess_format
from shardkit.writers.recipe import recipe_from_mapping

__all__ = ["Draft", "DraftInput", "Fields", "draft_recipe"]

_SAMPLED_FILES = 3  # of each ending: the first, one in the middle, the last
_SAMPLED_RECORDS = 100
_SAMPLE_BYTES = 1 << 20
_TRIED_FILES = 256  # of each ending; beyond that, files are taken to be like the others
_SHOWN_FIELDS = 20
_BEGINNING_CHARACTERS = 70
_TEXT_NAMES = ("text", "content", "body", "document", "raw_content", "markdown", "code")
_ID_NAME = re.compile(r"(?:.*[._-])?(?:u?uid|guid|id|hash|sha\d*|digest)|\w*Id", re.IGNORECASE)
_URL = re.compile(r"https?://\S+")
_HTML = re.compile(r"\s*<(?:!doctype html|html|head|body)\b", re.IGNORECASE)
_LEAST_WORDS = 10


@dataclass(frozen=True, slots=True)
class Fields:
    """What the records of a format hold: the keys of the recipe, and what else there is."""

    text: str = "text"
    id: str | None = None
    url: str | None = None
    html: bool = False
    lines: bool = False
    others: Sequence[str] = field(default=(), compare=False)
    beginning: str = field(default="", compare=False)
    """Of the first text."""
    short: float = field(default=0.0, compare=False)
    """Share of texts in the sample that have fewer than `_LEAST_WORDS` words."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One entry of `inputs`."""

    path: str
    exclude: Sequence[str]
    endings: Sequence[str]
    files: int
    bytes: int
    fields: Fields


@dataclass(frozen=True, slots=True)
class Draft:
    """What was found, and the recipe as YAML; `left_out` says why a file is no input, by its name."""

    inputs: Sequence[DraftInput]
    left_out: Mapping[str, str]
    text: str


def draft_recipe(
    data: Sequence[str], folder: Path, *, tokenizer: str, eos: str, storage: StorageOptions | None = None
) -> Draft:
    """A recipe for files, folders, globs and URLs; its relative paths start from `folder`.

    RecipeError if a path matches nothing, or if no file holds documents.
    """
    inputs: list[DraftInput] = []
    left_out: dict[str, str] = {}
    for argument in _with_globs(data):
        path = argument if is_remote(argument) else _relative(argument, folder)
        inputs += _inputs_at(path, folder, storage, left_out)
    if not inputs:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:5])
        raise RecipeError(f"{' '.join(data)}: no file holds documents ({reasons})")
    return Draft(inputs, left_out, _yaml_of(inputs, tokenizer, eos))


def _with_globs(data: Sequence[str]) -> list[str]:
    """The arguments. Where a shell has listed all files of a folder with one ending, their glob again."""
    listed: dict[Path, list[str]] = defaultdict(list)
    for argument in data:
        path = Path(argument)
        is_file = not is_remote(argument) and path.is_file()
        listed[path.parent / f"*{_ending(path.name)}" if is_file else path].append(argument)
    made: list[str] = []
    for pattern, arguments in listed.items():
        whole = len(arguments) > 1 and len(arguments) == len(list(pattern.parent.glob(pattern.name)))
        made += [str(pattern)] if whole else arguments
    return made


def _relative(path: str, folder: Path) -> str:
    """Relative to the recipe's folder, or absolute if it lies elsewhere altogether."""
    relative = Path(os.path.relpath(Path(path).absolute(), folder))
    return str(Path(path).absolute() if relative.parts[:3] == ("..",) * 3 else relative)


def _ending(name: str) -> str:
    """ ".jsonl.gz" of "a.b.jsonl.gz"."""
    path = PurePosixPath(name)
    compressed = path.suffix.lower() in COMPRESSIONS
    return (PurePosixPath(path.stem).suffix + path.suffix) if compressed else path.suffix


def _inputs_at(
    path: str, folder: Path, storage: StorageOptions | None, left_out: dict[str, str]
) -> list[DraftInput]:
    """The inputs for one argument; files that are none go to `left_out`."""
    stub = {"inputs": path, "tokenizer": {"path": "x", "eos": "x"}, "output": "x"}
    recipe = recipe_from_mapping(stub, folder=folder)
    groups: dict[str, list[InputFile]] = defaultdict(list)
    unfit: list[InputFile] = []
    for name, file in find_files(recipe, recipe.inputs[0], path, storage).items():
        problem = _problem(file, len(groups[_ending(name)]))
        if problem is None:
            groups[_ending(name)].append(file)
        else:
            left_out[name] = problem
            unfit.append(file)
    found: dict[Fields, list[str]] = defaultdict(list)
    for ending, files in groups.items():
        fields = _fields_of(files) if files else None
        if fields is not None:
            found[fields].append(ending)
        elif files:
            left_out[files[0].name] = f"and {len(files) - 1:,} more have no field of text"
    made = []
    for fields, endings in found.items():
        files = [file for ending in endings for file in groups[ending]]
        others = {f"*{ending}" for ending, members in groups.items() if members and ending not in endings}
        kept = {_ending(file.name) for file in files}
        names = {PurePosixPath(file.name).name for file in unfit}
        others |= {f"*{_ending(name)}" if _ending(name) not in {*kept, ""} else name for name in names}
        size = sum(file.bytes for file in files)
        made.append(DraftInput(path, sorted(others), endings, len(files), size, fields))
    return made


def _problem(file: InputFile, number: int) -> str | None:
    """Why a file is no input, or None; `number` of its ending have been tried."""
    known = guess_format(file.name)
    if known is None:
        return "not a format that can be read, judged by its name"
    if known[0] == "jsonl" and number < _TRIED_FILES:
        line = next(_lines(file, known[1]), "")
        if line.lstrip().startswith("["):
            return "an array of JSON objects: write an input with `format: json` for it"
        if not isinstance(_parsed(line), dict):
            return "its first line is not a JSON object"
    return None


def _fields_of(files: Sequence[InputFile]) -> Fields | None:
    """The fields of the files of one ending; None if no field holds text."""
    format, compression = guess_format(files[0].name) or ("", None)
    if format in ("warc", "text", "html"):
        long = format == "text" and any(file.bytes > 1 << 26 for file in files)
        return Fields(lines=long)
    chosen = {0: files[0], len(files) // 2: files[len(files) // 2], len(files) - 1: files[-1]}
    samples = [_records(file, format, compression) for file in list(chosen.values())[:_SAMPLED_FILES]]
    samples = [sample for sample in samples if sample]
    values: dict[str, list[list[object]]] = defaultdict(list)  # by field, of each file
    for sample in samples:
        for name in dict.fromkeys(name for record in sample for name in record):
            values[name].append([record.get(name) for record in sample])
    in_all = {name: lists for name, lists in values.items() if len(lists) == len(samples)}
    everywhere = {name: [value for found in lists for value in found] for name, lists in in_all.items()}
    return _choose(everywhere)


def _choose(values: Mapping[str, list[object]]) -> Fields | None:
    """Which fields are text, id and URL, by their values in all records of the sample."""
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
        beginning=_readable(texts[text][0]),
        short=fmean(len(string.split()) < _LEAST_WORDS for string in texts[text]),
    )


def _strings(values: Sequence[object]) -> list[str]:
    """The values if they are text, apart from nulls; empty if fewer than half are."""
    strings = [value for value in values if isinstance(value, str) and value]
    others = [value for value in values if value is not None and not isinstance(value, str)]
    return strings if not others and 2 * len(strings) >= len(values) else []


def _distinct(values: Sequence[object]) -> bool:
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == len(values)


def _records(file: InputFile, format: str, compression: str | None) -> list[dict[str, object]]:
    """The first records, fields of objects inside them as "a.b"; empty if they cannot be read."""
    try:
        if format == "jsonl":
            parsed = (_parsed(line) for line in _lines(file, compression))
            found = [record for record in parsed if isinstance(record, dict)]
        elif format == "csv":
            delimiter = "\t" if PurePosixPath(file.name).suffixes[:1] == [".tsv"] else ","
            lines = io.StringIO("\n".join(_lines(file, compression)))
            found = list(csv.DictReader(lines, delimiter=delimiter))
        elif format in ("mds", "wds"):
            found = first_samples(file, format, compression, _SAMPLED_RECORDS)
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


def _lines(file: InputFile, compression: str | None) -> Iterator[str]:
    """The lines of the first `_SAMPLE_BYTES` that are complete, or the last one of a shorter file."""
    held = b""
    try:
        with open_input(file) as stored:
            for piece in decompressed(stored, compression, file.bytes):
                *lines, held = (held + piece).split(b"\n")
                yield from (line.decode("utf-8-sig", "replace") for line in lines if line.strip())
                if stored.tell() >= _SAMPLE_BYTES:
                    return
    except (ContainerError, OSError):
        return
    if held.strip():
        yield held.decode("utf-8-sig", "replace")


def _parsed(line: str) -> object:
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


def _readable(text: str) -> str:
    """The beginning of a text on one line, without characters that end a comment or control a terminal."""
    line = "".join(filter(str.isprintable, " ".join(text[: 4 * _BEGINNING_CHARACTERS].split())))
    return line if len(line) <= _BEGINNING_CHARACTERS else f"{line[:_BEGINNING_CHARACTERS]}…"


def _yaml_of(inputs: Sequence[DraftInput], tokenizer: str, eos: str) -> str:
    entries = [_yaml_of_input(entry, source) for entry, source in zip(inputs, _sources(inputs), strict=True)]
    short = fmean(entry.fields.short for entry in inputs)
    length = f"length: {{min_words: {_LEAST_WORDS}}}"
    if short > 0.2:
        filters = f"filters: []\n  # - {length}  # would drop {short:.0%} of the sampled documents\n"
    else:
        filters = f"filters:\n  - {length}\n"
    return f"""\
# A recipe for `shardkit build`, written by `shardkit init`. Relative paths start from this file's folder.
inputs:
{"".join(entries)}
# Applied in order; the first rule that a document fails drops it. For English web pages: fineweb.
{filters}  # - gopher_quality
  # - gopher_repetition

dedup:
  exact: true  # remove documents with equal text
  # near: 0.8  # remove near-duplicates: word 5-grams with at least this Jaccard similarity

tokenizer:
  path: {_scalar(tokenizer)}
  eos: {_scalar(eos)}  # ends every document

pack:
  sequence_length: 2049  # tokens of a row: 2,048 to train on, and the label of the last one

output:
  path: out
"""


def _sources(inputs: Sequence[DraftInput]) -> list[str]:
    """A label for each input: the last part of its path that is no pattern, numbered if others have it."""
    made: list[str] = []
    for entry in inputs:
        parts = [part for part in entry.path.split("/") if part not in ("", ".", "..") and "*" not in part]
        label = parts[-1].removesuffix(_ending(parts[-1])) if parts else "data"
        same = sum(other == label or other.startswith(f"{label}-") for other in made)
        made.append(f"{label}-{same + 1}" if same else label)
    return made


def _yaml_of_input(entry: DraftInput, source: str) -> str:
    fields = entry.fields
    count = f"{entry.files:,} files" if entry.files > 1 else "1 file"
    lines = [f"  # {count} ({', '.join(map(_readable, entry.endings))}), {format_bytes(entry.bytes)}"]
    if fields.beginning:
        lines.append(f"  # The first text begins: {fields.beginning}")
    lines.append(f"  - path: {_scalar(entry.path)}")
    lines.append(f"    source: {_scalar(source)}  # a label for reports")
    if entry.exclude:
        lines.append(f"    exclude: {_scalar(entry.exclude)}")
    for key, value, default in (
        ("text", fields.text, "text"),
        ("id", fields.id, None),
        ("url", fields.url, None),
    ):
        if value != default:
            lines.append(f"    {key}: {_scalar(value)}")
    if fields.html:
        lines.append("    extract: resiliparse  # the texts are HTML; needs pip install 'shardkit[html]'")
    if fields.lines:
        lines.append("    lines: true  # each line is a document: the files are large")
    if fields.others:
        shown = _scalar([name for name in fields.others if name.isprintable()][:_SHOWN_FIELDS])
        lines.append(f"    # metadata: {shown}  # other fields, to keep in the provenance table")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
