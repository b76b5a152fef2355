"""The machine of a simulation: what the modules of shardkit see as threads, time, system calls and chance.

`installed` puts these in place of `threading`, `time`, `os`, `fcntl`, … in all modules of shardkit, in
`concurrent.futures` and in `pathlib`, and of their functions in default arguments. Code that no simulation is
running gets the real ones, so nothing changes for others in the process. System calls are real ones on a real
folder: each is a step, and may meet a fault of the simulated disk. Times of files are virtual, and listings
are sorted.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures._base as futures_base
import errno
import fcntl
import importlib
import os
import queue
import random
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardkit import locks
from shardkit.cache import download
from shardkit.storage import limits, retry, running_clock, threads
from simulation import threads as virtual
from simulation.scheduler import Event, Scheduler, active

__all__ = ["Disk", "Machine", "installed", "machine", "running_on"]

EPOCH = 1_000_000_000.0  # what the clock on the wall shows at virtual time 0: no real file is that old
_REAL_SINCE = 1_500_000_000.0  # times of files behind it come from the real clock
_SECONDS_OF_LOCK_POLL = 30.0


class Disk:
    """Room and faults of the disk below `root`."""

    def __init__(self, root: Path, total: int) -> None:
        self.root, self.total = root, total
        self.foreign = 0
        """Bytes that other programs take."""
        self.error_share = 0.0
        """Of writes and syncs that fail with EIO."""
        self.sync_seconds = 0.0

    def used(self) -> int:
        folders = [Path(folder) for folder, _, _ in os.walk(self.root)]
        return self.foreign + sum(size for folder in folders for size in self.sizes(folder).values())

    def sizes(self, folder: Path) -> dict[str, int]:
        """Of the files in a folder; no call that is a step, or may fail."""
        if not os.path.isdir(folder):  # noqa: PTH112
            return {}
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    @property
    def free(self) -> int:
        return max(0, self.total - self.used())


class Machine:
    """One machine: its scheduler, its disk, and how far its wall clock is from the steady one."""

    def __init__(self, scheduler: Scheduler, disk: Disk, chance: random.Random) -> None:
        self.scheduler, self.disk, self.chance = scheduler, disk, chance
        self.clock_shift = 0.0
        self.after_call: Callable[[str], None] = lambda name: None
        """Called after each system call that changes the disk."""

    @property
    def wall_seconds(self) -> float:
        return EPOCH + self.scheduler.now + self.clock_shift

    def fails(self) -> bool:
        return self.disk.error_share > 0 and self.chance.random() < self.disk.error_share


_machines: list[Machine] = []


def machine() -> Machine | None:
    """The machine of the running task."""
    return _machines[-1] if _machines and active() is not None else None


class _Module:
    """Some names of a module, and the module's own for all others."""

    def __init__(self, real: types.ModuleType, names: dict[str, object]) -> None:
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Environment(Mapping[str, str]):
    """`os.environ`, with what the launcher of the running process has put there."""

    def __getitem__(self, name: str) -> str:
        return self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def _own(self) -> dict[str, str]:
        scheduler = active()
        task = None if scheduler is None else scheduler.current
        return {**os.environ, **({} if task is None else task.process.environment)}


def _monotonic() -> float:
    found = machine()
    return time.monotonic() if found is None else found.scheduler.now


def _perf_counter() -> float:
    found = machine()
    return time.perf_counter() if found is None else found.scheduler.now


def _time() -> float:
    found = machine()
    return time.time() if found is None else found.wall_seconds


def _time_ns() -> int:
    return int(_time() * 1e9)


def _sleep(seconds: float) -> None:
    found = machine()
    if found is None:
        time.sleep(seconds)
    else:
        found.scheduler.step()
        found.scheduler.sleep(seconds)


def _jitter() -> float:
    found = machine()
    return random.random() if found is None else found.chance.random()


def _either(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """`simulated` in a simulation, else `real`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (real if active() is None else simulated)(*args, **kwargs)

    return call


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """A system call: a step, then the call."""
    found = machine()
    if found is None:
        return getattr(os, name)(*args, **kwargs)
    found.scheduler.step()
    if name != "pread" and found.fails():
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))
    result = getattr(os, name)(*args, **kwargs)
    found.after_call(name)
    return result


def _plain(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(name, *args, **kwargs)


def _open(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
    found = machine()
    if found is None:
        return os.open(path, flags, mode, **kwargs)
    found.scheduler.step()
    if flags & os.O_CREAT and found.fails():
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    descriptor = os.open(path, flags, mode, **kwargs)
    assert found.scheduler.current is not None
    found.scheduler.current.process.descriptors.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    found = machine()
    if found is None:
        os.close(descriptor)
        return
    found.scheduler.step()
    assert found.scheduler.current is not None
    os.close(descriptor)
    found.scheduler.current.process.descriptors.discard(descriptor)
    found.scheduler.locks_changed()


def _write(name: str) -> Callable[..., int]:
    def call(descriptor: int, data: Any, *place: int) -> int:
        found = machine()
        if found is not None:
            found.scheduler.step()
            if found.fails():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        written: int = getattr(os, name)(descriptor, data, *place)
        return written

    return call


def _fsync(descriptor: int) -> None:
    found = machine()
    if found is None:
        os.fsync(descriptor)
        return
    found.scheduler.step()
    if found.disk.sync_seconds:
        found.scheduler.sleep(found.chance.random() * found.disk.sync_seconds)
    if found.fails():
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _allocate(descriptor: int, offset: int, size: int) -> None:
    found = machine()
    if found is None:
        os.posix_fallocate(descriptor, offset, size)
        return
    found.scheduler.step()
    if size > found.disk.free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, offset + size)
    found.after_call("posix_fallocate")


def _stat(name: str) -> Callable[..., os.stat_result]:
    def call(path: Any, **kwargs: Any) -> os.stat_result:
        found = machine()
        if found is None:
            result: os.stat_result = getattr(os, name)(path, **kwargs)
            return result
        found.scheduler.step()
        return _with_virtual_times(found, name, path, kwargs)

    return call


def _with_virtual_times(found: Machine, name: str, path: Any, kwargs: dict[str, Any]) -> os.stat_result:
    """A file's status; a time that the real clock has put there becomes the virtual one."""
    result: os.stat_result = getattr(os, name)(path, **kwargs)
    if max(result.st_mtime, result.st_atime) < _REAL_SINCE or not stat.S_ISREG(result.st_mode):
        return result
    now = int(found.wall_seconds * 1e9)
    modified = now if result.st_mtime >= _REAL_SINCE else result.st_mtime_ns
    accessed = now if result.st_atime >= _REAL_SINCE else result.st_atime_ns
    os.utime(path, ns=(accessed, modified), **kwargs)
    again: os.stat_result = getattr(os, name)(path, **kwargs)
    return again


class _Entry:
    """`os.DirEntry` of a listing."""

    def __init__(self, found: Machine, entry: os.DirEntry[str]) -> None:
        self._found, self._entry = found, entry
        self.name, self.path = entry.name, entry.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self._found.scheduler.step()
        return _with_virtual_times(self._found, "stat", self.path, {"follow_symlinks": follow_symlinks})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Listing:
    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *details: object) -> None:
        pass


def _scandir(path: Any = ".") -> Any:
    found = machine()
    if found is None:
        return os.scandir(path)
    found.scheduler.step()
    with os.scandir(path) as entries:
        return _Listing([_Entry(found, entry) for entry in sorted(entries, key=lambda entry: entry.name)])


def _listdir(path: Any = ".") -> list[Any]:
    found = machine()
    if found is None:
        return os.listdir(path)  # noqa: PTH208
    found.scheduler.step()
    return sorted(os.listdir(path))  # noqa: PTH208


def _getpid() -> int:
    scheduler = active()
    return os.getpid() if scheduler is None or scheduler.current is None else scheduler.current.process.number


def _urandom(size: int) -> bytes:
    found = machine()
    return os.urandom(size) if found is None else found.chance.randbytes(size)


def _token_hex(size: int) -> str:
    return _urandom(size).hex()


def _mkdtemp(suffix: str = "", prefix: str = "", dir: Any = None) -> str:
    found = machine()
    if found is None:
        return tempfile.mkdtemp(suffix, prefix, dir)
    path = os.path.join(dir, f"{prefix}{_token_hex(4)}{suffix}")  # noqa: PTH118
    _call("mkdir", path)
    return path


def _flock(descriptor: int, operation: int) -> None:
    found = machine()
    if found is None:
        fcntl.flock(descriptor, operation)
        return
    found.scheduler.step()
    if operation & fcntl.LOCK_UN:
        fcntl.flock(descriptor, operation)
        found.scheduler.locks_changed()
        return
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
        found.scheduler.wait_for_locks(_SECONDS_OF_LOCK_POLL)


def _disk_usage(path: Any) -> Any:
    found = machine()
    if found is None:
        return shutil.disk_usage(path)
    used = found.disk.used()
    return types.SimpleNamespace(total=found.disk.total, used=used, free=max(0, found.disk.total - used))


_MODULES: dict[str, object] = {
    "threading": _Module(
        threading,
        {
            "Lock": _either(threading.Lock, virtual.Lock),
            "RLock": _either(threading.RLock, virtual.RLock),
            "Condition": _either(threading.Condition, virtual.Condition),
            "Event": _either(threading.Event, Event),
            "Thread": _either(threading.Thread, virtual.Thread),
            "local": virtual.local,
            "current_thread": virtual.current_thread,
            "get_ident": lambda: virtual.current_thread().ident,
        },
    ),
    "time": _Module(
        time,
        {
            "monotonic": _monotonic,
            "perf_counter": _perf_counter,
            "time": _time,
            "time_ns": _time_ns,
            "sleep": _sleep,
        },
    ),
    "os": _Module(
        os,
        {
            "open": _open,
            "close": _close,
            "write": _write("write"),
            "pwrite": _write("pwrite"),
            "fsync": _fsync,
            "posix_fallocate": _allocate,
            "stat": _stat("stat"),
            "fstat": _stat("fstat"),
            "scandir": _scandir,
            "listdir": _listdir,
            "environ": _Environment(),
            "getpid": _getpid,
            "urandom": _urandom,
            **{
                name: _plain(name)
                for name in ("rename", "replace", "unlink", "mkdir", "link", "utime", "pread")
            },
        },
    ),
    "tempfile": _Module(tempfile, {"mkdtemp": _mkdtemp}),
    "fcntl": _Module(fcntl, {"flock": _flock}),
    "shutil": _Module(shutil, {"disk_usage": _disk_usage}),
    "socket": _Module(socket, {"gethostname": lambda: "host"}),
    "secrets": _Module(secrets, {"token_hex": _token_hex}),
    "atexit": types.SimpleNamespace(register=lambda call: call, unregister=lambda call: None),
}
_FUNCTIONS: dict[object, object] = {
    time.monotonic: _monotonic,
    time.time: _time,
    time.sleep: _sleep,
    retry._jitter: _jitter,
    threading.Lock: _either(threading.Lock, virtual.Lock),
    concurrent.futures.Future: virtual.Future,
    queue.SimpleQueue: _either(queue.SimpleQueue, virtual.SimpleQueue),
    concurrent.futures.ThreadPoolExecutor: _either(concurrent.futures.ThreadPoolExecutor, virtual.Executor),
}
_IMPORTED_LATE = (
    "shardkit.writers.stages.publish",
    "shardkit.datasets.tar_scan",
    "shardkit.formats.tar.find",
)
_OTHERS = ("concurrent.futures._base", "pathlib", "pathlib._local")


@contextmanager
def installed() -> Iterator[None]:
    """In the block, simulations see their machine in place of this one."""
    for late in _IMPORTED_LATE:
        importlib.import_module(late)
    undo: list[Callable[[], None]] = []
    real = {id(sys.modules[name]): simulated for name, simulated in _MODULES.items()}
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("shardkit.")
        if module is None or not (is_ours or name in _OTHERS):
            continue
        for key, value in list(vars(module).items()):
            new: object = real.get(id(value))
            if new is None and is_ours:
                new = _FUNCTIONS.get(_hashed(value))
            if new is not None:
                undo.append(_set(module, key, new))
            if is_ours and getattr(value, "__module__", None) == name:
                undo += _replace_defaults(value)
    undo.append(_set(futures_base, "_AcquireFutures", virtual.AcquireFutures))
    undo.append(_set(locks, "_given_up", virtual.ProcessDict()))
    undo.append(_set(download, "_threads", virtual.local()))
    undo.append(_set(threads, "_threads", virtual.PerProcess(threads._threads, threads.Threads)))
    per_process = virtual.PerProcess(running_clock._clock, running_clock.RunningClock)
    undo.append(_set(running_clock, "_clock", per_process))
    undo.append(_set(limits, "_shared", virtual.PerProcess(limits._shared, limits._SharedGates)))
    try:
        yield
    finally:
        for action in reversed(undo):
            action()


def _set(holder: Any, name: str, new: object) -> Callable[[], None]:
    old = getattr(holder, name)
    setattr(holder, name, new)
    return lambda: setattr(holder, name, old)


def _replace_defaults(value: object) -> Iterator[Callable[[], None]]:
    """Replace real functions in the default arguments of a function, or of a class's methods."""
    functions = [value] if isinstance(value, types.FunctionType) else []
    if isinstance(value, type):
        functions = [each for each in vars(value).values() if isinstance(each, types.FunctionType)]
    for function in functions:
        named = function.__kwdefaults__ or {}
        if any(_hashed(each) in _FUNCTIONS for each in named.values()):
            new = {key: _FUNCTIONS.get(_hashed(each), each) for key, each in named.items()}
            yield _set(function, "__kwdefaults__", new)
        plain = function.__defaults__ or ()
        if any(_hashed(each) in _FUNCTIONS for each in plain):
            yield _set(function, "__defaults__", tuple(_FUNCTIONS.get(_hashed(each), each) for each in plain))


def _hashed(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return None
    return value


@contextmanager
def running_on(machine: Machine) -> Iterator[None]:
    """In the block, tasks run on this machine."""
    _machines.append(machine)
    try:
        yield
    finally:
        _machines.pop()
