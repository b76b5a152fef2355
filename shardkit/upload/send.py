"""`upload`: a dataset's folder to a store.

A file is read and compared with the hash that index or card states before it is sent, so damage stays at
home; a file that changes meanwhile is an error. Each object carries the xxh3-128 of its bytes as metadata:
the next run compares that instead of sending again. A store that keeps no metadata is read instead.

Tars without a list get one: loaders cannot count the samples of tars that they have not fetched. It states
sizes, counts and hashes, and lies only at the target.

Memory: at most 64 MiB (four parts) for each file on its way to S3, half a gigabyte with 8 threads.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_changes
from pathlib import Path

from shardkit.errors import ShardError
from shardkit.hashing import hash_bytes, hash_file, new_hash
from shardkit.index import FileInfo, ShardInfo
from shardkit.locate import CARD_NAME
from shardkit.storage.local import LocalStore
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, Store
from shardkit.storage.url import is_remote, local_path
from shardkit.upload.contents import (
    CONTENT_HASH,
    METADATA_NAME,
    Contents,
    Listing,
    check_files,
    checkable_hash,
    find_contents,
    make_contents,
)
from shardkit.upload.progress import Listener, listen
from shardkit.upload.publication import Publication, Settings
from shardkit.upload.report import TransferReport, make_report
from shardkit.upload.stores import transfer_store

__all__ = ["Sender", "upload"]

_LIST_HASHES = ("xxh64",)
_READ_BYTES = 1 << 20


def upload(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | Store,
    *,
    storage: StorageOptions | None = None,
    threads: int = 8,
    replace: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    progress: bool | Listener = True,
) -> TransferReport:
    """Send the dataset in the folder `source` to a URL or store; what is there already is not sent again.

    Every file is compared with its index while it is read. `threads` files travel at a time. Another dataset
    at the target is refused unless `replace`; `verify` reads everything back before the index is put;
    `dry_run` only tells what would be done. Raises ShardError (nothing to send, or damaged: nothing is sent),
    StoreError, TransferError; after any of them, or an interruption, the same call goes on.
    """
    if is_remote(source):
        raise ShardError(source, "is not on this machine: shardkit upload sends a folder; download it first")
    start = time.monotonic()
    folder = local_path(source)
    contents, listing = _contents_of(folder, threads)
    settings = Settings(threads, replace=replace, dry_run=dry_run, verify=verify)
    with transfer_store(target, storage) as store, listen(progress) as listener:
        sender = Sender(store, {file.basename: folder / file.basename for file in contents.files})
        if contents.card_bytes is not None:
            sender.data[CARD_NAME] = contents.card_bytes  # the very bytes that were checked
        outcome = Publication(store, contents, sender, settings, listener).run()
        return make_report(
            contents, listing, outcome, settings, target=store.url, seconds=time.monotonic() - start
        )


class Sender:
    """Files of this machine, or bytes, into a store. `data` maps names in the dataset to them.

    `digests` are their xxh3-128, of those that were read.
    """

    def __init__(self, target: Store, data: dict[str, Path | bytes]) -> None:
        self.data = data
        self.digests: dict[str, str] = {}
        self._target = target

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Whether the object's metadata, or its bytes if it has none, have the file's xxh3-128."""
        digest = self._digest(file)
        try:
            info = self._target.head(file.basename)
            if info.bytes != file.bytes or info.version != found.version:
                return False
            kept = info.metadata.get(METADATA_NAME)
            return (self._hash_of_object(file) if kept is None else kept) == digest
        except ObjectNotFoundError:
            return False

    def place(self, file: FileInfo) -> ObjectInfo:
        """Send a file; ShardError if it is damaged or changes meanwhile."""
        data = self.data[file.basename]
        before = _state(data)
        digest = self._digest(file)
        info = self._target.put(file.basename, data, metadata={METADATA_NAME: digest})
        if _state(data) != before:
            self._target.delete(file.basename)
            raise ShardError(str(data), "changed while it was sent; run the upload again")
        return info

    def read_back(self, file: FileInfo) -> None:
        """Compare the object's bytes with the file's hash."""
        if (got := self._hash_of_object(file)) != (digest := self._digest(file)):
            where = f"{self._target.url}/{file.basename}"
            raise ShardError(where, f"{CONTENT_HASH} {got}, {digest} was sent; run the upload again")

    def finish(self) -> None:
        """Each put is durable by itself."""

    def _digest(self, file: FileInfo) -> str:
        """The file's xxh3-128, after the stated hash has been compared."""
        name, data = file.basename, self.data[file.basename]
        if name not in self.digests:
            stated = checkable_hash(file)
            names = {CONTENT_HASH, *([stated] if stated else ())}
            hashes = hash_bytes(data, names) if isinstance(data, bytes) else hash_file(data, names)
            if stated and hashes[stated] != file.hashes[stated]:
                raise ShardError(
                    name if isinstance(data, bytes) else data,
                    f"is damaged, and was not sent: {stated} {hashes[stated]}, "
                    f"stated is {file.hashes[stated]}",
                )
            self.digests[name] = hashes[CONTENT_HASH]
        return self.digests[name]

    def _hash_of_object(self, file: FileInfo) -> str:
        hasher, buffer = new_hash(CONTENT_HASH), memoryview(bytearray(_READ_BYTES))
        with self._target.open(file.basename) as body:
            while count := body.readinto(buffer):
                hasher.update(buffer[:count])
        return hasher.hexdigest()


def _state(data: Path | bytes) -> tuple[int, int, int] | None:
    """What changes when a file is written to or replaced."""
    if isinstance(data, bytes):
        return None
    try:
        status = data.stat()
    except OSError as error:
        raise ShardError(data, f"cannot be read: {error.strerror or error}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _contents_of(folder: Path, threads: int) -> tuple[Contents, Listing]:
    if not folder.is_dir():
        raise ShardError(folder, "there is no such folder; name the folder that holds the dataset")
    store = LocalStore(folder)
    found = find_contents(store)
    if len(found) > 1:
        raise ShardError(folder, "has both index.json and shards.json; remove the one that is not meant")
    return check_files(store, found[0] if found else _listed_tars(folder, threads))


def _listed_tars(folder: Path, threads: int) -> Contents:
    """The dataset that a folder of tars without a list is."""
    from shardkit import tar
    from shardkit.tar.shard_list import LIST_NAME

    if (folder / CARD_NAME).exists() or (folder / "provenance").is_dir():
        raise ShardError(folder, "is an unfinished build: it has no index yet; run the build again")
    shards = tar.scan_folder(folder)
    if not shards:
        raise ShardError(
            folder, f"holds no dataset: looked for index.json (MDS), {LIST_NAME} and *.tar files"
        )

    def hashed(shard: ShardInfo) -> ShardInfo:
        stored = shard.stored
        stored = with_changes(stored, hashes=hash_file(folder / stored.basename, _LIST_HASHES))
        return with_changes(shard, raw=stored) if shard.zip is None else with_changes(shard, zip=stored)

    with ThreadPoolExecutor(threads) as pool:
        listed = list(pool.map(hashed, shards))
    return make_contents(str(folder), LIST_NAME, tar.shard_list_bytes(listed), None)
