"""Spans of tokens that are read but are not targets: loaders set their labels to -100.

An alternative to excluding whole rows (`Exclusions`): a row keeps its other documents. The delivered rows,
their order and the state of a loader are the same with and without a mask.

Masking a batch is a binary search in the rows that have spans; memory is 24 bytes per span.
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
"""Maximum length in tokens of a sequence whose repetition is detected, as in OLMo-core's instance filter."""

_LINE = re.compile(r"([0-9]+)\s+([0-9]+)\s*:\s*([0-9]+)")


class TokenMask:
    """Immutable spans (row in dataset order, first token, one past the last token); they may overlap.

    Raises ValueError for a span that is empty or negative.
    """

    def __init__(self, spans: Iterable[tuple[int, int, int]] | npt.NDArray[np.integer[Any]]) -> None:
        array = np.asarray(spans if isinstance(spans, np.ndarray) else list(spans), np.int64).reshape(-1, 3)
        wrong = (array[:, 0] < 0) | (array[:, 1] < 0) | (array[:, 2] <= array[:, 1])
        if (wrong | (array[:, 0] > MAX_SAMPLES)).any():
            row, begin, end = array[wrong | (array[:, 0] > MAX_SAMPLES)][0].tolist()
            raise ValueError(
                f"row {row}, tokens {begin}:{end}: not a span; rows and tokens count from 0, and a span must "
                "end after it begins"
            )
        self._rows, self._begins, self._ends = array[np.lexsort(array.T[::-1])].T
        self.fingerprint: str | None = None
        """The fingerprint of the dataset that the row numbers refer to; None if the file does not name it."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TokenMask:
        """Read a text file with a row and a half-open range of its tokens per line (17 120:340).

        # begins a comment; a line "# fingerprint: HEX", which `shardkit trace --mask` writes, names the
        dataset of the rows. Raises ValueError with file and line for an invalid line, OSError if the file
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
        """Join the masks of several datasets whose rows are numbered in sequence; None if there is no span.

        `first_samples`: the joined number of each dataset's first row.
        """
        found = [np.empty((0, 3), np.int64)]
        for mask, first in zip(masks, first_samples, strict=True):
            if mask is not None:
                found.append(np.stack([mask._rows + first, mask._begins, mask._ends], axis=1))
        spans = np.concatenate(found)
        return cls(spans) if len(spans) else None

    def check(self, rows: int, length: int) -> None:
        """Raise ValueError for a span outside a dataset of `rows` rows of `length` tokens."""
        if len(self._rows) and self._rows[-1] >= rows:
            raise ValueError(
                f"tokens of row {self._rows[-1]:,} are masked, but the dataset has only {rows:,} rows"
            )
        if len(self._rows) and self._ends.max() > length:
            at = int(self._ends.argmax())
            masked = f"row {self._rows[at]:,}: tokens up to {self._ends[at] - 1:,} are masked"
            raise ValueError(f"{masked}, but a row has only {length:,} tokens")

    @property
    def rows(self) -> int:
        """The number of rows that have a span."""
        return len(np.unique(self._rows))

    @property
    def tokens(self) -> int:
        """The number of tokens in all spans; a token in several spans counts several times."""
        return int((self._ends - self._begins).sum())

    def to_list(self) -> list[tuple[int, int, int]]:
        """Return the spans, sorted."""
        return list(
            zip(self._rows.tolist(), self._begins.tolist(), self._ends.tolist(), strict=True),
        )

    def places(self, rows: Ints, length: int) -> Ints:
        """Return the indices of the masked tokens in the flattened array of these rows of `length` tokens."""
        first, last = (np.searchsorted(self._rows, rows, side) for side in ("left", "right"))
        counts = last - first
        if not counts.any():
            return np.empty(0, np.int64)
        at = np.repeat(np.arange(len(rows)), counts)
        spans = np.arange(len(at)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begins, sizes = at * length + self._begins[spans], self._ends[spans] - self._begins[spans]
        places: Ints = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
        return places
