"""Output memory that is used again, but never while anyone can still see it.

Fresh memory costs a page fault for every 4 KiB, as much as copying a row into it, and scattered small pages
evict one another from a core's cache: on large pages used again, converting rows is up to 1.4 times as fast.
`OutputMemory.lend` gives an array whose bytes are taken back when it and everything made from it (views,
tensors, batches) have died, and not before: NumPy and torch keep the lent array alive as the base of whatever
shows its memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from math import prod

import numpy as np
import numpy.typing as npt

__all__ = ["OutputMemory"]

_KEPT = 8  # free pieces kept: those beyond were a peak
_LARGE_PAGE = 2 << 20
_SLAB_BYTES = 8 << 20  # carved into pieces
_MIN_BYTES, _MAX_BYTES = 64 << 10, _SLAB_BYTES  # below, malloc reuses memory by itself; above, faults are few

_Bytes = npt.NDArray[np.uint8]


class OutputMemory:
    """Lends arrays. Threads may share it."""

    def __init__(self) -> None:
        # Every change is one atomic step of a dict or deque: the garbage collector may come in between.
        self._free: deque[_Bytes] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], _Bytes]] = {}
        self._slab: _Bytes = np.empty(0, dtype=np.uint8)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of arbitrary content that belongs to the caller until it dies."""
        count = prod(shape) * dtype.itemsize
        if not _MIN_BYTES <= count <= _MAX_BYTES:
            return np.empty(shape, dtype)
        piece = self._take(count)
        # Through a memoryview: what is made from `lent` then refers to `lent`, not to the piece under it.
        lent = np.frombuffer(piece.data, dtype=np.uint8)
        reference = weakref.ref(lent, self._took_back)
        self._lent[id(reference)] = (reference, piece)
        return lent[:count].view(dtype).reshape(shape)

    def _took_back(self, died: weakref.ref[_Bytes]) -> None:
        self._free.append(self._lent.pop(id(died))[1])

    def _take(self, count: int) -> _Bytes:
        try:
            piece = self._free.pop()
        except IndexError:
            return self._carve(count)
        return piece if len(piece) >= count else self._carve(count)

    def _carve(self, count: int) -> _Bytes:
        slab = self._slab
        if len(slab) < count:
            slab = _large_pages(_SLAB_BYTES)
        rounded = min(len(slab), -(-count // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._slab = slab[rounded:]
        return slab[:rounded]


def _large_pages(count: int) -> _Bytes:
    """`count` bytes of zeros, on large pages if the system has them."""
    memory = mmap.mmap(-1, count + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % _LARGE_PAGE
    return whole[start : start + count]
