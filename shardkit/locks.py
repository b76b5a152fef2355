"""Locks between processes that end with their process (flock), with a limit on how long to wait.

The kernel frees a flock when its last descriptor is closed, also after kill -9. Locks hold between processes
of a machine, and between machines on file systems that support that (NFS 4, Lustre mounted with `flock`,
CephFS, …).

`held_file` guards a folder, alone or shared with others, and asks again every tenth of a second.

A `FileLock` saves work and guards no bytes: processes take one for each shard that they fetch. The kernel
does the waiting, so no time is lost between two attempts. A lock whose holder is stopped (kill -STOP, a
frozen container) would never be granted: a waiter gives up after its timeout and continues without it. Until
a lock that was given up is granted after all, nobody else in the process waits for it, so that waits that
cannot be canceled do not pile up. Once it is granted, whoever asks next gets it from the thread that waited.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

_POLL_SECONDS = 0.1
_HOLDER_BYTES = 64  # at most

# Links are refused, and pipes do not block: somebody else put them there.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_Key = tuple[int, int, int]  # process, device and inode of a lock


def held_file(path: Path, *, shared: bool, wait_seconds: float = 0.0) -> int | None:
    """A descriptor that holds the lock of a file until it is closed; None if others have it. OSError.

    The file is made if there is none. Whoever holds it alone may remove it: that is noticed.
    """
    deadline = time.monotonic() + wait_seconds
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # otherwise its last holder removed it: make a new one
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            os.close(descriptor)
            problem = f"{error.strerror}: this file system has no locks (flock), use a folder on another"
            raise OSError(error.errno, problem, str(path)) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class FileLock:
    """An exclusive lock on a file of its own. One thread takes it, and releases it, at a time."""

    def __init__(self, file: Path, *, keep: bool = False, holder: bytes = b"") -> None:
        """`keep`: leave the file behind when the lock is released (for locks that are taken all the time).

        `holder`: written into the file while it is held, for `read_holder` of others.
        """
        self._file = file
        self._keep = keep
        self._holder = holder
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def acquire(self, timeout_seconds: float = 0.0) -> bool:
        """Take the lock; False if another holds it for all of `timeout_seconds`.

        False at once if it is held and a wait for it that was given up has not been answered since.
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
                    with contextlib.suppress(OSError):  # a full disk
                        os.pwrite(descriptor, self._holder, 0)
                return True
            os.close(descriptor)  # its last holder removed the file: this lock locks nothing any more

    def read_holder(self) -> bytes:
        """Return the bytes that the holder of the lock has written. b"" if no holder has written any."""
        try:
            descriptor = os.open(self._file, _FLAGS & ~os.O_CREAT)
        except OSError:
            return b""
        try:
            return os.read(descriptor, _HOLDER_BYTES)
        except OSError:  # a pipe that somebody else put there
            return b""
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Let go; nothing happens if it is not held."""
        if self.held:
            if not self._keep:
                with contextlib.suppress(OSError):  # a file that stays locks nothing
                    self._file.unlink()  # while it is held: who waits sees that the file is gone
            _unlock(self._descriptor)
            self._descriptor = -1


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _locked(descriptor: int, timeout_seconds: float) -> int | None:
    """A descriptor that holds the lock of the open file: this one, or that of a wait which was given up.

    None if others hold it. This one is closed unless it is returned.
    """
    status = os.fstat(descriptor)
    key = os.getpid(), status.st_dev, status.st_ino
    try:
        while True:
            given_up = _given_up.get(key)  # before asking: it may give the lock back in between
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
    # Not only closed: a child forked in the meantime has the file open, too, and would keep the lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class _Waiter:
    """A thread that waits in the system for a lock, and gives it back if nobody wants it any more."""

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
        """The descriptor that holds the lock if it was granted after all; None if others hold it."""
        with self._state:
            if not self._is_given_up:
                return None
            try:
                # A lock belongs to the open file, not to a thread: this succeeds if the system has granted it
                # to the waiting thread, even if that has not run since.
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            self._forget()
        self._ended.wait()  # the thread uses the descriptor until its wait is answered, which it is now
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


_given_up: dict[_Key, _Waiter] = {}  # locks that were waited for in vain
