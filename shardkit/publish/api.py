"""`upload` sends a dataset to a store, `download` fetches one, `publish_files` fills a local folder.

A folder of tars without a list gets one when it is uploaded, because loaders cannot count the samples of tars
that they have not fetched. The list contains sizes, counts and hashes, and is written only at the target.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from shardkit.card import CARD_NAME
from shardkit.datasets.row_costs import tables_among
from shardkit.display import Described, Facts, counted
from shardkit.errors import ShardError
from shardkit.files import link_or_copy, not_for_everyone, publish_bytes
from shardkit.formats.mds.index import TABLE_NAME, table_bytes
from shardkit.hashing import hash_file
from shardkit.hints import answers_keywords
from shardkit.manifest import FileInfo, ShardInfo
from shardkit.progress import TransferListener, make_listener
from shardkit.publish.contents import (
    Contents,
    Listing,
    check_files,
    find_only_contents,
    make_contents,
    with_files,
    with_table,
)
from shardkit.publish.publication import Outcome, Publication, Settings
from shardkit.publish.repository_card import write_repository_card
from shardkit.publish.transports import (
    LocalFiles,
    Placer,
    Receiver,
    clear_leftovers,
    holds_dataset,
    locked_folder,
    sender_to,
    transfer_store,
)
from shardkit.storage.local import LocalStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StorageOptions, Store, StoreError
from shardkit.storage.url import is_remote, local_path
from shardkit.synonyms import TRANSFER
from shardkit.units import format_bytes

_SPARE_BYTES = 64 << 20  # disk space to leave free for the index and for other programs
_LIST_HASHES = ("xxh64",)


@dataclass(frozen=True, slots=True, repr=False)
class TransferReport(Described):
    """The result of a transfer, or with `dry_run` of one that was only planned.

    `sent` files were written to the target, `skipped` files were already there, and `deleted` files belonged
    only to an earlier dataset. `left` names files at the source that are not part of its dataset, at most
    1,000 of `left_count`; `foreign` counts such objects at the target.
    """

    source: str
    target: str
    fingerprint: str
    files: int
    bytes: int
    sent: tuple[str, ...]
    sent_bytes: int
    skipped: int
    skipped_bytes: int
    deleted: tuple[str, ...]
    left: tuple[str, ...]
    left_count: int
    foreign: int
    verified: bool
    dry_run: bool
    seconds: float

    @property
    def up_to_date(self) -> bool:
        """Whether the target already had the dataset, so that nothing was sent or deleted."""
        return not self.sent and not self.deleted

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"up_to_date": self.up_to_date, "seconds": round(self.seconds, 3)}

    def describe(self) -> tuple[str, Facts]:
        """Return the location of the dataset as a title, and facts about the files that were moved."""
        moved = f"{counted(len(self.sent), 'file')}, {format_bytes(self.sent_bytes)}"
        facts = [
            ("from", self.source),
            ("files", f"{self.files:,}, {format_bytes(self.bytes)}"),
            ("to write" if self.dry_run else "written", "nothing" if self.up_to_date else moved),
            ("there before", f"{counted(self.skipped, 'file')}, {format_bytes(self.skipped_bytes)}"),
        ]
        if self.deleted:
            facts.append(("to delete" if self.dry_run else "deleted", counted(len(self.deleted), "file")))
        if self.verified:
            facts.append(("verified", "every file was read back and has the right hash"))
        return f"Dataset {self.target}", [*facts, ("fingerprint", self.fingerprint)]


@answers_keywords(TRANSFER)
def upload(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | Store,
    *,
    storage: StorageOptions | None = None,
    threads: int = 8,
    replace: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    progress: bool | TransferListener = True,
) -> TransferReport:
    """Send the dataset in the folder `source` to a URL or store; files that are already there are skipped.

    Every file is compared with the hash in its index while it is read, `threads` files at a time. If the
    target has another dataset, the upload is refused unless `replace`. `verify` reads everything back before
    the index is written; `dry_run` only reports what would be done. Raises ShardError (there is no dataset,
    or it is damaged: nothing is sent), StoreError or TransferError; after an error or interruption, the same
    call resumes.
    """
    if is_remote(source):
        raise ShardError(source, "is not on this machine: shardkit upload sends a folder; download it first")
    start = time.monotonic()
    folder = local_path(source)
    contents, listing = _with_row_costs(*_contents_to_send(folder, threads), LocalStore(folder))
    settings = Settings(threads, replace=replace, dry_run=dry_run, verify=verify)
    data: dict[str, Path | bytes] = {file.basename: folder / file.basename for file in contents.files}
    if contents.card_bytes is not None:
        data[CARD_NAME] = contents.card_bytes  # the bytes that were checked, even if the file changes now
    if (table := _index_table(contents)) is not None:
        contents, data[TABLE_NAME] = with_table(contents, table), table
    with (
        transfer_store(target, storage) as store,
        make_listener(progress) as listener,
        locked_folder(Path(store.url)) if isinstance(store, LocalStore) and not dry_run else nullcontext(),
    ):
        outcome = Publication(store, contents, sender_to(store, LocalFiles(data)), settings, listener).run()
        if not dry_run:
            write_repository_card(store, contents)
        return _report(contents, listing, outcome, settings, store.url, start)


@answers_keywords(TRANSFER)
@not_for_everyone()
def download(
    source: str | os.PathLike[str] | Store,
    folder: str | os.PathLike[str],
    *,
    storage: StorageOptions | None = None,
    threads: int = 8,
    replace: bool = False,
    dry_run: bool = False,
    progress: bool | TransferListener = True,
) -> TransferReport:
    """Fetch the dataset at a URL or in a store into `folder`, which then holds the same files.

    Every file is compared with the hash in its index, `threads` files at a time. A folder that holds another
    dataset, or other files of the same names, is refused unless `replace`; `dry_run` only reports what would
    be done. Raises ShardError, StoreError or TransferError; after an error, the same call resumes.
    """
    if is_remote(folder):
        raise StoreError(str(folder), "is not on this machine: shardkit download fills a local folder")
    start = time.monotonic()
    path = local_path(folder)
    if path.exists() and not path.is_dir():
        raise StoreError(str(path), "is not a folder; choose another")
    with transfer_store(source, storage) as opened, make_listener(progress) as listener:
        store = opened.pinned() if isinstance(opened, ResilientStore) else opened
        found = find_only_contents(store)
        if found is None:
            problem = (
                "holds no complete dataset: there is neither index.json nor shards.json; give its folder"
            )
            raise ShardError(store.url, problem)
        contents, listing = _with_row_costs(*check_files(store, found), store)
        settings = Settings(threads, replace=replace, dry_run=dry_run)
        target = LocalStore(path)
        with nullcontext() if dry_run else locked_folder(path):
            _check_space(path, target, contents)
            if not dry_run:
                clear_leftovers(path)
            outcome = Publication(target, contents, Receiver(store, path), settings, listener).run()
            if not dry_run and (table := _index_table(contents)) is not None:
                publish_bytes(path / TABLE_NAME, table)  # may come last: it records which index it describes
        return _report(contents, listing, outcome, settings, str(path), start)


def publish_files(
    folder: Path,
    contents: Contents,
    files: LocalFiles,
    settings: Settings,
    *,
    place: Callable[[Path, Path], None] = link_or_copy,
) -> Outcome:
    """Publish `contents`, whose `files` are on this machine, in a folder that `locked_folder` has locked.

    Raises RefusedError if the folder holds files that are not a dataset, or another dataset and
    `settings.replace` is not set.
    """
    holds_dataset(folder)
    clear_leftovers(folder)
    placer = Placer(folder, files, place)
    return Publication(LocalStore(folder), contents, placer, settings, lambda report: None).run()


def _report(
    contents: Contents, listing: Listing, outcome: Outcome, settings: Settings, target: str, start: float
) -> TransferReport:
    """Return the report of a transfer that began at `start`; `listing` is the listing of the source."""
    return TransferReport(
        source=contents.where,
        target=target,
        fingerprint=contents.manifest.fingerprint,
        files=len(contents.files),
        bytes=contents.bytes,
        sent=tuple(sorted(outcome.sent)),
        sent_bytes=sum(outcome.sent.values()),
        skipped=len(outcome.skipped),
        skipped_bytes=sum(outcome.skipped.values()),
        deleted=outcome.deleted,
        left=listing.others,
        left_count=listing.other_count,
        foreign=outcome.foreign,
        verified=settings.verify and not settings.dry_run,
        dry_run=settings.dry_run,
        seconds=time.monotonic() - start,
    )


def _contents_to_send(folder: Path, threads: int) -> tuple[Contents, Listing]:
    if not folder.is_dir():
        raise ShardError(folder, "there is no such folder; name the folder that holds the dataset")
    store = LocalStore(folder)
    return check_files(store, find_only_contents(store) or _listed_tars(folder, threads))


def _with_row_costs(contents: Contents, listing: Listing, store: Store) -> tuple[Contents, Listing]:
    """Move the dataset's tables of row costs from `listing.others` to `contents.files`."""
    names = tables_among(listing.others, contents.manifest.fingerprint)
    tables = [FileInfo(name, store.head(name).bytes) for name in names]
    others = tuple(name for name in listing.others if name not in names)
    count = listing.other_count - len(names)
    return with_files(contents, tables), with_changes(listing, others=others, other_count=count)


def _listed_tars(folder: Path, threads: int) -> Contents:
    """Read all tars of a folder that has no shards.json; return them as a dataset with a new shards.json."""
    from shardkit.formats import tar
    from shardkit.formats.tar.shard_list import LIST_NAME

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


def _index_table(contents: Contents) -> bytes | None:
    """Return the bytes of index.bin, made from the index of a large MDS dataset; None for other datasets."""
    manifest = contents.manifest
    return table_bytes(manifest.shards, contents.index, manifest.blocks) if manifest.format == "mds" else None


def _check_space(folder: Path, target: LocalStore, contents: Contents) -> None:
    """Raise StoreError if the disk does not have enough space for the files to fetch."""
    there = {info.key: info.bytes for info in target.list()}
    needed = sum(max(0, file.bytes - there.get(file.basename, 0)) for file in contents.files)
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed + _SPARE_BYTES > free:
        problem = f"the files need {format_bytes(needed)}, but the disk has only {format_bytes(free)} free"
        raise StoreError(str(folder), f"{problem}; choose another folder")
