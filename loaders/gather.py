"""Copying rows from anywhere in memory into one array, by one core or by several, whichever is quicker now.

One core copies random rows of 8 KiB at about half of what memory gives. torch's `index_select` spreads a
gather over torch's threads without Python's lock, which doubles the rate on two idle cores, but takes many
times longer where those threads must wait for a core. So both ways are timed and the quicker one is used; the
other is tried again, the more rarely the more often it lost. Both copy the same bytes. (Python threads are no
third way: they hand Python's lock to and fro, and two of them gather more slowly than one.)

Several cores are used only by a training loop that does nothing but read; in a background thread and in a
forked child, where torch's threads would be in the way or missing, it is always one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.loaders.memory import OutputMemory

__all__ = ["Gather"]

_CAST_BYTES = 256 << 10  # gathered, then converted: both fit a core's second-level cache
_SHARED_BYTES = 256 << 10  # smaller gathers end before a second thread has begun
_TRIAL = 6
_HOPELESS = 4
_PATIENCE = 256  # gathers until the slower way is tried again
_MOST_PATIENCE = 1 << 16
_PROCESS = os.getpid()

_Rows = npt.NDArray[np.generic]


class Gather:
    """Gathers rows of one shape and type and converts them to another type."""

    def __init__(
        self, shape: tuple[int, ...], stored: np.dtype[np.generic], delivered: np.dtype[np.generic]
    ) -> None:
        self._shape, self._stored, self._delivered = shape, stored, delivered
        self._row_bytes = stored.itemsize * prod(shape)
        self._output = OutputMemory()
        self._choice = _Choice()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._torch_type = getattr(torch, stored.name, None) if stored.isnative else None

    def bind(
        self, lowest: int, span: int, held: list[npt.NDArray[np.generic]]
    ) -> Callable[[npt.NDArray[np.int64]], _Rows]:
        """A function from byte offsets to rows within `span` bytes from address `lowest`.

        The function keeps `held`, the arrays that own the memory, alive.
        """
        places = span - self._row_bytes + 1
        memory = np.asarray(_Stretch(lowest, (places,), (1,), f"|V{self._row_bytes}", held))
        shared = np.asarray(_Stretch(lowest, (places, self._row_bytes), (1, 1), "|u1", held))
        tensor = torch.from_numpy(shared)

        def gather(offsets: npt.NDArray[np.int64]) -> _Rows:
            if not self._may_share(len(offsets)):
                return self._by_one(memory, offsets)
            by_several = self._choice.next()
            start = time.perf_counter()
            rows = self._by_several(tensor, offsets) if by_several else self._by_one(memory, offsets)
            self._choice.took(by_several, (time.perf_counter() - start) / len(offsets))
            return rows

        return gather

    def _may_share(self, rows: int) -> bool:
        return (
            rows * self._row_bytes >= _SHARED_BYTES
            and self._torch_type is not None
            and threading.current_thread() is threading.main_thread()
            and os.getpid() == _PROCESS
            and torch.get_num_threads() > 1
        )

    def _by_one(self, memory: npt.NDArray[np.void], offsets: npt.NDArray[np.int64]) -> _Rows:
        if self._stored == self._delivered:
            return memory[offsets].view(self._stored).reshape(-1, *self._shape)
        rows = self._output.lend((len(offsets), *self._shape), self._delivered)
        step = max(1, _CAST_BYTES // self._row_bytes)
        for start in range(0, len(offsets), step):
            piece = memory[offsets[start : start + step]]
            rows[start : start + step] = piece.view(self._stored).reshape(-1, *self._shape)
        return rows

    def _by_several(self, memory: torch.Tensor, offsets: npt.NDArray[np.int64]) -> _Rows:
        shape = (len(offsets), *self._shape)
        rows = self._output.lend(shape, self._delivered)
        if self._stored == self._delivered:
            raw = rows.reshape(len(offsets), -1).view(np.uint8)
            torch.index_select(memory, 0, torch.from_numpy(offsets), out=torch.from_numpy(raw))
            return rows
        assert self._torch_type is not None
        if len(self._scratch) < len(offsets):
            self._scratch = torch.empty((len(offsets), self._row_bytes), dtype=torch.uint8)
        scratch = self._scratch[: len(offsets)]
        torch.index_select(memory, 0, torch.from_numpy(offsets), out=scratch)
        torch.from_numpy(rows).copy_(scratch.view(self._torch_type).reshape(shape))
        return rows


class _Choice:
    """Whether several cores are quicker than one, by what both took lately.

    A trial of the other way is a few gathers in a row, because sleeping threads wake slowly; it ends at once
    when one takes `_HOPELESS` times as long.
    """

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        self._quicker = 0
        self._patience = _PATIENCE
        self._until_trial = 8
        self._trial: list[float] = []

    def next(self) -> int:
        """0: one core, 1: several."""
        if self._until_trial > 0:
            self._until_trial -= 1
            return self._quicker
        return 1 - self._quicker

    def took(self, way: int, seconds: float) -> None:
        usual = self._seconds[self._quicker]
        if way == self._quicker:
            self._seconds[way] = 0.75 * usual + 0.25 * seconds if usual else seconds
            if self._seconds[1 - way] and self._seconds[way] > 2 * self._seconds[1 - way]:
                self._until_trial = 0  # it has become slow: is the other still quicker?
            return
        self._trial.append(seconds)
        is_hopeless = seconds > _HOPELESS * usual and (way == 0 or len(self._trial) > 1)
        if len(self._trial) < _TRIAL and not is_hopeless:
            return
        self._seconds[way] = seconds if is_hopeless else min(self._trial)
        won = self._seconds[way] < usual
        self._patience = _PATIENCE if won else min(2 * self._patience, _MOST_PATIENCE)
        self._until_trial = self._patience
        self._quicker = way if won else self._quicker
        self._trial = []


class _Stretch:
    """Lets NumPy see a stretch of address space, as rows that overlap: one starts at every byte."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, held: list[Any]
    ) -> None:
        self._held = held  # the arrays that own the memory; NumPy keeps this object as the view's base
        # "Writable", because torch warns of arrays that are not; nothing here writes to it.
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
        }
