"""Blocks: many batches in one message from a DataLoader worker, with their arrays in shared memory.

For each tensor of each batch, torch's queue creates a shared file, passes its descriptor and maps it anew.
That costs more than reading a small batch and takes fresh pages for every byte. Here worker w of k still
makes the batches w, w + k, ... but sends several of them together. The parent delivers them in turn, batch t
from worker t % k, so neither the order nor the place of an error changes. A worker's first block is one
batch, and each later block has twice as many, up to `block_bytes`: the first batches do not wait for others.

`BlockMemory` is one unnamed file in memory. It has a part for each worker, with an arena that only this
worker allocates from and a flag for each block that it has sent. A block's message has the offsets of its
arrays; the parent's batches are views of them. When all views are garbage, in any order and thread, the
parent clears the flag, and the worker reuses the memory for its next block: pages are faulted in once, not
once per batch. Memory that a process may still see is never written to: a forked process sees all batches of
its parent, so the flags of their blocks are never cleared, unless the forked process is itself such a worker.

Arrays that do not fit the arena (a loop that keeps its batches; a system without memfd) are sent as torch's
shared tensors, one for each column of a block. Everything else (lists, strings, small arrays) is pickled.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.worker_blocks"):
    import torch

from shardkit.loaders.batch import Batch, Fields, batches_of
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.producer import Group

BLOCK_BYTES = 4 << 20  # default maximum size of a block; a message costs as much as gathering 1 MiB
MAX_BLOCK_BATCHES = 256  # maximum batches per block, however small; reached after 8 doublings

_ARENA_BYTES = 512 << 20  # address space reserved for each worker; memory is used only as needed
_SMALL_BYTES = 64 << 10  # smaller arrays are pickled; equal to the smallest piece of an arena
_FLAGS = _ARENA_BYTES // _SMALL_BYTES  # maximum number of blocks with arrays in one arena

_Array = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]


class _Placed(NamedTuple):
    """The location and layout of an array in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Block:
    """Several batches of a worker, to be pickled; unpickling yields a tuple (worker number, batches)."""

    count: int
    memory: int
    worker: int
    flag: int | None
    pieces: list[dict[str, Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.memory, self.worker, self.flag, self.pieces)


class BlockMemory:
    """Memory shared by a process and the workers of one of its DataLoader iterators."""

    def __init__(
        self, workers: int, tensor: Callable[[_Array], object], *, arena_bytes: int = _ARENA_BYTES
    ) -> None:
        """`tensor`: function that converts arrays to tensors. `arena_bytes`: size of each worker's arena."""
        self._number = next(_numbers)
        self._tensor = tensor
        self._part_bytes = _FLAGS + arena_bytes
        self._process = os.getpid()
        self._watched: dict[int, weakref.ref[_Bytes]] = {}
        self._outbox: Outbox | None = None
        self._map(_new_file(workers * self._part_bytes))
        _memories[self._number] = self

    def outbox(self, worker: int, output: OutputMemory) -> Outbox:
        """Return, in a worker, the object that makes its blocks; `output` then lends shared memory."""
        if self._outbox is None:
            first = worker * self._part_bytes
            flags = slice(first, first + _FLAGS)
            if (arena := self._bytes[flags.stop : first + self._part_bytes]).size:
                output.share(arena)
            self._outbox = Outbox(self._number, worker, self._bytes, flags, output)
        return self._outbox

    def receive(self, worker: int, flag: int | None, pieces: list[dict[str, Any]]) -> tuple[int, list[Batch]]:
        """Return, in the parent, the worker's number and the batches made from the `pieces` of its block."""
        # The base of all views of this block, so that it is garbage when they are. It is made from a
        # memoryview, because views of `_bytes` itself would have `_bytes` as their base.
        lent = np.frombuffer(self._bytes.data, np.uint8)
        if flag is not None:
            place = worker * self._part_bytes + flag
            self._watched[place] = weakref.ref(lent, partial(self._release, place, _forks))
        batches: list[Batch] = []
        for piece in pieces:
            fields = {name: _opened(values, lent) for name, values in piece.items()}
            batches += batches_of(fields, self._tensor)
        return worker, batches

    def _release(self, place: int, forks: int, _: weakref.ref[_Bytes]) -> None:
        """Let a worker reuse a block's memory, unless a process forked since then may still see it."""
        del self._watched[place]
        if forks == _forks and os.getpid() == self._process:
            self._bytes[place] = 0

    def _map(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._bytes: _Bytes = np.zeros(1, np.uint8)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
            self._bytes = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        assert get_spawning_popen() is not None, "only a worker gets a copy"
        file = None if self._descriptor is None else DupFd(self._descriptor)
        return {"number": self._number, "part_bytes": self._part_bytes, "file": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._number, self._part_bytes, self._outbox = state["number"], state["part_bytes"], None
        self._map(None if state["file"] is None else state["file"].detach())


def _new_file(size: int) -> int | None:
    """Return the descriptor of an unnamed file of `size` bytes in memory; None if unavailable."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor: int | None = None
    try:
        descriptor = os.memfd_create("shardkit-blocks")
        os.ftruncate(descriptor, size)
        mmap.mmap(descriptor, 0).close()  # fails if a limit on addresses (ulimit -v) is too low
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


class Outbox:
    """Makes blocks in a worker, and reuses the memory of blocks that the parent has released."""

    def __init__(self, memory: int, worker: int, whole: _Bytes, flags: slice, output: OutputMemory) -> None:
        """`whole`: the shared memory of all workers; `flags`: where this worker's flags are in it."""
        self._memory, self._worker, self._whole, self._output = memory, worker, whole, output
        self._flags = whole[flags]
        self._sent: dict[int, list[_Array]] = {}

    def blocks(self, groups: Iterator[Group], most_batches: int) -> Iterator[Block]:
        """Yield the batches of `groups` in blocks; batches read before an error are delivered before it."""
        size, rest = 1, _Piece({}, 0)
        while True:
            pieces: list[_Piece] = []
            missing = size
            try:
                while missing:
                    if not rest.batches:
                        if (group := next(groups, None)) is None:
                            break
                        rest = _Piece(group.fields, len(group.cursors))
                    piece, rest = rest.cut(missing)
                    pieces.append(piece)
                    missing -= piece.batches
            except Exception:  # deliver the batches that were read before the error, then raise it
                if pieces:
                    yield self._block(pieces)
                raise
            if pieces:
                yield self._block(pieces)
            if missing:
                return
            size = min(2 * size, most_batches)

    def _block(self, pieces: list[_Piece]) -> Block:
        for released in [flag for flag in self._sent if not self._flags[flag]]:
            del self._sent[released]
        placed: list[_Array] = []
        sent = [{name: self._placed(values, placed) for name, values in p.fields.items()} for p in pieces]
        flag: int | None = None
        if placed:
            flag = next(free for free in range(_FLAGS) if free not in self._sent)
            self._sent[flag] = placed
            self._flags[flag] = 1
        return Block(sum(piece.batches for piece in pieces), self._memory, self._worker, flag, sent)

    def _placed(self, values: Any, placed: list[_Array]) -> Any:
        """Return where `values` are in shared memory, copied if needed; or return a value to pickle."""
        if (
            not isinstance(values, np.ndarray)
            or values.nbytes < _SMALL_BYTES
            or values.dtype.kind not in _KINDS
        ):
            return values
        if self._output.is_shared and not self._holds(values):
            copied = self._output.lend(values.shape, values.dtype)
            copied[...] = values
            values = copied
        if not self._holds(values):
            return torch.from_numpy(values)
        placed.append(values)
        offset = _address(values) - _address(self._whole)
        return _Placed(offset, values.shape, values.strides, values.dtype.str)

    def _holds(self, values: _Array) -> bool:
        return 0 <= _address(values) - _address(self._whole) < len(self._whole)


class _Piece(NamedTuple):
    """Consecutive batches of a group."""

    fields: Fields
    batches: int

    def cut(self, most: int) -> tuple[_Piece, _Piece]:
        """Return the first `most` batches and the remaining ones."""
        first = {name: values[:most] for name, values in self.fields.items()}
        behind = {name: values[most:] for name, values in self.fields.items()}
        return _Piece(first, min(most, self.batches)), _Piece(behind, max(0, self.batches - most))


def deal(source: Iterator[tuple[int, list[Batch]]], workers: int) -> Iterator[Batch]:
    """Yield single batches from the workers' blocks in turn: batch t from worker t % `workers`."""
    ready: list[deque[Batch]] = [deque() for _ in range(workers)]
    for own in itertools.cycle(ready):
        while not own:
            worker, batches = next(source, (0, None))
            if batches is None:
                return
            ready[worker].extend(batches)
            batches = None  # otherwise the wait for the next block would keep this one alive
        yield own.popleft()


def _receive(
    memory: int, worker: int, flag: int | None, pieces: list[dict[str, Any]]
) -> tuple[int, list[Batch]]:
    """Open a block, in the thread of the parent that unpickles it."""
    found = _memories.get(memory)
    return (worker, []) if found is None else found.receive(worker, flag, pieces)


def _opened(values: Any, lent: _Bytes) -> Any:
    """Return a field of a received block: a view if it is in shared memory, else an array or other value."""
    if isinstance(values, _Placed):
        return np.ndarray(values.shape, values.dtype, lent, values.offset, values.strides)
    return values.numpy() if isinstance(values, torch.Tensor) else values


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@contextmanager
def forking_workers() -> Iterator[None]:
    """Context manager in which forked processes count as workers, which use no batches of this process.

    Workers do not collect its garbage either, because garbage may hold CUDA events and streams, and a forked
    child aborts if it destroys such objects of its parent.
    """
    _forking.workers = True
    try:
        yield
    finally:
        _forking.workers = False


def _before_fork() -> None:
    global _forks
    if not getattr(_forking, "workers", False):
        _forks += 1
        return
    _forking.collects = gc.isenabled()
    gc.disable()


def _after_fork_in_parent() -> None:
    if getattr(_forking, "workers", False) and _forking.collects:
        gc.enable()


def _after_fork_in_child() -> None:
    if getattr(_forking, "workers", False):
        gc.freeze()
        _after_fork_in_parent()
        _forking.workers = False


_KINDS = "biuf"  # NumPy kinds of dtypes that torch supports as well
_numbers = itertools.count()
_memories: weakref.WeakValueDictionary[int, BlockMemory] = weakref.WeakValueDictionary()
_forks = 0  # number of forks that were not workers, whose processes may see batches of this process
_forking = threading.local()
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
