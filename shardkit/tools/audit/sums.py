"""Order-independent sums of the samples delivered: how two multisets of sample ids are compared.

    count;  sum of ids mod 2**64;  sum of H(id) mod 2**64, for each of two 64-bit halves of a keyed H

Memory is constant, and adding costs about 15 ns a sample. Two multisets in which no sample's multiplicity
differs by 2**13 or more have equal sums with probability at most 2**-100: if the smallest power of two in
the difference is 2**k, k < 13, each half's sum of differences is uniform over 2**(64 - k) values for a
random H, and the key is drawn anew for each audit, so that no data can be made to fit it. H is SplitMix64's
finalizer, keyed and applied three times; the order of samples is made by another function, fmix64.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from shardkit.arrays import Ints, Words

FALSE_ACCEPTANCE = "2**-100"
"""Bound on the probability that wrong multiplicities (by less than 2**13 each) go undetected."""

_WORD = (1 << 64) - 1
_CHUNK = 1 << 14  # ids hashed at once: the temporaries stay in a core's second-level cache
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


class SampleHash:
    """H: two 64-bit words per sample id, under a key of 24 bytes (default: a random one)."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(24) if key is None else key
        if len(self.key) != 24:
            raise ValueError(f"the key must have 24 bytes, not {len(self.key)}")
        self._keys = [np.uint64(word) for word in np.frombuffer(self.key, dtype="<u8").tolist()]

    def __call__(self, ids: Ints) -> tuple[Words, Words]:
        """The two words of each id, in their shape."""
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
    """SplitMix64's finalizer (Stafford's variant 13), in place."""
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
        """Count these samples, whose words are H of them."""
        low, high = words
        self.count += ids.size
        self.ids = (self.ids + _sum(ids.view(np.uint64))) & _WORD
        self.low = (self.low + _sum(low)) & _WORD
        self.high = (self.high + _sum(high)) & _WORD


def _sum(words: Words) -> int:
    return int(words.sum(dtype=np.uint64)) if words.size else 0
