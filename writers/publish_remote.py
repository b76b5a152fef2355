"""From a finished build to a bucket, by the steps of an upload: nothing is written to the local disk again.

Files go straight from the work folder, under their names in the dataset; the index comes last. The objects
are the very bytes that a local output would have. A publication that is cut short is gone on with by the next
run of the same build, which has its work folder still; another dataset is only replaced when told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError, ShardError, ShardkitError
from shardkit.index import FileInfo, Manifest
from shardkit.storage.store import ObjectInfo, StorageOptions, Store
from shardkit.upload.contents import Contents, check_files, find_contents, make_contents
from shardkit.upload.progress import TransferProgress
from shardkit.upload.publication import Publication, Settings, finish_publication
from shardkit.upload.send import Sender
from shardkit.upload.stores import transfer_store
from shardkit.writers.execution.work_files import borrowed, content_of
from shardkit.writers.progress import Listener, StageProgress
from shardkit.writers.publish import CARD_NAME

__all__ = ["RemoteDataset", "RemoteOutput", "find_remote_dataset", "finish_remote", "publish_remote"]

_THREADS = 8


@dataclass(frozen=True, slots=True)
class RemoteOutput:
    """Where a dataset goes that is not to lie on this machine."""

    url: str
    storage: StorageOptions | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def work_name(self) -> str:
        """The name of the default work folder: the last part of the URL tells datasets apart."""
        return self.url.rpartition("/")[2] + ".work"


@dataclass(frozen=True, slots=True)
class RemoteDataset:
    """What lies at a remote output: its card, and what is wrong with it if anything is."""

    contents: Contents
    problem: str | None

    @property
    def card(self) -> dict[str, Any] | None:
        return None if self.contents.card is None else dict(self.contents.card)


def find_remote_dataset(output: RemoteOutput) -> RemoteDataset | None:
    """The dataset that is there, or None; BuildError if the place cannot be reached or read."""
    try:
        with transfer_store(output.url, output.storage) as store:
            next(iter(store.list()), None)  # a bucket that is not there is better known before the work
            found = find_contents(store, strict=False)
            if not found:
                return None
            try:
                check_files(store, found[0])
            except ShardError as error:
                return RemoteDataset(found[0], error.problem)
            return RemoteDataset(found[0], "with two indexes" if len(found) > 1 else None)
    except ShardkitError as error:
        raise BuildError(f"output {output}: {error}") from error


def finish_remote(output: RemoteOutput, dataset: RemoteDataset) -> None:
    """Do what a publication that was cut short just after its index had left to do."""
    try:
        with transfer_store(output.url, output.storage) as store:
            finish_publication(store, dataset.contents)
    except ShardkitError as error:
        raise BuildError(f"output {output}: {error}") from error


def publish_remote(
    output: RemoteOutput,
    manifest: Manifest,
    links: Mapping[str, Path],
    texts: Mapping[str, bytes],
    *,
    replace: bool,
    listener: Listener,
) -> None:
    """Put `links` (name in the dataset -> file of the work folder) and `texts` to `output`, the index last.

    BuildError if another dataset is there and `replace` is not set, or if the store fails.
    """
    name, index = _index(manifest)
    contents = make_contents(output.url, name, index, texts[CARD_NAME])
    assert contents.names == links.keys() | texts.keys()
    settings = Settings(_THREADS, replace=replace)

    def hear(progress: TransferProgress) -> None:
        files = progress.files_done, progress.files
        listener(StageProgress("upload", *files, 0, 0, progress.bytes_moved, progress.seconds))

    try:
        with transfer_store(output.url, output.storage) as store:
            Publication(store, contents, _Borrower(store, links, texts), settings, hear).run()
    except ShardkitError as error:
        raise BuildError(f"output: {error}") from error


class _Borrower:
    """A `Sender` of outputs of tasks: those that lie in a store come to this machine one by one."""

    def __init__(self, store: Store, links: Mapping[str, Path], texts: Mapping[str, bytes]) -> None:
        self._links = links
        self._sender = Sender(store, {**links, **texts})

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        if (path := self._links.get(file.basename)) and (digest := content_of(path)):
            self._sender.digests.setdefault(file.basename, digest)  # its bytes are compared as they come
        return self._sender.is_there(file, found)

    def place(self, file: FileInfo) -> ObjectInfo:
        path = self._links.get(file.basename)
        if path is None:
            return self._sender.place(file)
        try:
            with borrowed(path) as here:
                self._sender.data[file.basename] = here
                return self._sender.place(file)
        except OSError as error:
            where = error.filename or path  # the object's URL, if the work folder is in a store
            raise ShardError(str(where), f"cannot be read: {error.strerror or error}") from error

    def read_back(self, file: FileInfo) -> None:
        self._sender.read_back(file)

    def finish(self) -> None:
        self._sender.finish()


def _index(manifest: Manifest) -> tuple[str, bytes]:
    if manifest.format == "mds":
        from shardkit import mds

        return "index.json", mds.index_bytes(manifest.shards)
    from shardkit import tar

    return "shards.json", tar.shard_list_bytes(manifest.shards)
