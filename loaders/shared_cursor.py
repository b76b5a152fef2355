"""`SharedCursor`: where an iteration of DataLoader workers starts, which is all that they must agree on.

It is memory that a process shares with the DataLoader workers it starts, changed under a
lock: a worker is a copy of the dataset of the process that iterates, which does not see what workers do.

    start   where the running iteration began, or the last one
    next    where the next one begins: `start`, until all workers have made the last batch of their share

The first worker of an iteration sets `start` to `next`; the others, however late they come, find it set.
`next` moves when all workers are done, so an iteration that a loop leaves before that starts again. Workers
tell iterations apart by the DataLoader's seed and by how often they have been iterated; where a seed repeats,
by having entered before. A StreamingDataLoader gives its workers a number that does not repeat, and says
which iteration it has left: a worker that comes to it only now begins nothing. A worker that ends after
another iteration has begun changes nothing.

The memory is an unnamed file: forked workers inherit it, spawned ones are given its descriptor, and nothing
is left behind however the processes end. A copy that is not a worker's (by pickle, or in a process that was
forked for something else) gets its own numbers.
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
_LOCK_SECONDS = 60.0

_NUMBERS = np.dtype(
    [
        ("iteration", "i8"),  # a running number
        ("seed", "i8"),  # of the workers of this iteration
        ("round", "i8"),
        ("workers", "i8"),  # how many of them; 0: it is not one of workers
        ("start", "i8", (2,)),
        ("next", "i8", (2,)),
        ("settings", "i8"),
        ("entered", "i8", (MAX_WORKERS,)),  # the iteration that each worker has begun
        ("made", "i8", (MAX_WORKERS,)),  # and the one of which it has made all batches
    ]
)

_CURSORS = struct.Struct("qqqq")  # start and next

_OFFSET: int = _NUMBERS.fields["start"][1] if _NUMBERS.fields else 0


@dataclass(frozen=True, slots=True)
class Worker:
    """Worker `number` of `count`, in its `round`-th iteration.

    `seed`: the DataLoader's; below 0 for the workers of a `StreamingDataLoader`, and never the same again.
    """

    number: int
    count: int
    seed: int
    round: int


@dataclass(frozen=True, slots=True)
class Shared:
    """What is known; `by_workers`: whether workers deliver the running iteration, or delivered the last."""

    start: Cursor
    next: Cursor
    by_workers: bool
    iteration: int = field(default=0, compare=False)
    """Its running number: whoever started an iteration knows by it whether another has begun since."""


class SharedCursor:
    """Where iterations start, shared with workers. In each process one thread uses it at a time."""

    def __init__(self, cursor: Cursor = (0, 0), settings: int = 0) -> None:
        self._create()
        self.begin(cursor, settings)

    def begin(self, cursor: Cursor, settings: int, *, left: tuple[int, int] = (0, 0)) -> None:
        """Start the next iteration here; `settings` is a digest of all else that batches depend on.

        `left`: (seed, round) of an iteration that the loop has left, of which workers may still be starting.
        """
        with self._locked() as numbers:
            numbers["iteration"] += 1
            numbers["workers"] = 0
            numbers["seed"], numbers["round"] = left
            numbers["start"] = numbers["next"] = cursor
            numbers["settings"] = settings

    def move(self, cursor: Cursor) -> None:
        """Record that an iteration started by `begin` has come here. Once per batch, so without the lock."""
        _CURSORS.pack_into(self._memory, _OFFSET, *cursor, *cursor)

    def read(self) -> Shared:
        """Read what is known now."""
        with self._locked() as numbers:
            start, following = _cursor(numbers["start"]), _cursor(numbers["next"])
            return Shared(start, following, bool(numbers["workers"]), int(numbers["iteration"]))

    def enter(self, worker: Worker, settings: int, saved: Cursor | None) -> tuple[int, Cursor]:
        """In a worker: return (number, start) of the iteration that it begins.

        `saved`: where a saved iteration started that all workers continue. StateError if workers disagree on
        that, or if a worker has other settings than the process that started it.
        """
        if worker.count > MAX_WORKERS:
            raise ValueError(f"{worker.count} workers are too many: at most {MAX_WORKERS}")
        with self._locked() as numbers:
            left = int(numbers["round"]) - bool(numbers["workers"])
            if worker.seed < 0 and numbers["seed"] == worker.seed and worker.round <= left:
                return -1, _cursor(numbers["start"])  # it begins what the loop has left
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
                    "the state that was loaded since: make a new DataLoader"
                )
            if saved is not None and saved != _cursor(numbers["start"]):
                raise StateError("the states of the DataLoader's workers are not from the same iteration")
            numbers["entered"][worker.number] = numbers["iteration"]
            return int(numbers["iteration"]), _cursor(numbers["start"])

    def mark_done(self, worker: Worker, iteration: int, following: Cursor) -> None:
        """In a worker: its share is made. When all are, the next iteration starts at `following`."""
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
                    "is stopped or hangs; end the workers and make another DataLoader"
                )
            time.sleep(0.001)
        try:
            yield self._numbers
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process has it
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
