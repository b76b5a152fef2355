"""Blocks: many batches in one message from a DataLoader worker, their arrays in memory that is mapped by both.

torch's queue makes a shared file for each tensor of each batch, passes its descriptor and maps it anew, which
costs more than reading a small batch and takes fresh pages for every byte. Here worker w of k still makes the
batches w, w + k, ... and sends some of them together. The parent deals them out in turn, batch t from worker
t % k, so neither the order nor the place of an error changes. A worker's first block is one batch and each
next one twice as many, up to `block_bytes`: the first batches do not wait for those behind them.

`BlockMemory` is one unnamed file in memory: a part for each worker, with an arena that only this worker
allocates from and a flag for each block that it has sent. A block's message has the places of its arrays; the
parent's batches are views of them. When all of these are garbage, in whatever order and thread, the parent
clears the flag, and the worker reuses the memory for its next block: pages are faulted in once, not once for
each batch. Memory that somebody may still see is never written to: a process that is forked sees all batches
that its parent holds, so the flags of these are never cleared.

Arrays that find no room (a loop that keeps its batches; a system without memfd) travel as torch's shared
tensors, one for each column of a block. Everything else (lists, strings, small arrays) is pickled.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.blocks"):
    import torch

from shardkit.loaders.batch import Batch, Fields, batches_of
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.producer import Group

__all__ = ["BLOCK_BYTES", "MAX_BLOCK_BATCHES", "Block", "BlockMemory", "Outbox", "deal"]

BLOCK_BYTES = 2 << 20  # a message costs as much as copying about 1 MiB
MAX_BLOCK_BATCHES = 64  # a message costs each of so many batches 2 microseconds

_ARENA_BYTES = 512 << 20  # of addresses for each worker; memory is taken where blocks are
_FLAGS = 8192  # blocks of the smallest pieces that fill an arena
_PART_BYTES = _FLAGS + _ARENA_BYTES

_Array = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]


class _Placed(NamedTuple):
    """An array in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Block:
    """In a worker: consecutive batches of its own. Unpickled by the parent it is (worker, its batches)."""

    count: int
    memory: int
    worker: int
    flag: int | None
    pieces: list[dict[str, Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.memory, self.worker, self.flag, self.pieces)


class BlockMemory:
    """What a process and the workers of one of its DataLoader iterators share."""

    def __init__(self, workers: int, tensor: Callable[[_Array], object]) -> None:
        """`tensor`: makes what a batch has of an array."""
        self._number = next(_numbers)
        self._tensor = tensor
        self._watched: dict[int, weakref.ref[_Bytes]] = {}
        self._outbox: Outbox | None = None
        try:
            descriptor = os.memfd_create("shardkit-blocks")
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, workers * _PART_BYTES)
            self._map(descriptor)
        except (AttributeError, OSError):  # not Linux; or a limit on addresses
            self._descriptor, self._memory = -1, bytes(1)
        _memories[self._number] = self

    def outbox(self, worker: int) -> Outbox:
        """In a worker: what sends its blocks."""
        if self._outbox is None:
            self._outbox = Outbox(self._number, worker, np.frombuffer(self._memory, np.uint8))
        return self._outbox

    def receive(self, worker: int, flag: int | None, pieces: list[dict[str, Any]]) -> tuple[int, list[Batch]]:
        """In the parent: (worker, the batches of its block)."""
        lent = np.frombuffer(self._memory, np.uint8)  # the base of every view of this block, and of no other
        if flag is not None:
            place = worker * _PART_BYTES + flag
            self._watched[place] = weakref.ref(lent, partial(self._release, place, _forks))
        batches: list[Batch] = []
        for piece in pieces:
            fields = {name: self._opened(values, lent) for name, values in piece.items()}
            batches += batches_of(fields, self._tensor)
        return worker, batches

    def _opened(self, values: Any, lent: _Bytes) -> Any:
        if isinstance(values, _Placed):
            return np.ndarray(values.shape, values.dtype, lent, values.offset)
        return values.numpy() if isinstance(values, torch.Tensor) else values

    def _release(self, place: int, forks: int, _: weakref.ref[_Bytes]) -> None:
        del self._watched[place]
        if forks == _forks:
            np.frombuffer(self._memory, np.uint8)[place] = 0

    def _map(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | bytes = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    def __getstate__(self) -> dict[str, Any]:
        assert get_spawning_popen() is not None, "only a worker gets a copy"
        return {"number": self._number, "file": None if self._descriptor < 0 else DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._number, self._outbox, self._memory = state["number"], None, bytes(1)
        if state["file"] is not None:
            descriptor = state["file"].detach()
            self._map(descriptor)
            os.close(descriptor)


class Outbox:
    """In a worker: puts batches into its part of the memory, and takes back what the parent has released."""

    def __init__(self, memory: int, worker: int, whole: _Bytes) -> None:
        self._memory, self._worker, self._whole = memory, worker, whole
        part = whole[worker * _PART_BYTES : (worker + 1) * _PART_BYTES]
        self._flags, self._output = part[:_FLAGS], OutputMemory(part[_FLAGS:])
        self._sent: dict[int, list[_Array]] = {}

    def blocks(self, groups: Iterator[Group], most_batches: int) -> Iterator[Block]:
        """The batches of `groups` in blocks; those before an error come before it."""
        size, rest = 1, _Rest({}, 0)
        while True:
            pieces: list[_Rest] = []
            missing = size
            try:
                while missing:
                    if not rest.count:
                        if (group := next(groups, None)) is None:
                            break
                        rest = _Rest(group.fields, len(group.cursors))
                    piece, rest = rest.cut(missing)
                    pieces.append(piece)
                    missing -= piece.count
            except Exception:
                if pieces:
                    yield self._block(pieces)
                raise
            if pieces:
                yield self._block(pieces)
            if missing:
                return
            size = min(2 * size, most_batches)

    def _block(self, pieces: list[_Rest]) -> Block:
        for flag in [flag for flag in self._sent if not self._flags[flag]]:
            del self._sent[flag]
        placed: list[_Array] = []
        sent = [
            {name: self._placed(values, placed) for name, values in piece.fields.items()} for piece in pieces
        ]
        flag = None
        if placed:
            flag = next(number for number in range(_FLAGS) if number not in self._sent)
            self._sent[flag] = placed
            self._flags[flag] = 1
        return Block(sum(piece.count for piece in pieces), self._memory, self._worker, flag, sent)

    def _placed(self, values: Any, placed: list[_Array]) -> Any:
        """Where `values` are in the shared memory, if they can be there; else what to pickle."""
        if not isinstance(values, np.ndarray) or values.nbytes < _SMALL_BYTES or values.dtype.kind not in "biuf":
            return values
        lent = self._output.lend(values.shape, values.dtype)
        lent[...] = values
        offset = _address(lent) - _address(self._whole)
        if not 0 <= offset < len(self._whole):
            return torch.from_numpy(lent)
        placed.append(lent)
        return _Placed(offset, values.shape, values.dtype.str)


class _Rest(NamedTuple):
    """Some of a group's batches."""

    fields: Fields
    count: int

    def cut(self, most: int) -> tuple[_Rest, _Rest]:
        """(the first `most` batches, those behind them)."""
        if self.count <= most:
            return self, _Rest({}, 0)
        first = {name: values[:most] for name, values in self.fields.items()}
        behind = {name: values[most:] for name, values in self.fields.items()}
        return _Rest(first, most), _Rest(behind, self.count - most)


def deal(source: Iterator[tuple[int, list[Batch]]], workers: int) -> Iterator[Batch]:
    """The batches of the workers' blocks, batch t from worker t % `workers`."""
    ready: list[deque[Batch]] = [deque() for _ in range(workers)]
    for own in itertools.cycle(ready):
        while not own:
            if (block := next(source, None)) is None:
                return
            worker, batches = block
            ready[worker].extend(batches)
            del block, batches
        yield own.popleft()


def _receive(
    memory: int, worker: int, flag: int | None, pieces: list[dict[str, Any]]
) -> tuple[int, list[Batch]]:
    """Open a block, in whichever thread of the parent unpickles it."""
    found = _memories.get(memory)
    return (worker, []) if found is None else found.receive(worker, flag, pieces)


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _count_fork() -> None:
    global _forks
    _forks += 1


_SMALL_BYTES = 64 << 10
_numbers = itertools.count()
_memories: weakref.WeakValueDictionary[int, BlockMemory] = weakref.WeakValueDictionary()
_forks = 0
os.register_at_fork(before=_count_fork)
