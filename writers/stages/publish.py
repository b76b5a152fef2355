"""Publishes a finished build to a folder or a store, by one protocol (`shardkit.publish`).

Files are hard-linked from the work folder into an output folder, or copied if that is on another file system;
to a store they are sent directly from the work folder. Objects and files have the same bytes. An interrupted
publication is continued by the next run of the same build, as long as its work folder exists; another
dataset, finished or not, is only replaced with --replace.

If the work folder is in a store, too, tasks of stage `upload` send the files, on all machines of the build,
once the output is claimed; but not to the Hugging Face Hub, where many files are one commit. A store that has
both the work folder and the output copies the objects itself, one request per file: no byte of a shard
passes a machine of the build. An object of the work folder is copied if its metadata has the hash in the
commit; otherwise, or if the store refuses, the file is read, verified and sent. Stage `pack` could write to
the output directly; but then the numbers of shards would have to be known before, and `--replace` would
remove the old dataset hours, not minutes, before the new one is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated

from shardkit.card import CARD_NAME, FILES_NAME
from shardkit.errors import BuildError, ShardError, ShardkitError
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.progress import Listener, TransferListener, TransferProgress
from shardkit.publish.api import publish_files
from shardkit.publish.contents import (
    INDEX_NAMES,
    MARKER_NAME,
    Contents,
    check_files,
    find_contents,
    head_if_any,
    index_files,
    make_contents,
)
from shardkit.publish.publication import (
    Publication,
    RefusedError,
    Settings,
    TransferError,
    finish_publication,
    run_all,
)
from shardkit.publish.repository_card import write_repository_card
from shardkit.publish.transports import (
    LocalFiles,
    Sender,
    clear_leftovers,
    holds_dataset,
    leftovers,
    locked_folder,
    sender_to,
    transfer_store,
)
from shardkit.storage.local import LocalStore
from shardkit.storage.store import (
    METADATA_NAME,
    ObjectInfo,
    StorageOptions,
    Store,
    StoreError,
    TransientError,
    commits_of,
    copier_of,
)
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.execution.work import Work

REPORT_NAME = "report.html"
_PREFIXES = {"tar": "shard-", "parquet": "text-", "jsonl": "text-"}  # prefixes of shard names, by ending
_PREFIXES |= dict.fromkeys(("bin", "npy", "ds"), "tokens-")  # as `TRAINER_FORMATS` name them
_THREADS = 8
_TASK_THREADS = 4  # each thread may hold 64 MiB
_TASK_FILES = 64
_TASK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RemoteOutput:
    """A dataset's URL in a store, with the options for its storage."""

    url: str
    storage: Annotated[StorageOptions | None, DecidesNoByte("how the URL is reached")] = None

    def __str__(self) -> str:
        return self.url

    @property
    def work_name(self) -> str:
        """The name of the default work folder: the last part of the URL with ".work"."""
        return self.url.rpartition("/")[2] + ".work"


@dataclass(frozen=True, slots=True)
class PublishedDataset:
    """A dataset found at an output: its contents if the index is readable, and what is wrong with it."""

    contents: Contents | None
    problem: str | None


def find_published(output: Path | RemoteOutput) -> PublishedDataset | None:
    """Return the dataset at `output`, or None. Raises BuildError for foreign files or if reading fails."""
    try:
        if isinstance(output, Path) and not holds_dataset(output):
            return None
        with _store_of(output) as store:
            next(iter(store.list()), None)  # fail now, not after the build, if the bucket does not exist
            return _published_in(store)
    except ShardkitError as error:
        raise BuildError(f"output {error}") from error


def _published_in(store: Store) -> PublishedDataset | None:
    try:
        found = find_contents(store, strict=False)
    except ShardError as error:
        return PublishedDataset(None, str(error))
    if not found:
        return None
    try:
        check_files(store, found[0])
    except ShardError as error:
        return PublishedDataset(found[0], error.problem)
    return PublishedDataset(found[0], "with two indexes" if len(found) > 1 else None)


def finish_published(output: Path | RemoteOutput, contents: Contents) -> None:
    """Complete a publication of `contents` that was interrupted just after its index was written."""
    try:
        if isinstance(output, RemoteOutput):
            with transfer_store(output.url, output.storage) as store:
                finish_publication(store, contents)
        elif (output / MARKER_NAME).exists() or leftovers(output):
            with locked_folder(output):
                clear_leftovers(output)
                finish_publication(LocalStore(output), contents)
    except RefusedError:
        pass  # another process is completing it
    except (ShardkitError, OSError) as error:
        raise BuildError(f"output {error}") from error


def global_shards(
    parts: Iterable[tuple[Artifact, Sequence[ShardInfo]]], *, prefixes: int | None = None
) -> list[tuple[Artifact, ShardInfo]]:
    """Return (file in the work folder, shard with its final name) of all parts' shards, in order.

    With `prefixes`, consecutive shards are distributed over this many folders.
    """
    numbers = count()
    return [
        (folder / s.stored.basename, _numbered(s, next(numbers), prefixes))
        for folder, shards in parts
        for s in shards
    ]


def _numbered(shard: ShardInfo, number: int, prefixes: int | None) -> ShardInfo:
    folder = "" if prefixes is None else f"{number % prefixes:0{len(f'{prefixes - 1:x}')}x}/"

    def name(old: str) -> str:
        # part-00002.00017.mds.zstd -> shard.00051.mds.zstd, part-00002.00017.tar -> shard-00051.tar
        ending = old.split(".", 2)[2]
        kind = ending.partition(".")[0]
        return f"{folder}{_PREFIXES.get(kind, 'shard.')}{number:05d}.{ending}"

    zipped = None if shard.zip is None else replace(shard.zip, basename=name(shard.zip.basename))
    return replace(shard, raw=replace(shard.raw, basename=name(shard.raw.basename)), zip=zipped)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The result of a task of stage `upload`: (bytes, version) of its objects in the output, by name."""

    objects: dict[str, tuple[int, str]]


class TaskSender(Sender):
    """Sends files of the work folder by tasks of the build, and index, card and report from this process."""

    def __init__(
        self,
        target: Store,
        output: RemoteOutput,
        links: Mapping[str, Artifact],
        files: LocalFiles,
        run: RunTasks,
    ) -> None:
        super().__init__(target, files)
        self._output, self._links, self._run = output, links, run

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        """Send files by new tasks; earlier tasks are not reused, as their objects may have been deleted."""
        this_time = os.urandom(8).hex()
        tasks = []
        for number, group in enumerate(_groups([file for file in files if file.basename in self._links])):
            sent = [(file, self._links[file.basename]) for file in group]
            size = sum(file.bytes for file in group)
            tasks.append(UPLOAD.task(f"{number:06d}", size, self._output, sent, this_time))
        [commits] = self._run(tasks)
        objects = (item for commit in commits for item in UPLOAD.result(commit).objects.items())
        yield {name: ObjectInfo(name, size, version) for name, (size, version) in objects}


def _groups(files: Iterable[FileInfo]) -> Iterator[list[FileInfo]]:
    """Yield the files in order, in groups of up to 64 files or about 1 GiB; one task sends one group."""
    group: list[FileInfo] = []
    for file in files:
        group.append(file)
        if len(group) == _TASK_FILES or sum(one.bytes for one in group) >= _TASK_BYTES:
            yield group
            group = []
    if group:
        yield group


def upload_files(
    folder: Path,
    output: RemoteOutput,
    files: Annotated[Sequence[tuple[FileInfo, Artifact]], DecidesNoByte("each `attempt` is a new task")],
    attempt: str,
) -> Uploaded:
    """Send the files that are missing or wrong in `output`. Writes nothing into `folder`."""
    objects: dict[str, tuple[int, str]] = {}
    with transfer_store(output.url, output.storage) as store:
        artifacts = {file.basename: artifact for file, artifact in files}
        sender = Sender(store, LocalFiles(artifacts))

        def send(file: FileInfo) -> None:
            info = head_if_any(store, file.basename)
            if info is None or info.bytes != file.bytes or not sender.is_there(file, info):
                info = _copy(store, file, artifacts[file.basename]) or sender.place(file)
            objects[file.basename] = info.bytes, info.version

        if errors := run_all([file for file, _ in files], send, _TASK_THREADS):
            raise errors[0][1]
    return Uploaded(dict(sorted(objects.items())))


def _copy(target: Store, file: FileInfo, artifact: Artifact) -> ObjectInfo | None:
    """Have the store copy a file of the work folder; return None if it cannot, or the file is damaged."""
    copier, work = copier_of(target), artifact.remote
    if copier is None or not isinstance(work, Work) or not copier.copies(work.store, file.bytes):
        return None
    try:
        info = work.store.head(work.key_of(artifact.path))
        is_intact = info.bytes == file.bytes
        is_intact &= info.metadata.get(METADATA_NAME) == work.content_of(artifact.path)
        return copier.copy(file.basename, work.store, info) if is_intact else None
    except TransientError:
        raise
    except StoreError:  # such as a server without copies: sending tells what else is wrong
        return None


UPLOAD = Stage("upload", "write", upload_files, cost=2)


def publish(
    output: Path | RemoteOutput,
    manifest: Manifest,
    links: Mapping[str, Artifact],
    texts: Mapping[str, bytes],
    *,
    replace: bool,
    run: RunTasks | None = None,
    listener: Listener[StageProgress] | None = None,
) -> None:
    """Write `links` (name in the dataset -> file of the work folder) and `texts` to `output`, the index last.

    With `run`, tasks send the files if both the work folder and the output are in a store. Raises BuildError
    if another dataset is there and `replace` is not set, if another process writes into the folder, or if
    the output refuses the files.
    """
    tables = index_files(manifest)
    [index_name] = tables.keys() & {*INDEX_NAMES}
    index = tables.pop(index_name)
    listed = texts.get(FILES_NAME)
    contents = make_contents(
        str(output), index_name, index, texts[CARD_NAME], *tables.values(), listed=listed
    )
    data: dict[str, Artifact | bytes] = {**links, **texts, **tables}
    assert contents.names == data.keys()
    files = LocalFiles(data)
    settings = Settings(_THREADS, replace=replace)
    try:
        if isinstance(output, Path):
            holds_dataset(output)  # write nothing next to foreign files, not even a lock
            with locked_folder(output):
                publish_files(output, contents, files, settings)
        else:
            with transfer_store(output.url, output.storage) as store:
                sender = sender_to(store, files)
                one_process = commits_of(store) is not None  # the Hub: all files are one commit
                if run is not None and not one_process and all(file.remote for file in links.values()):
                    sender = TaskSender(store, output, links, files, run)
                Publication(store, contents, sender, settings, _heard_by(listener)).run()
                write_repository_card(store, contents)
    except (RefusedError, TransferError) as error:
        raise BuildError(f"output {error}") from error
    except (ShardkitError, OSError) as error:
        raise BuildError(f"output {error}; run the same command again to continue the build") from error


def _heard_by(listener: Listener[StageProgress] | None) -> TransferListener:
    def hear(progress: TransferProgress) -> None:
        files = progress.files_done, progress.files
        if listener is not None:
            listener(
                StageProgress("publish", *files, 0, 0, progress.bytes_moved, progress.seconds, step="write")
            )

    return hear


@contextmanager
def _store_of(output: Path | RemoteOutput) -> Iterator[Store]:
    if isinstance(output, Path):
        yield LocalStore(output)
    else:
        with transfer_store(output.url, output.storage) as store:
            yield store
