"""The n-grams of an index's documents, coded in 9.5 to 18.5 bits each.

A document's n-grams are 64-bit hashes. A sketch keeps the `k` smallest of them, or all if there are no more,
and of each the upper bits: `extra` more than the bits of the number of distinct n-grams. So of the hashes of
another document, one that is no n-gram of this document looks like one with a probability of at most
2^-extra: 2^-16 for short documents, and 2^-8 for long ones, whose similarity depends less on one n-gram.

The numbers ascend, and the differences between them are Golomb-Rice codes (Golomb 1966, Rice 1979): d >>
extra zeros, a one, and the lower `extra` bits of d, from the lowest bit of a byte up. Differences of random
numbers have a geometric distribution, for which this code is within 0.1 bits of the best.

    sketches.bin   the codes of each document, from a whole byte on; INDEXED (population.py) has their places
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.kernels.simd import load_8_bytes, trailing_zeros
from shardkit.writers.dedup.population import DOCUMENTS_FILE, INDEXED
from shardkit.writers.dedup.tables import RowFile, Rows
from shardkit.writers.execution.artifacts import Artifact

SKETCHES_FILE = "sketches.bin"

_BUDGET_BITS = 5120  # 640 bytes: documents of up to 512 n-grams use this for more bits of each
_LEAST_EXTRA, _MOST_EXTRA = 8, 16
_AT_ONCE = 1 << 19  # n-grams decoded together
_ROWS = 4096  # rows of documents that are read together
_GAP_BYTES = 64 << 10  # gaps that are read and discarded: cheaper than another read
_READ_BYTES = 4 << 20
_PADDING = 16  # bytes after the codes, so that eight bytes can be loaded anywhere
_WINDOW = np.uint64((1 << 57) - 1)  # valid bits of a load that begins inside a byte
_ONE = np.uint64(1)

INDEXED_LIMIT = 0xFFFFFFFF  # the largest value of the 4-byte fields of INDEXED


def extra_bits(stored: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many bits more than those of their number are kept of n-grams, int64[n], if `stored` are."""
    extra: npt.NDArray[np.int64] = np.clip(
        _BUDGET_BITS // np.maximum(stored, 1) - 2, _LEAST_EXTRA, _MOST_EXTRA
    )
    return extra


def kept_bits(stored: npt.NDArray[np.int64], distinct: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many upper bits are kept of n-grams, int64[n], of documents with `distinct` of them."""
    of_number = np.frexp(np.maximum(distinct - 1, 0).astype(np.float64))[1].astype(np.int64)
    return of_number + extra_bits(stored)


class SketchWriter:
    """Writes the sketches of documents, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / SKETCHES_FILE).open("wb")
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(
        self, hashes: UInt64s, offsets: Int64s, distinct: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Append documents; hashes[offsets[i]:offsets[i + 1]] are the i-th's smallest n-grams, ascending.

        Returns (starts, sizes) of their codes in bytes.
        """
        stored = np.diff(offsets)
        extra, bits = extra_bits(stored), kept_bits(stored, distinct)
        sizes = np.empty(len(stored), np.int64)
        _sizes(hashes, offsets, bits, extra, sizes)
        ends = np.cumsum(sizes)
        out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
        _encode(hashes, offsets, bits, extra, ends - sizes, out)
        self._file.write(out.data)
        starts = self._bytes + ends - sizes
        self._bytes += len(out)
        return starts, sizes


@kernel
def _sizes(hashes: UInt64s, offsets: Int64s, bits: Int64s, extra: Int64s, sizes: Int64s) -> None:
    for document in range(len(bits)):
        shift, rice = np.uint64(64 - bits[document]), np.uint64(extra[document])
        count, before = int64(0), np.uint64(0)
        for at in range(offsets[document], offsets[document + 1]):
            value = hashes[at] >> shift
            count += int64(value - before >> rice) + 1 + extra[document]
            before = value
        sizes[document] = (count + 7) >> 3


@kernel
def _encode(
    hashes: UInt64s, offsets: Int64s, bits: Int64s, extra: Int64s, starts: Int64s, out: UInt8s
) -> None:
    for document in range(len(bits)):
        shift, rice = np.uint64(64 - bits[document]), np.uint64(extra[document])
        position, before = 8 * starts[document], np.uint64(0)
        for at in range(offsets[document], offsets[document + 1]):
            value = hashes[at] >> shift
            difference = value - before
            before = value
            position += int64(difference >> rice)
            # The one that ends the zeros, and then the lower bits.
            rest = (difference & ((_ONE << rice) - _ONE)) << _ONE | _ONE
            left = extra[document] + 1
            while left > 0:
                inside = position & 7
                out[position >> 3] |= np.uint8(rest << np.uint64(inside) & np.uint64(0xFF))
                taken = min(8 - inside, left)
                rest >>= np.uint64(taken)
                position += taken
                left -= taken


@kernel
def _decode(
    data: UInt8s,
    starts: Int64s,
    sizes: Int64s,
    stored: Int64s,
    bits: Int64s,
    extra: Int64s,
    out: UInt64s,
    wrong: Bools,
) -> None:
    """Write the n-grams of each document to `out`, their upper bits in place and zeros below.

    `data` needs _PADDING bytes more than the codes take. Sets wrong[i] if the codes of document i are not
    those of `stored` numbers of so many bits; nothing outside of `data` is read.
    """
    to = int64(0)
    for document in range(len(starts)):
        position, stop = 8 * starts[document], 8 * (starts[document] + sizes[document])
        rice, shift = extra[document], np.uint64(64 - bits[document])
        limit = np.uint64(0xFFFFFFFFFFFFFFFF) >> shift
        mask = (_ONE << np.uint64(rice)) - _ONE
        value = np.uint64(0)
        for at in range(to, to + stored[document]):
            quotient = int64(0)
            while position < stop:
                window = load_8_bytes(data, position >> 3) >> np.uint64(position & 7) & _WINDOW
                zeros = trailing_zeros(window) if window else int64(57)
                quotient += zeros
                position += zeros
                if window:
                    break
            position += 1
            if position + rice > stop:
                wrong[document] = True
                break
            low = load_8_bytes(data, position >> 3) >> np.uint64(position & 7) & mask
            position += rice
            difference = np.uint64(quotient) << np.uint64(rice) | low
            if difference > limit - value:
                wrong[document] = True
                break
            value += difference
            out[at] = value << shift
        to += stored[document]


def read_sketches(
    folder: Artifact, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.void], UInt64s]]:
    """Yield (INDEXED rows, n-grams) of some documents of an index's part; `rows` must ascend strictly.

    The n-grams of a document are `stored` numbers, whose lower bits are zeros (`kept_bits`). They are read
    and decoded some megabytes at a time, or one document. Raises BuildError for a damaged part.
    """
    table = RowFile(folder / DOCUMENTS_FILE)
    if table.dtype != INDEXED:
        raise BuildError(f"{folder / DOCUMENTS_FILE}: has rows of {table.dtype}; make the index again")
    codes = Rows(folder / SKETCHES_FILE, np.uint8, header=False)
    for begin in range(0, len(rows), _ROWS):
        found = table.read(rows[begin : begin + _ROWS])
        _check(found, len(codes), folder)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(found["stored"], dtype=np.int64)])
        at = 0
        while at < len(found):
            stop = max(at + 1, int(np.searchsorted(ends, ends[at] + _AT_ONCE, "right")) - 1)
            yield found[at:stop], _read(codes, found[at:stop])
            at = stop


def _check(rows: npt.NDArray[np.void], size: int, folder: Artifact) -> None:
    """Raise BuildError unless the places are inside the file and ascend, and counts are possible.

    Kernels use these numbers as addresses, and arrays are made of these sizes.
    """
    start = rows["start"]
    sizes, stored, distinct, total = (
        rows[name].astype(np.int64) for name in ("size", "stored", "distinct", "total")
    )
    right = (start >= 0) & (start <= size - sizes)
    right &= (stored > 0) & (stored <= distinct) & (distinct <= total) & (stored <= 8 * sizes)
    right[1:] &= start[1:] >= (start + sizes)[:-1]
    if not right.all():
        raise BuildError(
            f"{folder / DOCUMENTS_FILE}: n-grams are outside {SKETCHES_FILE}; make the index again"
        )


def _read(codes: Rows, rows: npt.NDArray[np.void]) -> UInt64s:
    starts, sizes, stored, distinct = (
        rows[name].astype(np.int64) for name in ("start", "size", "stored", "distinct")
    )
    hashes, wrong = np.empty(int(stored.sum()), np.uint64), np.zeros(len(rows), np.bool_)
    gaps = starts[1:] - (starts + sizes)[:-1] > _GAP_BYTES
    pieces = (starts // _READ_BYTES)[1:] != (starts // _READ_BYTES)[:-1]
    edges = [0, *(np.flatnonzero(gaps | pieces) + 1).tolist(), len(rows)]
    at = 0
    with codes:
        for begin, end in pairwise(edges):
            some = slice(begin, end)
            first, stop = int(starts[begin]), int(starts[end - 1] + sizes[end - 1])
            data = np.zeros(stop - first + _PADDING, np.uint8)
            data[:-_PADDING] = codes.read(first, stop)
            count = int(stored[some].sum())
            extra, bits = extra_bits(stored[some]), kept_bits(stored[some], distinct[some])
            places = starts[some] - first, sizes[some], stored[some]
            _decode(data, *places, bits, extra, hashes[at : at + count], wrong[some])
            at += count
    if wrong.any():
        raise BuildError(f"{codes.artifact}: is not coded as its sizes say; make the index again")
    return hashes
