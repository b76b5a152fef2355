"""Read and check the headers of flat files of token ids.

    Megatron   .bin: ids, one document after the other; .idx in the same folder locates the documents:
               "MMIDIDX" 00 00 | u64 version 1 | u8 dtype | u64 sequences n | u64 documents m
               i32 sizes[n] | i64 pointers[n] (bytes into .bin)
               | i64 documents[m] (first sequence of each, then n)
    llm.c      .bin: 256 int32 (magic, version, number of ids, zeros), then ids; also modded-nanogpt.
               Magic 20240520 means uint16 (GPT-2), 20240801 uint32 (Llama 3)
    NumPy      .npy: a header, then a 1-D array
    bare       .bin of nanoGPT, .npy of OLMo and Dolma: ids only; their dtype is not in the file

All writers of Megatron's format store sequences contiguously in order, so a .bin is read as one stream; an
index with any other layout is refused. Every size, pointer and document is checked before it is used, in
pieces, so that memory does not grow with the number of sequences. Datasets with a mode for each sequence
(multimodal) hold more than tokens and are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import NOT_WHOLE, ShardError
from shardkit.formats.tar.values import parse_npy_header
from shardkit.formats.trainers import LLMC_HEADER_BYTES

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
MEGATRON_HEADER_BYTES = 34
# Maps the dtype byte of an .idx to a dtype. Codes 9 and 10 are from Megatron-DeepSpeed and GPT-NeoX.
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
    9: "uint32", 10: "uint64",
}  # fmt: skip
_PIECE = 1 << 18  # number of index entries checked at a time

# Maps a magic number to (version, dtype of tokens).
LLMC_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_NPY_MAGIC = b"\x93NUMPY"
HEAD_BYTES = 4096  # number of bytes at a file's start that include any header


class TokenHeader(NamedTuple):
    """The byte offset and dtype of a file's ids; `dtype` is None if the file does not record it."""

    start: int
    dtype: np.dtype[Any] | None


def read_header(where: str | PathLike[str], head: bytes, size: int) -> TokenHeader:
    """Parse the header of a .bin or .npy of `size` bytes from `head`, its first `HEAD_BYTES`.

    A file without a known header holds bare ids. Raises ShardError if a header contradicts the file's size.
    """
    if head.startswith(_NPY_MAGIC):
        return _npy_header(where, head, size)
    words = np.frombuffer(head[: min(len(head), LLMC_HEADER_BYTES) // 4 * 4], "<i4")
    if len(words) < 3 or int(words[0]) not in LLMC_HEADERS:
        return TokenHeader(0, None)
    version, name = LLMC_HEADERS[int(words[0])]
    if len(words) < LLMC_HEADER_BYTES // 4:
        raise ShardError(where, f"ends after {size:,} bytes, inside its header")
    if words[1] != version:
        raise ShardError(where, f"has version {words[1]} of its format; only {version} is known", offset=4)
    itemsize, count = np.dtype(name).itemsize, int(words[2])
    if size != LLMC_HEADER_BYTES + count * itemsize:
        held = (size - LLMC_HEADER_BYTES) / itemsize
        raise ShardError(where, f"states {count:,} tokens of {name}, but holds {held:,.10g}", offset=8)
    return TokenHeader(LLMC_HEADER_BYTES, np.dtype(name).newbyteorder("<"))


def _npy_header(where: str | PathLike[str], head: bytes, size: int) -> TokenHeader:
    try:
        header = parse_npy_header(memoryview(head))
    except ValueError as error:
        raise ShardError(where, f"{error}; it is damaged, or {NOT_WHOLE}") from error
    dtype, shape = header.dtype, header.shape
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.byteorder == ">":
        problem = f"is an array of {dtype.str} of shape {list(shape)}"
        raise ShardError(where, f"{problem}: expected one axis of little-endian integers")
    if size != header.bytes + shape[0] * dtype.itemsize:
        problem = f"states {shape[0]:,} tokens of {dtype.name}, but has {size - header.bytes:,} bytes"
        raise ShardError(where, f"{problem} for them: it is damaged, or {NOT_WHOLE}")
    return TokenHeader(header.bytes, dtype)


def refuse_two_kinds(where: str | PathLike[str], names: Sequence[str]) -> None:
    """Raise ShardError if `names` mix training and validation files, which would become one stream."""
    if all(any(word in name for name in names) for word in ("train", "val")):
        raise ShardError(where, "has both training and validation files: name one kind, such as 'train*.bin'")


class MegatronIndex:
    """Checks a Megatron .idx file; reads its header, and on demand the ends of documents."""

    def __init__(
        self, file: BinaryIO, where: str | PathLike[str], size: int, tokens: str | PathLike[str], bytes: int
    ) -> None:
        """Read and check all of an index: `where` is its name, `size` its size in bytes.

        `tokens` and `bytes` are name and size of its .bin. Raises ShardError if the index is malformed or
        contradicts the size of the .bin.
        """
        self._where, self._size = where, size
        self._tokens, self._bytes = tokens, bytes
        self.dtype, self.sequences, self.marks = self._header(file)
        self._check_sequences(file)
        self._check_documents(file)

    @property
    def documents(self) -> int:
        """Number of documents; without document marks, each sequence counts as one."""
        return max(0, self.marks - 1) or self.sequences

    def document_ends(self, file: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
        """Yield int64 arrays of the documents' ends, in tokens from the start of the .bin.

        If the index has no document marks, each sequence counts as a document.
        """
        marks_start, total = MEGATRON_HEADER_BYTES + 12 * self.sequences, self._bytes // self.dtype.itemsize
        count = max(0, self.marks - 1) if self.marks else self.sequences
        for first in range(0, count, _PIECE):
            number = min(_PIECE, count - first)
            if self.marks:
                marks = self._read(file, marks_start + 8 * (first + 1), "<i8", number)
            else:
                marks = np.arange(first + 1, first + 1 + number, dtype=np.int64)
            low, high = int(marks[0]), min(int(marks[-1]), self.sequences - 1)
            pointers = self._pointers(file, low, max(0, high - low + 1)) // self.dtype.itemsize
            yield np.append(pointers, total).astype(np.int64)[marks - low]

    def _header(self, file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
        head = file.read(MEGATRON_HEADER_BYTES)
        if head.startswith(OLD_MAGIC):
            raise self._refused("is an index of the old cached or lazy kind; write it again as mmap")
        if not head.startswith(MAGIC):
            raise self._refused("is not a Megatron index: the magic is missing", 0)
        if len(head) < MEGATRON_HEADER_BYTES:
            raise self._refused(f"ends after {len(head):,} bytes, inside its header")
        version, sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
        if version != 1:
            raise self._refused(f"has version {version}; only version 1 is known", 9)
        name = DTYPES.get(head[17])
        if name is None or np.dtype(name).kind == "f":
            raise self._refused(f"states {name or f'the unknown type {head[17]}'}, not a dtype of tokens", 17)
        expected = MEGATRON_HEADER_BYTES + 12 * sequences + 8 * documents
        if self._size == expected + sequences and sequences:
            raise self._refused(
                "has a mode for each sequence: a multimodal dataset holds more than tokens, and cannot be "
                "converted"
            )
        if self._size != expected:
            raise self._refused(
                f"has {self._size:,} bytes; {sequences:,} sequences and {documents:,} document marks take "
                f"{expected:,}: it is cut short or damaged"
            )
        return np.dtype(name).newbyteorder("<"), sequences, documents

    def _refused(self, problem: str, offset: int | None = None) -> ShardError:
        return ShardError(self._where, problem, offset=offset)

    def _check_sequences(self, file: BinaryIO) -> None:
        """Raise ShardError unless the sequences, by sizes and pointers, cover the whole .bin in order."""
        expected = 0
        for first in range(0, self.sequences, _PIECE):
            count = min(_PIECE, self.sequences - first)
            sizes = self._read(file, MEGATRON_HEADER_BYTES + 4 * first, "<i4", count).astype(np.int64)
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
                outside = " (outside of the .bin)" if not 0 <= pointer <= self._bytes else ""
                raise self._refused(
                    f"the pointer of sequence {number:,} is byte {pointer:,} of the .bin{outside}, but the "
                    f"sizes before it add up to {due:,}",
                    MEGATRON_HEADER_BYTES + 4 * self.sequences + 8 * number,
                )
            expected = int(ends[-1])
        if expected != self._bytes:
            name = os.fspath(self._where).rpartition("/")[2]
            raise ShardError(
                self._tokens,
                f"has {self._bytes:,} bytes; the sizes in {name} add up to {expected:,}: one of "
                "the two files is cut short or belongs to another dataset",
            )

    def _check_documents(self, file: BinaryIO) -> None:
        """Raise ShardError unless document marks, which are sequence numbers, ascend from 0 to the last."""
        start = MEGATRON_HEADER_BYTES + 12 * self.sequences
        before = 0
        for first in range(0, self.marks, _PIECE):
            marks = self._read(file, start + 8 * first, "<i8", min(_PIECE, self.marks - first))
            if first == 0 and marks[0] != 0:
                raise self._refused(f"the first document begins at sequence {marks[0]:,}", start)
            bad = (np.diff(marks, prepend=before) < 0) | (marks > self.sequences)
            if bad.any():
                number = int(bad.argmax())
                problem = f"document {first + number:,} begins at sequence {marks[number]:,}, out of order"
                raise self._refused(f"{problem} or above {self.sequences:,}", start + 8 * (first + number))
            before = int(marks[-1])
        if self.marks and before != self.sequences:
            problem = f"the last document ends at sequence {before:,} of {self.sequences:,}"
            raise self._refused(problem, start + 8 * (self.marks - 1))

    def _pointers(self, file: BinaryIO, first: int, count: int) -> npt.NDArray[np.int64]:
        return self._read(file, MEGATRON_HEADER_BYTES + 4 * self.sequences + 8 * first, "<i8", count)

    def _read(self, file: BinaryIO, offset: int, dtype: str, count: int) -> npt.NDArray[Any]:
        file.seek(offset)
        data = file.read(count * np.dtype(dtype).itemsize)
        values: npt.NDArray[Any] = np.frombuffer(data, dtype)
        if len(values) != count:
            raise self._refused("was cut short while it was being read", offset)
        return values
