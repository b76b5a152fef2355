"""`SharedCursor`: where an iteration of DataLoader workers starts. Workers must agree on nothing else.

It is memory that a process shares with the DataLoader workers that it starts, and is changed under a lock.
Each worker has a copy of the process's dataset, and the process does not see what workers change in it.

    start   where the running iteration began, or the last one
    next    where the next iteration begins: at `start`, until all workers have made their last batch

The first worker of an iteration sets `start` to `next`; later workers find it set. `next` moves when all
workers are done, so an iteration that a loop leaves earlier starts again. Workers distinguish iterations by
the DataLoader's seed and by how often they have been iterated; if a seed repeats, a worker that has already
entered the iteration begins a new one. A StreamingDataLoader gives its workers a number that does not repeat,
and records which iteration it has left: a worker that enters that iteration late does not begin it. A worker
that ends after another iteration has begun changes nothing.

The memory is an unnamed file: forked workers inherit it, spawned workers receive its descriptor, and nothing
remains after the processes end, even if they crash. A copy that does not belong to a worker (a pickle, or in
a process forked for another purpose) gets its own numbers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import StateError, naming_extras

with naming_extras("shardkit.loaders.shared_cursor"):
    from torch.utils.data import get_worker_info

from shardkit.order.batches import Cursor

MAX_WORKERS = 1024
_LOCK_SECONDS = 60.0  # longest wait for the lock, which is normally held for microseconds

_NUMBERS = np.dtype(
    [
        ("iteration", "i8"),  # number of the latest iteration; increases by 1 per iteration
        ("seed", "i8"),  # seed of the workers of this iteration
        ("round", "i8"),  # how often these workers have been iterated
        ("workers", "i8"),  # number of workers; 0: an iteration without workers
        ("start", "i8", (2,)),  # cursor: position, and number of batches delivered in its epoch
        ("next", "i8", (2,)),  # cursor
        ("settings", "i8"),  # digest of the settings on which batches depend
        ("entered", "i8", (MAX_WORKERS,)),  # per worker: number of the iteration that it began last
        ("made", "i8", (MAX_WORKERS,)),  # per worker: number of the iteration that it completed last
    ]
)

_CURSORS = struct.Struct("qqqq")  # the fields `start` and `next`

_OFFSET: int = _NUMBERS.fields["start"][1] if _NUMBERS.fields else 0


@dataclass(frozen=True, slots=True)
class Worker:
    """DataLoader worker `number` of `count`, in its `round`-th iteration.

    `seed`: the DataLoader's seed; for workers of a `StreamingDataLoader`, a unique number below 0.
    """

    number: int
    count: int
    seed: int
    round: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A snapshot of the cursor; `by_workers`: whether the latest iteration is delivered by workers."""

    start: Cursor
    next: Cursor
    by_workers: bool
    iteration: int = field(default=0, compare=False)
    """Number of the latest iteration; it increases when another iteration begins."""


class SharedCursor:
    """The start of iterations, shared with workers. In each process only one thread at a time may use it."""

    def __init__(self, cursor: Cursor = (0, 0), settings: int = 0) -> None:
        self._create()
        self.begin(cursor, settings)

    def begin(self, cursor: Cursor, settings: int, *, left: tuple[int, int] = (0, 0)) -> None:
        """Start the next iteration at `cursor`; `settings`: digest of the other values batches depend on.

        `left`: (seed, round) of an iteration that the loop has left, whose workers may still be starting.
        """
        with self._locked() as numbers:
            numbers["iteration"] += 1
            numbers["workers"] = 0
            numbers["seed"], numbers["round"] = left
            numbers["start"] = numbers["next"] = cursor
            numbers["settings"] = settings

    def move(self, cursor: Cursor) -> None:
        """Record the position of an iteration without workers. Takes no lock, as it is called per batch."""
        _CURSORS.pack_into(self._memory, _OFFSET, *cursor, *cursor)

    def read(self) -> Shared:
        """Return a snapshot of the cursor."""
        with self._locked() as numbers:
            start, following = _cursor(numbers["start"]), _cursor(numbers["next"])
            return Shared(start, following, bool(numbers["workers"]), int(numbers["iteration"]))

    def enter(self, worker: Worker, settings: int, saved: Cursor | None) -> tuple[int, Cursor]:
        """Enter an iteration, in a worker; return the iteration's number and the cursor where it starts.

        `saved`: start of a saved iteration that all workers continue. Raises StateError if workers have
        different `saved` values, or if a worker's settings differ from those of the process that started it.
        """
        if worker.count > MAX_WORKERS:
            raise ValueError(f"num_workers is {worker.count}; the limit is {MAX_WORKERS}")
        with self._locked() as numbers:
            left = int(numbers["round"]) - bool(numbers["workers"])
            if worker.seed < 0 and numbers["seed"] == worker.seed and worker.round <= left:
                return -1, _cursor(numbers["start"])  # the loop has already left this iteration
            known = tuple(int(numbers[name]) for name in ("seed", "round", "workers"))
            is_first = known != (worker.seed, worker.round, worker.count)
            if is_first or numbers["entered"][worker.number] == numbers["iteration"]:
                numbers["iteration"] += 1
                numbers["seed"], numbers["round"], numbers["workers"] = (
                    worker.seed,
                    worker.round,
                    worker.count,
                )
                if saved is not None:
                    numbers["next"] = saved
                    numbers["settings"] = settings
                numbers["start"] = numbers["next"]
            if numbers["settings"] != settings:
                raise StateError(
                    "this worker was started with other settings (lanes, window, weights, …) than those of "
                    "the state that was loaded later: create a new DataLoader"
                )
            if saved is not None and saved != _cursor(numbers["start"]):
                raise StateError("the states of the DataLoader's workers are not from the same iteration")
            numbers["entered"][worker.number] = numbers["iteration"]
            return int(numbers["iteration"]), _cursor(numbers["start"])

    def mark_done(self, worker: Worker, iteration: int, following: Cursor) -> None:
        """Record, in a worker, that it made its whole share; if all have, set `next` to `following`."""
        with self._locked() as numbers:
            numbers["made"][worker.number] = iteration
            if numbers["iteration"] == iteration and (numbers["made"][: worker.count] == iteration).all():
                numbers["next"] = following

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"file": DupFd(self._descriptor)}
        with self._locked() as numbers:
            return {"numbers": numbers.tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._map(state["file"].detach(), process=None)
        else:
            self._create(state["numbers"])

    @contextmanager
    def _locked(self) -> Iterator[npt.NDArray[np.void]]:
        if self._process != os.getpid() and get_worker_info() is None:
            self._create(self._numbers.tobytes())
        deadline = time.monotonic() + _LOCK_SECONDS
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a DataLoader worker has held the lock of the shared cursor for {_LOCK_SECONDS:g} s: it "
                    "is stopped or hangs; end the workers and create another DataLoader"
                )
            time.sleep(0.001)
        try:
            yield self._numbers
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process holds the lock
            return False
        return True

    def _create(self, numbers: bytes = bytes(_NUMBERS.itemsize)) -> None:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(numbers)
            self._map(os.dup(file.fileno()), process=os.getpid())

    def _map(self, descriptor: int, process: int | None) -> None:
        weakref.finalize(self, os.close, descriptor)
        self._descriptor, self._process = descriptor, process
        self._memory = memory = mmap.mmap(descriptor, _NUMBERS.itemsize)
        self._numbers: npt.NDArray[np.void] = np.ndarray((), dtype=_NUMBERS, buffer=memory)


def _cursor(numbers: npt.NDArray[np.int64]) -> Cursor:
    position, delivered = numbers.tolist()
    return position, delivered
