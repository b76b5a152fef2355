"""Locks between processes that die with their process: flock, with a limit on how long to wait.

The operating system releases a flock when its last descriptor is closed, also after kill -9. Waiting is done
by the system, not by asking again and again. A lock whose holder has been stopped (kill -STOP, a frozen
container) would never come: whoever waits gives up in time and goes on without it, because these locks save
work; they guard no bytes.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

__all__ = ["FileLock"]


class FileLock:
    """An exclusive lock on a file of its own. One thread takes it, and releases it, at a time."""

    def __init__(self, file: Path, *, keep: bool = False) -> None:
        """`keep`: leave the file behind when the lock is released (for locks that are taken all the time)."""
        self._file = file
        self._keep = keep
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def acquire(self, timeout_seconds: float = 0.0) -> bool:
        """Take the lock; False if another holds it for all of `timeout_seconds`."""
        assert not self.held
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not _lock(descriptor, timeout_seconds):
                return False
            if _is_at(descriptor, self._file):
                self._descriptor = descriptor
                return True
            os.close(descriptor)  # its last holder removed the file: this lock locks nothing any more

    def release(self) -> None:
        """Let go; nothing happens if it is not held."""
        if self.held:
            if not self._keep:
                self._file.unlink(missing_ok=True)  # while it is held: who waits sees that the file is gone
            os.close(self._descriptor)
            self._descriptor = -1


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, timeout_seconds: float) -> bool:
    """Lock the open file, or close it and return False."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if timeout_seconds <= 0:
            os.close(descriptor)
            return False
    return _Waiter(descriptor).wait(timeout_seconds)


class _Waiter:
    """A thread that waits in the system for a lock, and gives it back if nobody wants it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._state = threading.Lock()
        self._locked = threading.Event()
        self._given_up = False
        threading.Thread(target=self._run, name="shardkit-lock", daemon=True).start()

    def wait(self, timeout_seconds: float) -> bool:
        if self._locked.wait(timeout_seconds):
            return True
        with self._state:
            self._given_up = not self._locked.is_set()
            return not self._given_up

    def _run(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._state:
            if self._given_up:
                os.close(self._descriptor)
            else:
                self._locked.set()
