"""Drafts a recipe from data: from formats, fields and sizes of files, and a sample of their records.

    files of each argument -> by extension: format, records of a few files, fields
    -> extensions with the same fields become one input, whose `exclude` matches all other files

Fields are found by content. The text is the field with the longest values, or one with a usual name if its
values are at least a third as long. A URL field has only http(s) addresses; an id field has a typical name
and no value twice. The first line of each file of JSON lines is parsed, to leave out files such as
MANIFEST.json. Otherwise only the first MiB of a few files per extension is read.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import NamedTuple

import yaml

from shardkit.encodings import encoding_of
from shardkit.errors import RecipeError, warn_user
from shardkit.formats.tokenizer_file import end_token, find_tokenizer, stated_tokens
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.units import format_bytes
from shardkit.writers.init_fields import (
    LEAST_WORDS,
    SHOWN_FIELDS,
    Fields,
    fields_of,
    first_lines,
    first_records,
    parsed_json,
    readable_text,
)
from shardkit.writers.inputs.dataset_splits import names_a_split
from shardkit.writers.inputs.decompress import COMPRESSIONS, ContainerError, decompressed
from shardkit.writers.inputs.files import InputFile, find_files, open_input
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, XML_FORMATS, FirstBytes, compression_in, look
from shardkit.writers.inputs.scan import SEEKING, TEXTUAL, guess_format
from shardkit.writers.recipe.plain import YAML_ENDINGS
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping

__all__ = ["Draft", "DraftInput", "Fields", "draft_recipe", "names_data", "recipe_of_data", "tokenizer_keys"]

DEFAULT_EOS = "<|endoftext|>"
SEQUENCE_LENGTH = 2049  # tokens of a row: 2,048 to train on, and the label of the last one

_TEXT_KEYS = ("text", "messages", "prompt", "completion", "tools")  # of an input: where its texts are
_PATH_CHARACTERS = 4096
_SIGNS = "*?[{"  # of patterns
_PAGES = ("warc", "html")  # formats whose main text resiliparse extracts by default
_MUCH_MARKUP = 0.2
_TRIED_FILES = 256  # number of files per extension to examine; all others are assumed to be like these


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A drafted entry of the recipe's `inputs`; `endings` are the extensions of its files."""

    path: str
    exclude: Sequence[str]
    endings: Sequence[str]
    files: int
    bytes: int
    fields: Fields

    @property
    def seems_html(self) -> bool:
        """Return whether so many texts begin with markup that the user should look at them."""
        return not self.fields.html and self.fields.markup > _MUCH_MARKUP


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted recipe, as YAML in `text`, and its inputs; `left_out` has reasons by name of the file."""

    inputs: Sequence[DraftInput]
    left_out: Mapping[str, str]
    text: str


def draft_recipe(
    data: Sequence[str],
    folder: Path,
    *,
    tokenizer: str,
    eos: str,
    bos: str | None = None,
    storage: StorageOptions | None = None,
) -> Draft:
    """Draft a recipe for files, folders, globs and URLs; its relative paths start at `folder`.

    Raises RecipeError if a path matches nothing, or if no file has documents.
    """
    inputs: list[DraftInput] = []
    left_out: dict[str, str] = {}
    for argument in _with_globs(data):
        path = argument if is_remote(argument) else _relative(argument, folder)
        inputs += _inputs_at(path, folder, storage, left_out)
    if not inputs:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:5])
        raise RecipeError(f"{' '.join(data)}: no file has documents ({reasons})")
    return Draft(inputs, left_out, _yaml_of(inputs, tokenizer, eos, bos))


def tokenizer_keys(given: str, folder: Path) -> dict[str, str]:
    """Return the keys path, eos and, if documents begin with it, bos of a recipe in `folder`.

    `given`: a file, a folder or the name of a model, relative to the current folder. Raises RecipeError if
    there is none.
    """
    file = find_tokenizer(Path.cwd(), given)
    path = given
    if Path(given).exists():
        absolute = Path(given).absolute()
        path = str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)
    bos = stated_tokens(file).get("adds_bos")
    return {"path": path, "eos": end_token(file) or DEFAULT_EOS} | ({} if bos is None else {"bos": bos})


def names_data(given: object, *, has_settings: bool) -> bool:
    """Return whether what `build` was given is data and no recipe.

    `has_settings`: settings came with it that only data needs. Otherwise a path that may be a recipe is one.
    """
    if isinstance(given, (Recipe, Mapping)):
        return False
    if not isinstance(given, (str, os.PathLike)):
        return True
    name = os.fspath(given)
    suffix = Path(name).suffix.lower()
    if suffix in YAML_ENDINGS:
        return False
    is_named = suffix not in (".json", ".txt") and guess_format(name) is not None
    return has_settings or is_named or any(sign in name for sign in _SIGNS) or Path(name).is_dir()


def recipe_of_data(
    data: object,
    *,
    output: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | Mapping[str, object] | None,
    sequence_length: int | None,
    text: str | None,
    storage: StorageOptions | None,
) -> tuple[dict[str, object], object]:
    """Return (recipe, documents or None) for data without a recipe: files, or documents in Python.

    The recipe has the inputs that `draft_recipe` finds, and no steps. Raises RecipeError if `output` or
    `tokenizer` is missing, or if no file has documents.
    """
    files, documents = _files_or_documents(data)
    asked = {"output": 'output="out"', "tokenizer": 'tokenizer="tokenizer.json" (or a model, such as "gpt2")'}
    given = {"output": output, "tokenizer": tokenizer}
    if missing := [name for name in asked if given[name] is None]:
        advice = " and ".join(asked[name] for name in missing)
        raise RecipeError(f"{missing[0]}: is missing; a build of data without a recipe needs {advice}")
    keys: Mapping[str, object]
    if isinstance(tokenizer, Mapping):
        keys = tokenizer
    else:
        keys = tokenizer_keys(os.fspath(tokenizer or ""), Path.cwd())
    length = SEQUENCE_LENGTH if sequence_length is None else sequence_length
    made: dict[str, object] = {"tokenizer": keys, "pack": {"sequence_length": length}, "output": output}
    if files is None:
        return made | ({} if text is None else {"inputs": {"text": text}}), documents
    draft = draft_recipe(files, Path.cwd(), tokenizer="", eos="", storage=storage)
    for name, why in draft.left_out.items():
        warn_user(f"{name} is not read: {why}")
    inputs = yaml.safe_load(draft.text)["inputs"]
    if text is not None:
        inputs = [
            {key: value for key, value in entry.items() if key not in _TEXT_KEYS} | {"text": text}
            for entry in inputs
        ]
    return made | {"inputs": inputs}, None


def _files_or_documents(data: object) -> tuple[list[str] | None, object]:
    """Return (paths, None), or (None, documents); an iterator is looked into, and its documents are whole."""
    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)], None
    if data is None or isinstance(data, (int, float)):
        raise RecipeError(
            f"recipe: {data!r} is neither a recipe nor data; give a YAML file, a dict of the same keys, "
            "files, or documents as dicts"
        )
    if not isinstance(data, (list, tuple, Iterator)):
        return None, data
    rest = iter(data)
    first = list(islice(rest, 1))
    if not first:
        raise RecipeError("inputs: there are no files and no documents")
    if not isinstance(first[0], (str, os.PathLike)):
        return None, data if isinstance(data, (list, tuple)) else chain(first, rest)
    paths = [*first, *rest]
    if other := [one for one in paths if not isinstance(one, (str, os.PathLike))]:
        kind = type(other[0]).__name__
        raise RecipeError(f"inputs: a {kind} is no path; give only paths, or only documents as dicts")
    named = [os.fspath(one) for one in paths]
    if texts := list(filter(_is_text, named)):
        raise RecipeError(
            f"inputs: {readable_text(texts[0])!r} is no file; give texts as dicts: {{'text': …}}"
        )
    return named, None


def _is_text(name: str) -> bool:
    """Return whether a name in a list of files looks like a text."""
    if "\n" in name or len(name) > _PATH_CHARACTERS:
        return True
    return " " in name and not (
        is_remote(name) or any(sign in name for sign in _SIGNS) or Path(name).exists()
    )


def _with_globs(data: Sequence[str]) -> list[str]:
    """Return the arguments; if they list all files of one extension in a folder, replace these by a glob.

    This restores a glob that the shell has expanded.
    """
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
    """Return a path relative to `folder`, or the absolute path if the relative one begins with ../../.. ."""
    relative = Path(os.path.relpath(Path(path).absolute(), folder))
    return str(Path(path).absolute() if relative.parts[:3] == ("..",) * 3 else relative)


def _ending(name: str) -> str:
    """Return the extension of a name, such as ".jsonl.gz" for "a.b.jsonl.gz".

    The parts of a set have the same one: ".tfrecord-*-of-*" for "a.tfrecord-00000-of-01024".
    """
    path = PurePosixPath(name)
    packed = path.suffix if path.suffix.lower() in COMPRESSIONS else ""
    extension = PurePosixPath(path.stem if packed else path).suffix
    if "-" in extension and guess_format(name) is not None:
        extension = re.sub(r"\d+", "*", extension)
    return extension + packed


def _inputs_at(
    path: str, folder: Path, storage: StorageOptions | None, left_out: dict[str, str]
) -> list[DraftInput]:
    """Return the inputs for one argument; add other files, with the reasons, to `left_out`."""
    stub = {"inputs": path, "tokenizer": {"path": "x", "eos": "x"}, "output": "x"}
    recipe = recipe_from_mapping(stub, folder=folder)
    named = find_files(recipe, recipe.inputs[0], path, storage)
    left_out |= dict.fromkeys(named.hidden, "its name, or that of its folder, begins with . or _")
    left_out |= named.left_out
    left_out |= dict.fromkeys(named.held_out, "its name is that of a split not meant for training")
    groups: dict[_Group, list[InputFile]] = defaultdict(list)
    others: dict[str, list[InputFile]] = defaultdict(list)  # files of unknown format, by extension
    unfit = [named.files[name] for name in named.held_out]
    for name, file in named.files.items():
        if name in named.held_out:
            continue
        ending = _ending(name)
        alike = [group for group in groups if group.ending == ending]
        if sum(len(groups[group]) for group in alike) >= _TRIED_FILES:
            groups[alike[-1]].append(file)
            continue
        found_group = _group_of(file, ending)
        if isinstance(found_group, _Group):
            groups[found_group].append(file)
        else:
            left_out[name] = found_group
            unfit.append(file)
            if guess_format(name) is None:
                others[ending].append(file)
    found: dict[Fields, list[_Group]] = defaultdict(list)
    alone: dict[_Group, Fields] = {}
    for group, files in groups.items():
        fields = fields_of(files, group.format, group.encoding)
        if isinstance(fields, Fields):
            found[fields].append(group)
            alone[group] = fields
        else:
            left_out[files[0].name] = f"{fields}, like {len(files) - 1:,} more files" if files[1:] else fields
    if not groups:
        for ending, files in others.items():
            if (as_text := _as_text(files)) is not None:
                group = _Group(ending, "text", as_text.encoding)
                groups[group] = files
                found[as_text].append(group)
                alone[group] = as_text
                unfit = [file for file in unfit if file not in files]
                for file in files:
                    del left_out[file.name]
    made = []
    for chosen in found.values():
        files = [file for group in chosen for file in groups[group]]
        rest = [file for group, members in groups.items() if group not in chosen for file in members]
        endings = sorted({group.ending for group in chosen}, key=[group.ending for group in chosen].index)
        exclude = _exclude(files, rest + unfit)
        size = sum(file.bytes for file in files)
        joined = _joined([alone[group] for group in chosen])
        made.append(DraftInput(path, exclude, endings, len(files), size, joined))
    return made


def _joined(fields: Sequence[Fields]) -> Fields:
    """Return equal fields of several extensions as one, with what samples of any of them showed."""
    return replace(
        fields[0],
        others=next((one.others for one in fields if one.others), ()),
        beginning=next((one.beginning for one in fields if one.beginning), ""),
        markup=max(one.markup for one in fields),
    )


class _Group(NamedTuple):
    """A kind of files: their extension, and their format and encoding if the recipe must name these."""

    ending: str
    format: str | None
    encoding: str | None


def _exclude(files: Sequence[InputFile], others: Sequence[InputFile]) -> list[str]:
    """Return globs, by extension if possible, that match all of `others` and none of `files`."""
    kept = {PurePosixPath(file.name).name for file in files}
    endings = {_ending(file.name) for file in files}
    globs = set()
    for file in others:
        path = PurePosixPath(file.name)
        name = path.name
        folder = next((part for part in path.parts[:-1] if names_a_split(part)), None)
        if _ending(name) not in {*endings, ""}:
            globs.add(f"*{_ending(name)}")
        elif folder is not None and not any(folder in PurePosixPath(one.name).parts for one in files):
            globs.add(escape(folder))
        elif name not in kept:
            general = re.sub(r"\d+", "*", escape(name))
            globs.add(escape(name) if any(fnmatchcase(one, general) for one in kept) else general)
        else:
            globs.add(escape(file.path if is_remote(file.path) else file.name))
    return sorted(globs)


def _group_of(file: InputFile, ending: str) -> _Group | str:
    """Return the group of a file, or a message why it cannot be an input."""
    known, stored = guess_format(file.name), _head(file)
    if ending.split(".")[1:2] == ["paths"]:
        return f"is a list of paths; write an input with `path: {file.name}`, `list: true` and `base`"
    if known is None:
        kind = look(stored)
        if look(_head(file, kind.compression)).format == "tfrecord":  # often called by numbers alone
            return _Group(ending, "tfrecord", None)
        return kind.what if not kind.is_text else "its name has no known format"
    format, compression = known
    if format == "mds":  # begins with binary numbers, so its content cannot be examined
        return _Group(ending, None, None)
    if format not in SEEKING:
        compression = compression_in(stored, compression)
    content = look(_head(file, compression))
    if format in XML_FORMATS and content.format in XML_FORMATS:  # the name .xml does not tell which
        return _Group(ending, content.format, None)
    if (format, content.kind) != ("jsonl", "json") and (problem := content.problem(format, "inputs[0]")):
        return problem
    # HTML pages declare their encoding themselves.
    encoding = _unmarked(content) if format in TEXTUAL and format != "html" else None
    if encoding is not None and encoding_of(encoding) is None:
        return f"is text in {encoding.upper()} without a byte order mark; convert it to UTF-8"
    if format != "jsonl":
        return _Group(ending, None, encoding)
    if content.kind == "json" and first_records(file, "json", compression):
        return _Group(ending, "json", encoding)
    if not isinstance(parsed_json(next(first_lines(file, compression), "")), dict):
        return "its first line is not a JSON object"
    return _Group(ending, None, encoding)


def _unmarked(content: FirstBytes) -> str | None:
    """Return the encoding if a recipe must name it: UTF-16 or UTF-32 without a byte order mark; else None."""
    return content.encoding if content.lacks_mark else None


def _as_text(files: Sequence[InputFile]) -> Fields | None:
    """Return fields for files of unknown format, each file a document; None if one of them is not text."""
    kinds = [look(_head(file)) for file in files[:_TRIED_FILES]]
    encodings = {_unmarked(kind) for kind in kinds}
    if any(not kind.is_text for kind in kinds) or len(encodings) > 1:
        return None
    [encoding] = encodings
    if encoding is not None and encoding_of(encoding) is None:
        return None
    pages = sum(kind.kind == "html" for kind in kinds)
    return Fields(format="text", html=2 * pages > len(kinds), encoding=encoding)


def _head(file: InputFile, compression: str | None = None) -> bytes:
    """Return the first bytes of a file, or of its decompressed content; b"" if they cannot be read."""
    try:
        with open_input(file) as stored:
            if compression is None:
                return stored.read(HEAD_BYTES)
            return bytes(next(iter(decompressed(stored, compression, file.bytes)), b""))[:HEAD_BYTES]
    except (ContainerError, OSError):
        return b""


def _yaml_of(inputs: Sequence[DraftInput], tokenizer: str, eos: str, bos: str | None) -> str:
    trained = f"{SEQUENCE_LENGTH - 1:,}"
    begin = "" if bos is None else f"  bos: {_scalar(bos)}  # begins every document (add_bos_token)\n"
    entries = [_yaml_of_input(entry, source) for entry, source in zip(inputs, _sources(inputs), strict=True)]
    short = fmean(entry.fields.short for entry in inputs)
    length = f"- length: {{min_words: {LEAST_WORDS}}}"
    if short > 0.2:
        length = f"# {length}  # would drop {short:.0%} of the sampled documents"
    return f"""\
# A recipe for `shardkit build`, written by `shardkit init`. Relative paths start from this file's folder.
inputs:
{"".join(entries)}
# In this order: cheap filters, then duplicates, then filters that take long, such as models.
steps:
  {length}
  # - gopher_quality  # for English web pages: these two, or all of fineweb
  # - gopher_repetition
  - exact  # remove documents with equal text
  # - near:  # remove near-duplicates: n-grams of 5 words with at least this Jaccard similarity
  #     similarity: 0.8
  #     minhash: {{unit: auto}}  # each character of Chinese, Japanese, Thai, ... is a word
  # - classifier: {{model: quality.bin, label: good}}  # reads only what is left

tokenizer:
  path: {_scalar(tokenizer)}
  eos: {_scalar(eos)}  # ends every document
{begin}
pack:
  sequence_length: {SEQUENCE_LENGTH}  # tokens of a row: {trained} to train on, and the label of the last one

output:
  path: out
"""


def _sources(inputs: Sequence[DraftInput]) -> list[str]:
    """Return a unique label per input: the last part of its path that is no pattern, numbered if needed."""
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
    lines = [f"  # {count} ({', '.join(map(readable_text, entry.endings))}), {format_bytes(entry.bytes)}"]
    if fields.beginning:
        lines.append(f"  # The first text begins: {fields.beginning}")
    lines.append(f"  - path: {_scalar(entry.path)}")
    lines.append(f"    source: {_scalar(source)}  # a label for reports")
    if entry.exclude:
        lines.append(f"    exclude: {_scalar(entry.exclude)}")
    for key, value, default in (
        ("format", fields.format, None),
        ("encoding", fields.encoding, None),
        ("text", fields.text, "text"),
        ("messages", fields.messages, None),
        ("prompt", fields.prompt, None),
        ("completion", fields.completion, None),
        ("id", fields.id, None),
        ("url", fields.url, None),
    ):
        if value != default:
            lines.append(f"    {key}: {_scalar(value)}")
    if fields.messages:
        lines.append("    # rendered by the tokenizer's chat template; answers are trained on")
    if fields.html:
        lines.append("    extract: resiliparse  # the texts are HTML; needs pip install 'shardkit[html]'")
    elif entry.seems_html:
        share = f"{fields.markup:.0%} of a sample begin with markup"
        lines.append(f"    # extract: resiliparse  # main text, if all texts are HTML: {share}")
    elif any((guess_format(f"x{ending}") or ("",))[0] in _PAGES for ending in entry.endings):
        lines.append("    # extract: trafilatura  # main text of pages; by default resiliparse")
    if fields.lines:
        lines.append("    lines: true  # each line is a document: the files are large")
    if fields.others:
        shown = _scalar([name for name in fields.others if name.isprintable()][:SHOWN_FIELDS])
        lines.append(f"    # metadata: {shown}  # other fields, to keep in the provenance table")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
