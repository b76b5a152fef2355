"""Where a conversion is written before it is seen: a folder inside the target, moved up file by file.

`DST/.shardkit-converting` is on the target's own file system, so publishing renames and copies nothing. It is
locked by its process; what a killed conversion left there is removed by the next one. Files get their names
by the steps of an upload (`shardkit.upload.publication`): a marker first, the index last, and with `replace`
the old index goes before any file changes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardkit.errors import ShardError
from shardkit.index import FileInfo
from shardkit.locate import CARD_NAME
from shardkit.mds.index_table import TABLE_NAME
from shardkit.storage.local import LocalStore
from shardkit.storage.store import ObjectInfo
from shardkit.upload.contents import INDEX_NAMES, MARKER_NAME, Contents, make_contents
from shardkit.upload.publication import Publication, Settings

__all__ = ["STAGING_NAME", "check_target", "publish", "staging"]

STAGING_NAME = ".shardkit-converting"
_THREADS = 8


def check_target(target: Path, *, replace: bool) -> None:
    """ShardError unless a dataset may be put here: nothing there, or something that may be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ShardError(target, "is not a folder; choose another target")
    names = {path.name for path in target.iterdir()} - {STAGING_NAME}
    if names & {*INDEX_NAMES}:
        if not replace:
            raise ShardError(target, "holds a dataset; use --replace to put the new one in its place")
    elif names and MARKER_NAME not in names:
        first = min(names)
        raise ShardError(target, f"holds files that are no dataset (first: {first}); choose another target")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty folder to write into, this process's alone; removed at the end, whatever happens."""
    folder = target / STAGING_NAME
    made = not target.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ShardError(target, f"cannot be written: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardError(target, "another conversion is writing here; wait for it") from None
        except OSError:
            pass  # some network file systems cannot lock a folder
        work = folder / "dataset"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if made:
                with suppress(OSError):  # holds the dataset by now, unless the conversion failed
                    target.rmdir()
    finally:
        os.close(descriptor)


def publish(work: Path, target: Path, *, replace: bool) -> Contents:
    """Move the dataset in `work` to its place, the index last."""
    name = next(name for name in INDEX_NAMES if (work / name).exists())
    card = (work / CARD_NAME).read_bytes()
    contents = make_contents(str(target), name, (work / name).read_bytes(), card)
    mover = _Mover(work, target)
    settings = Settings(_THREADS, replace=replace)
    Publication(LocalStore(target), contents, mover, settings, lambda report: None).run()
    return contents


class _Mover:
    """Files from the staging folder to the target, by name."""

    def __init__(self, work: Path, target: Path) -> None:
        self._work, self._target, self._store = work, target, LocalStore(target)

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """What is there is another dataset's, or of a conversion that was cut short: the new one is moved."""
        return False

    def place(self, file: FileInfo) -> ObjectInfo:
        """Make the file durable, then give it its name."""
        source, target = self._work / file.basename, self._target / file.basename
        try:
            _sync(source)
            source.rename(target)
        except OSError as error:
            raise ShardError(target, f"cannot be written: {error.strerror or error}") from error
        return self._store.head(file.basename)

    def read_back(self, file: FileInfo) -> None:
        """The conversion itself has read everything back."""

    def finish(self) -> None:
        """Make the names durable, and put the compact index of a large dataset beside."""
        table = self._work / TABLE_NAME
        if table.exists():
            _sync(table)
            table.rename(self._target / TABLE_NAME)
        else:
            (self._target / TABLE_NAME).unlink(missing_ok=True)
        _sync(self._target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
