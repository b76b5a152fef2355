"""The driver's lease: makes sure that only one process at a time runs a build in a work folder in a store.

The build holds the lease, an object that it rewrites every few seconds:

    lease/<epoch>     the holder's name and the number of its heartbeat; the highest epoch counts

A lease whose heartbeat has not changed for `lease_seconds` of the observer's own clock has expired; clocks of
different machines are never compared. A process takes a lease over by creating the next epoch, which the
store allows for only one process. A driver that was suspended meanwhile finds a higher epoch and ends. Leases
do not affect outputs: tasks are pure, and a task that two processes run is committed once.

A work folder on a file system has a lock instead (`locked_folder`): the system releases it as soon as its
process ends, so the next build need not wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.errors import BuildError, warn_user
from shardkit.files import Closing
from shardkit.locks import held_file
from shardkit.storage.store import ObjectExistsError, ObjectInfo, Store, StoreError

LEASE_SECONDS = 60.0
"""Time without a heartbeat after which a driver counts as dead, in seconds."""
BEATS = 6  # heartbeats per `lease_seconds`; several, so that one may be late or fail
LOCK_NAME = "lock"
_PREFIX = "lease/"


class DriverLease(Closing):
    """The lease of a work folder in `store`, as one process sees it. Messages call the process `name`."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = LEASE_SECONDS / BEATS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self._lease_seconds, self._beat_seconds = lease_seconds, beat_seconds
        self._store, self._clock, self._sleep = store, clock, sleep
        self._id = f"{name} {os.urandom(8).hex()}"
        self._own = ("", "")  # key and version of the last heartbeat of this process
        self._beats = 0
        self._seen = ("", "")  # key and version of the last heartbeat seen of another process
        self._seen_since = 0.0  # time at which this process first saw that heartbeat
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.held = False
        self.was_lost = False

    def acquire(self) -> None:
        """Take the lease, waiting for a dead driver's lease to expire.

        Raises BuildError if another driver is alive.
        """
        is_first = True
        try:
            while not self.try_acquire():
                before, holder = self._seen, self.holder()
                if is_first:
                    warn_user(
                        f"{self._store.url}: {holder} holds the lease of this work folder; waiting up to "
                        f"{self._lease_seconds:.0f} s to see whether it is alive"
                    )
                    is_first = False
                self._sleep(self._beat_seconds / 4)
                newest = self._newest()
                if newest is not None and newest.key == before[0] and newest.version != before[1]:
                    raise BuildError(
                        f"{self._store.url}: {holder} runs a build in this work folder; its lease expires "
                        f"{self._lease_seconds:.0f} s after its last renewal, which was just now. Stop "
                        f"that build, wait for it, or set another `work`"
                    )
        except StoreError as error:
            raise BuildError(
                f"work folder {self._store.url}: {error}; run the same command again to continue"
            ) from error

    def try_acquire(self) -> bool:
        """Take the lease if it is free or expired; return whether this process has it. May raise StoreError.

        It expires when this process has seen no new heartbeat for `lease_seconds`.
        """
        if self.held:
            return True
        now, newest = self._clock(), self._newest()
        if newest is not None:
            if self._seen != (newest.key, newest.version):
                self._seen, self._seen_since = (newest.key, newest.version), now
            if now - self._seen_since < self._lease_seconds:
                return False
        epoch = 1 if newest is None else int(newest.key.removeprefix(_PREFIX)) + 1
        try:
            self._write(f"{_PREFIX}{epoch:08d}", if_absent=True)
        except ObjectExistsError:
            return False  # another process was faster
        if newest is not None:
            self._store.delete(newest.key)
        if self._newest_key() > self._own[0]:  # the first listing may miss an object renamed while it runs
            self._store.delete(self._own[0])
            return False
        self.held, self.was_lost = True, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat_on, name="shardkit-lease", daemon=True)
            self._thread.start()
        return True

    def check(self) -> None:
        """Raise BuildError if another process has taken over the lease."""
        if self.was_lost:
            raise BuildError(
                f"{self._store.url}: another driver has taken over this work folder, because this process "
                f"was silent for more than {self._lease_seconds:.0f} s (suspended, or cut off from the "
                f"store); finished tasks are kept, and that driver continues"
            )

    def holder(self) -> str:
        """Return the name of the process that holds the lease, for messages."""
        with contextlib.suppress(StoreError):
            newest = self._newest()
            if newest is not None:
                return self._store.get(newest.key).decode(errors="replace").partition(" ")[0]
        return "another process"

    def close(self) -> None:
        """Release the lease by removing its object. If the store fails, the lease expires by itself."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._beat_seconds)
        if self.held:
            self.held = False
            with contextlib.suppress(StoreError):
                self._store.delete(self._own[0])

    def renew(self) -> None:
        """Write the next heartbeat, or set `was_lost` if the lease was taken over. May raise StoreError."""
        newest = self._newest()
        if newest is None or (newest.key, newest.version) != self._own:
            is_ours = newest is not None and self._store.get(newest.key).startswith(self._id.encode())
            if not is_ours:  # if it is ours, the last write succeeded but its response was lost
                self.held, self.was_lost = False, True
                if newest is not None and newest.key > self._own[0]:
                    self._store.delete(self._own[0])  # a late write of this process may have recreated it
                return
        self._write(self._own[0])

    def _beat_on(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            if self.held:
                with contextlib.suppress(StoreError):  # the next heartbeat may succeed
                    self.renew()
        if not self.held and self._own[0]:  # this heartbeat may have been written after `close` removed it
            with contextlib.suppress(StoreError):
                if self._store.get(self._own[0]).startswith(self._id.encode()):
                    self._store.delete(self._own[0])

    def _write(self, key: str, *, if_absent: bool = False) -> None:
        self._beats += 1
        info = self._store.put(key, f"{self._id} {self._beats}".encode(), if_absent=if_absent)
        self._own = key, info.version

    def _newest_key(self) -> str:
        newest = self._newest()
        return "" if newest is None else newest.key

    def _newest(self) -> ObjectInfo | None:
        return max(self._store.list(_PREFIX), key=lambda info: info.key, default=None)


def process_name() -> str:
    """Return a unique name for this process: host, process id and a random part."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(4).hex()}"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a work folder on a file system; raises BuildError if another build holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = held_file(folder / LOCK_NAME, shared=False)
    except OSError as error:
        problem = f"cannot be used as work folder: {error.strerror}; set `work` to another folder"
        raise BuildError(f"{folder}: {problem}") from error
    if descriptor is None:
        raise BuildError(
            f"{folder}: another build uses this work folder; wait for it, or set `work` to another folder"
        )
    try:
        yield
    finally:
        os.close(descriptor)
        # A build removes its work folder while it holds the lock, but NFS and FUSE keep a folder while a file
        # in it is open: remove it now.
        if not (folder / LOCK_NAME).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
