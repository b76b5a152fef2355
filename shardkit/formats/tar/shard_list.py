"""Read and write the list of a dataset's tars (shards.json), and parse the names that a user gives instead.

shards.json has the form that `wids` reads, plus our hashes:

    {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": …,
     "shardlist": [{"url": "shard-00000.tar", "nsamples": 512, "filesize": 2631680,
                    "hashes": {"xxh64": …}, "columns": {"tokens.npy": "ndarray:uint16:2048"}}, …]}

wids defines `url`, `nsamples`, `filesize` and `md5sum`. `hashes`, `columns` and `raw_bytes` (of a compressed
tar) are ours and optional, so lists made by `wids-index` are readable too. The whole list may have "blocks",
also ours: size and xxh3_128 of the dataset's block checksums (formats/block_checksums.py). URLs are
relative to the list's folder; in lists by others they may be absolute, relative to a "base", and grouped into
"datasets". The list is published last: its presence means that the dataset is complete.

Names are only parsed here; `shardkit.formats.tar.find` looks for them on disks and in stores:

    part-{000..099}.tar    {train,extra}/*.tar    a.tar::b.tar

Braces mean the same as in bash and webdataset: comma lists, ranges of numbers (a leading zero pads) or of
letters with an optional step, nested; expanded names keep the written order. "*", "?" and "[...]" match
within one folder, "**" matches any number of folders; the matches of a pattern are sorted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from shardkit.errors import ShardError
from shardkit.files import load_json, publish_bytes
from shardkit.manifest import (
    BLOCKS_NAME,
    UNKNOWN,
    Column,
    FileInfo,
    Manifest,
    ShardInfo,
    checked_basename,
    stated_file,
)
from shardkit.storage.url import is_remote

MAX_NAMES = 1 << 20  # limit per brace list, so that a typing mistake does not fill the memory

_SUFFIXES = {
    ".tar": ("", ".tar"),
    ".tar.gz": ("gz", ".tar"),
    ".tgz": ("gz", ".tar"),
    ".tar.bz2": ("bz2", ".tar"),
    ".tbz2": ("bz2", ".tar"),
    ".tar.zst": ("zstd", ".tar"),
    ".tar.zstd": ("zstd", ".tar"),
}

_MAGIC = frozenset("*?[")

_RANGE = re.compile(r"(?:(-?\d{1,18})\.\.(-?\d{1,18})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d{1,18}))?")


def tar_compression(basename: str) -> tuple[str, str] | None:
    """Return (compression algorithm, name of the uncompressed tar) for a file name; None if it is no tar.

    The algorithm of an uncompressed tar is "".
    """
    lower = basename.lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if lower.endswith(suffix) and len(PurePosixPath(basename).name) > len(suffix):
            algorithm, tar = _SUFFIXES[suffix]
            return algorithm, basename[: len(basename) - len(suffix)] + tar if algorithm else basename
    return None


def is_tar_name(basename: str) -> bool:
    """Return whether a file of this name is read as a tar."""
    return tar_compression(basename) is not None


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern, which may match several files."""
    return not _MAGIC.isdisjoint(name)


def expand_braces(text: str) -> list[str]:
    """Expand brace lists into names, in order. Raises ValueError for unbalanced braces or too many names."""
    try:
        return _expand(text)
    except RecursionError as error:
        raise ValueError(f"{text[:60]!r}… nests or chains too many braces") from error


def _expand(text: str) -> list[str]:
    start = text.find("{")
    if "}" in (text if start < 0 else text[:start]):
        raise ValueError(f"{text!r} has a '}}' without its '{{'")
    if start < 0:
        return [text]
    stop = _closing(text, start)
    head, inner = text[:start], text[start + 1 : stop]
    tails = _expand(text[stop + 1 :])
    middles = _alternatives(inner)
    if len(middles) * len(tails) > MAX_NAMES:
        raise ValueError(f"{text!r} names more than {MAX_NAMES:,} files")
    return [head + middle + tail for middle in middles for tail in tails]


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"{text!r} has a '{{' without its '}}'")


def _alternatives(inner: str) -> list[str]:
    found = _RANGE.fullmatch(inner)
    if found:
        return _range(found)
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append(inner[start:at])
            start = at + 1
    parts.append(inner[start:])
    if len(parts) == 1:  # neither a list nor a range: as in bash, braces are kept
        return [f"{{{name}}}" for name in _expand(inner)]
    return [name for part in parts for name in _expand(part)]


def _range(found: re.Match[str]) -> list[str]:
    low, high = found[1] or found[3], found[2] or found[4]
    numbers = found[1] is not None
    first, last = (int(low), int(high)) if numbers else (ord(low), ord(high))
    step = abs(int(found[5] or 1)) or 1
    if abs(last - first) // step >= MAX_NAMES:
        raise ValueError(f"{{{found[0]}}} names more than {MAX_NAMES:,} files")
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if not numbers:
        return [chr(value) for value in values]
    padded = any(end.lstrip("-").startswith("0") and len(end.lstrip("-")) > 1 for end in (low, high))
    width = max(len(low), len(high)) if padded else 0
    return [f"{value:0{width}d}" for value in values]


def fixed_folder(name: str) -> str:
    """Return a name's folder; for a pattern, the deepest folder above all possible matches; "" if none."""
    parts = name.split("/")
    count = next((i for i, part in enumerate(parts) if is_pattern(part)), len(parts) - 1)
    return "/".join(parts[: min(count, len(parts) - 1)])


def common_folder(folders: Sequence[str]) -> str:
    """Return the deepest folder that equals or contains each of `folders`."""
    split = [folder.split("/") for folder in folders]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches `name`, folder by folder. As in a shell, `*` skips hidden names."""
    return _matches(name.split("/"), pattern.split("/"))


def _matches(name: list[str], pattern: list[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**":
        hidden = next((i for i, part in enumerate(name) if part.startswith(".")), len(name))
        return any(_matches(name[i:], pattern[1:]) for i in range(min(hidden + 1, len(name))))
    if name[0].startswith(".") and not pattern[0].startswith("."):
        return False
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


LIST_NAME = "shards.json"

MAX_LIST_BYTES = 1 << 30  # maximum size of a list; 450,000 shards with two hashes take about 150 MB

_BLOCKS_KEY = "blocks"
_MAX_COUNT = 1 << 53  # every JSON reader represents integers below this exactly


def describe_tar(
    basename: str,
    *,
    stored_bytes: int = UNKNOWN,
    raw_bytes: int = UNKNOWN,
    samples: int = UNKNOWN,
    hashes: Mapping[str, str] | None = None,
    columns: tuple[Column, ...] = (),
) -> ShardInfo:
    """Return the ShardInfo of a tar, compressed or not. Raises ValueError if the name is not a tar's."""
    found = tar_compression(basename)
    if found is None:
        raise ValueError(f"{basename!r} is not named like a tar (.tar, .tar.gz, .tgz, .tar.bz2, .tar.zst)")
    algorithm, inner = found
    stored = FileInfo(basename, stored_bytes, dict(hashes or {}))
    if not algorithm:
        return ShardInfo(stored, samples, columns)
    return ShardInfo(FileInfo(inner, raw_bytes), samples, columns, zip=stored, compression=algorithm)


def fixed_size(encoding: str) -> int | None:
    """Return the size in bytes of a value of encoding `ndarray:dtype:shape`; None for other encodings."""
    parts = encoding.split(":")
    if len(parts) != 3 or parts[0] != "ndarray":
        return None
    try:
        dims = [int(d) for d in parts[2].split(",")] if parts[2] else []
        return int(np.dtype(parts[1]).itemsize * prod(dims))
    except (TypeError, ValueError):
        return None


def tar_files(folder: Path) -> list[str]:
    """Return the sorted names of the tars directly in `folder`, except hidden ones (macOS's ._a.tar)."""
    try:
        names = [p.name for p in folder.iterdir() if is_tar_name(p.name) and p.is_file()]
        return sorted(name for name in names if not name.startswith("."))
    except OSError as error:
        raise ShardError(folder, f"cannot be listed: {error.strerror or error}") from error


def read_list(file: Path) -> bytes:
    """Return the bytes of a shards.json. Raises ShardError if it is unreadable or above `MAX_LIST_BYTES`."""
    try:
        if file.stat().st_size > MAX_LIST_BYTES:
            raise ShardError(file, f"is larger than {MAX_LIST_BYTES:,} bytes; split the dataset")
        return file.read_bytes()
    except OSError as error:
        raise ShardError(file, f"cannot be read: {error.strerror or error}") from error


def parse_shard_list(file: str | PathLike[str], text: bytes) -> Manifest:
    """Parse a shards.json whose tars are in its own folder. Raises ShardError, naming `file`, otherwise."""
    base, manifest = parse_listing(file, text)
    if base is not None:
        raise ShardError(file, f"lists tars elsewhere, at {base}; list only tars of its own folder")
    return manifest


def parse_listing(file: str | PathLike[str], text: bytes) -> tuple[str | None, Manifest]:
    """Parse the bytes of any shards.json into (base URL to which its names are relative, manifest).

    The base is None if it is the list's own folder. Raises ShardError, naming `file`, for a malformed list.
    """
    try:
        listing = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"is not JSON: {error}") from error
    if not isinstance(listing, dict) or not isinstance(listing.get("shardlist"), list):
        raise ShardError(file, 'is not a list of tar shards: expected an object with a "shardlist"')
    if listing.get("wids_version", 1) != 1:
        raise ShardError(file, "has a wids_version other than 1")
    entries = _rebased(listing, listing.get("base"), file)
    parts = listing.get("datasets") or []
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or not isinstance(part.get("shardlist"), list):
            raise ShardError(file, 'has a dataset without a "shardlist"; open the lists it names instead')
        entries += _rebased(part, part.get("base", listing.get("base")), file)
    base = _common_base([url for entry in entries if isinstance(url := entry.get("url"), str)], file)
    if base is not None:
        entries = [entry | {"url": str(entry.get("url"))[len(base) + 1 :]} for entry in entries]
    stated = listing.get(_BLOCKS_KEY)
    blocks = None if stated is None or parts else stated_file(BLOCKS_NAME, stated, file)
    return base, Manifest("tar", tuple(_read_entry(entry, file) for entry in entries), blocks=blocks)


def _rebased(part: dict[str, Any], base: object, file: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the entries of a list, or of one dataset in it, with `base` prepended to relative URLs."""
    if base is not None and not isinstance(base, str):
        raise ShardError(file, f"has a base that is not a URL: {str(base)[:80]!r}")
    entries = []
    for entry in part["shardlist"]:
        if not isinstance(entry, dict):
            raise ShardError(file, f"has an entry that is not an object: {str(entry)[:80]!r}")
        url = entry.get("url")
        if base and isinstance(url, str) and not is_remote(url):
            entry = entry | {"url": f"{base.rstrip('/')}/{url}"}
        entries.append(entry)
    return entries


def _common_base(urls: list[str], file: str | PathLike[str]) -> str | None:
    """Return the folder that all absolute URLs share; None if all URLs are relative."""
    remote = [url for url in urls if is_remote(url)]
    if not remote:
        return None
    base = common_folder([fixed_folder(url) for url in urls])
    if base.count("/") < 2 or base.endswith("://"):
        other = next((url for url in urls if not is_remote(url)), urls[-1])
        raise ShardError(
            file, f"lists tars in different places, {remote[0]} and {other}; list the tars of one bucket"
        )
    return base


def _read_entry(entry: dict[str, Any], file: str | PathLike[str]) -> ShardInfo:
    name = checked_basename(entry.get("url"), file)
    hashes, columns = entry.get("hashes", {}), entry.get("columns", {})
    for what, table in (("hashes", hashes), ("columns", columns)):
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise ShardError(file, f"{name}: {what} must map names to strings")
    if isinstance(entry.get("md5sum"), str):
        hashes = {"md5": entry["md5sum"], **hashes}
    if not is_tar_name(name):
        raise ShardError(file, f"{name!r} is not named like a tar (.tar, .tar.gz, .tgz, .tar.bz2, .tar.zst)")
    return describe_tar(
        name,
        stored_bytes=_count(entry, "filesize", name, file, UNKNOWN),
        raw_bytes=_count(entry, "raw_bytes", name, file, UNKNOWN),
        samples=_count(entry, "nsamples", name, file, None),
        hashes=hashes,
        columns=tuple(Column(c, encoding, fixed_size(encoding)) for c, encoding in columns.items()),
    )


def _count(
    entry: dict[str, object], key: str, name: str, file: str | PathLike[str], default: int | None
) -> int:
    value = entry.get(key, default)
    if default is not None and key not in entry:
        return default
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ShardError(file, f"{name}: {key} must be an integer of 0 or more, not {str(value)[:40]!r}")
    return value


def write_shard_list(folder: Path, shards: Sequence[ShardInfo], blocks: FileInfo | None = None) -> None:
    """Publish shards.json for `shards` atomically. `blocks` is the entry of their block checksum file."""
    publish_bytes(folder / LIST_NAME, shard_list_bytes(shards, blocks))


def shard_list_bytes(shards: Sequence[ShardInfo], blocks: FileInfo | None = None) -> bytes:
    """Return the bytes of shards.json for `shards`. `blocks` is the entry of their block checksum file."""
    # wids caches shards under this name, so it must differ between datasets.
    name = f"shardkit-{Manifest('tar', shards).fingerprint}"
    listing: dict[str, object] = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": name,
        "shardlist": [_entry(shard) for shard in shards],
    }
    if blocks is not None:
        listing[_BLOCKS_KEY] = {"bytes": blocks.bytes, **blocks.hashes}
    return json.dumps(listing, separators=(",", ":")).encode() + b"\n"


def _entry(shard: ShardInfo) -> dict[str, object]:
    stored = shard.stored
    entry: dict[str, object] = {"url": stored.basename, "nsamples": shard.samples, "filesize": stored.bytes}
    if "md5" in stored.hashes:
        entry["md5sum"] = stored.hashes["md5"]
    if stored.hashes:
        entry["hashes"] = dict(sorted(stored.hashes.items()))
    if shard.columns:
        entry["columns"] = {c.name: c.encoding for c in shard.columns}
    if shard.zip is not None:
        entry["raw_bytes"] = shard.raw.bytes
    return entry
