"""MinHash signatures with the very values of `datasketch.MinHash`, at the speed of compiled loops.

Equal in every bit to `MinHash(num_perm=permutations, seed=seed, hashfunc=H, scheme=scheme)` updated with the
same n-grams, for any H of 32 bits: hashes come in, values go out. Of datasketch's permutation schemes:

    affine32   a * mix(h) + b mod 2^32, a odd: the default of datasketch 2.0 and later
    legacy     ((a * h + b mod 2^64) mod 2^61 - 1) mod 2^32: the only one before 2.0

`xxh32_ranges` is H = xxhash.xxh32_intdigest over ranges of one UTF-8 buffer. Cost: a multiplication, an
addition and a minimum for each n-gram and permutation, vectorised over permutations.
"""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Scheme", "datasketch_permutations", "signatures_datasketch", "xxh32_ranges"]

Scheme = Literal["affine32", "legacy"]
Factors = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]

_PRIME = (1 << 61) - 1
_MAX_HASH = (1 << 32) - 1

# xxHash's specification, section XXH32.
_PRIME1, _PRIME2, _PRIME3 = np.uint32(2654435761), np.uint32(2246822519), np.uint32(3266489917)
_PRIME4, _PRIME5 = np.uint32(668265263), np.uint32(374761393)


def datasketch_permutations(
    permutations: int, seed: int, scheme: Scheme = "affine32"
) -> tuple[Factors, Factors]:
    """(a, b): uint32[permutations] each for affine32, uint64 for legacy; drawn as datasketch draws them."""
    generator = np.random.RandomState(seed)
    if scheme == "affine32":
        a = generator.randint(0, 1 << 31, permutations, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
        return a, generator.randint(0, 1 << 32, permutations, dtype=np.uint32)
    assert scheme == "legacy", scheme
    drawn = [
        (generator.randint(1, _PRIME, dtype=np.uint64), generator.randint(0, _PRIME, dtype=np.uint64))
        for _ in range(permutations)
    ]
    pairs = np.array(drawn, np.uint64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def signatures_datasketch(
    hashes: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    a: Factors,
    b: Factors,
) -> npt.NDArray[np.uint32]:
    """uint32[n, permutations]: the least value of each permutation among hashes[offsets[i]:offsets[i + 1]].

    `a` and `b` from `datasketch_permutations`; their type tells the scheme. A document without n-grams has
    2^32 - 1 everywhere.
    """
    signatures = np.full((len(offsets) - 1, len(a)), _MAX_HASH, np.uint32)
    if a.dtype == np.uint32:
        _affine(hashes, offsets, a, b, signatures)
    else:
        assert a.dtype == np.uint64, a.dtype
        _legacy(hashes, offsets, a, b, signatures)
    return signatures


def xxh32_ranges(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    seed: int = 0,
) -> npt.NDArray[np.uint32]:
    """uint32[n]: xxh32 of each data[starts[i]:stops[i]]; ranges may overlap, as those of n-grams do."""
    assert len(starts) == len(stops)
    assert not len(starts) or (starts.min() >= 0 and (starts <= stops).all() and stops.max() <= len(data))
    hashes = np.empty(len(starts), np.uint32)
    _xxh32_ranges(data, starts, stops, np.uint32(seed), hashes)
    return hashes


@numba.njit(nogil=True, cache=True)
def _mixed(h):  # type: ignore[no-untyped-def]
    """MurmurHash3's finalizer, by which datasketch prepares hashes for affine permutations."""
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@numba.njit(nogil=True, cache=True)
def _affine(hashes, offsets, a, b, signatures):  # type: ignore[no-untyped-def]
    """Four n-grams at a time: a row of the signatures is loaded and stored less often."""
    for document in range(len(signatures)):
        row = signatures[document]
        at, end = offsets[document], offsets[document + 1]
        while at + 4 <= end:
            h0, h1 = _mixed(hashes[at]), _mixed(hashes[at + 1])
            h2, h3 = _mixed(hashes[at + 2]), _mixed(hashes[at + 3])
            for k in range(len(a)):
                factor, addend = a[k], b[k]
                first = min(np.uint32(factor * h0 + addend), np.uint32(factor * h1 + addend))
                second = min(np.uint32(factor * h2 + addend), np.uint32(factor * h3 + addend))
                row[k] = min(row[k], min(first, second))
            at += 4
        while at < end:
            h0 = _mixed(hashes[at])
            for k in range(len(a)):
                row[k] = min(row[k], np.uint32(a[k] * h0 + b[k]))
            at += 1


@numba.njit(nogil=True, cache=True)
def _legacy(hashes, offsets, a, b, signatures):  # type: ignore[no-untyped-def]
    prime = np.uint64(_PRIME)
    for document in range(len(signatures)):
        row = signatures[document]
        for at in range(offsets[document], offsets[document + 1]):
            h = np.uint64(hashes[at])
            for k in range(len(a)):
                wrapped = a[k] * h + b[k]
                # x mod 2^61 - 1: the top three bits count once each; -(2^61 - 1) is +1 in the low 32 bits.
                folded = (wrapped & prime) + (wrapped >> np.uint64(61))
                row[k] = min(row[k], np.uint32(np.uint32(folded) + np.uint32(folded >= prime)))


@numba.njit(nogil=True, cache=True)
def _rotated(value, bits):  # type: ignore[no-untyped-def]
    return np.uint32(value << np.uint32(bits)) | np.uint32(value >> np.uint32(32 - bits))


@numba.njit(nogil=True, cache=True)
def _word(data, at):  # type: ignore[no-untyped-def]
    """Four bytes, little endian: one load, because an unsigned index needs no test for negative ones."""
    first = np.uint64(at)
    return (
        np.uint32(data[first])
        | np.uint32(np.uint32(data[first + np.uint64(1)]) << np.uint32(8))
        | np.uint32(np.uint32(data[first + np.uint64(2)]) << np.uint32(16))
        | np.uint32(np.uint32(data[first + np.uint64(3)]) << np.uint32(24))
    )


@numba.njit(nogil=True, cache=True)
def _round(lane, word):  # type: ignore[no-untyped-def]
    return np.uint32(_rotated(np.uint32(lane + np.uint32(word * _PRIME2)), 13) * _PRIME1)


@numba.njit(nogil=True, cache=True)
def _xxh32(data, start, stop, seed):  # type: ignore[no-untyped-def]
    at = start
    if stop - start >= 16:
        lane1 = np.uint32(seed + _PRIME1 + _PRIME2)
        lane2 = np.uint32(seed + _PRIME2)
        lane3 = np.uint32(seed)
        lane4 = np.uint32(seed - _PRIME1)
        while at <= stop - 16:
            lane1 = _round(lane1, _word(data, at))
            lane2 = _round(lane2, _word(data, at + 4))
            lane3 = _round(lane3, _word(data, at + 8))
            lane4 = _round(lane4, _word(data, at + 12))
            at += 16
        hashed = np.uint32(
            _rotated(lane1, 1) + _rotated(lane2, 7) + _rotated(lane3, 12) + _rotated(lane4, 18)
        )
    else:
        hashed = np.uint32(seed + _PRIME5)
    hashed = np.uint32(hashed + np.uint32(stop - start))
    while at <= stop - 4:
        hashed = np.uint32(_rotated(np.uint32(hashed + _word(data, at) * _PRIME3), 17) * _PRIME4)
        at += 4
    while at < stop:
        hashed = np.uint32(
            _rotated(np.uint32(hashed + np.uint32(data[np.uint64(at)]) * _PRIME5), 11) * _PRIME1
        )
        at += 1
    hashed = np.uint32(np.uint32(hashed ^ (hashed >> np.uint32(15))) * _PRIME2)
    hashed = np.uint32(np.uint32(hashed ^ (hashed >> np.uint32(13))) * _PRIME3)
    return np.uint32(hashed ^ (hashed >> np.uint32(16)))


@numba.njit(nogil=True, cache=True)
def _xxh32_ranges(data, starts, stops, seed, hashes):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        hashes[i] = _xxh32(data, starts[i], stops[i], seed)
