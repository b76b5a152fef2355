"""Dedup indexes of Arrow files and the parts that `sign_documents` wrote for them, without a build."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.hashing import digest_of
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.index import DedupIndex, index_settings
from shardkit.writers.dedup.signatures import bands_and_rows
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.index_build import publish_index, publish_to_store
from shardkit.writers.index_files import (
    INDEX,
    INDEX_TABLES,
    IndexPart,
    IndexTables,
    StoreTarget,
    index_part,
    index_tables,
)
from support.task_folders import TaskFolders, commit_folder

Files = list[tuple[Path, Any]]  # the folder of each task, and what it returned
NOTHING = np.zeros(0, np.int64)


def write_files(
    folder: Path,
    splits: Sequence[tuple[Path, Path, npt.NDArray[np.int64]]],
    config: NearDedupConfig,
    sketch: int,
) -> tuple[list[tuple[Path, IndexPart]], list[tuple[Path, IndexTables]]]:
    """(parts, tables) of an index; `splits` are (Arrow file, part folder, removed rows)."""
    parts, commits = list[tuple[Path, IndexPart]](), list[Commit]()
    for number, (documents, part, removed) in enumerate(splits):
        place = folder / f"indexed-{number}"
        place.mkdir(parents=True)
        made = index_part(Artifact(documents), Artifact(part), removed, config.minhash, sketch, place)
        parts.append((place, made))
        commits.append(commit_folder(place, "index", f"{number:05d}", INDEX.recorded(made)))
    tables = index_tables(TaskFolders(folder / "tables"), commits, bands_and_rows(config)[0])
    return parts, [(one.folder, INDEX_TABLES.result(one)) for one in tables.values()]


def make_index(
    folder: Path,
    splits: Sequence[tuple[Path, Path, npt.NDArray[np.int64]]],
    config: NearDedupConfig,
    sketch: int,
    *,
    made_from: Mapping[str, Any] | None = None,
    work: Path | None = None,
    replace: bool = False,
) -> DedupIndex:
    """The index folder/index."""
    files = write_files(work or folder / "index-work", splits, config, sketch)
    settings = index_settings(config)
    return publish_index(*files, folder / "index", made_from or {}, settings, sketch=sketch, replace=replace)


def put_index(
    files: tuple[Files, Files], url: str, config: NearDedupConfig, *, replace: bool = False
) -> DedupIndex:
    """The index at a URL, put there as tasks and a build do it; `files` are those of `write_files`."""
    target, named = StoreTarget(url), list[dict[str, Any]]()
    for kind, folders in zip(("part", "table"), files, strict=True):
        found: dict[str, Any] = {}
        for number, (folder, made) in enumerate(folders):
            name = f"{kind}-{digest_of([number, made.files])[:32]}"
            sent = folder.with_name(f"{folder.name}-sent")
            shutil.copytree(folder, sent, dirs_exist_ok=True)
            target.put(name, sent, made.files)
            assert not {path.name for path in sent.iterdir()} & made.files.keys()
            found[name] = made
        named.append(found)
    parts, tables = named
    settings = index_settings(config)
    return publish_to_store(parts, tables, target, {}, settings, sketch=64, replace=replace)
