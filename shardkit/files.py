"""Files that survive a power cut, locks that end with their process, and small helpers around both.

A file's bytes are durable after `fsync` of the file, its name after `fsync` of its folder. The kernel frees a
lock (flock) when its holder ends, whatever ended it. Locks hold between processes of a machine, and between
machines on file systems that support that (NFS 4, Lustre mounted with `flock`, CephFS, …).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = [
    "PART_SUFFIX",
    "Closing",
    "fsync_path",
    "held_file",
    "link_or_copy",
    "load_json",
    "make_folder",
    "move_durably",
    "part_of",
    "publish_bytes",
    "upgraded",
]

PART_SUFFIX = ".shardkit-part"
_POLL_SECONDS = 0.1


class Closing:
    """A context manager that ends with `close`."""

    __slots__ = ()

    def close(self) -> None:
        """Give back what is held; safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_json(text: str | bytes) -> Any:
    """Parse JSON from outside; ValueError if anything is wrong with it, too deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nest too deeply") from None


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def part_of(path: Path) -> Path:
    """The temporary name of a file that is being written."""
    return path.with_name(f".{path.name}{PART_SUFFIX}")


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or make a synced copy where the file system cannot.

    A file of that name is replaced in one step. The name itself is durable once its folder is synced.
    """
    temporary = part_of(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        fsync_path(temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # rename(2) does nothing where both are names of one file


def move_durably(source: Path, target: Path) -> None:
    """Sync a file, then rename it. The name itself is durable once its folder is synced."""
    fsync_path(source)
    source.rename(target)


def make_folder(folder: Path) -> bool:
    """Make a folder and those above it, durably; return whether it was missing."""
    if folder.is_dir():
        return False
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)
    return True


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
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # removed by who held it: make a new one
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def upgraded(descriptor: int) -> bool:
    """Whether a lock that is shared became ours alone; if not, it may be lost."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
