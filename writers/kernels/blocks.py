"""Bit masks of text in blocks of 64 bytes, one bit per byte: white space, letters and other characters.

Comparisons of whole blocks classify ASCII; other characters are decoded one by one and looked up. In a mask,
bit i is for byte i of a block. Bytes after the end of a text count as white space.
"""

from __future__ import annotations

import numpy as np

from shardkit.kernels.numba_support import UInt8s, int64, kernel
from shardkit.kernels.simd import range_mask, trailing_zeros
from shardkit.kernels.utf8 import ALPHA, PUNCTUATION, SPACE, next_character

BLOCK_BYTES = 64
TAIL_BYTES = 72  # size of a block plus 8 bytes, because kernels load 8 bytes from any position in a block
_ALL, _ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)


@kernel(inline=True)
def block_at(data: UInt8s, at: int, tail: UInt8s) -> tuple[UInt8s, int]:
    """Return (array, index) such that array[index:index + 72] has the 72 bytes data[at:at + 72].

    If `data` has fewer bytes, they are copied to the scratch array `tail`, uint8[72], and zeros follow them.
    """
    if at + TAIL_BYTES <= len(data):
        return data, at
    for i in range(TAIL_BYTES):
        tail[i] = data[at + i] if at + i < len(data) else 0
    return tail, int64(0)


@kernel(inline=True)
def lowest_bits(count: int) -> np.uint64:
    """Return a mask of the lowest `count` bits, at most 64; 0 if `count` is negative."""
    return _ALL >> np.uint64(BLOCK_BYTES - count) if count > 0 else np.uint64(0)


@kernel(allocates=False)
def find_byte(data: UInt8s, at: int, end: int, byte: int) -> int:
    """Return the index of the first `byte` in data[at:end], or `end` if there is none."""
    while at < end and at + BLOCK_BYTES <= len(data):
        found = range_mask(data, at, byte, 1)
        if found:
            return min(at + trailing_zeros(found), end)
        at += BLOCK_BYTES
    while at < end and data[at] != byte:
        at += 1
    return min(at, end)


@kernel(allocates=False)
def find_line_mark(data: UInt8s, at: int, end: int) -> int:
    """Return the index of the first byte in data[at:end] that may begin a line end, or `end`.

    Line ends are as for `str.splitlines`; they begin with the bytes 0A to 0D, 1C to 1E, C2 and E2.
    """
    while at < end and at + BLOCK_BYTES <= len(data):
        found = range_mask(data, at, 10, 4) | range_mask(data, at, 28, 3)
        found |= range_mask(data, at, 0xC2, 1) | range_mask(data, at, 0xE2, 1)
        if found:
            return min(at + trailing_zeros(found), end)
        at += BLOCK_BYTES
    while at < end:
        byte = data[at]
        if 10 <= byte <= 13 or 28 <= byte <= 30 or byte == 0xC2 or byte == 0xE2:
            break
        at += 1
    return min(at, end)


@kernel(allocates=False)
def copy_bytes(data: UInt8s, at: int, end: int, target: UInt8s, to: int) -> int:
    """Copy data[at:end] to target[to:]; return where the copy ends."""
    # A loop over two views from index 0 becomes a memory copy; a slice assignment takes seconds to compile.
    source, place = data[at:end], target[to:]
    for index in range(end - at):
        place[index] = source[index]
    return to + end - at


@kernel(allocates=False)
def space_mask(
    data: UInt8s, at: int, end: int, flags: UInt8s, spilled: np.uint64, tail: UInt8s
) -> tuple[np.uint64, np.uint64]:
    """Return (mask, spilled): the bits of white space (`str.isspace`) in data[at:at + 64].

    The text ends at `end`. A space of several bytes may begin in this block and end in the next one. The
    returned `spilled` has the bits of its bytes in the next block: pass it in the call for that block, and 0
    in the call for the first block. `flags` is the result of character_flags().
    """
    block, place = block_at(data, at, tail)
    spaces = range_mask(block, place, 9, 5) | range_mask(block, place, 28, 5) | spilled
    heads = range_mask(block, place, 0xC0, 0x40)
    spilled = np.uint64(0)
    if end - at < BLOCK_BYTES:
        valid = lowest_bits(end - at)
        spaces |= ~valid
        heads &= valid
    # Decode only the few characters whose first byte may begin white space: C2, E1, E2 and E3.
    heads &= range_mask(block, place, 0xC2, 1) | range_mask(block, place, 0xE1, 3)
    while heads:
        offset = trailing_zeros(heads)
        heads &= heads - _ONE
        code, after = next_character(data, at + offset)
        if flags[code] & SPACE:
            spaces, spilled = spread(spaces, offset, after - at)
    return spaces, spilled


@kernel(inline=True)
def spread(mask: np.uint64, first: int, stop: int) -> tuple[np.uint64, np.uint64]:
    """Set bits `first` to `stop` - 1; return (mask, mask of the next block, for the bits from 64 on)."""
    if stop <= BLOCK_BYTES:
        return mask | lowest_bits(stop) & ~lowest_bits(first), np.uint64(0)
    return mask | ~lowest_bits(first), lowest_bits(stop - BLOCK_BYTES)


@kernel(allocates=False)
def word_masks(
    data: UInt8s, at: int, end: int, flags: UInt8s, spilled: np.uint64, tail: UInt8s
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return five masks of the block data[at:at + 64]; the arguments are as for `space_mask`.

    The masks are (white space, letters, characters other than white space and punctuation, heads, spilled).
    White space has the bits of all its bytes; other characters have only the bit of their first byte. Heads
    are the first bytes of all characters. `spilled` is as in `space_mask`.
    """
    block, place = block_at(data, at, tail)
    spaces = range_mask(block, place, 9, 5) | range_mask(block, place, 28, 5) | spilled
    letters = range_mask(block, place, 65, 26) | range_mask(block, place, 97, 26)
    plain = letters | range_mask(block, place, 48, 10)
    heads = ~range_mask(block, place, 0x80, 0x40)
    spilled = np.uint64(0)
    if end - at < BLOCK_BYTES:
        valid = lowest_bits(end - at)
        spaces, letters, plain, heads = spaces | ~valid, letters & valid, plain & valid, heads & valid
    others = heads & range_mask(block, place, 0xC0, 0x40)
    while others:
        offset = trailing_zeros(others)
        bit = others & (~others + _ONE)
        others ^= bit
        code, after = next_character(data, at + offset)
        flag = flags[code]
        if flag & SPACE:
            spaces, spilled = spread(spaces, offset, after - at)
        elif flag & ALPHA:
            letters |= bit
        if not flag & (PUNCTUATION | SPACE):
            plain |= bit
    return spaces, letters, plain, heads, spilled
