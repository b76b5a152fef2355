"""Count occurrences of the words and phrases of a list in texts, ignoring case.

Texts and phrases are lower-cased with Arrow's `utf8_lower`, which maps one character to one. With
`separated`, the characters before and after an occurrence must not be word characters (letters, digits, _, as
in regular expressions); otherwise phrases are found anywhere, as is needed for scripts without spaces. At
most one phrase is counted at each position. Candidates are looked up by their first two bytes, so long lists
cost little more than short ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, int64, kernel
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.kernels.utf8 import join_runs, next_character, same_runs
from shardkit.writers.kernels.words import WORD, character_tables


class Phrases:
    """A list of phrases, indexed for search; empty entries are ignored."""

    def __init__(self, phrases: Iterable[str], *, separated: bool = True) -> None:
        lowered = {
            phrase for phrase in lower(pa.array(list(phrases), pa.large_string())).to_pylist() if phrase
        }
        # Buckets are numbered by the first two bytes of a phrase; a phrase of one byte gets a zero byte.
        encoded = sorted((phrase.encode() for phrase in lowered), key=lambda phrase: (phrase + b"\0")[:2])
        first = [(phrase + b"\0")[0] << 8 | (phrase + b"\0")[1] for phrase in encoded]
        self._buckets = np.searchsorted(np.array(first, np.int64), np.arange((1 << 16) + 1))
        self._data, self._offsets = join_runs(encoded)
        self._separated = separated

    def count(self, lowered: pa.LargeStringArray, wanted: Bools) -> Int64s:
        """Return int64[n], how often phrases occur in each text (in lower case); 0 if it is not `wanted`."""
        counts = np.zeros(len(lowered), np.int64)
        if len(self._offsets) > 1:
            tables = (character_tables().flags, self._buckets, self._data, self._offsets)
            _count(text_bytes(lowered), text_offsets(lowered), wanted, tables, self._separated, counts)
        return counts


def lower(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return the texts in lower case."""
    return pc.utf8_lower(texts)


# (flags of characters, number of the first phrase of each bucket, bytes of all phrases, their offsets)
_Tables = tuple[UInt8s, Int64s, UInt8s, Int64s]


@kernel
def _count(
    data: UInt8s, offsets: Int64s, wanted: Bools, tables: _Tables, separated: bool, counts: Int64s
) -> None:
    flags, buckets = tables[0], tables[1]
    for document in range(len(wanted)):
        if not wanted[document]:
            continue
        at, end = offsets[document], offsets[document + 1]
        inside = False  # whether the previous character is a word character
        while at < end:
            code, after = next_character(data, at)
            if not (separated and inside):
                one = int64(data[at]) << 8
                two = one | data[at + 1] if at + 1 < end else one
                found = buckets[two] < buckets[two + 1] and _any(data, at, end, two, tables, separated)
                if not found and buckets[one] < buckets[one + 1]:
                    found = _any(data, at, end, one, tables, separated)
                counts[document] += found
            inside = (flags[code] & WORD) != 0
            at = after


@kernel
def _any(data: UInt8s, at: int, end: int, key: int, tables: _Tables, separated: bool) -> bool:
    """Return whether a phrase of the bucket `key` begins at data[at]."""
    flags, buckets, phrases, offsets = tables
    for phrase in range(buckets[key], buckets[key + 1]):
        begin, size = offsets[phrase], offsets[phrase + 1] - offsets[phrase]
        if size > end - at or not same_runs(data, at, phrases, begin, size):
            continue
        after = at + size
        if not separated or after == end or not flags[next_character(data, after)[0]] & WORD:
            return True
    return False
