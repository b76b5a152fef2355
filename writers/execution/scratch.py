"""The scratch folder of a machine for a work folder in a store: a cache, and the place where tasks write.

    <scratch>/work-<id>/<task key>/        records, and files that were fetched
    <scratch>/work-<id>/unfinished/        temporary folders of running tasks, and downloads in flight
    <scratch>/work-<id>/lock               shared lock of every process that uses the folder

The folder is private to the user, although it may be in /tmp. A process that starts while no other process
uses the folder removes leftovers of killed processes, and scratch folders of removed work folders.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import xxhash

from shardkit.errors import BuildError
from shardkit.files import who_else_writes
from shardkit.locks import held_file

UNFINISHED = "unfinished"

_NAME = "work-"
_LOCK = "lock"
_CLEARING_SECONDS = 30.0  # how long to wait while another process removes leftovers under an exclusive lock
_TRIES = 3
_locks: dict[Path, int] = {}  # descriptors that this process holds until it ends


def default_scratch(url: str) -> Path:
    """Return a folder per user and work folder, below the system's temporary folder ($TMPDIR)."""
    name = xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())
    return Path(tempfile.gettempdir()) / f"shardkit-{os.getuid()}" / name


def folder_of(scratch: Path, id: str) -> Path:
    """Return the scratch folder of the work folder with this id."""
    return scratch / f"{_NAME}{id}"


def prepare(folder: Path) -> None:
    """Create the folder and hold its lock until this process ends.

    Raises BuildError if the folder cannot be used, or is not private to this user.
    """
    if folder in _locks and folder.is_dir():
        return
    try:
        if folder in _locks:  # the folder was removed after it was locked
            os.close(_locks.pop(folder))
        _make_private(folder)
        for _ in range(_TRIES):
            descriptor = _hold(folder)
            if descriptor is not None:
                _locks[folder] = descriptor
                return
    except OSError as error:
        raise BuildError(f"{folder}: cannot be used as scratch folder: {error.strerror or error}") from error
    raise BuildError(f"{folder}: is locked by another process; set another `scratch` folder")


def _hold(folder: Path) -> int | None:
    try:
        alone = held_file(folder / _LOCK, shared=False)
        if alone is not None:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            _remove_others(folder)
            os.close(alone)
        return held_file(folder / _LOCK, shared=True, wait_seconds=_CLEARING_SECONDS)
    except FileNotFoundError:  # another process removed the folder meanwhile
        _make_private(folder)
        return None


def _make_private(folder: Path) -> None:
    """Create a folder that is private to this user. In the default place, its parent is private too."""
    shared = Path(tempfile.gettempdir())
    own = [path for path in (*folder.parents, folder) if path.is_relative_to(shared) and path != shared]
    for path in own if folder.is_relative_to(shared) else [folder]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    for path in (folder, *(path for path in own if path.name == f"shardkit-{os.getuid()}")):
        if (reason := who_else_writes(path)) is not None:
            raise BuildError(f"{path}: {reason}; remove it, or set another `scratch` folder")


def _remove_others(folder: Path) -> None:
    """Remove sibling folders that no process has locked: their work folders no longer exist."""
    for other in folder.parent.glob(f"{_NAME}*"):
        if other == folder or not (other / _LOCK).is_file():
            continue
        descriptor = held_file(other / _LOCK, shared=False)
        if descriptor is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(descriptor)
