"""Write a dataset to a store or folder that readers may open at any moment; any step may be interrupted.

    claim      a marker names the dataset that is coming, and all files that may be deleted at the end
    index off  only with `replace`: the index of another dataset is deleted before any of its files changes
    files      missing and wrong files are written, several at a time
    check      the listing of the target must show every file as it was written or found
    index on   written only if there is none, so that of two different datasets at most one wins
    clean      files that only the earlier dataset named, then the marker, are deleted

So an index is only ever visible with all of its files, even after an interruption, and the same call resumes.
Only the winner cleans: before its index is written, a transfer may not know that another dataset took over.
The marker is checked before each file and after the index, to detect another transfer; a file that is being
written at that moment may still end up in the other's dataset (docs/limits.md), because stores have no
conditional write for that. If the dataset's own index is already there, there is no claim: missing or damaged
files are written again. Files that no dataset at the target has named are never deleted, and overwriting one
requires `replace`.

A write that a store acknowledges is durable. In a folder, renames and removals are durable once the folder is
synced, which happens between all steps whose order must survive a power cut.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from errno import ENOSYS, ENOTSUP, EPERM, EXDEV
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

from shardkit.card import CARD_NAME
from shardkit.errors import ShardError, ShardkitError
from shardkit.files import fsync_path, load_json
from shardkit.formats.mds.index import TABLE_NAME
from shardkit.manifest import FileInfo, checked_basename
from shardkit.progress import FileCounter, TransferListener
from shardkit.publish.contents import (
    INDEX_NAMES,
    MARKER_NAME,
    Contents,
    Listing,
    content_hash,
    find_contents,
    head_if_any,
)
from shardkit.storage.local import LocalStore
from shardkit.storage.store import (
    METADATA_NAME,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    Store,
    StoreError,
    commits_of,
)

MAX_THREADS = 256  # limit of `threads`; each thread may use 64 MiB and four connections
MAX_MARKER_BYTES = 1 << 30  # maximum size of a marker, which names up to four million files
MAX_ERRORS = 16  # a transfer stops after this many failed files
_TAKEN_OVER = "the transfer of another dataset took over this target"
_NO_LINKS = (EPERM, ENOTSUP, ENOSYS, EXDEV)

T = TypeVar("T")


class RefusedError(StoreError):
    """The target has, or is receiving, files that may not be overwritten."""


class TransferError(ShardkitError):
    """Files of a transfer failed. `errors` has up to MAX_ERRORS errors; the message quotes the first one.

    Transferred files stay at the target, and the same call continues with the rest.
    """

    def __init__(self, message: str, errors: tuple[Exception, ...] = ()) -> None:
        super().__init__(message)
        self.errors = errors

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.errors))


class Transport(Protocol):
    """Moves files to the target. Methods are called from many threads."""

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Return whether the target's object `found`, whose size is right, has the file's content."""

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        """Write files in groups if the transport supports that; yield {name: object} of each written group.

        Files that are not yielded are written one at a time by `place`.
        """

    def place(self, file: FileInfo) -> ObjectInfo:
        """Write the file durably to the target, and return the target's object."""

    def read_back(self, file: FileInfo) -> None:
        """Read the target's object back. Raises ShardError if it is not the file's content."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a publication."""

    threads: int
    replace: bool = False
    dry_run: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {MAX_THREADS}, not {self.threads}")


@dataclass
class Outcome:
    """The files sent, or planned with `dry_run`; `sent` and `skipped` are {file name: bytes}.

    Threads fill it without a lock, because no two of them handle the same file.
    """

    sent: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    foreign: int = 0


@dataclass(frozen=True)
class _Marker:
    """The claim at a target: the dataset that is being written, and the files of it and of earlier datasets.

    `obsolete` names the files that only earlier datasets have; None in a marker of an older version.
    """

    identity: str | None
    files: frozenset[str]
    obsolete: frozenset[str] | None

    def leaves(self, contents: Contents) -> frozenset[str]:
        """Return the names of files to delete once the index of `contents`, which made this claim, exists."""
        return self.files - contents.names if self.obsolete is None else self.obsolete


class Publication:
    """The publication of one dataset into `target`."""

    def __init__(
        self,
        target: Store,
        contents: Contents,
        transport: Transport,
        settings: Settings,
        listener: TransferListener,
    ) -> None:
        self._target, self._contents, self._transport = target, contents, transport
        self._settings, self._listener = settings, listener
        self._versions: dict[str, str] = {}
        self._claim_version: str | None = None  # version of the marker; "": unknown; None: no claim
        self._outcome = Outcome()
        self._right: set[str] = set()

    def run(self) -> Outcome:
        """Run all steps. Raises TransferError if files failed, RefusedError if the target has other files."""
        contents, settings, outcome = self._contents, self._settings, self._outcome
        marker = _read_marker(self._target)
        old = self._old_datasets()
        foreign_marker = marker is not None and marker.identity != contents.identity
        complete = old is not None and len(old) == 1 and old[0].is_same(contents) and not foreign_marker
        if not complete:
            self._refuse_others(old_index=bool(old), foreign_marker=foreign_marker)
        named = set(marker.files if marker else ())
        if old is None:
            named |= {CARD_NAME, TABLE_NAME}
        named.update(*(dataset.owned for dataset in old or ()))
        obsolete: Set[str] = named - contents.names
        if complete:
            obsolete = marker.leaves(contents) if marker else frozenset()
        listing = Listing.of(self._target, contents.names | named)
        outcome.foreign = listing.other_count
        outcome.deleted = tuple(sorted(obsolete & listing.found.keys()))
        if not complete and marker is None and not settings.replace:
            self._refuse_unclaimed(listing)
        claims = not complete and not settings.dry_run
        if claims:
            self._claim(marker, named, index_seen=bool(old))
        self._move(listing)
        if settings.dry_run:
            return outcome
        if settings.verify:
            counter = FileCounter(self._listener, "verify", len(contents.files), contents.bytes)
            self._each(contents.files, counter, self._transport.read_back)
        if claims or outcome.sent:
            _settle(self._target, contents.names)
            self._check()
        if claims:
            self._put_index()
            self._check_claim()  # raises if another transfer won, because only the winner may delete files
        _clean(self._target, outcome.deleted, has_marker=claims or marker is not None)
        return outcome

    def _old_datasets(self) -> list[Contents] | None:
        """Return the datasets at the target. If an index is invalid, return None if `replace`, else raise."""
        try:
            return find_contents(self._target, strict=False)
        except ShardError as error:
            if not self._settings.replace:
                raise RefusedError(
                    self._target.url, f"holds an index that cannot be read ({error}); use --replace"
                ) from error
            return None  # the invalid index will be deleted; files that it named stay unless overwritten

    def _refuse_others(self, *, old_index: bool, foreign_marker: bool) -> None:
        if self._settings.replace:
            return
        if foreign_marker:
            raise RefusedError(
                self._target.url,
                f"holds an unfinished transfer of another dataset ({MARKER_NAME}): finish that one, or use "
                f"--replace to put this one in its place",
            )
        if old_index:
            raise RefusedError(
                self._target.url, "holds another dataset; use --replace to put this one in its place"
            )

    def _refuse_unclaimed(self, listing: Listing) -> None:
        """Refuse to overwrite files of an unknown origin: existing files must have the right content."""

        def check(file: FileInfo) -> None:
            if self._is_there(file, listing):
                self._right.add(file.basename)
            elif file.basename in listing.found:
                raise RefusedError(
                    f"{self._target.url}/{file.basename}",
                    "exists with other content; use --replace to overwrite it",
                )

        errors = run_all(self._contents.files, check, self._settings.threads)
        if errors:
            raise errors[0][1]

    def _is_there(self, file: FileInfo, listing: Listing) -> bool:
        found = listing.found.get(file.basename)
        if found is None or found.bytes != file.bytes:
            return False
        return file.basename in self._right or self._transport.is_there(file, found)

    def _claim(self, marker: _Marker | None, named: set[str], *, index_seen: bool) -> None:
        """Write the marker, then delete the old index. Raises RefusedError if another dataset came first."""
        names = self._contents.names
        if marker is None or marker.identity != self._contents.identity or not named <= marker.files:
            claim = {"files": sorted(names | named), "obsolete": sorted(named - names)}
            text = json.dumps({"dataset": self._contents.identity, **claim})
            try:
                if self._settings.replace:
                    self._target.put(MARKER_NAME, text.encode())
                else:
                    _put_first(self._target, MARKER_NAME, text.encode())
            except ObjectExistsError:
                other = _read_marker(self._target)
                if other is None or other.identity != self._contents.identity:
                    raise RefusedError(
                        self._target.url, "another dataset is being written here; choose another target"
                    ) from None
        if self._settings.replace:
            for name in INDEX_NAMES:
                self._target.delete(name)
            _settle(self._target)
        elif not index_seen and any(head_if_any(self._target, name) for name in INDEX_NAMES):
            self._target.delete(MARKER_NAME)
            raise RefusedError(self._target.url, "another transfer has just finished; run this one again")
        self._claim_version = ""
        self._check_claim()  # sets `_claim_version` to the marker's version

    def _move(self, listing: Listing) -> None:
        outcome, transport, dry_run = self._outcome, self._transport, self._settings.dry_run
        files = {file.basename: file for file in self._contents.files}
        counter = FileCounter(self._listener, "files", len(files), self._contents.bytes)
        for placed in () if dry_run else transport.place_together(self._contents.files):
            for name, info in placed.items():
                file = files.pop(name)
                self._placed(file, info)
                counter.add(file.bytes, moved=True)

        def handle(file: FileInfo) -> bool:
            name = file.basename
            if self._is_there(file, listing):
                outcome.skipped[name] = file.bytes
                self._versions[name] = listing.found[name].version
                return False
            if dry_run:
                outcome.sent[name] = file.bytes
            else:
                self._check_claim()
                self._placed(file, transport.place(file))
            return True

        self._each(list(files.values()), counter, handle)

    def _placed(self, file: FileInfo, placed: ObjectInfo) -> None:
        name = file.basename
        if placed.bytes != file.bytes:
            where = f"{self._target.url}/{name}"
            raise StoreError(where, f"has {placed.bytes:,} bytes, but {file.bytes:,} were sent")
        self._versions[name] = placed.version
        self._outcome.sent[name] = file.bytes

    def _each(
        self, files: Sequence[FileInfo], counter: FileCounter, action: Callable[[FileInfo], bool | None]
    ) -> None:
        """Run `action` on every file; it returns False if it moved no bytes. Raises TransferError."""
        outcome, count = self._outcome, len(self._contents.files)
        errors = run_all(
            files,
            lambda file: counter.add(file.bytes, moved=action(file) is not False),
            self._settings.threads,
        )
        for _, error in errors:
            if isinstance(error, RefusedError):
                raise error
        if errors:
            failed = f"{len(errors):,} of {count:,} files failed, " if len(errors) > 1 else ""
            done = f"{len(outcome.sent):,} files were sent, and {len(outcome.skipped):,} were there before"
            raise TransferError(
                f"{failed}{errors[0][1]}; {done}; run the same command again to continue",
                tuple(error for _, error in errors),
            )

    def _check(self) -> None:
        """Check that the target lists every file as it was written or found. Raises TransferError."""
        after = Listing.of(self._target, self._contents.names)
        for file in self._contents.files:
            info = after.find(self._target, file.basename)
            where = f"{self._target.url}/{file.basename}"
            if info is None:
                raise TransferError(f"{where}: was removed during the transfer; run it again")
            if (info.bytes, info.version) != (file.bytes, self._versions[file.basename]):
                raise TransferError(f"{where}: was changed by others during the transfer; run it again")

    def _check_claim(self) -> None:
        """Raise RefusedError if a transfer of another dataset has replaced this one's claim."""
        if self._claim_version is None:
            return
        info = head_if_any(self._target, MARKER_NAME)
        if info is not None and info.version == self._claim_version:
            return
        marker = _read_marker(self._target)
        if marker is None:  # another transfer of this dataset may have finished
            self._accept_same_index(_TAKEN_OVER)
        elif marker.identity != self._contents.identity:
            raise RefusedError(self._target.url, f"{_TAKEN_OVER}; run that transfer again")
        else:
            self._claim_version = "" if info is None else info.version

    def _put_index(self) -> None:
        contents = self._contents
        marker = _read_marker(self._target)
        if marker is None or marker.identity != contents.identity:
            self._accept_same_index(_TAKEN_OVER)
            return
        try:
            _put_first(self._target, contents.index_name, contents.index)
        except ObjectExistsError:
            self._accept_same_index("another dataset was published first")

    def _accept_same_index(self, problem: str) -> None:
        """Accept that another transfer has published the same dataset. Raises RefusedError otherwise."""
        there = find_contents(self._target, strict=False)
        if len(there) != 1 or not there[0].is_same(self._contents):
            raise RefusedError(self._target.url, f"{problem}; no index was written: run that transfer again")


def finish_publication(target: Store, contents: Contents) -> None:
    """Delete the obsolete files and the marker of a publication that was interrupted after its index.

    Does nothing if the target has no marker of `contents`.
    """
    marker = _read_marker(target)
    if marker is not None and marker.identity == contents.identity:
        _clean(target, sorted(marker.leaves(contents)), has_marker=True)


def run_all(items: Iterable[T], action: Callable[[T], None], threads: int) -> list[tuple[T, Exception]]:
    """Call `action` on every item in `threads` threads; return the items that failed, with their errors.

    `items` may be a long iterator: few items are in memory at a time. After `MAX_ERRORS` failures no more
    items are started. An interruption (an exception that is not an `Exception`) also stops the rest and is
    raised at once: the threads are daemons and end after their current item.
    """
    remaining = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[tuple[T, Exception]] = []
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        interruption: BaseException | None = None
        try:
            while not stop.is_set():
                with lock:
                    item = next(remaining, stop)
                if item is stop:
                    break
                try:
                    action(item)  # type: ignore[arg-type]
                except Exception as error:
                    with lock:
                        errors.append((item, error))  # type: ignore[arg-type]
                        if len(errors) >= MAX_ERRORS:
                            stop.set()
        except BaseException as error:
            interruption = error
        ended.put(interruption)

    workers = [
        threading.Thread(target=work, name=f"shardkit-transfer-{n}", daemon=True) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            interruption = ended.get()  # needs no timeout: the store's deadlines limit each action
            if interruption is not None:
                raise interruption
    finally:
        stop.set()
    return errors


def _put_first(target: Store, name: str, data: bytes) -> None:
    """Write a file that must not exist. Raises ObjectExistsError if it does."""
    metadata = {METADATA_NAME: content_hash(data)} if name in INDEX_NAMES else None
    try:
        target.put(name, data, if_absent=True, metadata=metadata)
    except StoreError as error:
        # In a folder, `if_absent` needs a hard link. If the file system has none, checking first is enough,
        # because the folder's lock excludes other writers.
        has_no_links = isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_LINKS
        if not (isinstance(target, LocalStore) and has_no_links):
            raise
        if head_if_any(target, name):
            raise ObjectExistsError(f"{target.url}/{name}", "already exists") from error
        target.put(name, data)


def _clean(target: Store, names: Iterable[str], *, has_marker: bool) -> None:
    """Delete files of earlier datasets, and the marker last: after an interruption, it still lists them."""
    names = list(names)
    if (commits := commits_of(target)) is not None:
        if names or has_marker:
            commits.commit({}, [*names, *([MARKER_NAME] if has_marker else [])])
        return
    for name in names:
        target.delete(name)
    if names:
        _settle(target, names)
    if has_marker:
        target.delete(MARKER_NAME)
        _settle(target)


def _settle(target: Store, names: Iterable[str] = ()) -> None:
    """If the target is a folder, sync it and the folders of the files `names` to make changes durable."""
    if isinstance(target, LocalStore):
        top = Path(target.url)
        folders = {parent for name in names for parent in (top / name).parents}
        for folder in sorted({top, *(folder for folder in folders if folder.is_relative_to(top))}):
            try:
                fsync_path(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(str(folder), f"cannot be written: {error.strerror or error}") from error


def _read_marker(target: Store) -> _Marker | None:
    where = f"{target.url}/{MARKER_NAME}"
    try:
        if target.head(MARKER_NAME).bytes > MAX_MARKER_BYTES:
            raise StoreError(where, "is too large to be a marker; remove it")
        content = load_json(target.get(MARKER_NAME))
        files = frozenset(checked_basename(name, where) for name in content["files"])
        files -= {*INDEX_NAMES, MARKER_NAME}
        obsolete = files.intersection(content["obsolete"]) if "obsolete" in content else None
        return _Marker(content.get("dataset"), files, obsolete)
    except ObjectNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, ShardError) as error:
        raise StoreError(
            where,
            f"is not a valid marker of an unfinished transfer ({error}); if no other transfer is writing to "
            "this target, delete the marker and run the command again",
        ) from error
