"""The node's cache: one folder shared by all processes of a machine, which communicate through it alone.

    FOLDER/shardkit-cache-1/shards/NAME          an entry: whole, synced, sealed
                            filling/NAME~PID~N   a file being filled, flocked by its writer
                            leases/NAME          flocked by the process that fetches the entry
                            damaged/…            the last few entries that failed their seal or their hashes
                            ledger               the size of each entry (`shardkit.cache.ledger`)
                            lock                 flocked while space is allocated or freed

An entry appears by rename, a shard's entry after its bytes are synced. Readers map it and check its seal when
they first use that file; a map stays readable after the entry is evicted. A file in filling/ whose flock is
free belongs to a process that died: it is removed. A process killed at any moment leaves no wrong data that
others would trust. Nothing outside of the sub-folder is ever read or removed. If someone removes the
sub-folder while it is used, it is made again.

If the disk has no room (bytes or inodes), or a stopped process holds the lock, entries go into this process's
memory, up to `spare_bytes`: without spare memory, each shard would be fetched again and again.

`shardkit.cache.entry` defines the names of entries and the proof of their bytes.

Anyone who can write to a cache can put wrong data into it, so a folder that other users can write is refused.
FOLDER must belong to this user or root, and only they, or FOLDER's group, may write there: users share a
cache by giving the group write permission (they also need umask 002). FOLDER may be one like /tmp, where
everybody writes and nobody can replace the files of others. The sub-folders must be real folders, not
writable by everybody, and belong to this user or root, or to a member of the group. The parents of FOLDER are
not checked.

Bytes are written with pwrite, not through a map: a page fault costs more than the copy (measured: 0.25
instead of 0.4 CPU-seconds per gigabyte, and up to 1.6 on fresh pages).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardkit.arrays import Bytes
from shardkit.cache.entry import SEAL_BYTES, is_sealed, make_seal, sealed_size
from shardkit.cache.ledger import Ledger, is_filling
from shardkit.cache.memory import CacheMemory
from shardkit.cache.protocol import CacheFolderError, Contents, Held, Lease, Slot
from shardkit.files import LACKING, NotRegularFileError, allocate, map_file, open_regular, who_else_writes
from shardkit.locks import FileLock
from shardkit.storage.threads import remake_after_fork

SUBFOLDER = "shardkit-cache-1"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk (bytes or inodes), a quota or a file size limit: data is delivered but not cached."""

_SUBFOLDERS = ("shards", "filling", "leases", "damaged")
_KEPT_DAMAGED = 4
LOCK_SECONDS = 10.0  # maximum wait for the folder's lock: held for milliseconds unless its holder was stopped
REFRESH_SECONDS = 20.0  # how often to read when entries were last used; 1/3 of planner.IDLE_SECONDS
_SPARE_SECONDS = 60.0  # when the disk has room again, entries in memory unused for this long are dropped
_LISTING_SHARE = 50  # listing the folder may take at most 1/50 of the time; slow listings are made less often
_MIN_FREE_BYTES, _MIN_FREE_SHARE = 2 << 30, 0.02  # bytes or share of the disk that stay free: the smaller

_numbers = itertools.count()  # make the names of files being filled unique
T = TypeVar("T")


class _DamagedError(Exception):
    """A file in shards/ is damaged, or is not the entry that its name identifies."""


class _UnusableError(Exception):
    """The folder cannot store an entry now; `counter` names the counter to increment."""

    def __init__(self, counter: str) -> None:
        super().__init__(counter)
        self.counter = counter


class CacheFolder:
    """Entries in a folder on a local disk, at most `capacity` bytes (None: the free disk minus a reserve)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        lock_seconds: float = LOCK_SECONDS,
        refresh_seconds: float = REFRESH_SECONDS,
        spare_bytes: int = 0,
    ) -> None:
        """Open or create the cache in `folder`; raises CacheFolderError if it cannot be used.

        `refresh_seconds`: maximum age of other processes' last uses of entries in `contents`. `spare_bytes`:
        maximum memory for entries that the folder cannot store.
        """
        self._spare = CacheMemory(spare_bytes)
        self._root, self._lock_seconds = Path(folder).absolute() / SUBFOLDER, lock_seconds
        self._refresh_seconds = refresh_seconds
        self._seen: dict[str, tuple[int, int, int]] = {}  # entries whose seal this process has checked
        self._counters: Counter[str] = Counter()
        self.after_fork()
        remake_after_fork(self)
        with explain_errors(folder):
            make_subfolders(self._root.parent, _SUBFOLDERS)
            usage = shutil.disk_usage(self._root)
            self._min_free = min(_MIN_FREE_BYTES, int(usage.total * _MIN_FREE_SHARE))
            self._remove_abandoned()
            with contextlib.suppress(OSError):  # the first reservation raises the error
                self._refresh()
            self._next_refresh = 0.0  # the first plan refreshes again, to see which entries others have used
        held = self._ledger.used_bytes
        self._capacity = max(0, usage.free - self._min_free + held) if capacity is None else capacity

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        return self._capacity

    def find(self, name: str) -> Bytes | None:
        with explain_errors(self._root.parent):
            try:
                data = self._proved(name)
            except _DamagedError:
                data = self._quarantine(name)
        self._touched.append(name)
        return self._spare.find(name) if data is None else data[:-SEAL_BYTES]

    def has(self, name: str) -> bool:
        return self._spare.has(name) or (self._root / "shards" / name).exists()

    def touch(self, name: str) -> bool:
        file = self._root / "shards" / name
        with explain_errors(self._root.parent):
            try:
                modified_ns = file.stat(follow_symlinks=False).st_mtime_ns
                with contextlib.suppress(PermissionError):  # another user's file: its times cannot be set
                    os.utime(file, ns=(time.time_ns(), modified_ns), follow_symlinks=False)
            except FileNotFoundError:
                return self._spare.touch(name)
        self._touched.append(name)
        return True

    def contents(self) -> Contents:
        with explain_errors(self._root.parent):
            self._refresh()
            with self._mutex:
                return {**self._snapshot(), **self._spare.contents()}

    def reserve(self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]) -> Slot | None:
        needed = sealed_size(raw_bytes)
        if needed > self._capacity:
            return None
        with explain_errors(self._root.parent):
            try:
                slot = self._remade(lambda: self._reserve(name, needed, victims))
                self._spare.drop_unused(_SPARE_SECONDS)
                return slot
            except _UnusableError as error:
                self._counters[error.counter] += 1
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._counters["disk_full"] += 1
        return self._spare.reserve(name, raw_bytes, victims)

    def lease(self, name: str, timeout_seconds: float = 0.0) -> Lease | None:
        lock = FileLock(self._root / "leases" / name, holder=self._holder)
        with explain_errors(self._root.parent):
            try:
                return lock if self._remade(lambda: self._acquire(lock, timeout_seconds)) else None
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return self._spare.lease(name, timeout_seconds)  # no room for a lock file: lease in memory

    def _acquire(self, lock: FileLock, timeout_seconds: float) -> bool:
        """Acquire a lease; return whether it is held. Never waits twice for a holder that has stopped."""
        if lock.acquire() or timeout_seconds <= 0:
            return lock.held
        holder = lock.read_holder()
        waited = self._stopped.get(holder)
        if waited is not None and waited.read_holder() == holder:
            return False
        self._stopped.pop(holder, None)
        if not lock.acquire(timeout_seconds) and holder:
            self._stopped[holder] = lock
        return lock.held

    def remove(self, name: str) -> None:
        self._seen.pop(name, None)
        self._spare.remove(name)
        with explain_errors(self._root.parent):
            self._move(self._root / "shards" / name, None)

    def counters(self) -> dict[str, int]:
        spare = self._spare.counters()
        return {key: self._counters[key] + count for key, count in spare.items()}

    def free_disk_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._root).free
        except OSError:
            return None

    def __reduce__(self) -> tuple[object, ...]:
        remade = partial(
            CacheFolder,
            lock_seconds=self._lock_seconds,
            refresh_seconds=self._refresh_seconds,
            spare_bytes=self._spare.capacity,
        )
        return remade, (self._root.parent, self._capacity)

    def after_fork(self) -> None:
        # Acquired before the folder's lock, so that only one thread per process waits for that lock.
        self._mutex = threading.Lock()
        self._ledger = Ledger(self._root)
        self._used: dict[str, float] = {}  # last known use of each entry, as a Unix time
        self._touched: deque[str] = deque(maxlen=1 << 16)  # entries used since `_used` was last updated
        self._next_refresh = 0.0
        self._holder = secrets.token_bytes(8)  # random: containers may have equal process ids
        self._stopped: dict[bytes, FileLock] = {}  # holder -> the lease that it did not release in time

    def enter(self, name: str, file: Path, descriptor: int) -> None:
        """Turn the filled file of a slot into the entry `name`."""
        self._move(file, self._root / "shards" / name, {name: os.fstat(descriptor).st_size})
        status = os.fstat(descriptor)
        self._seen[name] = (status.st_ino, status.st_size, status.st_mtime_ns)

    def note_full(self) -> None:
        """Count an entry that was not kept because the disk is full."""
        self._counters["disk_full"] += 1

    def set_aside(self, file: Path) -> None:
        """Move a damaged file to damaged/, where the last few are kept for inspection."""
        self._counters["quarantined"] += 1
        folder = self._root / "damaged"
        self._move(file, folder / f"{file.name.partition('~')[0]}~{time.time_ns()}")
        with contextlib.suppress(FileNotFoundError):  # someone has removed the folder
            kept = sorted(folder.iterdir(), key=lambda f: f.name.rpartition("~")[2])
            for old in kept[:-_KEPT_DAMAGED]:
                _remove(old)

    def give_back(self, file: Path) -> None:
        """Remove a file that was being filled."""
        self._move(file, None)

    def _move(self, file: Path, target: Path | None, added: Mapping[str, int] | None = None) -> None:
        """Rename `file`, or remove it without a `target`; the ledger drops its name and records `added`."""
        # FileNotFoundError: someone has removed the folder; readers that have mapped the bytes keep them.
        with contextlib.suppress(FileNotFoundError), self._locked() as is_locked:
            if target is None:
                file.unlink(missing_ok=True)
            else:
                file.rename(target)
            if is_locked:
                self._ledger.record(added or {}, [file.name])

    @contextlib.contextmanager
    def _locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the folder's lock, with an up-to-date ledger, until the block ends; yield whether it is held.

        If another process holds the lock too long, it may have been stopped: the block runs without the lock,
        and `Ledger.settle` corrects the ledger later. Raises FileNotFoundError if the folder was removed.
        """
        with self._mutex:
            lock = FileLock(self._root / "lock", keep=True)
            is_locked = lock.acquire(self._lock_seconds if wait else 0.0)
            try:
                if is_locked and not self._ledger.follow(locked=True):
                    listed = {**_list(self._root / "shards"), **_list(self._root / "filling")}
                    self._ledger.write({name: status.st_size for name, status in listed.items()})
                yield is_locked
            finally:
                lock.release()

    def _remade(self, action: Callable[[], T]) -> T:
        """Run `action`; if someone has removed the folders, create them and run it again."""
        try:
            return action()
        except FileNotFoundError:
            make_subfolders(self._root.parent, _SUBFOLDERS)
            return action()

    def _proved(self, name: str) -> Bytes | None:
        """Return an entry's bytes and seal, checked; None if it is missing. Raises _DamagedError."""
        try:
            # Does not follow links or read pipes: another user may have put them there.
            descriptor = open_regular(self._root / "shards" / name, follow_links=False)
        except FileNotFoundError:
            return None
        except NotRegularFileError as error:
            raise _DamagedError from error
        try:
            status = os.fstat(descriptor)
            if status.st_size < SEAL_BYTES:
                raise _DamagedError
            data = map_file(descriptor, status.st_size)
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._seen.get(name) != identity:
                if not is_sealed(data, name):
                    raise _DamagedError
                self._seen[name] = identity
            with contextlib.suppress(OSError):  # another user's file: its last use cannot be recorded
                os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
            return data
        finally:
            os.close(descriptor)

    def _quarantine(self, name: str) -> Bytes | None:
        """Set a damaged entry aside and return None; if it was fetched again meanwhile, return its bytes."""
        lease = self.lease(name, self._lock_seconds)
        try:
            return self._proved(name)
        except _DamagedError:
            self.set_aside(self._root / "shards" / name)
            return None
        finally:
            if lease is not None:
                lease.release()

    def _reserve(
        self, name: str, needed: int, victims: Callable[[Contents], Iterable[str]]
    ) -> FolderSlot | None:
        with self._locked() as is_locked:
            if not is_locked:
                raise _UnusableError("locked_out")
            if not self._make_room(needed, victims):
                if self._lacks_disk(needed):
                    raise _UnusableError("disk_full")
                return None
            slot = FolderSlot(self, name, self._root / "filling", needed)
            # Record before allocating: a process killed in between leaves the ledger too high, never too low.
            self._ledger.record({slot.file.name: needed})
            try:
                slot.allocate()
            except OSError:
                self._ledger.record({}, [slot.file.name])
                raise
            return slot

    def _make_room(self, needed: int, victims: Callable[[Contents], Iterable[str]]) -> bool:
        """Evict entries until `needed` bytes fit; return whether they do. Needs the folder's lock."""
        ledger = self._ledger
        if self._fits(needed):
            return True
        ledger.record({}, self._remove_abandoned())
        self._apply_touches()
        if self._fits(needed):
            return True
        for victim in victims(ledger.entries()):
            if is_filling(victim) or victim not in ledger.sizes:
                continue
            size, is_gone = ledger.sizes[victim], _remove(self._root / "shards" / victim)
            ledger.record({}, [victim])
            self._seen.pop(victim, None)
            self._used.pop(victim, None)
            self._counters["evictions"] += is_gone
            self._counters["evicted_bytes"] += is_gone * size
            if self._fits(needed):
                return True
        return False

    def _fits(self, needed: int) -> bool:
        return self._ledger.used_bytes + needed <= self._capacity and not self._lacks_disk(needed)

    def _lacks_disk(self, needed: int) -> bool:
        return shutil.disk_usage(self._root).free - needed < self._min_free

    def _refresh(self) -> None:
        """Read other processes' changes and, every `_refresh_seconds`, when entries were last used."""
        with self._mutex:
            if self._ledger.follow(locked=False) and time.monotonic() < self._next_refresh:
                return
        began = time.monotonic()
        try:
            # List filling/ first: a file that is renamed to shards/ meanwhile is seen twice, not missed.
            filling, shards = _list(self._root / "filling"), _list(self._root / "shards")
        except FileNotFoundError:  # someone has removed the folder
            with self._mutex:
                self._ledger.forget()
            return
        with self._locked(wait=False) as is_locked:
            sizes = {name: status.st_size for name, status in (shards | filling).items()}
            if is_locked:
                self._ledger.settle(sizes)
            elif not self._ledger.follow(locked=False):
                self._ledger.assume(sizes)
            self._used = {name: status.st_atime for name, status in shards.items()}
            for name in sorted(self._used, key=self._used.__getitem__):
                self._ledger.touch(name)
            self._apply_touches()
        seconds = time.monotonic() - began
        self._next_refresh = time.monotonic() + max(self._refresh_seconds, _LISTING_SHARE * seconds)

    def _apply_touches(self) -> None:
        """Move the entries that this process has used to the end of the ledger's order of last use."""
        now = time.time()
        while self._touched:
            name = self._touched.popleft()
            self._used[name] = now
            self._ledger.touch(name)

    def _snapshot(self) -> Contents:
        self._apply_touches()
        now, ledger = time.time(), self._ledger
        entries = {
            name: Held(size, now - self._used.setdefault(name, now))
            for name, size in ledger.sizes.items()
            if name not in ledger.filling
        }
        for name, size in ledger.filled_bytes().items():
            entries[name] = Held(size + ledger.sizes.get(name, 0), 0.0, filling=True)
        return entries

    def _remove_abandoned(self) -> list[str]:
        """Remove files in filling/ whose writers have died; return their names."""
        removed = []
        for file in (self._root / "filling").iterdir():
            with contextlib.suppress(OSError):
                try:
                    descriptor = open_regular(file, follow_links=False)
                except NotRegularFileError:  # a pipe or a link: not made by a cache, so remove it
                    file.unlink(missing_ok=True)
                    continue
                try:
                    # Raises BlockingIOError, which is suppressed, if its writer is alive.
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink(missing_ok=True)
                    removed.append(file.name)
                finally:
                    os.close(descriptor)
        return removed


class FolderSlot:
    """Reserved space in a `CacheFolder`: a flocked file of its final size."""

    def __init__(self, cache: CacheFolder, name: str, folder: Path, size: int) -> None:
        self._cache, self._name, self._size = cache, name, size
        self._entry: Bytes | None = None
        self.file, self._descriptor = _create_locked(folder, name)

    def allocate(self) -> None:
        """Allocate the file's space, so that a full disk raises OSError here and not SIGBUS at a later write.

        On an error, the file is removed.
        """
        try:
            allocate(self._descriptor, self._size)
        except BaseException:
            self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    @property
    def data(self) -> Bytes:
        if self._entry is None:
            with explain_errors(self.file.parents[2]):
                self._entry = map_file(self._descriptor, self._size, writable=True)
        return self._entry[:-SEAL_BYTES]

    def write(self, at: int, piece: memoryview) -> None:
        try:
            written = os.pwrite(self._descriptor, piece, at)
            if written != len(piece):  # space is allocated: the disk is not full, but failing
                raise OSError(errno.EIO, f"{written:,} of {len(piece):,} bytes were written")
        except OSError as error:
            raise self._failed(error) from error

    def commit(self, *, durable: bool = True) -> None:
        try:
            os.pwrite(self._descriptor, make_seal(self.data, self._name), self._size - SEAL_BYTES)
            if durable:
                os.fsync(self._descriptor)
            self._cache.enter(self._name, self.file, self._descriptor)
        except OSError as error:
            self._end(keep=False)
            if error.errno in NO_ROOM:  # some file systems allocate at fsync; waiting readers have the bytes
                self._cache.note_full()
                return
            raise self._failed(error) from error
        self._end(keep=True)

    def _failed(self, error: OSError) -> CacheFolderError:
        problem = f"cannot be written: {error.strerror or error}; the disk may be failing"
        return CacheFolderError(f"{self.file}: {problem}")

    def discard(self, *, damaged: bool = False) -> None:
        is_kept = False
        if damaged and self._descriptor >= 0:
            with contextlib.suppress(OSError):  # on a failing disk, the file is removed instead
                self._cache.set_aside(self.file)
                is_kept = True
        self._end(keep=is_kept)

    def _end(self, *, keep: bool) -> None:
        descriptor, self._descriptor, self._entry = self._descriptor, -1, None
        if descriptor < 0:
            return
        try:
            if not keep:
                # On a failing disk the file stays, unlocked; the next process that makes room removes it.
                with contextlib.suppress(OSError):
                    self._cache.give_back(self.file)
        finally:
            os.close(descriptor)


def _create_locked(folder: Path, name: str) -> tuple[Path, int]:
    """Create and flock a file with a unique name."""
    while True:
        file = folder / f"{name}~{os.getpid()}~{next(_numbers)}~{time.time_ns()}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return file, descriptor
        except BlockingIOError:
            pass  # another process took it for abandoned, between open and flock
        os.close(descriptor)


def _list(folder: Path) -> dict[str, os.stat_result]:
    listed = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                listed[entry.name] = entry.stat(follow_symlinks=False)
    return listed


def _remove(file: Path) -> bool:
    """Remove a file, or a folder that someone put there; return whether it existed."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        shutil.rmtree(file)
    return True


@contextlib.contextmanager
def explain_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError raised in the block to a CacheFolderError that names the cache folder."""
    try:
        yield
    except OSError as error:
        problem = f"the cache folder cannot be used: {error.strerror or error}; give another cache_dir"
        if error.errno in LACKING:
            problem += ", on a local disk: this file system lacks a call that a cache needs (flock, mmap)"
        raise CacheFolderError(f"{folder}: {problem}") from error


def make_subfolders(folder: Path, names: Iterable[str]) -> None:
    """Create sub-folders `names` of a cache; raises CacheFolderError if untrusted users can write there."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)  # not 0o777: umask may be 0
    folder = folder.resolve()
    _refuse(folder, who_else_writes(folder, group=True, sticky=True))
    mode = folder.stat().st_mode
    is_groups = bool(mode & stat.S_IWGRP and not mode & stat.S_IWOTH)
    root = folder / SUBFOLDER
    for path in (root, *(root / name for name in names)):
        path.mkdir(mode=0o775 if is_groups else 0o755, parents=True, exist_ok=True)
        _refuse(path, who_else_writes(path, group=True, other_owner=is_groups))


def _refuse(folder: Path, reason: str | None) -> None:
    if reason is not None:
        raise CacheFolderError(
            f"{folder}: the cache folder cannot be used: {reason}, so entries cannot be trusted; chmod or "
            "chown it, or give another cache_dir, such as a folder of your own in it"
        )
