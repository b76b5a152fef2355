"""Random permutations of range(n) by arithmetic: nothing is stored, and any element is computed directly.

`Permutation(n, key)` maps 0 … n - 1 onto itself one to one, for any n up to 2**62, in O(1) memory; `inverse`
is the inverse map. The result depends on (n, key) alone: integers only, no library's random numbers, golden
vectors under tests/golden. `permute` and `unpermute` do the same for many permutations at once, one per
element.

How. x is cut into (left, right): right is the low h bits, with h = (n - 1).bit_length() // 2, and left is in
[0, rows) with rows = ceil(n / 2**h). Eight alternating Feistel rounds follow, with G = 2**64 / golden ratio
and F = the finalizer of MurmurHash3 (fmix64: two multiplications, three xor-shifts). They use the best 32 or
h bits of F:

    odd rounds   left  = (left + (F(right + key + i * G) >> 32) * rows >> 32) % rows
    even rounds  right ^= F(left + key + i * G) >> (64 - h)

and again for the few x that land in [n, rows * 2**h) (cycle walking). The domain exceeds n by less than
2**h, so about one element in sqrt(n) walks. The usual domain, the next power of four, is up to four times n
and 2.2 times on average, and walking through it costs several times as much (192 ns against 37 ns for an
element of a permutation of 100,003; tests/benchmarks/bench_order.py measures both).

For n <= 64, elements are instead ranked by their hashes, so that every one of the n! orders is equally
likely. Eight rounds over two or three bits would bias how often a pair of elements maps to a pair of results,
visibly so in 200,000 keys.

Cost: 30-50 ns per element in arrays of thousands; about 100 microseconds for a single element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Words

MAX_SIZE = 1 << 62  # so that left + its increment, and positions made from elements, stay below 2**63
CHUNK = 1 << 14  # number of elements processed at once: nine arrays of 128 KiB fit a core's L2 cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_ROUNDS = 8  # six rounds fail the test of pair frequencies at n = 65, eight pass it
_TINY = 64  # largest n whose elements are ranked by their hashes: about 300 ns per element
_MIX1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX2 = np.uint64(0xC4CEB9FE1A85EC53)
ONE, _32, _33, _64 = (np.uint64(value) for value in (1, 32, 33, 64))
_POWERS = ONE << np.arange(63, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Domains:
    """Sizes, keys and derived values of permutations: uint64 arrays of one shape, () for one permutation."""

    sizes: Words
    keys: Words
    rows: Words
    low_bits: Words

    @classmethod
    def of(cls, sizes: Words, keys: Words) -> Domains:
        """Make the domains of permutations of `sizes` >= 1 elements; `keys` must already be well mixed."""
        # The bit length of n - 1 is the number of powers of two <= n - 1: exact, unlike a floating-point log.
        bits = np.searchsorted(_POWERS, sizes - ONE, side="right")
        low_bits = np.asarray(bits // 2, dtype=np.uint64)
        rows = np.asarray((sizes + (ONE << low_bits) - ONE) >> low_bits, dtype=np.uint64)
        return cls(sizes, keys, rows, low_bits)

    def take(self, which: npt.NDArray[np.intp] | slice) -> Domains:
        """Return the domains of some elements; a single permutation applies to all elements."""
        if self.sizes.ndim == 0:
            return self
        return Domains(self.sizes[which], self.keys[which], self.rows[which], self.low_bits[which])


class Permutation:
    """A keyed permutation of range(size). `key` is a 64-bit integer or any bytes; it is hashed."""

    __slots__ = ("_domain", "_size")

    def __init__(self, size: int, key: int | bytes) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation must have 0 to 2**62 elements, not {size:,}")
        if isinstance(key, int):
            if not 0 <= key < 1 << 64:
                raise ValueError(
                    f"an integer key must be in [0, 2**64), not {key}; give longer keys as bytes"
                )
            key = key.to_bytes(8, "little")
        # Keys that differ in one bit must give unrelated permutations, so the rounds use a hash of the key.
        digest = hashlib.blake2b(key, digest_size=8, person=b"shardkit.perm.1").digest()
        word = np.array(int.from_bytes(digest, "little"), dtype=np.uint64)
        self._size = size
        self._domain = Domains.of(np.array(max(size, 1), dtype=np.uint64), word)

    def __len__(self) -> int:
        return self._size

    def __call__(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the image of each index, in the same shape. Raises IndexError outside range(size)."""
        indices = self._checked(indices)
        return permute(indices.ravel(), self._domain).reshape(indices.shape).view(np.int64)

    def inverse(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the elements whose images are `indices`: inverse(self(x)) == x."""
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
    """Return, for each i, the image of `indices[i]` under permutation i (or the only one); 1-D uint64.

    Every index must be below its permutation's size; this is not checked here.
    """
    return _apply(indices, domains, inverse=False)


def unpermute(indices: Words, domains: Domains) -> Words:
    """Apply the inverse of `permute`."""
    return _apply(indices, domains, inverse=True)


def mix64(values: Words) -> Words:
    """Apply fmix64 of MurmurHash3: a bijection of 64-bit words in which each bit depends on all bits."""
    mixed = np.array(values, dtype=np.uint64)
    scratch = np.empty_like(mixed)
    _mix_high(mixed, scratch)
    np.right_shift(mixed, _33, out=scratch)
    np.bitwise_xor(mixed, scratch, out=mixed)
    return mixed


def _mix_high(words: Words, scratch: Words) -> None:
    # fmix64 in place without its last xor-shift, which does not change the high 33 bits.
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
    # The walk ends: it follows a cycle of the larger domain that began inside the smaller one.
    while outside.size:
        walkers = domains.take(outside)
        walked = one_pass(result[outside], walkers)
        result[outside] = walked
        outside = outside[walked >= walkers.sizes]
    return result


class _Rounds:
    """The state of one pass over a chunk: both halves, and the inputs of the round function."""

    __slots__ = ("_drop", "_keys", "_low_bits", "_mixed", "_rows", "_scratch", "left", "right")

    def __init__(self, indices: Words, domains: Domains) -> None:
        self._low_bits, self._rows = domains.low_bits, domains.rows
        self._drop = _64 - domains.low_bits
        self._keys = domains.keys
        self.left = indices >> domains.low_bits
        self.right = indices & ((ONE << domains.low_bits) - ONE)
        self._mixed, self._scratch = np.empty_like(indices), np.empty_like(indices)

    def increments(self, number: int) -> Words:
        """Return uniform words in [0, rows) that an odd round adds to left. The next call overwrites them."""
        mixed = self._hash(self.right, number)
        np.right_shift(mixed, _32, out=mixed)
        np.multiply(mixed, self._rows, out=mixed)
        np.right_shift(mixed, _32, out=mixed)
        return mixed

    def masks(self, number: int) -> Words:
        """Return the words that an even round xors onto right. The next call overwrites them."""
        mixed = self._hash(self.left, number)
        np.right_shift(mixed, self._drop, out=mixed)
        return mixed

    def reduce(self) -> None:
        """Reduce left (< 2 * rows) modulo rows by min(left, left - rows): negative values wrap to huge."""
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
        # Integer overflow wraps on purpose: a ufunc on arrays wraps without a warning, a scalar does not.
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
    # Row i has the hashes of all elements of permutation i, padded with words of all ones. Hashes are
    # distinct because G is odd and fmix64 is one to one, so ranks have no ties.
    sizes, keys = np.broadcast_to(domains.sizes, count), np.broadcast_to(domains.keys, count)
    elements = np.arange(int(sizes.max(initial=1)), dtype=np.uint64)
    counters = (elements + ONE) * GOLDEN
    for start in range(0, count, CHUNK // _TINY):
        piece = slice(start, start + CHUNK // _TINY)
        hashes = mix64(keys[piece, None] + counters)
        hashes[elements >= sizes[piece, None]] = ~np.uint64(0)
        yield piece, hashes
