"""Input files as splits, the units of reading, and the digests of what they hold.

The order of splits depends on nothing but names and contents. Compressed files are one split; plain JSONL and
text with lines are cut after every 64 MiB at b"\\n"; Parquet is cut between row groups. Plain files in a
store are cut at the same places by small reads; which records their splits begin with is counted by tasks
(stages/record_counts.py). The size is a constant: worker count and memory never change which records meet in
a split.

A split may stand for several small files, which are then its parts (small_files.py).

Each split's stored bytes are hashed while they are in memory from being read; an input's digest goes over its
files' names, cuts and hashes. No times are kept, so a copied corpus has the same digests, and a changed byte
in any file gives another one. Of a file in a store its size and version (of S3 the ETag) stand for its bytes,
so that nothing is downloaded to find that there is nothing to do; a copied bucket may then be built again.

Where a file is cut is in its footer (Parquet) or at its newlines. `KeptCuts` remembers that in
the work folder, by the file's path, size and version, so that the next start and --explain read no file.
Of a local file the version is its mtime, ctime and inode, because a size and an mtime come back with `cp -p`.
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
from shardkit.writers.recipe.recipe import InputConfig, Recipe

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

CUTS_NOTE = "inputs.json.zst"  # of `KeptCuts` in a work folder
SPLIT_BYTES = 1 << 26
_READ_BYTES = 1 << 20
_TRIAL_SPLITS = 8  # of each input, where `limit` is set: a few places are more alike to the whole than one
_TRIAL_RECORD_BYTES = 4096  # as large as records are taken to be, to have enough splits for them
_THREADS = 8  # that read footers: of a remote file it is waiting only
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
}
# Not read from front to back, so never compressed as a whole.
SEEKING = frozenset({"parquet", "arrow"})
TEXTUAL = frozenset({"jsonl", "json", "csv", "text", "html"})
_OTHER_COMPRESSIONS = frozenset({".br", ".zip", ".7z", ".tar", ".tgz", ".sz", ".snappy"})


_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Split:
    """A run of records of one file, and with `rest` also all records of further small files.

    [start, end) counts bytes of a plain file, row groups of a Parquet file; a compressed file is whole.
    """

    index: Annotated[int, DecidesNoByte("number among all splits")]
    source: int  # number of the recipe's input
    input: Annotated[InputFile, RecipeKey("file")]
    format: str  # of InputConfig.format
    compression: str | None  # a value of COMPRESSIONS, or None
    start: int
    end: int
    first_record: int  # line or row number of the first record, or UNCOUNTED
    bytes: int  # stored bytes of this split
    limit: int | None = None  # read so many of its records at most
    rest: tuple[Split, ...] = ()  # of further files of the same input, which the same task reads next

    @property
    def parts(self) -> tuple[Split, ...]:
        """A split for each of its files."""
        return (replace(self, bytes=self.input.bytes, rest=()), *self.rest) if self.rest else (self,)

    @property
    def file(self) -> str:
        """The file's name in ids and reports."""
        return self.input.name

    @property
    def task_name(self) -> str:
        """The name of all tasks of the split: readable, and unique and constant for (file, start)."""
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
) -> list[Split]:
    """All splits in order of input, file name and position; `storage` says how URLs are reached.

    `key` is the key path of an input's files by its number, for errors.

    RecipeError when an input matches nothing or cannot be listed, a file belongs to two inputs, two files
    have one name, or a format is unknown; BuildError when a file cannot be read.
    """
    kept = KeptCuts() if kept is None else kept
    found = _find_all(recipe, storage, key)

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
        cut = [next(read) if is_read(entry) else [(0, entry[1].bytes, 0, entry[1].bytes)] for entry in found]
    places = [(*entry, *place) for entry, made in zip(found, cut, strict=True) for place in made]
    splits = [Split(index, *place) for index, place in enumerate(places)]
    return splits if recipe.limit is None else _limited(splits, recipe.limit)


_Found = tuple[int, InputFile, str, str | None]
"""The number of its input, a file, its format and compression."""


def _find_all(recipe: Recipe, storage: StorageOptions | None, key: str) -> list[_Found]:
    found: list[_Found] = []
    owners: dict[str, tuple[int, str]] = {}
    names: dict[str, InputFile] = {}
    for source, config in enumerate(recipe.inputs):
        where = key.format(source)
        files = find_files(recipe, config, where, storage)
        _warn_of_unread(files, where)
        for (name, file), identity in zip(files.files.items(), identities(files.files.values()), strict=True):
            if identity in owners:
                owner, other = owners[identity]
                raise RecipeError(
                    f"{where}: {name} is the same file as {other} of inputs[{owner}]; "
                    "its documents would be read twice"
                )
            if name in names:
                raise RecipeError(
                    f"{where}: {file.path} and {names[name].path} would both be called {name}, and their "
                    "documents have the same ids; change inputs[].base"
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
    """Warn of files that look like data and are not read, and of such that may not be meant to be read."""
    # macOS makes a file "._name" for each file.
    hidden = [name for name in found.hidden if guess_format(name) and not PurePosixPath(name).match("._*")]
    splits = ", ".join(sorted(set(found.left_out.values())))
    for names, why in (
        (
            hidden,
            "not read, as a name begins with . or _; to read such files spell that in the path",
        ),
        (list(found.left_out), f"not read: {splits}; to read such files name them in an input of their own"),
        (
            list(found.held_out),
            "read, and called like a split that is not to train on; use `exclude` or, if they are meant, an "
            "input of their own",
        ),
    ):
        if names:
            count = f"{names[0]} and {len(names) - 1:,} more are" if len(names) > 1 else f"{names[0]} is"
            warn_user(f"{key}: {count} {why}")


def _limited(splits: Sequence[Split], limit: int) -> list[Split]:
    """Splits spread evenly over each input, with at most `limit` records to read in all of them."""
    chosen: list[Split] = []
    for source in sorted({split.source for split in splits}):
        # Those whose first record takes no counting of others, so that ids are those of the whole build.
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
    """A split for each file of a group, and the others, in order."""
    return [part for split in splits for part in split.parts]


def guess_format(name: str) -> tuple[str, str | None] | None:
    """(format, compression) of a file by its name; None if it is no format that can be read."""
    compression, extension = _endings(name)
    format = _FORMATS.get(extension)
    return None if format is None or (format in SEEKING and compression) else (format, compression)


def _endings(name: str) -> tuple[str | None, str]:
    """(compression, the suffix before that of the compression)."""
    path = PurePosixPath(name)
    compression = COMPRESSIONS.get(path.suffix.lower())
    return compression, PurePosixPath(path.stem if compression else path).suffix.lower()


def _format_of(name: str, config: InputConfig, key: str) -> tuple[str, str | None]:
    compression, extension = _endings(name)
    is_tar = extension == ".tar" and config.format in (None, "wds")
    if extension in _OTHER_COMPRESSIONS and compression is None and not is_tar:
        raise RecipeError(f"{key}: {name}: {extension} files cannot be read; use {' '.join(COMPRESSIONS)}")
    format = config.format or _FORMATS.get(extension)
    if format is None:
        known = " ".join(sorted(_FORMATS))
        raise RecipeError(
            f"{key}: the name {name} does not tell its format ({known}, each also with "
            f"{' '.join(sorted(COMPRESSIONS))}); set inputs[].format or name the files with a glob"
        )
    own_key = key.removesuffix("path") + "encoding"
    holds_pages = format in ("html", "warc") or config.extract not in (None, "none")
    if config.encoding is not None and not (holds_pages or format in TEXTUAL):
        raise RecipeError(f"{own_key}: {name} is {format}, which says its own")
    if config.encoding == GUESS and not holds_pages:
        raise RecipeError(f"{own_key}: {GUESS} is for web pages; {name} is {format}: name its encoding")
    if format in SEEKING and compression is not None:
        raise RecipeError(f"{key}: {name}: a compressed {format} file cannot be read; decompress it")
    return format, compression


def _takes_reading(
    file: InputFile, format: str, compression: str | None, config: InputConfig, split_bytes: int
) -> bool:
    """Whether the file must be read to know its cuts; any other is one split."""
    if format == "parquet":
        return True
    is_utf8 = encoding_of(config.encoding or "utf-8") == "utf-8"  # else it is decoded from its start
    has_lines = is_utf8 and (format == "jsonl" or (format == "text" and config.lines is True))
    return has_lines and compression is None and file.bytes > split_bytes


def hash_split(split: Split) -> str:
    """xxh3-128 of a split's stored bytes. Parquet is cut by row groups: a file's first split has it whole.

    Of a file in a store: of its size and version.
    """
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
    """`hash_split` of all their parts, in threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(hash_split, parts_of(splits)))


def check_unchanged(splits: Sequence[Split], hashes: Sequence[str]) -> None:
    """BuildError if a local file is not what was read of it; reads of a URL see that by themselves.

    `hashes` are the `hash_split` of what was read, of all parts. A file with another size or mtime has
    changed. One with another ctime or inode alone may be the same (its mode or owner changed, it was linked,
    or its file system invents inodes): it is read again, and must have the same cuts and hashes.
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
    """For each input of the recipe its label, number of files, stored bytes and digest.

    `hashes` are those of all parts of the splits.
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
