"""Limits waits for DataLoader workers; errors name the worker, its state and the time of the last batch.

Without a timeout, torch waits forever for a worker that is stopped or hangs, that cannot send its batch (a
full /dev/shm, an object that is not picklable), or that never starts. With a timeout, torch also counts time
in which the whole job was suspended. This module gives torch a short timeout, `LOOK_SECONDS`, after which
torch checks for dead workers, and `PatientIterator` retries until its own timeout, measured by the clock of
`storage.running_clock`, which leaves out suspended time.

Workers that do not end by themselves, not even at SIGTERM because they are stopped, are killed: when their
iterator is dropped, when a wait for one has failed, and when the interpreter ends, which would wait for them.
"""

from __future__ import annotations

import atexit
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardkit.loaders.producer import LoaderTimeoutError
from shardkit.storage.running_clock import running_seconds
from shardkit.units import format_bytes

LOOK_SECONDS = 5.0  # interval of checks for dead workers; torch's own interval without a timeout

_END_SECONDS = 2.0  # time for workers to end after SIGTERM
_STATES = {
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a disk",
    "R": "running",
}


class PatientIterator(Iterator[Any]):
    """Wraps an iterator of torch's DataLoader so that each `next` takes at most `timeout_seconds`."""

    def __init__(self, source: Any, where: Callable[[], str], timeout_seconds: float) -> None:
        """`where`: function that returns a text with the waiting rank and its step, for messages."""
        self._source, self._where, self._timeout_seconds = source, where, timeout_seconds
        self._source._timeout = min(LOOK_SECONDS, timeout_seconds)
        self._last = running_seconds()

    def __next__(self) -> Any:
        began = running_seconds()
        while True:
            try:
                found = next(self._source)
            except RuntimeError as error:
                if str(error).startswith("DataLoader worker"):
                    lost = "if it was killed, the machine may have run out of memory"
                    raise RuntimeError(f"{self._where()}: {error} ({lost})") from error
                if not is_torch_timeout(error):
                    raise
                now = running_seconds()
                if now - began < self._timeout_seconds:
                    continue
                problem = describe_wait(self._source, self._timeout_seconds)
                end_workers(self._source)
                problem += f"; the last batch of any worker came {now - self._last:.0f} s ago"
                raise LoaderTimeoutError(f"{self._where()}: {problem}") from error
            self._last = running_seconds()
            return found


def is_torch_timeout(error: RuntimeError) -> bool:
    """Return whether this is the error that torch's DataLoader raises at its timeout."""
    return str(error).startswith("DataLoader timed out after")


def describe_wait(iterator: Any, seconds: float) -> str:
    """Return a message that names the worker that torch's iterator waits for, and the worker's state."""
    workers = iterator._workers
    task = iterator._task_info.get(iterator._rcvd_idx, ())
    numbers = [task[0]] if len(task) == 1 else range(len(workers))
    named = ", ".join(f"worker {n} (process {workers[n].pid}, {_state(workers[n].pid)})" for n in numbers)
    return (
        f"no batch from {named} within {seconds:g} s (timeout_seconds); if stderr has a traceback, a batch "
        "could not be sent: batches of collate_fn or convert_fn must be picklable and need space in /dev/shm"
        f"{_shared_memory()} (docker run --shm-size)"
    )


def _shared_memory() -> str:
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f", which has {format_bytes(room.free)} free of {format_bytes(room.total)}"


def _state(process: int) -> str:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "ended"
    return _STATES.get(stat.rpartition(")")[2].split()[0], "waiting")


def end_workers(iterator: Any) -> None:
    """End the workers of torch's iterator within seconds, killing those that do not end at SIGTERM."""
    if getattr(iterator, "_worker_pids_set", False):  # otherwise torch's SIGCHLD handler would raise
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for worker in iterator._workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    _kill(iterator._workers)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        with suppress(ValueError, AssertionError):  # the worker is closed, or belongs to another process
            if worker.is_alive():
                worker.kill()
                worker.join(_END_SECONDS)


_iterators: weakref.WeakSet[Any] = weakref.WeakSet()


class _EndingIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, which in addition kills workers that have not ended when torch stops waiting."""

    def _shutdown_workers(self) -> None:
        # Not in a finalizer: in a garbage cycle finalizers run first, when torch still watches the workers
        # and would raise an error anywhere in the program if one is killed.
        super()._shutdown_workers()
        _kill(self._workers)


def kill_when_dropped(iterator: Any) -> None:
    """Make torch's iterator kill its remaining workers after it has been dropped and has waited for them."""
    if not _iterators:
        # Registered after multiprocessing's exit function, which waits forever, so that ours runs first.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _iterators.add(iterator)
    iterator.__class__ = _EndingIterator


def _end_all() -> None:
    for iterator in list(_iterators):
        end_workers(iterator)
