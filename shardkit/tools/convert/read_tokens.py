"""Reads tokens in .bin files: documents of Megatron's .bin/.idx pairs, and streams without document ends.

`shardkit.formats.tokens` describes the headers. Files of nanoGPT, llm.c and modded-nanogpt do not record
where documents end: they are read as one stream, in the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.formats.tokens import HEAD_BYTES, MegatronIndex, read_header
from shardkit.hashing import hash_file, new_hash
from shardkit.manifest import FileInfo
from shardkit.tools.convert.source import BLOCK_BYTES, NO_ENDS, SOURCE_HASH, TokenBlock


@dataclass(slots=True)
class _Tokens:
    """Reads the tokens of a file from offset `start`; the file has `bytes` bytes.

    After the last token, `info` is set to the file's size and hash.
    """

    path: Path
    start: int
    dtype: np.dtype[Any]
    bytes: int
    info: FileInfo | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[Any], bool]]:
        """Yield (tokens, whether they are the last); raises ShardError if the file's size has changed."""
        changed = ShardError(self.path, "changed while it was read; convert it again")
        hasher = new_hash(SOURCE_HASH)
        try:
            with self.path.open("rb", buffering=0) as file:
                head = file.read(self.start)
                hasher.update(head)
                size = len(head)
                while True:
                    data = np.empty(BLOCK_BYTES, np.uint8)  # new each time, as callers may keep views of it
                    filled = _fill(file, data.data)
                    if not filled:
                        break
                    hasher.update(data[:filled].data)
                    size += filled
                    if filled % self.dtype.itemsize or size > self.bytes:
                        raise changed
                    yield data[:filled].view(self.dtype), size == self.bytes
        except OSError as error:
            raise ShardError(self.path, f"cannot be read: {error.strerror or error}") from error
        if size != self.bytes:
            raise changed
        self.info = FileInfo(self.path.name, size, {SOURCE_HASH: hasher.hexdigest()})


def _fill(file: Any, view: memoryview) -> int:
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled


def megatron_files(path: Path) -> tuple[Path, Path] | None:
    """Return the paths (.bin, .idx) of the pair that `path` (a file or the common prefix) names, or None."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")
    if path.suffix == ".idx" or pair[1].is_file():
        return pair
    return None


class MegatronSource:
    """Reads the documents of one .bin/.idx pair."""

    kind: ClassVar[str] = "megatron"
    max_token: int | None = None
    has_documents = True
    left_out = ()
    files = 1
    files_done = 0

    def __init__(self, path: Path, index: Path) -> None:
        """Check the index; raises ShardError if it is invalid or does not match the .bin file."""
        self._path, self._index = path, index
        self.digests: list[FileInfo] = []
        try:
            self.bytes = path.stat().st_size
            with index.open("rb") as file:
                self._checked = MegatronIndex(file, index, index.stat().st_size, path, self.bytes)
        except OSError as error:
            raise ShardError(error.filename or index, f"cannot be read: {error.strerror or error}") from error
        self.dtype = self._checked.dtype

    @property
    def facts(self) -> Mapping[str, object]:
        return {"sequences": self._checked.sequences, "documents": self._checked.documents}

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield all tokens in order as blocks, which contain the ends of documents."""
        pieces = _Tokens(self._path, 0, self.dtype, self.bytes)
        with self._index.open("rb") as file:
            ends = _Feed(self._checked.document_ends(file))
            start = document = document_start = 0
            for tokens, ends_file in pieces:
                here = ends.take(start + len(tokens))
                yield TokenBlock(
                    tokens,
                    here - start,
                    str(self._path),
                    document,
                    start - document_start,
                    tokens.nbytes,
                    ends_file,
                )
                start += len(tokens)
                if len(here):
                    document, document_start = document + len(here), int(here[-1])
        assert pieces.info is not None
        self.files_done = 1
        digest = hash_file(self._index, pieces.info.hashes)
        self.digests = [pieces.info, FileInfo(self._index.name, self._index.stat().st_size, digest)]


class _Feed:
    """Takes ascending numbers from an iterator of arrays, up to a given limit at a time."""

    def __init__(self, pieces: Iterator[npt.NDArray[np.int64]]) -> None:
        self._pieces = pieces
        self._waiting: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def take(self, limit: int) -> npt.NDArray[np.int64]:
        """Remove and return all remaining numbers up to and including `limit`."""
        taken = []
        while True:
            count = int(np.searchsorted(self._waiting, limit, side="right"))
            taken.append(self._waiting[:count])
            self._waiting = self._waiting[count:]
            if len(self._waiting):
                break
            following = next(self._pieces, None)
            if following is None:
                break
            self._waiting = following
        return np.concatenate(taken)


class NanogptSource:
    """Reads the tokens of .bin files as one stream, file by file."""

    kind: ClassVar[str] = "nanogpt"
    max_token: int | None = None
    has_documents = False
    left_out = ()

    def __init__(self, paths: Sequence[Path], source_dtype: str | None = None) -> None:
        """Check the files' headers; `source_dtype` is the dtype of files without a header (None: uint16).

        Raises ShardError if a file is not a .bin of tokens, or if headers or dtypes differ between files.
        """
        self._paths = list(paths)
        self.digests: list[FileInfo] = []
        headers = [_read_header(path, source_dtype) for path in self._paths]
        kinds = dict(zip(headers, self._paths, strict=True))
        if len(kinds) > 1:
            (_, one), (_, other) = list(kinds.items())[:2]
            raise ShardError(other, f"has a different header or type than {one}; convert them separately")
        self._start, name = headers[0]
        self.dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        self.bytes = sum(path.stat().st_size for path in self._paths)
        self.files = len(self._paths)
        self.files_done = 0

    @property
    def facts(self) -> Mapping[str, object]:
        return {"header": bool(self._start), "dtype": self.dtype.name}

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield all tokens in order as blocks."""
        for path in self._paths:
            pieces, token = _Tokens(path, self._start, self.dtype, path.stat().st_size), 0
            for tokens, ends_file in pieces:
                yield TokenBlock(tokens, NO_ENDS, str(path), 0, token, tokens.nbytes, ends_file)
                token += len(tokens)
            assert pieces.info is not None
            self.digests.append(pieces.info)
            self.files_done += 1


def _read_header(path: Path, source_dtype: str | None) -> tuple[int, str]:
    """Return (size of the header in bytes, name of the tokens' dtype) of a .bin file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise ShardError(path, f"cannot be read: {error.strerror or error}") from error
    start, dtype = read_header(path, head, size)
    name = source_dtype or "uint16" if dtype is None else dtype.name
    itemsize = np.dtype(name).itemsize
    if size == 0 or (size - start) % itemsize:
        raise ShardError(path, f"has {size:,} bytes, not a whole number of {name} tokens ({itemsize} bytes)")
    return start, name
