"""What a power cut leaves of the files of a process that does all by itself: nothing that was not synced.

A stand-in for pulling the plug of a machine. It knows what was synced, as it hears of every `os.fsync`, and
at the cut it undoes the rest, in one of two ways between which real file systems lie:

    strict   names as of the last sync of their folder, contents as of that of the file (what POSIX promises)
    data     all names as they are, but files that were not synced are empty (the known trap of renames)

The folder itself and what lies in it at the start are taken to be safe. Folders that were removed do not come
back.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Literal

__all__ = ["Disk", "Way"]

Way = Literal["strict", "data"]


class Disk:
    """The disk below `folders`. `kept`, new and on the same file system, takes what may have to come back."""

    def __init__(self, folders: list[Path], kept: Path) -> None:
        self._folders, self._kept = folders, kept
        self._names: dict[int, dict[str, int]] = {}  # folder's inode -> name -> inode, as synced
        self._files: dict[int, tuple[int, int]] = {}  # inode -> size, time of change, as synced
        self._fsync = os.fsync

    def install(self) -> None:
        """Hear of every sync of this process from now on."""
        self._kept.mkdir()
        for top in self._folders:
            for path in [top, *top.rglob("*")] if top.exists() else []:
                self._note(path)
        os.fsync = self._synced  # type: ignore[assignment]

    def cut(self, way: Way) -> None:
        """Undo what was not synced."""
        for top in self._folders:
            if top.exists():
                self._undo(top, way)

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

    def _undo(self, folder: Path, way: Way) -> None:
        names = self._names.get(folder.stat().st_ino, {})
        for path in list(folder.iterdir()):
            status = path.lstat()
            is_folder = stat.S_ISDIR(status.st_mode)
            if way == "strict" and names.get(path.name) != status.st_ino:
                shutil.rmtree(path) if is_folder else path.unlink()
            elif is_folder:
                self._undo(path, way)
            elif self._files.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                os.truncate(path, 0)
        for name, inode in names.items():
            kept, path = self._kept / str(inode), folder / name
            if way == "strict" and kept.exists() and not path.exists():
                path.hardlink_to(kept)
