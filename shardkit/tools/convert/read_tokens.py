"""Tokens in .bin files: documents of Megatron's .bin/.idx pairs, and streams without any ends.

Megatron's .bin has tokens one after the other, and its .idx says where documents lie:

    .idx  "MMIDIDX" 00 00 | u64 version 1 | u8 dtype | u64 sequences n | u64 documents m
          i32 sizes[n] | i64 pointers[n] (bytes into .bin) | i64 documents[m] (first sequence of each, then n)

All writers put sequences one behind the other in order, so a .bin is one stream and is read as one; an index
that says otherwise is refused. Every size, pointer and document is checked before it is used, in pieces: the
memory does not grow with the number of sequences. Datasets with a mode for each sequence (multimodal) hold
more than tokens and are refused.

nanoGPT writes bare little-endian uint16. llm.c and modded-nanogpt put 256 int32 before the tokens: magic,
version, number of tokens, zeros; 20240520 stands for uint16 (GPT-2), 20240801 for uint32 (Llama 3). Neither
says where documents end, so the files are one stream, in the order in which they are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.hashing import hash_file, new_hash
from shardkit.manifest import FileInfo
from shardkit.tools.convert.source import BLOCK_BYTES, NO_ENDS, SOURCE_HASH, TokenBlock

__all__ = ["MegatronSource", "NanogptSource", "megatron_files"]

MAGIC = b"MMIDIDX\x00\x00"

OLD_MAGIC = b"TNTIDX\x00\x00"

MEGATRON_HEADER_BYTES = 34
# 9 and 10 are those of Megatron-DeepSpeed and GPT-NeoX.
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
    9: "uint32", 10: "uint64",
}  # fmt: skip

_PIECE = 1 << 18  # entries of the index looked at a time


@dataclass(slots=True)
class _Tokens:
    """The tokens of a file of `bytes` behind its first `start` bytes; at the end, its digest is in `info`."""

    path: Path
    start: int
    dtype: np.dtype[Any]
    bytes: int
    info: FileInfo | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[Any], bool]]:
        """(tokens, whether they end the file); ShardError if the file is not as it was."""
        changed = ShardError(self.path, "changed while it was read; convert it again")
        hasher = new_hash(SOURCE_HASH)
        try:
            with self.path.open("rb", buffering=0) as file:
                head = file.read(self.start)
                hasher.update(head)
                size = len(head)
                while True:
                    data = np.empty(BLOCK_BYTES, np.uint8)  # a new one each time: views of it may be kept
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
    """(.bin, .idx) if `path` is either, or their common prefix; None if there is no such pair."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")
    if path.suffix == ".idx" or pair[1].is_file():
        return pair
    return None


class MegatronSource:
    """The documents of one .bin/.idx pair."""

    kind: ClassVar[str] = "megatron"
    max_token: int | None = None
    has_documents = True
    left_out = ()
    files = 1
    files_done = 0

    def __init__(self, path: Path, index: Path) -> None:
        """ShardError if the index is not sound or does not fit the .bin."""
        self._path, self._index = path, index
        self.digests: list[FileInfo] = []
        try:
            with index.open("rb") as file:
                self.dtype, self._sequences, self._documents = self._header(file)
                self.bytes = path.stat().st_size
                self._check_sequences(file)
                self._check_documents(file)
        except OSError as error:
            raise ShardError(error.filename or index, f"cannot be read: {error.strerror or error}") from error

    @property
    def facts(self) -> Mapping[str, object]:
        return {"sequences": self._sequences, "documents": max(0, self._documents - 1) or self._sequences}

    def blocks(self) -> Iterator[TokenBlock]:
        """All tokens in order, and where documents end."""
        pieces = _Tokens(self._path, 0, self.dtype, self.bytes)
        with self._index.open("rb") as file:
            ends = _Feed(self._document_ends(file))
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

    def _header(self, file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
        head = file.read(MEGATRON_HEADER_BYTES)
        if head.startswith(OLD_MAGIC):
            raise self._refused("is an index of the old cached or lazy kind; write it anew as mmap")
        if not head.startswith(MAGIC):
            raise self._refused("is no Megatron index: the magic is missing", 0)
        if len(head) < MEGATRON_HEADER_BYTES:
            raise self._refused(f"ends after {len(head):,} bytes, inside of its header")
        version, sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
        if version != 1:
            raise self._refused(f"has version {version}; only version 1 is known", 9)
        name = DTYPES.get(head[17])
        if name is None or np.dtype(name).kind == "f":
            raise self._refused(f"states {name or f'the unknown type {head[17]}'}, which is no token's", 17)
        expected = MEGATRON_HEADER_BYTES + 12 * sequences + 8 * documents
        size = self._index.stat().st_size
        if size == expected + sequences and sequences:
            raise self._refused(
                "has a mode for each sequence: a multimodal dataset holds more than tokens, and is not "
                "converted"
            )
        if size != expected:
            raise self._refused(
                f"has {size:,} bytes; {sequences:,} sequences and {documents:,} document marks take "
                f"{expected:,}: it is cut short or damaged"
            )
        return np.dtype(name).newbyteorder("<"), sequences, documents

    def _refused(self, problem: str, offset: int | None = None) -> ShardError:
        return ShardError(self._index, problem, offset=offset)

    def _check_sequences(self, file: BinaryIO) -> None:
        """Sizes and pointers must cover the .bin from its start to its end without holes."""
        expected = 0
        for first in range(0, self._sequences, _PIECE):
            count = min(_PIECE, self._sequences - first)
            sizes = _read(file, MEGATRON_HEADER_BYTES + 4 * first, "<i4", count).astype(np.int64)
            if (negative := sizes < 0).any():
                number = first + int(negative.argmax())
                at = MEGATRON_HEADER_BYTES + 4 * number
                raise self._refused(f"sequence {number:,} has {sizes[number - first]:,} tokens", at)
            ends = expected + np.cumsum(sizes) * self.dtype.itemsize
            pointers = self._pointers(file, first, count)
            wrong = pointers != np.concatenate([[expected], ends[:-1]])
            if wrong.any():
                number = first + int(wrong.argmax())
                pointer, end = int(pointers[number - first]), int(ends[number - first])
                due = end - int(sizes[number - first]) * self.dtype.itemsize
                outside = " (outside of the .bin)" if not 0 <= pointer <= self.bytes else ""
                raise self._refused(
                    f"sequence {number:,} is said to begin at byte {pointer:,} of the .bin{outside}; the "
                    f"sizes before it add up to {due:,}",
                    MEGATRON_HEADER_BYTES + 4 * self._sequences + 8 * number,
                )
            expected = int(ends[-1])
        if expected != self.bytes:
            raise ShardError(
                self._path,
                f"has {self.bytes:,} bytes; the sizes in {self._index.name} add up to {expected:,}: one of "
                "the two files is cut short or of another dataset",
            )

    def _check_documents(self, file: BinaryIO) -> None:
        """Documents begin at the first sequence, end at the last, and never go back."""
        start = MEGATRON_HEADER_BYTES + 12 * self._sequences
        before = 0
        for first in range(0, self._documents, _PIECE):
            marks = _read(file, start + 8 * first, "<i8", min(_PIECE, self._documents - first))
            if first == 0 and marks[0] != 0:
                raise self._refused(f"the first document begins at sequence {marks[0]:,}", start)
            bad = (np.diff(marks, prepend=before) < 0) | (marks > self._sequences)
            if bad.any():
                number = int(bad.argmax())
                problem = f"document {first + number:,} begins at sequence {marks[number]:,}, out of order"
                raise self._refused(f"{problem} or of {self._sequences:,}", start + 8 * (first + number))
            before = int(marks[-1])
        if self._documents and before != self._sequences:
            problem = f"the last document ends at sequence {before:,} of {self._sequences:,}"
            raise self._refused(problem, start + 8 * (self._documents - 1))

    def _pointers(self, file: BinaryIO, first: int, count: int) -> npt.NDArray[np.int64]:
        return _read(file, MEGATRON_HEADER_BYTES + 4 * self._sequences + 8 * first, "<i8", count)

    def _document_ends(self, file: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
        """Where documents end, in tokens, piece by piece; each sequence is one if none are marked."""
        marks_start, total = MEGATRON_HEADER_BYTES + 12 * self._sequences, self.bytes // self.dtype.itemsize
        count = max(0, self._documents - 1) if self._documents else self._sequences
        for first in range(0, count, _PIECE):
            number = min(_PIECE, count - first)
            if self._documents:
                marks = _read(file, marks_start + 8 * (first + 1), "<i8", number)
            else:
                marks = np.arange(first + 1, first + 1 + number, dtype=np.int64)
            low, high = int(marks[0]), min(int(marks[-1]), self._sequences - 1)
            pointers = self._pointers(file, low, max(0, high - low + 1)) // self.dtype.itemsize
            yield np.append(pointers, total).astype(np.int64)[marks - low]


class _Feed:
    """Numbers in order, handed out up to a limit."""

    def __init__(self, pieces: Iterator[npt.NDArray[np.int64]]) -> None:
        self._pieces = pieces
        self._waiting: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def take(self, limit: int) -> npt.NDArray[np.int64]:
        """All that are left up to `limit`."""
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


def _read(file: BinaryIO, offset: int, dtype: str, count: int) -> npt.NDArray[Any]:
    file.seek(offset)
    data = file.read(count * np.dtype(dtype).itemsize)
    values: npt.NDArray[Any] = np.frombuffer(data, dtype)
    if len(values) != count:
        raise ShardError(str(file.name), "was cut short while it was read", offset=offset)
    return values


NANOGPT_HEADER_BYTES = 1024
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
            pieces, token = _Tokens(path, self._start, self.dtype, path.stat().st_size), 0
            for tokens, ends_file in pieces:
                yield TokenBlock(tokens, NO_ENDS, str(path), 0, token, tokens.nbytes, ends_file)
                token += len(tokens)
            assert pieces.info is not None
            self.digests.append(pieces.info)
            self.files_done += 1


def _read_header(path: Path, source_dtype: str | None) -> tuple[int, str]:
    """(bytes before the tokens, name of their type)"""
    try:
        with path.open("rb") as file:
            head = file.read(NANOGPT_HEADER_BYTES)
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
    if len(words) < NANOGPT_HEADER_BYTES // 4:
        raise ShardError(path, f"ends after {size:,} bytes, inside of its header")
    if words[1] != version:
        raise ShardError(path, f"has version {words[1]} of its kind; only {version} is known", offset=4)
    itemsize, count = np.dtype(name).itemsize, int(words[2])
    if size != NANOGPT_HEADER_BYTES + count * itemsize:
        held = (size - NANOGPT_HEADER_BYTES) / itemsize
        raise ShardError(path, f"states {count:,} tokens of {name}, and has room for {held:,.10g}", offset=8)
    return NANOGPT_HEADER_BYTES, name
