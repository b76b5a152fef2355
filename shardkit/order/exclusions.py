"""Rows of a dataset that are excluded from training: sorted ranges, and the numbering of the kept rows.

Kept rows are numbered 0, 1, 2, … in dataset order: their kept ids. With sorted, disjoint ranges [b_i, e_i),
and r_i the number of rows that the first i ranges exclude, range i comes after b_i - r_i kept rows. So

    select(kept id k) = k + r_i    i = number of ranges with b_i - r_i <= k
    rank(row x)       = x - r_i    i = number of ranges that begin at or before x

are one binary search each. Memory is 24 bytes per range, for any number of rows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.files import local_path
from shardkit.hints import near_path
from shardkit.order.order import MAX_SAMPLES

_LINE = re.compile(r"([0-9]+)(?:\s*:\s*([0-9]+))?")

FINGERPRINT_LINE = re.compile(r"#\s*fingerprint:\s*([0-9a-f]{32})\s*")

_AnyInts = npt.NDArray[np.integer[Any]]


class Exclusions:
    """Immutable ranges of rows, [begin, end) in dataset order; ranges that touch or overlap are merged.

    Raises ValueError for a range that is empty, negative or ends after row 2**60.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] | _AnyInts) -> None:
        pairs = _pairs(ranges)
        self.fingerprint: str | None = None
        """The fingerprint of the dataset that the row numbers refer to; None if the file does not name it."""
        self._begins, self._ends = _merged(pairs[:, 0], pairs[:, 1])
        self._removed = np.zeros(len(self._begins) + 1, dtype=np.int64)
        np.cumsum(self._ends - self._begins, out=self._removed[1:])
        self._kept_before = self._begins - self._removed[:-1]

    @classmethod
    def of(cls, rows: Iterable[int | tuple[int, int]] | _AnyInts) -> Exclusions:
        """Make exclusions from row numbers and (begin, end) pairs in any order, or from an array of rows."""
        if isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu":
            begins = rows.astype(np.int64)
            return cls(np.stack([begins, begins + 1], axis=1))
        return cls([row if isinstance(row, tuple) else (row, row + 1) for row in rows])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Exclusions:
        """Read a text file with a row (17) or a half-open range (17:21) per line; # begins a comment.

        A line "# fingerprint: HEX", which `shardkit trace --exclude` writes, names the dataset. Raises
        ValueError with file and line for an invalid line, OSError if the file cannot be read.
        """
        ranges, fingerprint = [], None
        place = local_path(path, "exclude")
        if not place.exists():
            raise FileNotFoundError(f"exclude: {place}: there is no such file; {near_path(place)}")
        with place.open(encoding="utf-8-sig", errors="backslashreplace") as file:
            for number, line in enumerate(file, 1):
                text = line.partition("#")[0].strip()
                if not text:
                    stated = FINGERPRINT_LINE.fullmatch(line.strip())
                    fingerprint = stated[1] if stated else fingerprint
                    continue
                try:
                    ranges.append(_parsed(text))
                except ValueError as error:
                    raise ValueError(f"{os.fspath(path)}: line {number:,}: {error}") from None
        found = cls(ranges)
        found.fingerprint = fingerprint
        return found

    def of_dataset(self, location: str, fingerprint: str, shard_samples: npt.ArrayLike) -> Exclusions | None:
        """Return these exclusions, or None if they are empty; raises ValueError if the dataset lacks a row.

        `location`, `fingerprint` and `shard_samples` describe the dataset.
        """
        if self.fingerprint not in (None, fingerprint):
            raise ValueError(
                f"the exclusion list has row numbers of the dataset with fingerprint {self.fingerprint}, but "
                f"{location} has fingerprint {fingerprint}: its rows have other numbers"
            )
        self.kept_of_shards(shard_samples)  # raises ValueError for rows that the dataset does not have
        return self if self.count else None

    @property
    def count(self) -> int:
        """The number of excluded rows."""
        return int(self._removed[-1])

    @property
    def digest(self) -> str:
        """The blake2b-128 of the merged ranges in hex: equal for all ways to write the same rows."""
        ranges = np.stack([self._begins, self._ends], axis=1).astype("<i8")
        return hashlib.blake2b(ranges.tobytes(), digest_size=16, person=b"shardkit.excl.1").hexdigest()

    def to_list(self) -> list[tuple[int, int]]:
        """Return the merged ranges, ascending."""
        return list(zip(self._begins.tolist(), self._ends.tolist(), strict=True))

    def kept_of_shards(self, shard_samples: npt.ArrayLike) -> Ints:
        """Return the kept rows per shard, int64[shards]; raises ValueError if excluded rows do not exist."""
        starts = np.concatenate([[0], np.cumsum(np.asarray(shard_samples, dtype=np.int64))])
        if len(self._ends) and self._ends[-1] > starts[-1]:
            raise ValueError(
                f"rows up to {int(self._ends[-1]) - 1:,} are excluded, but the dataset has {starts[-1]:,} "
                f"samples: row numbers count from 0, in dataset order"
            )
        return np.diff(starts - self._removed_before(starts))

    def select(self, kept_ids: npt.ArrayLike) -> Ints:
        """Return the row of each kept id, as an array of equal shape; raises IndexError for negative ids."""
        ids = _numbers(kept_ids, "kept ids")
        rows: Ints = ids + self._removed[np.searchsorted(self._kept_before, ids, side="right")]
        return rows

    def rank(self, rows: npt.ArrayLike) -> Ints:
        """Return the kept id of each row, in an array of the same shape: the inverse of `select`.

        Raises IndexError for excluded rows.
        """
        array = _numbers(rows, "rows")
        if array.size and (excluded := self.contains(array)).any():
            raise IndexError(f"row {int(array[excluded].flat[0]):,} is excluded")
        return array - self._removed_before(array)

    def contains(self, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether each row is excluded."""
        array = _numbers(rows, "rows")
        inside: npt.NDArray[np.bool_] = array < np.concatenate([[0], self._ends])[self._begun(array)]
        return inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exclusions) and self.to_list() == other.to_list()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Exclusions: {self.count:,} rows in {len(self._begins):,} ranges, {self.digest}>"

    def _begun(self, rows: Ints) -> npt.NDArray[np.intp]:
        """Return how many ranges begin at or before each row."""
        return np.searchsorted(self._begins, rows, side="right")

    def _removed_before(self, rows: Ints) -> Ints:
        """Return, for each of `rows`, the number of excluded rows before it."""
        begun = self._begun(rows)
        # The last range that has begun may extend past the row; do not count that part.
        beyond = np.concatenate([[0], self._ends])[begun] - rows
        removed: Ints = self._removed[begun] - np.maximum(beyond, 0)
        return removed


def _parsed(text: str) -> tuple[int, int]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is neither a row (17) nor a half-open range (17:21)")
    begin = int(match[1])
    end = begin + 1 if match[2] is None else int(match[2])
    _check(begin, end)
    return begin, end


def _check(begin: int, end: int) -> None:
    if not 0 <= begin < end:
        raise ValueError(
            f"{begin}:{end} is not a range of rows: it must begin at 0 or later, and end after it begins"
        )
    if end > MAX_SAMPLES:
        raise ValueError(f"{begin}:{end} goes beyond {MAX_SAMPLES:,}, the most rows that a dataset may have")


def _pairs(ranges: Iterable[tuple[int, int]] | _AnyInts) -> Ints:
    """Return the ranges as int64[n, 2]; raises ValueError for an invalid one."""
    if not isinstance(ranges, np.ndarray):
        ranges = list(ranges)
        for begin, end in ranges:
            _check(begin, end)
    pairs = np.asarray(ranges)
    if not pairs.size:
        return np.empty((0, 2), dtype=np.int64)
    if pairs.dtype.kind not in "iu" or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"ranges must be pairs of whole numbers, not {pairs.dtype}{list(pairs.shape)}")
    wrong = (pairs[:, 0] < 0) | (pairs[:, 1] <= pairs[:, 0]) | (pairs[:, 1] > MAX_SAMPLES)
    if wrong.any():
        _check(*pairs[wrong][0].tolist())
    return pairs.astype(np.int64)


def _merged(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the begins and ends of the union of ranges, sorted, with a kept row between any two ranges."""
    by_begin = np.argsort(begins, kind="stable")
    begins, ends = begins[by_begin], np.maximum.accumulate(ends[by_begin])
    opens = np.ones(len(begins), dtype=np.bool_)
    opens[1:] = begins[1:] > ends[:-1]
    return begins[opens], ends[np.roll(opens, -1)]


def _numbers(values: npt.ArrayLike, what: str) -> Ints:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be whole numbers, not {array.dtype}")
    if array.size and int(array.min()) < 0:
        raise IndexError(f"{what} are numbered from 0, not {int(array.min()):,}")
    return array.astype(np.int64, copy=False)
