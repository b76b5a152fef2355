"""Random permutations of range(n) by arithmetic: nothing is stored, any element is found directly.

`Permutation(n, key)` maps 0 … n - 1 onto itself one to one, for any n up to 2**62, in O(1) memory; `inverse`
goes back. The result depends on (n, key) alone: integers only, no library's random numbers, golden vectors
under tests/golden. `permute` and `unpermute` do the same for many permutations at once, one per element.

How. x is cut into (left, right), right being the low h bits, with h = (n - 1).bit_length() // 2 and left
counting to rows = ceil(n / 2**h). Eight alternating Feistel rounds, G = 2**64 / golden ratio, F = the
finaliser of MurmurHash3 (fmix64: two multiplications, three xor-shifts), of which the best 32 or h bits are
used:

    odd rounds   left  = (left + (F(right + key + i * G) >> 32) * rows >> 32) % rows
    even rounds  right ^= F(left + key + i * G) >> (64 - h)

and again for the few x that land in [n, rows * 2**h) (cycle walking). The domain exceeds n by less than
2**h, so about one element in sqrt(n) walks. The usual domain, the next power of four, is up to four times n
and 2.2 times on average, and walking through it costs several times as much (192 ns against 37 ns for an
element of a permutation of 100,003; tests/benchmarks/bench_order.py measures both).

n <= 64 ranks the hashes of all n elements instead, so that every one of the n! orders is equally likely.
Eight rounds over two or three bits would bias how often a pair of elements goes to a pair of places,
visibly so in 200,000 keys.

Cost: 30-50 ns for an element in arrays of thousands; about 100 microseconds for a single one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Words

MAX_SIZE = 1 << 62  # left + its increment, and positions derived from elements, stay below 2**63
CHUNK = 1 << 14  # elements worked on at once: nine arrays of 128 KiB stay in a core's second-level cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_ROUNDS = 8  # six fail the test of pair frequencies at n = 65, eight pass it
_TINY = 64  # largest n that is ranked: about 300 ns for an element
_MIX1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX2 = np.uint64(0xC4CEB9FE1A85EC53)
ONE, _32, _33, _64 = (np.uint64(value) for value in (1, 32, 33, 64))
_POWERS = ONE << np.arange(63, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Domains:
    """Sizes, keys and what follows from them; uint64 arrays of one shape, () for a single permutation."""

    sizes: Words
    keys: Words
    rows: Words
    low_bits: Words

    @classmethod
    def of(cls, sizes: Words, keys: Words) -> Domains:
        """Domains of permutations of `sizes` >= 1 elements; `keys` must already be well mixed."""
        # The number of powers of two that are <= n - 1 is its bit length, without floating point.
        bits = np.searchsorted(_POWERS, sizes - ONE, side="right")
        low_bits = np.asarray(bits // 2, dtype=np.uint64)
        rows = np.asarray((sizes + (ONE << low_bits) - ONE) >> low_bits, dtype=np.uint64)
        return cls(sizes, keys, rows, low_bits)

    def take(self, which: npt.NDArray[np.intp] | slice) -> Domains:
        """The domains of some elements; a single permutation is everyone's."""
        if self.sizes.ndim == 0:
            return self
        return Domains(self.sizes[which], self.keys[which], self.rows[which], self.low_bits[which])


class Permutation:
    """A keyed permutation of range(size); `key` is 64 bits or any bytes, hashed either way."""

    __slots__ = ("_domain", "_size")

    def __init__(self, size: int, key: int | bytes) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation has 0 to 2**62 elements, not {size:,}")
        if isinstance(key, int):
            if not 0 <= key < 1 << 64:
                raise ValueError(f"an integer key must be in [0, 2**64), not {key}; longer keys: bytes")
            key = key.to_bytes(8, "little")
        # Two keys that differ in one bit must share nothing, so the rounds see only their hash.
        digest = hashlib.blake2b(key, digest_size=8, person=b"shardkit.perm.1").digest()
        word = np.array(int.from_bytes(digest, "little"), dtype=np.uint64)
        self._size = size
        self._domain = Domains.of(np.array(max(size, 1), dtype=np.uint64), word)

    def __len__(self) -> int:
        return self._size

    def __call__(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return where each of `indices` goes, in the same shape. IndexError outside range(size)."""
        indices = self._checked(indices)
        return permute(indices.ravel(), self._domain).reshape(indices.shape).view(np.int64)

    def inverse(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The elements that go to `indices`: inverse(self(x)) == x."""
        indices = self._checked(indices)
        return unpermute(indices.ravel(), self._domain).reshape(indices.shape).view(np.int64)

    def _checked(self, indices: npt.ArrayLike) -> Words:
        array = np.asarray(indices)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, not {array.dtype}")
        if array.size and not 0 <= (low := int(array.min())) <= (high := int(array.max())) < self._size:
            raise IndexError(f"{low if low < 0 else high:,} is not in range({self._size:,})")
        return array.astype(np.uint64)


def permute(indices: Words, domains: Domains) -> Words:
    """Element i of the result is `indices[i]` under permutation i (or under the only one); 1-D uint64.

    Every index must be below its permutation's size; this is not checked here.
    """
    return _apply(indices, domains, inverse=False)


def unpermute(indices: Words, domains: Domains) -> Words:
    """The inverse of `permute`."""
    return _apply(indices, domains, inverse=True)


def mix64(values: Words) -> Words:
    """fmix64 of MurmurHash3: a bijection of 64-bit words in which each bit depends on all bits."""
    mixed = np.array(values, dtype=np.uint64)
    scratch = np.empty_like(mixed)
    _mix_high(mixed, scratch)
    np.right_shift(mixed, _33, out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
    return mixed


def _mix_high(words: Words, scratch: Words) -> None:
    # fmix64 in place without its last xor-shift, which leaves the high 33 bits alone.
    np.right_shift(words, _33, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX1, out=words)
    np.right_shift(words, _33, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX2, out=words)


def _apply(indices: Words, domains: Domains, *, inverse: bool) -> Words:
    result = np.empty_like(indices)
    for start in range(0, len(indices), CHUNK):
        piece = slice(start, start + CHUNK)
        result[piece] = _apply_chunk(indices[piece], domains.take(piece), inverse=inverse)
    return result


def _apply_chunk(indices: Words, domains: Domains, *, inverse: bool) -> Words:
    tiny = domains.sizes <= _TINY
    if tiny.all():
        return _ranks_back(indices, domains) if inverse else _ranks(indices, domains)
    if tiny.any():
        result = np.empty_like(indices)
        for which in (np.flatnonzero(tiny), np.flatnonzero(~tiny)):
            result[which] = _apply_chunk(indices[which], domains.take(which), inverse=inverse)
        return result
    one_pass = _backward if inverse else _forward
    result = one_pass(indices, domains)
    outside = np.flatnonzero(result >= domains.sizes)
    # Every element returns to its domain: a walk follows a cycle that began inside.
    while outside.size:
        walkers = domains.take(outside)
        walked = one_pass(result[outside], walkers)
        result[outside] = walked
        outside = outside[walked >= walkers.sizes]
    return result


class _Rounds:
    """The state of one pass over a chunk: both halves, and what the round function needs."""

    __slots__ = ("_drop", "_keys", "_low_bits", "_mixed", "_rows", "_scratch", "left", "right")

    def __init__(self, indices: Words, domains: Domains) -> None:
        self._low_bits, self._rows = domains.low_bits, domains.rows
        self._drop = _64 - domains.low_bits
        self._keys = domains.keys
        self.left = indices >> domains.low_bits
        self.right = indices & ((ONE << domains.low_bits) - ONE)
        self._mixed, self._scratch = np.empty_like(indices), np.empty_like(indices)

    def increments(self, number: int) -> Words:
        """Return uniform words in [0, rows) that an odd round adds to left. Overwritten by the next call."""
        mixed = self._hash(self.right, number)
        np.right_shift(mixed, _32, out=mixed)
        np.multiply(mixed, self._rows, out=mixed)
        np.right_shift(mixed, _32, out=mixed)
        return mixed

    def masks(self, number: int) -> Words:
        """Return the words that an even round xors onto right. Overwritten by the next call."""
        mixed = self._hash(self.left, number)
        np.right_shift(mixed, self._drop, out=mixed)
        return mixed

    def reduce(self) -> None:
        """Left modulo rows, for left in (-rows, 2 * rows): a negative value is a huge unsigned one."""
        np.subtract(self.left, self._rows, out=self._mixed)
        np.minimum(self.left, self._mixed, out=self.left)

    def reduce_negative(self) -> None:
        np.add(self.left, self._rows, out=self._mixed)
        np.minimum(self.left, self._mixed, out=self.left)

    def join(self) -> Words:
        np.left_shift(self.left, self._low_bits, out=self.left)
        np.bitwise_or(self.left, self.right, out=self.left)
        return self.left

    def _hash(self, half: Words, number: int) -> Words:
        # Integer overflow wraps by intent; a ufunc on arrays does so without a warning.
        offset = np.multiply(GOLDEN, np.array(number, dtype=np.uint64), out=np.empty((), dtype=np.uint64))
        np.add(half, self._keys, out=self._mixed)
        np.add(self._mixed, offset, out=self._mixed)
        _mix_high(self._mixed, self._scratch)
        return self._mixed


def _forward(indices: Words, domains: Domains) -> Words:
    rounds = _Rounds(indices, domains)
    for number in range(1, _ROUNDS, 2):
        np.add(rounds.left, rounds.increments(number), out=rounds.left)
        rounds.reduce()
        np.bitwise_xor(rounds.right, rounds.masks(number + 1), out=rounds.right)
    return rounds.join()


def _backward(indices: Words, domains: Domains) -> Words:
    rounds = _Rounds(indices, domains)
    for number in range(_ROUNDS - 1, 0, -2):
        np.bitwise_xor(rounds.right, rounds.masks(number + 1), out=rounds.right)
        np.subtract(rounds.left, rounds.increments(number), out=rounds.left)
        rounds.reduce_negative()
    return rounds.join()


def _ranks(indices: Words, domains: Domains) -> Words:
    result = np.empty_like(indices)
    for piece, hashes in _element_hashes(len(indices), domains):
        own = np.take_along_axis(hashes, indices[piece, None].astype(np.intp), axis=1)
        result[piece] = np.count_nonzero(hashes < own, axis=1)
    return result


def _ranks_back(indices: Words, domains: Domains) -> Words:
    result = np.empty_like(indices)
    for piece, hashes in _element_hashes(len(indices), domains):
        by_rank = np.argsort(hashes, axis=1, kind="stable")
        result[piece] = np.take_along_axis(by_rank, indices[piece, None].astype(np.intp), axis=1)[:, 0]
    return result


def _element_hashes(count: int, domains: Domains) -> Iterator[tuple[slice, Words]]:
    # Row i holds the hashes of all elements of permutation i, then all ones. They are distinct, since G is
    # odd and fmix64 one to one: ranks have no ties.
    sizes, keys = np.broadcast_to(domains.sizes, count), np.broadcast_to(domains.keys, count)
    elements = np.arange(int(sizes.max(initial=1)), dtype=np.uint64)
    counters = (elements + ONE) * GOLDEN
    for start in range(0, count, CHUNK // _TINY):
        piece = slice(start, start + CHUNK // _TINY)
        hashes = mix64(keys[piece, None] + counters)
        hashes[elements >= sizes[piece, None]] = ~np.uint64(0)
        yield piece, hashes
