"""From a finished build to the dataset's folder, where readers may be looking at any moment.

The index is written last and atomically, and an old one is removed first, so no reader ever sees an index
whose shards are not all there. Files are hard-linked from the work folder, or copied, synced and renamed if
that is another file system. A marker names all files of a publication in progress: when it is cut short, the
next one knows what to clear away. One process at a time publishes into a folder, which a lock in it sees to,
and files are replaced one by one, each whole. Files that no dataset or build put there are never touched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import BuildError, ShardError
from shardkit.index import Manifest, ShardInfo, checked_basename, publish_bytes
from shardkit.plain_json import load_json
from shardkit.writers.execution.locks import held_file
from shardkit.writers.execution.work import fsync_path
from shardkit.writers.execution.work_files import borrowed

__all__ = [
    "ANNOTATIONS_FOLDER",
    "CARD_NAME",
    "PROVENANCE_FOLDER",
    "QUARANTINE_NAME",
    "REPORT_NAME",
    "OutputState",
    "finish_publication",
    "global_shards",
    "old_manifest",
    "output_state",
    "place",
    "publish",
    "read_card",
]

CARD_NAME = "dataset.json"
REPORT_NAME = "report.html"
QUARANTINE_NAME = "quarantine.jsonl"
PROVENANCE_FOLDER = "provenance"
ANNOTATIONS_FOLDER = "annotations"
INDEX_NAMES = ("index.json", "shards.json")
_MARKER = ".shardkit-publishing.json"
_LOCK = ".shardkit-publishing.lock"
_THREADS = 8

OutputState = Literal["empty", "unfinished", "complete"]


def output_state(output: Path) -> OutputState:
    """What lies in the output folder; BuildError if it is something else than a dataset."""
    if not output.exists():
        return "empty"
    if not output.is_dir():
        raise BuildError(f"{output}: is not a folder; choose another output")
    if any((output / name).exists() for name in INDEX_NAMES):
        return "complete"
    if (output / _MARKER).exists():
        return "unfinished"
    others = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
    if others:
        raise BuildError(
            f"{output}: holds files that are no dataset (first: {others[0]}); "
            f"choose another output, or empty it"
        )
    return "empty"


def read_card(output: Path) -> dict[str, Any] | None:
    """The card of the dataset in a folder, or None if it has none that can be read."""
    try:
        card = load_json((output / CARD_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) else None


def global_shards(parts: Iterable[tuple[Path, Sequence[ShardInfo]]]) -> list[tuple[Path, ShardInfo]]:
    """(file in the work folder, shard under its name in the dataset) of all parts' shards, in order."""
    numbers = count()
    return [
        (folder / s.stored.basename, _numbered(s, next(numbers))) for folder, shards in parts for s in shards
    ]


def _numbered(shard: ShardInfo, number: int) -> ShardInfo:
    def name(old: str) -> str:
        # part-00002.00017.mds.zstd -> shard.00051.mds.zstd, part-00002.00017.tar -> shard-00051.tar
        ending = old.split(".", 2)[2]
        return f"shard-{number:05d}.{ending}" if ending == "tar" else f"shard.{number:05d}.{ending}"

    zipped = None if shard.zip is None else replace(shard.zip, basename=name(shard.zip.basename))
    return replace(shard, raw=replace(shard.raw, basename=name(shard.raw.basename)), zip=zipped)


def publish(
    output: Path,
    manifest: Manifest,
    links: Mapping[str, Path],
    texts: Mapping[str, bytes],
    *,
    replace: bool,
    wait_seconds: float = 0.0,
) -> None:
    """Put `links` (name in the dataset -> file of the work folder) and `texts` into `output`, the index last.

    BuildError if a complete dataset is there and `replace` is not set (the very same one is well), or if
    another process is publishing there for longer than `wait_seconds`.
    """
    try:
        with _sole_publisher(output, wait_seconds):
            _publish(output, manifest, links, texts, replace=replace)
    except OSError as error:
        raise BuildError(f"{output}: cannot be written: {error}; the same command continues") from error


@contextmanager
def _sole_publisher(output: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of an output, which is in there, as machines may share the output and nothing else."""
    output_state(output)  # nothing is put where something else lies
    output.mkdir(parents=True, exist_ok=True)
    descriptor = held_file(output / _LOCK, shared=False, wait_seconds=wait_seconds)
    if descriptor is None:
        raise BuildError(f"{output}: another process publishes a dataset there; wait for it, or end it")
    try:
        yield
    finally:
        try:
            (output / _LOCK).unlink()
        finally:
            os.close(descriptor)


def _publish(
    output: Path, manifest: Manifest, links: Mapping[str, Path], texts: Mapping[str, bytes], *, replace: bool
) -> None:
    state = output_state(output)
    if state == "complete" and not replace:
        if (output / CARD_NAME).exists() and (output / CARD_NAME).read_bytes() == texts[CARD_NAME]:
            (output / _MARKER).unlink(missing_ok=True)
            return
        raise BuildError(f"{output}: holds another dataset; use --replace to put this one in its place")
    stale = _published_files(output, state)
    names = [*links, *texts, *INDEX_NAMES]
    marked = sorted({*stale, *names})
    publish_bytes(output / _MARKER, json.dumps({"files": marked}).encode())
    _clear(output, marked, keep={*links, *texts})
    for folder in {(output / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda name: _place_output(links[name], output / name), links))
    for name, text in texts.items():
        publish_bytes(output / name, text)
    for folder in {(output / name).parent for name in names}:
        fsync_path(folder)
    _write_index(output, manifest)
    (output / _MARKER).unlink(missing_ok=True)  # whoever found the dataset complete may have done that
    fsync_path(output)
    fsync_path(output.parent)  # the work folder goes next: a power cut must not take both


def finish_publication(output: Path) -> None:
    """Remove what a crash just after the index leaves: the marker, and the lock if nobody has it."""
    (output / _MARKER).unlink(missing_ok=True)
    if (output / _LOCK).exists() and (descriptor := held_file(output / _LOCK, shared=False)) is not None:
        (output / _LOCK).unlink()
        os.close(descriptor)


def _write_index(output: Path, manifest: Manifest) -> None:
    if manifest.format == "mds":
        from shardkit import mds

        mds.write_index(output, manifest.shards)
    else:
        from shardkit import tar

        tar.write_shard_list(output, manifest.shards)


def _published_files(output: Path, state: OutputState) -> set[str]:
    """Names of what an earlier or unfinished dataset put into the folder."""
    names: set[str] = set()
    if (output / _MARKER).exists():
        try:
            listed = load_json((output / _MARKER).read_bytes())["files"]
            names |= {checked_basename(name, output / _MARKER) for name in listed}
        except (ValueError, KeyError, TypeError, ShardError) as error:
            raise BuildError(f"{output / _MARKER}: cannot be read ({error}); empty the folder") from error
    if state == "complete":
        names |= {CARD_NAME, REPORT_NAME, QUARANTINE_NAME}
        names |= {shard.stored.basename for shard in old_manifest(output).shards}
        for folder in (PROVENANCE_FOLDER, ANNOTATIONS_FOLDER):
            names |= {f"{folder}/{path.name}" for path in (output / folder).glob("part-*.parquet")}
    return names


def old_manifest(output: Path) -> Manifest:
    """The manifest of the dataset in a folder; BuildError if it cannot be read."""
    from shardkit import mds, tar

    read = mds.read_index if (output / "index.json").exists() else tar.read_shard_list
    try:
        return read(output)
    except ShardError as error:
        raise BuildError(f"{error}; it cannot be replaced: empty the folder yourself") from error


def _clear(output: Path, names: Sequence[str], keep: Set[str]) -> None:
    """Remove an earlier dataset, its index first; files of names in `keep` are replaced one by one, later."""
    for name in INDEX_NAMES:
        (output / name).unlink(missing_ok=True)
    if any((output / name).exists() for name in names):
        fsync_path(output)
    for name in names:
        if name not in keep:
            (output / name).unlink(missing_ok=True)
    for folder in {(output / name).parent for name in names}:
        for path in folder.glob(".*.tmp*"):  # of a copy or a write that was cut short
            meant = (folder / path.name[1:].rsplit(".tmp", 1)[0]).relative_to(output).as_posix()
            if meant == _MARKER or meant in names:
                path.unlink(missing_ok=True)


def _place_output(source: Path, target: Path) -> None:
    with ExitStack() as stack:
        try:
            path = stack.enter_context(borrowed(source))
        except OSError as error:  # of the work folder, not of the output
            raise BuildError(f"{source}: cannot be read: {error}; the same command continues") from error
        place(path, target)


def place(source: Path, target: Path) -> None:
    """The same file under another name, or a synced copy where a file cannot have names in both folders.

    What is there is replaced in one step.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        fsync_path(temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # it stays where both were names of one file
