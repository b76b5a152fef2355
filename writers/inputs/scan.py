"""Divides input files into splits, the units of reading, and computes digests of their contents.

The order of splits depends only on names and contents. A compressed file is one split; plain JSONL and text
with lines are cut after every 64 MiB at b"\\n"; Parquet is cut between row groups. Plain files in a store are
cut at the same places by small reads, and tasks count the number of each split's first record
(stages/record_counts.py). The split size is a constant: worker count and memory never change which records
share a split.

A split may contain several small files (small_files.py), which are then in `Split.parts`.

Each split's stored bytes are hashed while they are in memory to be read; the digest of an input covers the
names, cuts and hashes of its files. It covers no times, so a copied corpus has the same digest, and a changed
byte in any file changes it. For a file in a store, its size and version (S3: the ETag) are used instead of
its bytes, so that nothing is downloaded just to find that nothing has changed; a copied bucket may be built
again.

The cuts of a file follow from its footer (Parquet) or its newlines. `KeptCuts` keeps them in the work folder,
by the file's path, size and version, so that the next start and --explain read no file. The version of a
local file consists of its mtime, ctime and inode, because `cp -p` preserves size and mtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import xxhash

from shardkit.encodings import GUESS, encoding_of
from shardkit.errors import BuildError, RecipeError, warn_user
from shardkit.hashing import digest_of
from shardkit.storage.store import StorageOptions
from shardkit.writers.execution.digests import DecidesNoByte, RecipeKey
from shardkit.writers.inputs.cuts import UNCOUNTED, Cut, KeptCuts, read_cuts, unreadable_cut
from shardkit.writers.inputs.decompress import COMPRESSIONS
from shardkit.writers.inputs.files import (
    Found,
    InputFile,
    fields_of_path,
    find_files,
    identities,
    open_input,
    version_now,
)
from shardkit.writers.recipe.inputs import READER, InputConfig
from shardkit.writers.recipe.recipe import Recipe

__all__ = [
    "CUTS_NOTE",
    "SEEKING",
    "SPLIT_BYTES",
    "TEXTUAL",
    "UNCOUNTED",
    "Cut",
    "KeptCuts",
    "Split",
    "check_unchanged",
    "describe_inputs",
    "guess_format",
    "hash_split",
    "hash_splits",
    "parts_of",
    "scan_inputs",
]

CUTS_NOTE = "inputs.json.zst"  # name of the file with `KeptCuts` in a work folder
SPLIT_BYTES = 1 << 26
_READ_BYTES = 1 << 20
_TRIAL_SPLITS = 8  # splits per input with `limit`: several places represent the input better than one
_TRIAL_RECORD_BYTES = 4096  # assumed size of a record, to choose enough splits
_THREADS = 8  # threads that read footers, which for remote files is mostly waiting
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".mds": "mds",
    ".tar": "wds",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
    ".wet": "warc",
    ".arc": "warc",
    ".xml": "mediawiki",
    ".pdf": "pdf",
    ".epub": "epub",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}
# Formats that are not read from front to back, so their files cannot be compressed as a whole.
SEEKING = frozenset({"parquet", "arrow"})
TEXTUAL = frozenset({"jsonl", "json", "csv", "text", "html", "mediawiki", "stackexchange"})
_OTHER_COMPRESSIONS = frozenset({".br", ".zip", ".7z", ".tar", ".tgz", ".sz", ".snappy"})
_POSTS = "posts.xml"  # name of the posts in a dump of Stack Exchange
# Endings of the parts of a Wikipedia dump (first and last page), and of TFRecord files (number and count).
_OF_PARTS = re.compile(r"(\.xml)-p\d+p\d+|(\.tfrecords?)-\d+-of-\d+")


_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Split:
    """A range of records in one file and, with `rest`, all records of further small files.

    [start, end) is in bytes for a plain file, in row groups for a Parquet file, and all of a compressed file.
    """

    index: Annotated[int, DecidesNoByte("number among all splits")]
    source: int  # index of the input in the recipe
    input: Annotated[InputFile, RecipeKey("file")]
    format: str  # a value of InputConfig.format, or READER
    compression: str | None  # a value of COMPRESSIONS, or None
    start: int
    end: int
    first_record: int  # line or row number of the first record, or UNCOUNTED
    bytes: int  # stored bytes of this split
    limit: int | None = None  # maximum number of records to read
    rest: tuple[Split, ...] = ()  # splits of further files of the same input, which the same task reads next

    @property
    def parts(self) -> tuple[Split, ...]:
        """One split per file of this split."""
        own = self.bytes - sum(part.bytes for part in self.rest)
        return (replace(self, bytes=own, rest=()), *self.rest) if self.rest else (self,)

    @property
    def file(self) -> str:
        """The file's name in ids and reports."""
        return self.input.name

    @property
    def task_name(self) -> str:
        """The name of this split's task in each stage: readable, unique, and constant for (file, start)."""
        readable = _UNSAFE.sub("_", Path(self.file).name)[:40].strip(".") or "file"
        return f"{readable}-{digest_of([self.file, self.start])[:16]}"

    @property
    def path(self) -> str:
        """The path of the file, for errors; `open_input(split.input)` opens it."""
        return self.input.path


def scan_inputs(
    recipe: Recipe,
    storage: StorageOptions | None = None,
    *,
    split_bytes: int = SPLIT_BYTES,
    kept: KeptCuts | None = None,
    key: str = "inputs[{}].path",
    given: Sequence[InputFile] | None = None,
    progress: bool = False,
) -> list[Split]:
    """Return all splits in order of input, file name and position; `storage` has the settings for URLs.

    `key` is the format string for key paths in errors. `given` are the files of the only input, in their
    order, if a build wrote them itself: then its path and `limit` are not used. `progress` shows how many
    files of a long list were found. Raises RecipeError if an input matches nothing or cannot be listed, a
    file belongs to two inputs, two files have the same name, or a format is unknown. Raises BuildError if a
    file cannot be read.
    """
    kept = KeptCuts() if kept is None else kept
    if given is not None:
        formats = [_format_of(file.name, recipe.inputs[0], key.format(0)) for file in given]
        found = [(0, file, *format) for file, format in zip(given, formats, strict=True)]
    else:
        found = _find_all(recipe, storage, key, progress)

    def is_read(entry: _Found) -> bool:
        source, file, format, compression = entry
        return _takes_reading(file, format, compression, recipe.inputs[source], split_bytes)

    def cuts(entry: _Found) -> list[Cut]:
        _, file, format, _ = entry
        if (known := kept.get(file, split_bytes)) is not None:
            return known
        made = read_cuts(file, format, split_bytes)
        if made != [unreadable_cut(file)]:
            kept.put(file, split_bytes, made)
        return made

    with ThreadPoolExecutor(_THREADS) as pool:
        read = pool.map(cuts, filter(is_read, found))
        cut = [next(read) if is_read(entry) else [_uncut(entry[1])] for entry in found]
    places = [(*entry, *place) for entry, made in zip(found, cut, strict=True) for place in made]
    splits = [Split(index, *place) for index, place in enumerate(places)]
    return splits if recipe.limit is None or given is not None else _limited(splits, recipe.limit)


def _uncut(file: InputFile) -> Cut:
    return 0, file.bytes, file.first_record, file.bytes


_Found = tuple[int, InputFile, str, str | None]
"""(number of the input, file, format, compression)."""


def _find_all(recipe: Recipe, storage: StorageOptions | None, key: str, progress: bool) -> list[_Found]:
    found: list[_Found] = []
    owners: dict[str, tuple[int, str]] = {}
    names: dict[str, InputFile] = {}
    for source, config in enumerate(recipe.inputs):
        where = key.format(source)
        files = find_files(recipe, config, where, storage, progress=progress)
        _warn_of_unread(files, where)
        for (name, file), identity in zip(files.files.items(), identities(files.files.values()), strict=True):
            if identity in owners:
                owner, other = owners[identity]
                raise RecipeError(
                    f"{where}: {name} is the same file as {other} of inputs[{owner}]; "
                    "its documents would be read twice; leave it out of one of these inputs"
                )
            if name in names:
                raise RecipeError(
                    f"{where}: {file.path} and {names[name].path} would both be called {name}, so their "
                    "documents would have the same ids; change inputs[].base"
                )
            try:
                fields_of_path(config, name)
            except ValueError as error:
                problem = f"inputs[{source}].path_fields: {error}; leave the file out with exclude"
                raise RecipeError(problem) from None
            owners[identity], names[name] = (source, name), file
            found.append((source, file, *_format_of(name, config, where)))
    return found


def _warn_of_unread(found: Found, key: str) -> None:
    """Warn about files that look like data but are not read, and files that may be read by mistake."""
    # macOS creates a file "._name" for each file.
    hidden = [name for name in found.hidden if guess_format(name) and not PurePosixPath(name).match("._*")]
    splits = ", ".join(sorted(set(found.left_out.values())))
    for names, why in (
        (
            hidden,
            "not read, as a name begins with . or _; to read such files, write that character in the path",
        ),
        (list(found.left_out), f"not read: {splits}; to read such files, name them in an input of their own"),
        (
            list(found.held_out),
            "read, but called like a test or validation split; leave such files out with `exclude` or, to "
            "train on them, name them in an input of their own",
        ),
    ):
        if names:
            count = f"{names[0]} and {len(names) - 1:,} more are" if len(names) > 1 else f"{names[0]} is"
            warn_user(f"{key}: {count} {why}")


def _limited(splits: Sequence[Split], limit: int) -> list[Split]:
    """Choose splits spread evenly over each input, with at most `limit` records per input in total."""
    chosen: list[Split] = []
    for source in sorted({split.source for split in splits}):
        # Use only splits whose first record number is known, so that ids are the same as in a full build.
        of_source = [split for split in splits if split.source == source and split.first_record != UNCOUNTED]
        bytes_each = max(1, sum(split.bytes for split in of_source) // len(of_source))
        wanted = max(_TRIAL_SPLITS, limit * _TRIAL_RECORD_BYTES // bytes_each)
        number = min(wanted, len(of_source), limit)
        each, more = divmod(limit, number)
        chosen += [
            replace(of_source[at * len(of_source) // number], limit=each + (at < more))
            for at in range(number)
        ]
    return [replace(split, index=index) for index, split in enumerate(chosen)]


def parts_of(splits: Iterable[Split]) -> list[Split]:
    """Return all splits in order, with a split of several files replaced by one split per file."""
    return [part for split in splits for part in split.parts]


def guess_format(name: str) -> tuple[str, str | None] | None:
    """Return (format, compression) of a file by its name, or None if no readable format has that name."""
    compression, extension = _endings(name)
    format = _named_format(name, extension)
    return None if format is None or (format in SEEKING and compression) else (format, compression)


def _named_format(name: str, extension: str) -> str | None:
    is_of_posts = extension == ".xml" and _POSTS in PurePosixPath(name).name.lower()
    return "stackexchange" if is_of_posts else _FORMATS.get(extension)


def _endings(name: str) -> tuple[str | None, str]:
    """Return the compression in a file's name, and the suffix of the name without it, in lower case."""
    path = PurePosixPath(name)
    compression = COMPRESSIONS.get(path.suffix.lower())
    extension = PurePosixPath(path.stem if compression else path).suffix.lower()
    part = _OF_PARTS.fullmatch(extension)
    return compression, extension if part is None else part[1] or part[2]


def _format_of(name: str, config: InputConfig, key: str) -> tuple[str, str | None]:
    if config.reader is not None:
        return READER, None
    compression, extension = _endings(name)
    is_tar = extension == ".tar" and config.format in (None, "wds")
    if extension in _OTHER_COMPRESSIONS and compression is None and not is_tar:
        remedy = f"compress with {' '.join(COMPRESSIONS)} instead"
        if extension == ".7z":
            remedy = f"unpack it with `7z x`, and name what is inside, or {remedy}"
        remedy += ", or set inputs[].reader to a function that reads them"
        raise RecipeError(f"{key}: {name}: {extension} files cannot be read; {remedy}")
    format = config.format or _named_format(name, extension)
    if extension == ".paths" and format in (None, "text"):
        own_list = key.removesuffix("path") + "list"
        raise RecipeError(f"{key}: {name} is a list of paths; set {own_list}: true to read the files in it")
    if format is None:
        known = " ".join(sorted(_FORMATS))
        raise RecipeError(
            f"{key}: the name {name} does not tell its format ({known}, each also with "
            f"{' '.join(sorted(COMPRESSIONS))}); set inputs[].format, inputs[].reader (a function "
            "that reads the file), or a glob that leaves the file out"
        )
    own_key = key.removesuffix("path") + "encoding"
    holds_pages = format in ("html", "warc", "epub") or config.extract not in (None, "none")
    if config.encoding is not None and not (holds_pages or format in TEXTUAL):
        raise RecipeError(f"{own_key}: {name} is {format}, a format with a fixed encoding; remove this key")
    if config.encoding == GUESS and not holds_pages:
        raise RecipeError(f"{own_key}: {GUESS} is for web pages only; {name} is {format}: name its encoding")
    if format in SEEKING and compression is not None:
        raise RecipeError(f"{key}: {name}: a compressed {format} file cannot be read; decompress it")
    return format, compression


def _takes_reading(
    file: InputFile, format: str, compression: str | None, config: InputConfig, split_bytes: int
) -> bool:
    """Return whether the file must be read to find its cuts; any other file is one split."""
    if format == "parquet":
        return True
    is_utf8 = encoding_of(config.encoding or "utf-8") == "utf-8"  # other encodings are decoded from the start
    is_lined = format in ("jsonl", "stackexchange") or (format == "text" and config.lines is True)
    return is_lined and is_utf8 and compression is None and file.bytes > split_bytes


def hash_split(split: Split) -> str:
    """Return the xxh3-128 of a split's stored bytes, or for a file in a store, of its size and version.

    Splits of Parquet are not byte ranges: a file's first split has the hash of the whole file, others "". A
    file whose digest is known is not read.
    """
    if split.input.digest:
        return split.input.digest
    if split.input.is_remote:
        return digest_of([split.input.bytes, split.input.version])
    whole = split.format == "parquet"
    if whole and split.start:
        return ""
    state = xxhash.xxh3_128()
    try:
        with open_input(split.input) as file:
            file.seek(0 if whole else split.start)
            left = None if whole else split.end - split.start
            while piece := file.read(_READ_BYTES if left is None else min(left, _READ_BYTES)):
                state.update(piece)
                left = None if left is None else left - len(piece)
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error
    return state.hexdigest()


def hash_splits(splits: Sequence[Split]) -> list[str]:
    """Return `hash_split` of all parts of the splits, computed in threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(hash_split, parts_of(splits)))


def check_unchanged(splits: Sequence[Split], hashes: Sequence[str]) -> None:
    """Raise BuildError if a local file has changed since it was read; for URLs, each read checks the version.

    `hashes` has `hash_split` of all parts as they were read. A file with another size or mtime has changed.
    If only its ctime or inode differs, it may be the same (its mode or owner changed, it was linked, or its
    file system has no fixed inodes): it is read again, and must have the same cuts and hashes.
    """
    parts = list(zip(parts_of(splits), hashes, strict=True))
    touched = set()
    for file in {part.input for part, _ in parts if not part.input.is_remote}:
        now = version_now(file)
        if now is None or now[0] != file.bytes or _mtime(now[1]) != _mtime(file.version):
            raise BuildError(f"{file.path}: changed while the build ran; run it again")
        if now[1] != file.version:
            touched.add(file)
    cuts: dict[InputFile, set[tuple[int, int, int]]] = {}
    for part, content in parts:
        file = part.input
        if file not in touched:
            continue
        is_same = hash_split(part) == content
        if (part.start, part.end) != (0, file.bytes):
            if file not in cuts:
                cuts[file] = {cut[:3] for cut in read_cuts(file, part.format, SPLIT_BYTES)}
            is_same = is_same and (part.start, part.end, part.first_record) in cuts[file]
        if not is_same:
            raise BuildError(f"{file.path}: changed while the build ran; run it again")


def _mtime(version: str) -> str:
    return version.partition("-")[0]


def describe_inputs(recipe: Recipe, splits: Sequence[Split], hashes: Sequence[str]) -> list[dict[str, Any]]:
    """Return label, number of files, stored bytes and digest of each input of the recipe.

    `hashes` has `hash_split` of all parts of the splits.
    """
    cuts: list[list[list[Any]]] = [[] for _ in recipe.inputs]
    files: list[set[str]] = [set() for _ in recipe.inputs]
    sizes = [0] * len(recipe.inputs)
    for split, content in zip(parts_of(splits), hashes, strict=True):
        cuts[split.source].append([split.file, split.start, split.end, content])
        files[split.source].add(split.file)
        sizes[split.source] += split.bytes
    return [
        {
            "source": label,
            "files": len(files[source]),
            "bytes": sizes[source],
            "digest": digest_of(cuts[source]),
        }
        for source, label in enumerate(recipe.sources)
    ]
