"""Put a dataset into a store or folder that readers may open at any moment, by steps that may stop anywhere.

    claim      a marker names the dataset that is coming, and all files that its end may remove
    index off  only with `replace`: the index of another dataset is deleted before any file of it changes
    files      what is not there, or not right, is written, several at a time
    check      the listing of the target must show every file as it was written or found
    index on   put only if there is none, so that of two different datasets at most one wins
    clean      files that only the earlier dataset named, then the marker, are deleted

So an index is only ever seen with all of its files, whatever stops this, and the same call continues. Only
the winner cleans: before its index is there, it may not know that another dataset took over. Before each
file, and after the index, a look at the marker tells whether one did; what is being put in that moment may
still land in the other's dataset (docs/limits.md), because stores have no condition for that. While the
dataset's own index is there, nothing is claimed: missing or damaged files are put again. Files that no
dataset of this place has named are never touched; one that would be overwritten is refused without `replace`.

What a store acknowledges is durable. In a folder, renames and removals are durable when the folder is synced:
this happens between all steps whose order a power cut must not change.
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

MAX_THREADS = 256  # each may hold 64 MiB, and a connection or four
MAX_MARKER_BYTES = 1 << 30  # four million names
MAX_ERRORS = 16  # enough to see whether one file or everything is wrong
_TAKEN_OVER = "the transfer of another dataset took this place over"
_NO_LINKS = (EPERM, ENOTSUP, ENOSYS, EXDEV)

T = TypeVar("T")


class RefusedError(StoreError):
    """What lies at the target, or is being written there, is not to be overwritten."""


class TransferError(ShardkitError):
    """Files of a transfer failed: `errors` has them up to a limit, the message the first and what was done.

    What was moved stays, and the same call continues with the rest.
    """

    def __init__(self, message: str, errors: tuple[Exception, ...] = ()) -> None:
        super().__init__(message)
        self.errors = errors

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.errors))


class Transport(Protocol):
    """How files get to the target. Called from many threads."""

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Whether `found`, of the right size, has the right content."""

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        """Bring those that this transport brings many at a time, and after each time say which were brought.

        As {name: what the target then has}.
        """

    def place(self, file: FileInfo) -> ObjectInfo:
        """Write the file to the target, its bytes durably, and return what the target then has."""

    def read_back(self, file: FileInfo) -> None:
        """Compare what the target holds byte for byte; ShardError."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to publish."""

    threads: int
    replace: bool = False
    dry_run: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {MAX_THREADS}, not {self.threads}")


@dataclass
class Outcome:
    """What was done, or with `dry_run` would be; filled by threads, each with its own names."""

    sent: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    foreign: int = 0


@dataclass(frozen=True)
class _Marker:
    """The claim at a target: which dataset is being put there, and the files of it or of earlier ones.

    `obsolete` are those of earlier ones only; None in a marker of an older version.
    """

    identity: str | None
    files: frozenset[str]
    obsolete: frozenset[str] | None

    def leaves(self, contents: Contents) -> frozenset[str]:
        """Return the names to delete once the index of `contents`, which claimed the place, is there."""
        return self.files - contents.names if self.obsolete is None else self.obsolete


class Publication:
    """One dataset on its way into `target`."""

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
        self._claim_version: str | None = None  # of the marker; "": not known; None: nothing is claimed
        self._outcome = Outcome()
        self._right: set[str] = set()

    def run(self) -> Outcome:
        """All steps. TransferError if files failed; RefusedError if something else lies at the target."""
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
            self._check_claim()  # only the winner cleans
        _clean(self._target, outcome.deleted, has_marker=claims or marker is not None)
        return outcome

    def _old_datasets(self) -> list[Contents] | None:
        """Return the datasets indexed there. If one cannot be read, None with `replace`, or RefusedError."""
        try:
            return find_contents(self._target, strict=False)
        except ShardError as error:
            if not self._settings.replace:
                raise RefusedError(
                    self._target.url, f"holds an index that cannot be read ({error}); use --replace"
                ) from error
            return None  # it is deleted all the same; what it named stays where it is not overwritten

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
        """Nobody says that a transfer put these files here: they may stay only if they are the right ones."""

        def check(file: FileInfo) -> None:
            if self._is_there(file, listing):
                self._right.add(file.basename)
            elif file.basename in listing.found:
                raise RefusedError(
                    f"{self._target.url}/{file.basename}",
                    "is there with another content; use --replace to overwrite it",
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
        """Put the marker, then take away the old index; RefusedError if another dataset came first."""
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
                        self._target.url, "another dataset is being put here; choose another target"
                    ) from None
        if self._settings.replace:
            for name in INDEX_NAMES:
                self._target.delete(name)
            _settle(self._target)
        elif not index_seen and any(head_if_any(self._target, name) for name in INDEX_NAMES):
            self._target.delete(MARKER_NAME)
            raise RefusedError(self._target.url, "another transfer finished this moment; run this one again")
        self._claim_version = ""
        self._check_claim()  # learns it

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
            raise StoreError(where, f"has {placed.bytes:,} bytes, {file.bytes:,} were sent")
        self._versions[name] = placed.version
        self._outcome.sent[name] = file.bytes

    def _each(
        self, files: Sequence[FileInfo], counter: FileCounter, action: Callable[[FileInfo], bool | None]
    ) -> None:
        """`action`, which may return whether bytes were moved, on every file; TransferError."""
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
            done = f"{len(outcome.sent):,} files were sent and {len(outcome.skipped):,} were there"
            raise TransferError(
                f"{failed}{errors[0][1]}; {done}; the same command continues",
                tuple(error for _, error in errors),
            )

    def _check(self) -> None:
        """The listing of the target must show every file as it was written or found."""
        after = Listing.of(self._target, self._contents.names)
        for file in self._contents.files:
            info = after.find(self._target, file.basename)
            where = f"{self._target.url}/{file.basename}"
            if info is None:
                raise TransferError(f"{where}: was removed during the transfer; run it again")
            if (info.bytes, info.version) != (file.bytes, self._versions[file.basename]):
                raise TransferError(f"{where}: was changed by another during the transfer; run it again")

    def _check_claim(self) -> None:
        """RefusedError if a transfer of another dataset has taken the place that this one has claimed."""
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
            self._accept_same_index("another dataset came first")

    def _accept_same_index(self, problem: str) -> None:
        """Losing the race to a transfer of the same dataset is fine."""
        there = find_contents(self._target, strict=False)
        if len(there) != 1 or not there[0].is_same(self._contents):
            raise RefusedError(self._target.url, f"{problem}; no index was put, run that transfer again")


def finish_publication(target: Store, contents: Contents) -> None:
    """Finish a publication of `contents` that was cut short after its index, if there is one."""
    marker = _read_marker(target)
    if marker is not None and marker.identity == contents.identity:
        _clean(target, sorted(marker.leaves(contents)), has_marker=True)


def run_all(items: Iterable[T], action: Callable[[T], None], threads: int) -> list[tuple[T, Exception]]:
    """Call `action` on every item in `threads` threads; return the items that failed, with their errors.

    Memory is for a few items only. After `MAX_ERRORS` failures nothing new is started. An interruption (any
    exception that is no `Exception`) stops the rest, too, and is raised at once: the threads are daemons and
    end with the item they are at.
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
            interruption = ended.get()  # each action is bounded by the store's own deadlines
            if interruption is not None:
                raise interruption
    finally:
        stop.set()
    return errors


def _put_first(target: Store, name: str, data: bytes) -> None:
    """Put a file only if there is none of that name; ObjectExistsError."""
    metadata = {METADATA_NAME: content_hash(data)} if name in INDEX_NAMES else None
    try:
        target.put(name, data, if_absent=True, metadata=metadata)
    except StoreError as error:
        # A folder decides it by a hard link. Where its file system has none, its lock has to do.
        has_no_links = isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_LINKS
        if not (isinstance(target, LocalStore) and has_no_links):
            raise
        if head_if_any(target, name):
            raise ObjectExistsError(f"{target.url}/{name}", "is there already") from error
        target.put(name, data)


def _clean(target: Store, names: Iterable[str], *, has_marker: bool) -> None:
    """Delete what only the earlier dataset named, then the marker, which lists these names until then."""
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
    """Make durable what happened to the files of these names in a folder, and to those right below it."""
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
        raise StoreError(where, f"cannot be read ({error}); remove it if you trust this place") from error
