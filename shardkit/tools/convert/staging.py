"""Where a conversion is written before it is seen: a folder inside the target, moved up file by file.

`DST/.shardkit-converting` is on the target's own file system, so publishing renames and copies nothing. The
target is locked for all of that time; what a killed conversion left there is removed by the next one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.datasets.locate import CARD_NAME
from shardkit.errors import ShardError
from shardkit.files import move_durably
from shardkit.formats.mds.index import TABLE_NAME
from shardkit.publish.api import publish_files
from shardkit.publish.contents import INDEX_NAMES, make_contents
from shardkit.publish.publication import RefusedError, Settings
from shardkit.publish.transports import LocalFiles, holds_dataset, locked_folder

__all__ = ["STAGING_NAME", "publish_staged", "refuse_target", "staging"]

STAGING_NAME = ".shardkit-converting"

_THREADS = 8


def refuse_target(target: Path, *, replace: bool) -> None:
    """RefusedError if something is there that is no dataset, or a dataset and `replace` is not set."""
    if holds_dataset(target) and not replace:
        raise RefusedError(str(target), "holds a dataset; use --replace to put the new one in its place")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty folder to write into, this process's alone; removed at the end, whatever happens."""
    with locked_folder(target):
        work = target / STAGING_NAME
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        except OSError as error:
            raise ShardError(target, f"cannot be written: {error.strerror or error}") from error
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish_staged(work: Path, target: Path, *, replace: bool) -> None:
    """Move the dataset in `work` to its place, the index last."""
    name = next(name for name in INDEX_NAMES if (work / name).exists())
    index, card = (work / name).read_bytes(), (work / CARD_NAME).read_bytes()
    table = (work / TABLE_NAME).read_bytes() if (work / TABLE_NAME).exists() else None
    contents = make_contents(str(target), name, index, card, table)
    files = LocalFiles({file.basename: work / file.basename for file in contents.files})
    publish_files(target, contents, files, Settings(_THREADS, replace=replace), place=move_durably)
