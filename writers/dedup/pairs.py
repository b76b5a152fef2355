"""Candidate pairs on disk: for each document, the earlier documents that it is paired with.

A pair (a, b), a < b, is stored with its second document b, so a document with many pairs takes one row. The
payload of a row has the partners `a`, ascending, as variable-length integers (LEB128, seven bits per byte,
lowest first): the distance from the lowest one to `b`, and then from each to the next one. Documents of a
family are paired with the same few documents, so a pair takes about two bytes.

    pairs.run   PAIRS: key b
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shardkit.kernels.numba_support import Int64s, UInt8s, UInt64s, kernel
from shardkit.writers.exchange.exchange import RunWriter, Table
from shardkit.writers.kernels.sorting import sort_keys

PAIRS = Table("pairs.run", np.dtype([("key", "<u8"), ("size", "<i8")]), payload=True, packed=0.25)

RUN_PAIRS = 1 << 22
WORD_DOCUMENTS = 1 << 32
_PEAK_BYTES_PER_PAIR = 64  # measured peak per pair while a run is sorted, with numbers over 32 bits
_CHUNK = 1 << 14  # maximum number of partners in a row, and of pairs made or written at a time
_LONGEST = 10  # bytes of the longest variable-length integer
_SEVEN, _LOW7, _MORE = np.uint64(7), np.uint64(127), np.uint64(128)


def run_pairs(memory_bytes: int) -> int:
    """Return the number of pairs that `PairWriter` can collect in this memory."""
    return max(1, min(RUN_PAIRS, memory_bytes // _PEAK_BYTES_PER_PAIR))


class PairWriter:
    """Collects pairs, drops repetitions, and writes sorted runs; a context manager that completes the file.

    If the `with` block ends with an error, the file is inconsistent, and the folder must be discarded.
    """

    def __init__(self, folder: Path, documents: int, *, run_pairs: int = RUN_PAIRS) -> None:
        self.pairs = 0
        # A pair of numbers below 2^32 fits one word, which sorts several times as fast as two words.
        self._columns = 1 if documents <= WORD_DOCUMENTS else 2
        self._pending = np.empty((self._columns, run_pairs), np.uint64)
        self._count = 0
        self._run = RunWriter(folder / PAIRS.file, PAIRS, memory_bytes=max(1 << 18, run_pairs * 16))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        self._sort()
        if self._count:
            self._write_run()
        del self._pending
        self._run.__exit__(kind, error, trace)

    def add(self, a: UInt64s, b: UInt64s) -> None:
        """Add the pairs (a[i], b[i]), a[i] < b[i]."""
        at = 0
        while at < len(a):
            taken = min(len(a) - at, self._pending.shape[1] - self._count)
            place, some = slice(self._count, self._count + taken), slice(at, at + taken)
            if self._columns == 1:
                self._pending[0, place] = b[some] << np.uint64(32) | a[some]
            else:
                self._pending[:, place] = b[some], a[some]
            self._count += taken
            at += taken
            if self._count == self._pending.shape[1]:
                self._sort()
                if self._count > self._pending.shape[1] // 2:  # else there is room for more pairs
                    self._write_run()

    def _sort(self) -> None:
        """Sort the pending pairs and drop repetitions."""
        pending = self._pending[:, : self._count]
        if self._columns == 1:
            sort_keys(pending[0])
        else:
            pending[:] = pending[:, np.lexsort((pending[1], pending[0]))]
        new = np.ones(self._count, np.bool_)
        new[1:] = (pending[:, 1:] != pending[:, :-1]).any(axis=0)
        unique = pending[:, new]
        self._count = unique.shape[1]
        self._pending[:, : self._count] = unique

    def _write_run(self) -> None:
        pending = self._pending[:, : self._count]
        if self._columns == 1:
            seconds, firsts = pending[0] >> np.uint64(32), pending[0] & np.uint64(0xFFFFFFFF)
        else:
            seconds, firsts = pending
        for numbers, sizes, payload in Partners.of(seconds, firsts).encoded():
            rows = np.empty(len(sizes), PAIRS.dtype)
            rows["key"], rows["size"] = numbers, sizes
            self._run.write(rows, payload)
        self.pairs += self._count
        self._count = 0


@dataclass(frozen=True, slots=True)
class Partners:
    """Documents and their earlier partners: those of numbers[i] are firsts[edges[i]:edges[i + 1]], ascending.

    `numbers` ascend, and a number may be repeated.
    """

    numbers: UInt64s
    edges: Int64s
    firsts: UInt64s

    @classmethod
    def of(cls, seconds: UInt64s, firsts: UInt64s) -> Self:
        """Make them of pairs sorted by second, then first document."""
        new = np.ones(len(seconds), np.bool_)
        new[1:] = seconds[1:] != seconds[:-1]
        starts = np.flatnonzero(new)
        return cls(seconds[starts], np.append(starts, len(seconds)), firsts)

    @classmethod
    def decoded(cls, numbers: UInt64s, sizes: Int64s, payload: UInt8s) -> Self:
        """Decode the payloads of rows with these numbers and sizes."""
        edges = np.zeros(len(numbers) + 1, np.int64)
        firsts = np.empty(int((payload < 128).sum()), np.uint64)
        _decode(numbers, sizes, payload, edges, firsts)
        return cls(numbers, edges, firsts)

    @property
    def seconds(self) -> UInt64s:
        """The second document of each pair, uint64[len(firsts)]."""
        return np.repeat(self.numbers, np.diff(self.edges))

    def encoded(self) -> Iterator[tuple[UInt64s, Int64s, UInt8s]]:
        """Yield (numbers, payload sizes, payloads), up to `_CHUNK` partners at a time.

        A document with more partners is repeated.
        """
        numbers, edges = self._cut()
        room = np.empty(_CHUNK * _LONGEST, np.uint8)
        begin = 0
        while begin < len(numbers):
            stop = int(np.searchsorted(edges, edges[begin] + _CHUNK, "right")) - 1
            some, sizes = numbers[begin:stop], np.empty(stop - begin, np.int64)
            count = _encode(some, edges[begin : stop + 1], self.firsts, sizes, room)
            yield some, sizes, room[:count]
            begin = stop

    def _cut(self) -> tuple[UInt64s, Int64s]:
        """Return numbers and edges, with documents repeated so that each has up to `_CHUNK` partners."""
        pieces = -(-np.diff(self.edges) // _CHUNK)
        if pieces.max(initial=1) <= 1:
            return self.numbers, self.edges
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        edges = np.append(np.repeat(self.edges[:-1], pieces) + nth * _CHUNK, self.edges[-1])
        return np.repeat(self.numbers, pieces), edges


@kernel
def _encode(numbers: UInt64s, edges: Int64s, firsts: UInt64s, sizes: Int64s, out: UInt8s) -> int:
    """Write the payloads of all documents into `out`, and their sizes; return the total size."""
    at = 0
    for document in range(len(numbers)):
        begin = at
        for pair in range(edges[document], edges[document + 1]):
            if pair == edges[document]:
                value = numbers[document] - firsts[pair]
            else:
                value = firsts[pair] - firsts[pair - 1]
            while value >= _MORE:
                out[at] = np.uint8(value & _LOW7 | _MORE)
                value >>= _SEVEN
                at += 1
            out[at] = np.uint8(value)
            at += 1
        sizes[document] = at - begin
    return at


@kernel
def _decode(numbers: UInt64s, sizes: Int64s, payload: UInt8s, edges: Int64s, firsts: UInt64s) -> None:
    at = count = 0
    for document in range(len(numbers)):
        stop = at + sizes[document]
        while at < stop:
            value, shift = np.uint64(0), np.uint64(0)
            while payload[at] >= 128:
                value |= (np.uint64(payload[at]) & _LOW7) << shift
                shift += _SEVEN
                at += 1
            value |= np.uint64(payload[at]) << shift
            at += 1
            is_first = count == edges[document]
            firsts[count] = numbers[document] - value if is_first else firsts[count - 1] + value
            count += 1
        edges[document + 1] = count
