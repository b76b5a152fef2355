"""Protects DataLoader workers from signals that are meant for the trainer.

Schedulers send TERM, and on request USR1, USR2 or HUP, to all processes of a job, and a terminal sends INT to
all of its group. The trainer handles the signal, ends its step and saves. A worker that died of the same
signal would take the step, and the checkpoint, with it.

`signals_held_back` blocks these signals while workers start, so that a signal cannot end them during their
start: forked and spawned processes inherit the mask. `leave_to_trainer` runs in the worker, before its first
batch. From then on the signals do nothing, except a TERM from the process that started the worker, which
torch uses to end workers that do not end by themselves. A thread receives this TERM, and also ends the worker
when that process is gone, even after a crash. A fork server gets the mask as well, and `forkserver_children`
restores the usual mask in its children, which therefore start unprotected. A fork server that was started by
other code is not protected.

Processes that a worker starts have the usual handlers, except that TERM stays blocked in them: use SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

TRAINER_SIGNALS = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))

_LOOK_SECONDS = 1.0  # interval at which a worker checks that its parent is alive
_PRELOADED = "shardkit.loaders.forkserver_children"

_watched: set[int] = set()  # ids of processes in which a thread waits for TERM


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Context manager: blocks the trainer's signals in this thread and in processes that it starts."""
    if start_method != "fork":
        resource_tracker.ensure_running()  # now, because its start inside the block would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINER_SIGNALS)
    try:
        if start_method == "forkserver":
            _start_fork_server()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_fork_server() -> None:
    """Start the fork server, if none runs, with this thread's signal mask."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    preloaded: list[str] = server._preload_modules  # type: ignore[attr-defined]
    if _PRELOADED not in preloaded:
        server.set_forkserver_preload([*preloaded, _PRELOADED])
    server.ensure_running()


def leave_to_trainer() -> None:
    """Ignore the trainer's signals in a worker process, and end it together with its parent process."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or os.getpid() in _watched:
        return
    if threading.current_thread() is not threading.main_thread():
        return  # a worker of DataLoader(worker_method="thread")
    # A handler that does nothing, because programs started by a worker would inherit SIG_IGN.
    for number in TRAINER_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINER_SIGNALS - {signal.SIGTERM})
    _watched.add(os.getpid())
    threading.Thread(target=_watch, args=(parent.pid,), name="shardkit-parent", daemon=True).start()


def _do_nothing(number: int, frame: object) -> None:
    """Ignore a signal that is meant for the trainer."""


def _watch(parent: int) -> None:
    """End this process when `parent` sends TERM or has ended."""
    descriptor = None
    with suppress(OSError):  # the kernel is old, or a sandbox forbids the call
        descriptor = os.pidfd_open(parent)
    while True:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        if received is not None and received.si_pid == parent:
            os._exit(0)  # the same exit status as with torch's own handler
        if _has_ended(parent, descriptor):
            os._exit(1)


def _has_ended(process: int, descriptor: int | None) -> bool:
    if descriptor is not None:
        return bool(wait([descriptor], 0))
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
