"""Locks between processes (flock) that are released when their process ends, with a timeout for waiting.

The kernel releases a flock when its last descriptor is closed, also after kill -9. Locks work between
processes of a machine, and between machines on file systems that support it (NFS 4, Lustre mounted with
`flock`, CephFS, …).

`held_file` locks a file that represents a folder, exclusively or shared; it tries again every 0.1 seconds.

A `FileLock` avoids duplicate work and protects no data: processes take one for each shard that they fetch.
The waiter blocks in the kernel, so no time is lost between two attempts. A lock whose holder is stopped (kill
-STOP, a frozen container) would never be granted: a waiter stops waiting after its timeout and continues
without the lock. A blocked flock call cannot be canceled, so its thread keeps waiting; until that call
returns, no other thread of the process waits for the same lock, so blocked threads do not pile up. Once it is
granted, the next caller of `acquire` takes the lock over from the thread that waited.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

_POLL_SECONDS = 0.1  # time between two attempts of `held_file`
_HOLDER_BYTES = 64  # maximum length of the `holder` text in a lock file

# Refuse links, and do not block on pipes: another user may have put one in place of the lock file.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_Key = tuple[int, int, int]  # identifies a lock: process id, device and inode


def held_file(path: Path, *, shared: bool, wait_seconds: float = 0.0) -> int | None:
    """Lock a file; return a descriptor that holds the lock until it is closed, or None after `wait_seconds`.

    The file is created if it does not exist. An exclusive holder may remove it; a waiter detects this and
    creates the file again. Raises OSError if the file system has no locks.
    """
    deadline = time.monotonic() + wait_seconds
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # otherwise its last holder removed it: create a new one
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            os.close(descriptor)
            problem = f"{error.strerror}: this file system has no locks (flock); use a folder on another"
            raise OSError(error.errno, problem, str(path)) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class FileLock:
    """An exclusive lock on a file that serves only as a lock. Use it in one thread at a time."""

    def __init__(self, file: Path, *, keep: bool = False, holder: bytes = b"") -> None:
        """`keep`: do not delete the file on release (for locks that are taken often).

        `holder`: text that is written into the file when the lock is granted; other processes read it by
        `read_holder`.
        """
        self._file = file
        self._keep = keep
        self._holder = holder
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def acquire(self, timeout_seconds: float = 0.0) -> bool:
        """Take the lock; return False if it was not granted within `timeout_seconds`.

        Returns False at once if an earlier wait for this lock timed out and its flock call is still blocked.
        """
        assert not self.held
        deadline = time.monotonic() + timeout_seconds
        while True:
            descriptor = _locked(os.open(self._file, _FLAGS, 0o664), deadline - time.monotonic())
            if descriptor is None:
                return False
            if _is_at(descriptor, self._file):
                self._descriptor = descriptor
                if self._holder:
                    with contextlib.suppress(OSError):  # the disk may be full
                        os.pwrite(descriptor, self._holder, 0)
                return True
            os.close(descriptor)  # its last holder removed the file, so a lock on it is void

    def read_holder(self) -> bytes:
        """Return the `holder` text that the current holder of the lock has written; b"" if there is none."""
        try:
            descriptor = os.open(self._file, _FLAGS & ~os.O_CREAT)
        except OSError:
            return b""
        try:
            return os.read(descriptor, _HOLDER_BYTES)
        except OSError:  # it is a pipe that another user put there
            return b""
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self.held:
            if not self._keep:
                with contextlib.suppress(OSError):  # a leftover file is harmless: it holds no lock
                    self._file.unlink()  # before the lock is released, so that waiters see it gone
            _unlock(self._descriptor)
            self._descriptor = -1


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _locked(descriptor: int, timeout_seconds: float) -> int | None:
    """Return a descriptor that holds the lock, or None if the lock is not granted within the timeout.

    The result is `descriptor` or the one of an earlier wait, which timed out and was granted the lock since.
    `descriptor` is closed unless it is returned.
    """
    status = os.fstat(descriptor)
    key = os.getpid(), status.st_dev, status.st_ino
    try:
        while True:
            given_up = _given_up.get(key)  # read before flock, as the waiter may release the lock in between
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if given_up is None:
                    break
            if (taken := given_up.take()) is not None or _given_up.get(key) is given_up:
                os.close(descriptor)
                return taken
    except OSError:
        os.close(descriptor)
        raise
    if timeout_seconds > 0:
        return descriptor if _Waiter(descriptor, key).wait(timeout_seconds) else None
    os.close(descriptor)
    return None


def _unlock(descriptor: int) -> None:
    # Closing alone is not enough: a child forked in the meantime has the file open and would keep the lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class _Waiter:
    """A thread that blocks in flock; it releases the lock at once if `wait` timed out before the grant."""

    def __init__(self, descriptor: int, key: _Key) -> None:
        self._descriptor, self._key = descriptor, key
        self._state = threading.Lock()
        self._ended = threading.Event()
        self._is_given_up = False
        threading.Thread(target=self._run, name="shardkit-lock", daemon=True).start()

    def wait(self, timeout_seconds: float) -> bool:
        if self._ended.wait(timeout_seconds):
            return True
        with self._state:
            self._is_given_up = not self._ended.is_set()
            if self._is_given_up:
                _given_up[self._key] = self
            return not self._is_given_up

    def take(self) -> int | None:
        """Return the descriptor that holds the lock if it was granted after the timeout; None otherwise."""
        with self._state:
            if not self._is_given_up:
                return None
            try:
                # A flock belongs to the open file, not to a thread: this succeeds if the kernel has granted
                # it to the waiting thread, even if that thread has not run since.
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            self._forget()
        self._ended.wait()  # the thread uses the descriptor until its flock call returns, which it does now
        return self._descriptor

    def _run(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with self._state:
            if self._is_given_up:
                _unlock(self._descriptor)
                self._forget()
            self._ended.set()

    def _forget(self) -> None:
        self._is_given_up = False
        if _given_up.get(self._key) is self:  # another thread may have given up after this one
            del _given_up[self._key]


_given_up: dict[_Key, _Waiter] = {}  # waiters that timed out and whose flock calls are still blocked
