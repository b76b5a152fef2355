"""Spans of tokens that are read and are no targets: loaders set their labels to -100.

An alternative to leaving out whole rows (`Exclusions`): a row keeps its other documents. Which rows come,
their order and the state of a loader are the same with and without it.

A look-up of a batch is a binary search in the rows that have spans; memory is 24 bytes a span.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.files import local_path
from shardkit.order.exclusions import FINGERPRINT_LINE
from shardkit.order.order import MAX_SAMPLES

LONGEST_PERIOD = 13
"""Tokens that may follow each other again and again to be a repetition: as in OLMo-core's instance filter."""

_LINE = re.compile(r"([0-9]+)\s+([0-9]+)\s*:\s*([0-9]+)")


class TokenMask:
    """Immutable spans (row, first token, one past the last), of rows in dataset order; they may overlap.

    ValueError for a span that is empty or negative.
    """

    def __init__(self, spans: Iterable[tuple[int, int, int]] | npt.NDArray[np.integer[Any]]) -> None:
        array = np.asarray(spans if isinstance(spans, np.ndarray) else list(spans), np.int64).reshape(-1, 3)
        wrong = (array[:, 0] < 0) | (array[:, 1] < 0) | (array[:, 2] <= array[:, 1])
        if (wrong | (array[:, 0] > MAX_SAMPLES)).any():
            row, begin, end = array[wrong | (array[:, 0] > MAX_SAMPLES)][0].tolist()
            raise ValueError(f"row {row}, tokens {begin}:{end}: not a span of a row's tokens")
        self._rows, self._begins, self._ends = array[np.lexsort(array.T[::-1])].T
        self.fingerprint: str | None = None
        """Of the dataset whose rows these are, where a file states it."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TokenMask:
        """From a text file: on each line a row and a half-open range of its tokens (17 120:340).

        # begins a comment; a line "# fingerprint: HEX", which `shardkit trace --mask` writes, says of which
        dataset the rows are. ValueError names the file and the line that is none of these; OSError if it
        cannot be read.
        """
        spans, fingerprint = [], None
        with local_path(path, "mask").open(encoding="utf-8-sig", errors="backslashreplace") as file:
            for number, line in enumerate(file, 1):
                text = line.partition("#")[0].strip()
                if not text:
                    stated = FINGERPRINT_LINE.fullmatch(line.strip())
                    fingerprint = stated[1] if stated else fingerprint
                    continue
                match = _LINE.fullmatch(text)
                if match is None:
                    problem = f"{text!r:.80} is not a row with a half-open range of tokens (17 120:340)"
                    raise ValueError(f"{os.fspath(path)}: line {number:,}: {problem}")
                spans.append((int(match[1]), int(match[2]), int(match[3])))
        found = cls(spans)
        found.fingerprint = fingerprint
        return found

    @classmethod
    def joined(cls, masks: Sequence[TokenMask | None], first_samples: Sequence[int]) -> TokenMask | None:
        """Join the masks of several datasets whose rows are numbered through. None if there is no span."""
        found = [np.empty((0, 3), np.int64)]
        for mask, first in zip(masks, first_samples, strict=True):
            if mask is not None:
                found.append(np.stack([mask._rows + first, mask._begins, mask._ends], axis=1))
        spans = np.concatenate(found)
        return cls(spans) if len(spans) else None

    def check(self, rows: int, length: int) -> None:
        """ValueError for a span that rows of `length` tokens do not have."""
        if len(self._rows) and self._rows[-1] >= rows:
            raise ValueError(f"tokens of row {self._rows[-1]:,} are masked; the dataset has {rows:,} rows")
        if len(self._rows) and self._ends.max() > length:
            at = int(self._ends.argmax())
            masked = f"row {self._rows[at]:,}: tokens up to {self._ends[at] - 1:,} are masked"
            raise ValueError(f"{masked}; a row has {length:,}")

    @property
    def rows(self) -> int:
        """Rows that have a span."""
        return len(np.unique(self._rows))

    @property
    def tokens(self) -> int:
        """Tokens in all spans; those of overlapping ones count each time."""
        return int((self._ends - self._begins).sum())

    def to_list(self) -> list[tuple[int, int, int]]:
        """The spans, sorted."""
        return list(
            zip(self._rows.tolist(), self._begins.tolist(), self._ends.tolist(), strict=True),
        )

    def places(self, rows: Ints, length: int) -> Ints:
        """The masked tokens of these rows, of `length` tokens each, as places in all of them flattened."""
        first, last = (np.searchsorted(self._rows, rows, side) for side in ("left", "right"))
        counts = last - first
        if not counts.any():
            return np.empty(0, np.int64)
        at = np.repeat(np.arange(len(rows)), counts)
        spans = np.arange(len(at)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begins, sizes = at * length + self._begins[spans], self._ends[spans] - self._begins[spans]
        places: Ints = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
        return places
