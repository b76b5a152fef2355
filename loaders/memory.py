"""Output memory that is used again, but never while anyone can still see it.

Fresh memory costs a page fault for every 4 KiB, more than copying a row into it. `OutputMemory.lend` gives an
array whose bytes are taken back when it and everything made from it (views, tensors, batches) have died, and
not before: NumPy and torch keep the lent array alive as the base of whatever shows its memory.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["OutputMemory"]

_KEPT = 4  # free pieces kept: a loop drops one batch while it takes the next
_MIN_BYTES = 64 << 10  # below, malloc reuses memory by itself


class OutputMemory:
    """Lends arrays of bytes. Threads may share it."""

    def __init__(self) -> None:
        # Appending and popping are atomic, also when the garbage collector does the appending.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=_KEPT)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of arbitrary content that belongs to the caller until it dies."""
        count = int(np.prod(shape)) * dtype.itemsize
        if count < _MIN_BYTES:
            return np.empty(shape, dtype)
        owner = self._take(count)
        # Through a memoryview: views of views then refer to `lent`, not to the owner of the memory.
        lent = np.frombuffer(owner.data, dtype=np.uint8)
        weakref.finalize(lent, self._free.append, owner).atexit = False
        return lent[:count].view(dtype).reshape(shape)

    def _take(self, count: int) -> npt.NDArray[np.uint8]:
        try:
            owner = self._free.pop()
        except IndexError:
            return np.empty(count, dtype=np.uint8)
        return owner if len(owner) >= count else np.empty(count, dtype=np.uint8)
