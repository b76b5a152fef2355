"""Limit the decoded size of one sample, and of one shard whose size is not recorded.

Compressed members, images and JSON can take a thousand times their file size in memory once decoded, and a
zstd frame 30,000 times. Code that decodes them takes the memory from a budget before it allocates it.

A sample may take `MAX_SAMPLE_BYTES`, or as much as the stored file of its shard, if that is more: data that
is not compressed can have any size. All copies that exist at once count, such as the text in a `.txt.gz`
member and the bytes from which it is decoded.
"""

from __future__ import annotations

import numpy as np

MAX_SAMPLE_BYTES = 1 << 30
MAX_UNSTATED_BYTES = 4 << 30  # limit for a compressed tar of unrecorded size; uncompressed tars are mapped
_HONEST_RATIO = 250  # compression ratio of a tar that is not suspicious; text reaches 10, logs 50
_SMALL_BYTES = 1 << 20  # smaller values get a rough estimate from their size alone, to save time
_PIECE_BYTES = 1 << 20
# Memory of CPython for an empty list or dict, and for a number or a short string with its entry in a list.
_BRACKET_BYTES, _COMMA_BYTES = 64, 40
# Lowest UTF-8 lead bytes of characters that make CPython store a str with two or four bytes per character.
_TWO_BYTES, _FOUR_BYTES = 0xC4, 0xF0


class SampleBudget:
    """Tracks how much memory one sample may still take."""

    __slots__ = ("_left", "limit")

    def __init__(self, stored_bytes: int = 0, *, limit: int = MAX_SAMPLE_BYTES) -> None:
        """Start with `limit` bytes, or `stored_bytes`, the size of the shard's stored file, if it is larger.

        `stored_bytes` is 0 if the size is not known.
        """
        self.limit = self._left = max(limit, stored_bytes)

    @property
    def left(self) -> int:
        """Number of bytes that may still be taken."""
        return self._left

    def take(self, count: int) -> None:
        """Take `count` bytes; call it before allocating. Raises ValueError if the sample gets too large."""
        if count > self._left:
            needed = self.limit - self._left + count
            raise ValueError(
                f"its sample would take {needed:,} bytes of memory; the limit is {self.limit:,}; "
                "split the sample, or leave the column out"
            )
        self._left -= count


def raw_limit(stored_bytes: int, stated_bytes: int) -> int:
    """Return the limit for the decompressed size of a tar whose file has `stored_bytes`, in bytes.

    `stated_bytes` is the decompressed size in the index, negative if not recorded; it is never exceeded.
    """
    usual = max(MAX_UNSTATED_BYTES if stated_bytes >= 0 else MAX_SAMPLE_BYTES, _HONEST_RATIO * stored_bytes)
    return min(usual, stated_bytes) if stated_bytes >= 0 else min(usual, MAX_UNSTATED_BYTES)


def text_bytes(data: memoryview) -> int:
    """Return an upper estimate of the memory that UTF-8 `data` takes as a str, in bytes.

    CPython takes one, two or four bytes per character, depending on the widest character.
    """
    if len(data) < _SMALL_BYTES:
        return 4 * len(data)
    widest = int(np.frombuffer(data, np.uint8).max())
    return len(data) * (1 if widest < _TWO_BYTES else 2 if widest < _FOUR_BYTES else 4)


def json_bytes(data: memoryview) -> int:
    """Estimate the memory of the value that JSON `data` encodes, in bytes, from its brackets and commas."""
    if len(data) < _SMALL_BYTES:
        return len(data)
    brackets = commas = 0
    for at in range(0, len(data), _PIECE_BYTES):
        piece = bytes(data[at : at + _PIECE_BYTES])
        brackets += piece.count(b"[") + piece.count(b"{")
        commas += piece.count(b",")
    return len(data) + brackets * _BRACKET_BYTES + commas * _COMMA_BYTES
