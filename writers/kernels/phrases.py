"""How often the words and phrases of a list stand in texts, whatever the case.

Both sides are in lower case (Arrow's `utf8_lower`, one character for one). With `separated`, what is before
and after an occurrence is no word character (letters, digits, _, as in regular expressions); otherwise
phrases are found anywhere, as scripts without spaces need. At each place at most one is counted. Candidates
are looked up by their first two bytes, so that long lists cost little more than short ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.writers.documents import text_offsets
from shardkit.writers.kernels.utf8 import next_character

__all__ = ["Phrases", "lower"]


class Phrases:
    """A list ready to be looked for; empty entries do not count."""

    def __init__(self, phrases: Iterable[str], *, separated: bool = True) -> None:
        lowered = {
            phrase for phrase in lower(pa.array(list(phrases), pa.large_string())).to_pylist() if phrase
        }
        # A phrase of one byte is looked up under that byte and 0.
        encoded = sorted((phrase.encode() for phrase in lowered), key=lambda phrase: (phrase + b"\0")[:2])
        first = [(phrase + b"\0")[0] << 8 | (phrase + b"\0")[1] for phrase in encoded]
        self._buckets = np.searchsorted(np.array(first, np.int64), np.arange((1 << 16) + 1))
        self._data = np.frombuffer(b"".join(encoded) or b"\0", np.uint8).copy()
        self._offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._separated = separated

    def count(self, lowered: pa.LargeStringArray, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """int64[n]: occurrences in each of the wanted texts, which are in lower case; 0 in the others."""
        counts = np.zeros(len(lowered), np.int64)
        buffer = lowered.buffers()[2]
        if buffer is not None and buffer.size and len(self._offsets) > 1:
            tables = (_word_characters(), self._buckets, self._data, self._offsets)
            data = np.frombuffer(buffer, np.uint8)
            _count(data, text_offsets(lowered), wanted, tables, self._separated, counts)
        return counts


def lower(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """The texts in lower case."""
    return pc.utf8_lower(texts)


@cache
def _word_characters() -> npt.NDArray[np.bool_]:
    """bool[1,114,112]: what regular expressions call a word character."""
    found = np.zeros(0x110000, np.bool_)
    found[:0x40000] = [chr(code).isalnum() for code in range(0x40000)]
    found[ord("_")] = True
    return found


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, tables, separated, counts):  # type: ignore[no-untyped-def]
    words, buckets = tables[0], tables[1]
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        at, end = offsets[document], offsets[document + 1]
        inside = False  # whether the character before is of a word
        while at < end:
            code, after = next_character(data, at)
            if not (separated and inside):
                one = np.int64(data[at]) << 8
                two = one | data[at + 1] if at + 1 < end else one
                found = buckets[two] < buckets[two + 1] and _any(data, at, end, two, tables, separated)
                if not found and buckets[one] < buckets[one + 1]:
                    found = _any(data, at, end, one, tables, separated)
                counts[document] += found
            inside = words[code]
            at = after


@numba.njit(nogil=True, cache=True)
def _any(data, at, end, key, tables, separated):  # type: ignore[no-untyped-def]
    """Whether a phrase of the bucket stands at `at`."""
    words, buckets, phrases, offsets = tables
    for phrase in range(buckets[key], buckets[key + 1]):
        begin, size = offsets[phrase], offsets[phrase + 1] - offsets[phrase]
        if size > end - at:
            continue
        same = True
        for place in range(size):
            if data[at + place] != phrases[begin + place]:
                same = False
                break
        after = at + size
        if same and (not separated or after == end or not words[next_character(data, after)[0]]):
            return True
    return False
