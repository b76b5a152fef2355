"""Waits for DataLoader workers that end: with the worker, what it does, and when it last gave a batch.

torch waits without end for a worker that is stopped or hangs, whose batch could not be sent (a full /dev/shm,
something that is not picklable), or that never starts, unless it is given a timeout; then it counts time in
which the whole job was suspended. Here torch is given a short one, `LOOK_SECONDS`, after which it looks for
dead workers, and `PatientIterator` asks again until the time is up, by the clock of `storage.clock`.

Workers that do not end by themselves, not even by SIGTERM because they are stopped, are killed: when their
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

LOOK_SECONDS = 5.0  # as torch does if it has no timeout

_END_SECONDS = 2.0  # for workers to end by SIGTERM
_STATES = {
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a disk",
    "R": "running",
}


class PatientIterator(Iterator[Any]):
    """An iterator of torch's DataLoader of which each `next` takes `timeout_seconds` at most."""

    def __init__(self, source: Any, where: Callable[[], str], timeout_seconds: float) -> None:
        """`where`: says which rank waits, at which step."""
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
                    lost = "one that was killed may have had no memory left"
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
    """Whether this is how torch's DataLoader says that its timeout is over."""
    return str(error).startswith("DataLoader timed out after")


def describe_wait(iterator: Any, seconds: float) -> str:
    """Say which worker of torch's iterator is waited for, and what it seems to be doing."""
    workers = iterator._workers
    task = iterator._task_info.get(iterator._rcvd_idx, ())
    numbers = [task[0]] if len(task) == 1 else range(len(workers))
    named = ", ".join(f"worker {n} (process {workers[n].pid}, {_state(workers[n].pid)})" for n in numbers)
    return (
        f"no batch from {named} within {seconds:g} s (timeout_seconds); a traceback on stderr would say that "
        "a batch could not be sent: those of a collate_fn must be picklable and need room in /dev/shm"
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
    """End the workers of torch's iterator, in seconds, whatever they do."""
    if getattr(iterator, "_worker_pids_set", False):  # or torch's handler of SIGCHLD raises
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
        with suppress(ValueError, AssertionError):  # closed, or another process's
            if worker.is_alive():
                worker.kill()
                worker.join(_END_SECONDS)


_iterators: weakref.WeakSet[Any] = weakref.WeakSet()


class _EndingIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, which waits for its workers to end, and then kills those that are left."""

    def _shutdown_workers(self) -> None:
        # No finalizer does it: of a cycle of garbage they run first, when torch still takes a worker that is
        # killed for one that was lost, and raises an error wherever the program is.
        super()._shutdown_workers()
        _kill(self._workers)


def kill_when_dropped(iterator: Any) -> None:
    """Kill what is left of the workers when torch's iterator is gone, and has waited for them to end."""
    if not _iterators:
        # Behind multiprocessing's own function, so before it: that one waits for workers without end.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _iterators.add(iterator)
    iterator.__class__ = _EndingIterator


def _end_all() -> None:
    for iterator in list(_iterators):
        end_workers(iterator)
