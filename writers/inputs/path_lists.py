"""Reads lists of paths: text files with the path or URL of one file per line, such as Common Crawl's
`warc.paths.gz`.

A line is exactly one file, whatever characters it has; blank lines and lines that begin with # are skipped. A
relative line starts at the input's `base` or, without one, at the folder of the list; whole URLs stay. In a
list that came from a store, a line with a slash in front starts at `base`, too, and cannot name a file of
this machine: whoever wrote the list does not know it. Nor can it name another bucket, whose requests would be
signed, unless `StorageOptions.follow_urls` allows it; files of web servers may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import BinaryIO

import xxhash

from shardkit.files import local_path
from shardkit.storage.url import is_remote
from shardkit.writers.inputs.decompress import COMPRESSIONS, ContainerError, decompressed
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, compression_of, look

MAX_LIST_BYTES = 1 << 30  # maximum size of a list, decompressed; one of Common Crawl has 13 MB
_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a list: the path or URL of a file, and where that was written."""

    place: str
    list: str
    number: int

    @property
    def where(self) -> str:
        return f"{self.list}: line {self.number:,}"


@dataclass(frozen=True, slots=True)
class Root:
    """Where the relative lines of one list start, and what its lines may name."""

    start: str  # a URL or an absolute path, without a slash at its end
    is_downloaded: bool  # the list came from a store
    follows_urls: bool = False

    def place(self, text: str) -> str:
        """Return the path or URL that a line means; raise ValueError if the line may not name it."""
        if "\0" in text:
            raise ValueError("is not the path of a file")
        if not is_remote(text):
            if text[:5].lower() == "file:":
                if self.is_downloaded:
                    raise ValueError(f"{text}: a list from a store cannot name files of this machine")
                return str(local_path(text))
            if text.startswith("/") and not (self.is_downloaded or is_remote(self.start)):
                return normpath(text)
            return self._below(text)
        is_near = text.startswith(f"{self.start}/") or bucket_of(text) == bucket_of(self.start)
        if not (is_near or text.lower().startswith(_WEB) or self.follows_urls) and self.is_downloaded:
            raise ValueError(
                f"{text} is in another place than the list, and would be read with your credentials; set "
                "base to that place, or allow it by --storage follow_urls=true"
            )
        return text

    def _below(self, text: str) -> str:
        relative = text.removeprefix("./").lstrip("/")
        if is_remote(self.start):
            if {".", ".."} & {*relative.split("/")}:
                raise ValueError(f"{text}: . and .. are not folders of a store")
            return f"{self.start}/{relative}"
        found = normpath(f"{self.start}/{relative}")
        if self.is_downloaded and not found.startswith(f"{self.start.rstrip('/')}/"):
            raise ValueError(f"{text} leaves {self.start}")
        return found


def bucket_of(url: str) -> str:
    """Return the scheme and the host or bucket of a URL."""
    return "/".join(url.split("/")[:3])


def read_lines(file: BinaryIO, size: int, name: str, root: Root) -> Iterator[Line]:
    """Yield the lines of an open list of `size` bytes, which may be compressed; `name` is its name.

    Raises ValueError, with a message that begins with the name, if the file is not a list or a line names no
    file; OSError if it cannot be read.
    """
    text = _text_of(file, size, name)
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            yield Line(root.place(stripped), name, number)
        except ValueError as error:
            raise ValueError(f"{name}: line {number:,}: {error}") from None


def _text_of(file: BinaryIO, size: int, name: str) -> str:
    compression = compression_of(file, COMPRESSIONS.get(Path(name).suffix.lower()))
    data = bytearray()
    try:
        for piece in decompressed(file, compression, size):
            data += piece
            if len(data) > MAX_LIST_BYTES:
                raise ValueError(f"{name}: has more than {MAX_LIST_BYTES:,} bytes, too many for a list")
    except ContainerError as error:
        raise ValueError(f"{name}: is damaged: {error}") from None
    found = look(bytes(data[:HEAD_BYTES]))
    if found.kind not in ("text", "paths"):
        raise ValueError(f"{name}: is not a list of paths: it is {found.what}")
    try:
        return data[len(found.mark) :].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not a list of paths: byte {error.start:,} is not UTF-8") from None


def unique(lines: Iterable[Line]) -> tuple[list[Line], int]:
    """Return the first line of each file, and the number of the other lines."""
    first: dict[str, Line] = {}
    count = 0
    for line in lines:
        first.setdefault(line.place, line)
        count += 1
    return [*first.values()], count - len(first)


def sample(names: Sequence[str], count: int | None) -> list[str]:
    """Return `count` of the names, in their order: those whose hashes are lowest.

    So a larger sample has all names of a smaller one, and a name stays when others are added behind it.
    """
    if count is None or count >= len(names):
        return [*names]
    ranked = sorted(names, key=lambda name: (xxhash.xxh3_64_intdigest(name.encode(errors="replace")), name))
    kept = {*ranked[:count]}
    return [name for name in names if name in kept]
