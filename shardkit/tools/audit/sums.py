"""Compares two multisets of sample ids by sums that do not depend on the order of the ids.

    count;  sum of ids mod 2**64;  sum of H(id) mod 2**64, for each of two 64-bit halves of a keyed H

Memory is constant, and adding takes about 15 ns per sample. Two different multisets in which no sample's
multiplicity differs by 2**13 or more have equal sums with probability at most 2**-100. If 2**k is the largest
power of two that divides all differences, k < 13, each half's sum of differences is uniform over 2**(64 - k)
values for a random H. Each audit uses a new random key, so no data can be constructed to collide. H is
SplitMix64's finalizer, keyed and applied three times; the order of samples uses a different function, fmix64.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Ints, Words

FALSE_ACCEPTANCE = "2**-100"
"""Bound on the probability that wrong multiplicities (by less than 2**13 each) go undetected."""

_WORD = (1 << 64) - 1
_CHUNK = 1 << 14  # ids hashed per iteration, so that the temporaries stay in a core's L2 cache
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


class SampleHash:
    """The keyed hash H, two 64-bit words per sample id; the key has 24 bytes and is random by default."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(24) if key is None else key
        if len(self.key) != 24:
            raise ValueError(f"the key must have 24 bytes, not {len(self.key)}")
        self._keys = [np.uint64(word) for word in np.frombuffer(self.key, dtype="<u8").tolist()]

    def __call__(self, ids: Ints) -> tuple[Words, Words]:
        """Return two arrays with the first and the second word of each id, in the shape of `ids`."""
        flat = np.ascontiguousarray(ids).ravel().view(np.uint64)
        low, high = np.empty_like(flat), np.empty_like(flat)
        scratch = np.empty(min(len(flat), _CHUNK), dtype=np.uint64)
        for begin in range(0, len(flat), _CHUNK):
            piece = slice(begin, begin + _CHUNK)
            one, two = low[piece], high[piece]
            part = scratch[: len(one)]
            np.add(flat[piece], self._keys[0], out=one)
            _mix(one, part)
            np.bitwise_xor(one, self._keys[1], out=one)
            _mix(one, part)
            np.add(one, self._keys[2], out=two)
            _mix(two, part)
        return low.reshape(ids.shape), high.reshape(ids.shape)


def _mix(words: Words, scratch: Words) -> None:
    """Apply SplitMix64's finalizer (Stafford's variant 13) in place."""
    np.right_shift(words, _30, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX1, out=words)
    np.right_shift(words, _27, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX2, out=words)
    np.right_shift(words, _31, out=scratch)
    np.bitwise_xor(words, scratch, out=words)


@dataclass(slots=True)
class Tally:
    """The sums of a multiset of samples; equal multisets have equal tallies under one key."""

    count: int = 0
    ids: int = 0
    low: int = 0
    high: int = 0

    def add(self, ids: Ints, words: tuple[Words, Words]) -> None:
        """Add samples to the sums; `words` is H(ids)."""
        low, high = words
        self.count += ids.size
        self.ids = (self.ids + _sum(ids.view(np.uint64))) & _WORD
        self.low = (self.low + _sum(low)) & _WORD
        self.high = (self.high + _sum(high)) & _WORD


def _sum(words: Words) -> int:
    return int(words.sum(dtype=np.uint64)) if words.size else 0
