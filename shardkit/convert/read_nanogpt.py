"""Streams of tokens in .bin files, as nanoGPT, llm.c and modded-nanogpt write them.

nanoGPT writes bare little-endian uint16. llm.c and modded-nanogpt put 256 int32 before the tokens: magic,
version, number of tokens, zeros; 20240520 stands for uint16 (GPT-2), 20240801 for uint32 (Llama 3). Neither
says where documents end, so the files are one stream, in the order in which they are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardkit.convert.source import NO_ENDS, HashedPieces, TokenBlock
from shardkit.errors import ShardError
from shardkit.index import FileInfo

__all__ = ["NanogptSource"]

HEADER_BYTES = 1024
# Magic -> (version, type of tokens).
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


class NanogptSource:
    """The tokens of .bin files, one behind the other."""

    kind: ClassVar[str] = "nanogpt"
    max_token: int | None = None
    has_documents = False
    left_out = ()

    def __init__(self, paths: Sequence[Path], source_dtype: str | None = None) -> None:
        """`source_dtype` of bare files. ShardError if a file is no .bin of tokens, or of another type."""
        self._paths = list(paths)
        self.digests: list[FileInfo] = []
        headers = [_read_header(path, source_dtype) for path in self._paths]
        kinds = dict(zip(headers, self._paths, strict=True))
        if len(kinds) > 1:
            (_, one), (_, other) = list(kinds.items())[:2]
            raise ShardError(other, f"has another header or type than {one}; convert them one by one")
        self._start, name = headers[0]
        self.dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        self.bytes = sum(path.stat().st_size for path in self._paths)
        self.files = len(self._paths)
        self.files_done = 0

    @property
    def facts(self) -> Mapping[str, object]:
        return {"header": bool(self._start), "dtype": self.dtype.name}

    def blocks(self) -> Iterator[TokenBlock]:
        """All tokens in order."""
        for path in self._paths:
            pieces, token, size = HashedPieces(path, self._start, self.dtype.itemsize), 0, path.stat().st_size
            for data in pieces:
                if len(data) % self.dtype.itemsize:
                    raise ShardError(path, "was changed while it was read; convert it again")
                tokens = data.view(self.dtype)
                token += len(tokens)
                last = self._start + token * self.dtype.itemsize >= size
                yield TokenBlock(
                    tokens, NO_ENDS, str(path), 0, token - len(tokens), len(data), ends_file=last
                )
            assert pieces.info is not None
            if pieces.info.bytes != size:
                raise ShardError(path, "was changed while it was read; convert it again")
            self.digests.append(pieces.info)
            self.files_done += 1


def _read_header(path: Path, source_dtype: str | None) -> tuple[int, str]:
    """(bytes before the tokens, name of their type)"""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise ShardError(path, f"cannot be read: {error.strerror or error}") from error
    words = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    if len(words) >= 3 and int(words[0]) in HEADERS:
        version, name = HEADERS[int(words[0])]
        return _checked_header(path, words, size, version, name)
    name = source_dtype or "uint16"
    itemsize = np.dtype(name).itemsize
    if size == 0 or size % itemsize:
        raise ShardError(path, f"has {size:,} bytes, which are no {name} tokens (of {itemsize} bytes each)")
    return 0, name


def _checked_header(path: Path, words: Any, size: int, version: int, name: str) -> tuple[int, str]:
    if len(words) < HEADER_BYTES // 4:
        raise ShardError(path, f"ends after {size:,} bytes, inside of its header")
    if words[1] != version:
        raise ShardError(path, f"has version {words[1]} of its kind; only {version} is known", offset=4)
    itemsize, count = np.dtype(name).itemsize, int(words[2])
    if size != HEADER_BYTES + count * itemsize:
        held = (size - HEADER_BYTES) / itemsize
        raise ShardError(path, f"states {count:,} tokens of {name}, and has room for {held:,.10g}", offset=8)
    return HEADER_BYTES, name
