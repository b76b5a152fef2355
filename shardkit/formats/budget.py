"""Memory that one sample, and one shard without a stated size, may take once decoded.

Compressed members, images and JSON take more memory than bytes in the file: a thousand times as much, and a
zstd frame 30,000 times. Whatever decodes them asks for what it is about to allocate first.

A sample may take `MAX_SAMPLE_BYTES`, or as much as the stored file of its shard, if that is more: what was
not compressed is read whatever its size. All copies that exist at once count, such as the text in a `.txt.gz`
member and the bytes that it is decoded from.
"""

from __future__ import annotations

import numpy as np

MAX_SAMPLE_BYTES = 1 << 30
MAX_UNSTATED_BYTES = 4 << 30  # of a tar in memory; a larger one should be stored uncompressed, which maps it
_HONEST_RATIO = 250  # of a compressed tar of any size; text reaches 10, logs 50
_SMALL_BYTES = 1 << 20  # of a value, below which looking at it is not worth the time
_PIECE_BYTES = 1 << 20
# Of an empty list or object of CPython, and of a number or a short string with its place in a list.
_BRACKET_BYTES, _COMMA_BYTES = 64, 40
_TWO_BYTES, _FOUR_BYTES = 0xC4, 0xF0  # the first bytes of characters for which CPython takes so many each


class SampleBudget:
    """What is left of the memory for one sample."""

    __slots__ = ("_left", "limit")

    def __init__(self, stored_bytes: int = 0, *, limit: int = MAX_SAMPLE_BYTES) -> None:
        """`stored_bytes`: size of the shard's stored file, 0 if that is not known."""
        self.limit = self._left = max(limit, stored_bytes)

    @property
    def left(self) -> int:
        """Bytes that may still be taken."""
        return self._left

    def take(self, count: int) -> None:
        """Take `count` bytes before they are allocated; ValueError if the sample would become too large."""
        if count > self._left:
            needed = self.limit - self._left + count
            raise ValueError(
                f"its sample would take {needed:,} bytes of memory, the limit is {self.limit:,}; "
                "split the sample, or leave the column out"
            )
        self._left -= count


def raw_limit(stored_bytes: int, stated_bytes: int) -> int:
    """Bytes that a compressed tar may hold: what its index states, but no more than tars of its size do.

    `stated_bytes` is negative if nothing is stated.
    """
    usual = max(MAX_UNSTATED_BYTES if stated_bytes >= 0 else MAX_SAMPLE_BYTES, _HONEST_RATIO * stored_bytes)
    return min(usual, stated_bytes) if stated_bytes >= 0 else min(usual, MAX_UNSTATED_BYTES)


def text_bytes(data: memoryview) -> int:
    """Memory of the str in UTF-8 `data`: one, two or four bytes a character, by the widest one."""
    if len(data) < _SMALL_BYTES:
        return 4 * len(data)
    widest = int(np.frombuffer(data, np.uint8).max())
    return len(data) * (1 if widest < _TWO_BYTES else 2 if widest < _FOUR_BYTES else 4)


def json_bytes(data: memoryview) -> int:
    """Memory of the value in JSON `data`, about: its texts and what each bracket and comma stands for."""
    if len(data) < _SMALL_BYTES:
        return len(data)
    brackets = commas = 0
    for at in range(0, len(data), _PIECE_BYTES):
        piece = bytes(data[at : at + _PIECE_BYTES])
        brackets += piece.count(b"[") + piece.count(b"{")
        commas += piece.count(b",")
    return len(data) + brackets * _BRACKET_BYTES + commas * _COMMA_BYTES
