"""The permutation of samples in plain Python: the definition that the vectorized one is tested against."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
_TINY, _ROUNDS = 64, 8
_WORD = (1 << 64) - 1


def permute_one(index: int, size: int, key: int) -> int:
    """`shardkit.order.permutation.permute` of one element."""
    if size <= _TINY:
        hashes = [mix64(key + (element + 1) * GOLDEN) for element in range(size)]
        return sum(other < hashes[index] for other in hashes)
    low_bits = (size - 1).bit_length() // 2
    rows = (size + (1 << low_bits) - 1) >> low_bits
    while True:
        left, right = index >> low_bits, index & ((1 << low_bits) - 1)
        for number in range(1, _ROUNDS, 2):
            left = (left + ((mix64(right + key + number * GOLDEN) >> 32) * rows >> 32)) % rows
            right ^= mix64(left + key + (number + 1) * GOLDEN) >> (64 - low_bits)
        index = left << low_bits | right
        if index < size:
            return index


def mix64(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    return word ^ word >> 33
