"""Simulate a power cut for the files of one process: what was not synced is lost.

It records every `os.fsync` and, at the cut, undoes the rest in one of three ways. What was not synced

    all     is lost: names are as of the last sync of their folder, contents as of that of the file
    some    is lost or not, name by name, as a seed draws (POSIX promises no order)
    data    is lost of files, which are empty; names are as they were (the known trap of renames)

The folder itself and its content at the start count as synced. Removed folders do not come back.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path
from typing import Literal

__all__ = ["Disk", "Way"]

Way = Literal["all", "some", "data"]


class Disk:
    """The disk below `folders`. `kept`, new and on the same file system, takes what may have to come back."""

    def __init__(self, folders: list[Path], kept: Path) -> None:
        self._folders, self._kept = folders, kept
        self._names: dict[int, dict[str, int]] = {}  # folder's inode -> name -> inode, as synced
        self._files: dict[int, tuple[int, int]] = {}  # inode -> size, time of change, as synced
        self._fsync = os.fsync

    def install(self) -> None:
        """Record every sync of this process from now on."""
        self._kept.mkdir()
        for top in self._folders:
            for path in [top, *top.rglob("*")] if top.exists() else []:
                self._note(path)
        os.fsync = self._synced  # type: ignore[assignment]

    def cut(self, way: Way, seed: int) -> None:
        """Undo what was not synced."""
        loses = {"all": 1.0, "some": 0.5, "data": 0.0}[way]
        for top in self._folders:
            if top.exists():
                self._undo(top, loses, random.Random(seed))

    def _synced(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._note(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _note(self, path: Path) -> None:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            return
        self._files[status.st_ino] = (status.st_size, status.st_mtime_ns)
        name = self._kept / str(status.st_ino)
        if not name.exists():
            name.hardlink_to(path)  # so that its inode is no other file's later

    def _undo(self, folder: Path, loses: float, drawn: random.Random) -> None:
        names = self._names.get(folder.stat().st_ino, {})
        for path in sorted(folder.iterdir()):
            status = path.lstat()
            is_folder = stat.S_ISDIR(status.st_mode)
            if names.get(path.name) != status.st_ino and drawn.random() < loses:
                shutil.rmtree(path) if is_folder else path.unlink()
            elif is_folder:
                self._undo(path, loses, drawn)
            elif self._files.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                os.truncate(path, 0)
        for name, inode in names.items():
            kept, path = self._kept / str(inode), folder / name
            if kept.exists() and not path.exists() and drawn.random() < loses:
                path.hardlink_to(kept)
