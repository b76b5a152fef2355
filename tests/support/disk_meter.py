"""Disk space of files while other processes write, rename and remove them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["disk_bytes", "files_of", "peak_bytes"]


def files_of(folder: Path) -> dict[int, os.stat_result]:
    """All files below a folder by inode: hard links once. Files that disappear meanwhile are left out."""
    found = {}
    for parent, _, names in os.walk(folder):  # silent about a folder that is gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 (20 times a second)
                found[status.st_ino] = status
    return found


def disk_bytes(*folders: Path) -> int:
    """Size of all files in whole blocks, each once."""
    files: dict[int, os.stat_result] = {}
    for folder in folders:
        files |= files_of(folder)
    return sum(status.st_blocks * 512 for status in files.values())


@contextlib.contextmanager
def peak_bytes(*folders: Path, seconds: float = 0.05) -> Iterator[list[int]]:
    """Peak of `disk_bytes` during the block, as the only item of a list."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        last = False
        while not last:
            last = ended.wait(seconds)
            peak[0] = max(peak[0], disk_bytes(*folders))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
