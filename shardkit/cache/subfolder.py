"""The sub-folder of a cache folder, where shards, indexes and what scans found lie, and who may write there.

Whoever can write in a cache can put wrong data into it, so one that other users can write is refused.
FOLDER must belong to this user or root, and only they may write there, or FOLDER's group: giving it write
permission is how users share a cache (they also need umask 002). FOLDER may be one like /tmp, where everybody
writes and nobody can replace what others made. The sub-folders must be real folders, not writable by
everybody, and belong to this user or root, or to a member of the group. Folders that FOLDER lies in are not
looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardkit.cache.protocol import CacheFolderError
from shardkit.files import LACKING, who_else_writes

__all__ = ["NO_ROOM", "SUBFOLDER", "explain_errors", "make_subfolders"]

SUBFOLDER = "shardkit-cache-1"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk without bytes or inodes, of a quota or a limit: what it cannot keep is used anyway."""


@contextlib.contextmanager
def explain_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError of the block as a CacheFolderError that names the cache folder."""
    try:
        yield
    except OSError as error:
        problem = f"the cache folder cannot be used: {error.strerror or error}; give another cache_dir"
        if error.errno in LACKING:
            problem += ", on a local disk: this file system lacks a call that a cache needs (flock, mmap)"
        raise CacheFolderError(f"{folder}: {problem}") from error


def make_subfolders(folder: Path, names: Iterable[str]) -> None:
    """Make the sub-folders of a cache; CacheFolderError if others than those it is for can write there."""
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
