"""One protocol, whatever moves the files: builds, uploads, downloads and conversions replace a dataset alike.

What is of one transport alone stands in test_upload, test_download and test_publish_remote. The old dataset
is MDS with index.bin, side files that only its card names, and more shards; the new one tar.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Protocol

import numpy as np
import pytest

from crash.power_cut import Disk, Way
from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError
from shardkit.formats import mds
from shardkit.manifest import FileInfo
from shardkit.publish import download, upload
from shardkit.publish.publication import MAX_ERRORS, run_all
from shardkit.publish.transports import Placer
from shardkit.storage.local import LocalStore
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store, StoreError
from shardkit.tools.convert import OutputOptions, convert
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, Output, facts_of
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.work import Work
from shardkit.writers.stages import publish as writers_publish
from shardkit.writers.stages.publish import RemoteOutput, find_published, finish_published, global_shards
from support.small_build import tree
from support.small_dataset import Built
from support.stores import PulledPlugError, WatchedStore, check_reader, fresh_memory, objects

WAIT_SECONDS = 30.0  # far above what any test takes
OPERATIONS = [
    (os, "link"),
    (os, "fsync"),
    (Path, "unlink"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, so that operations have an order, and index.bin from the first shard on."""
    monkeypatch.setattr("shardkit.formats.mds.index.TABLE_SHARDS", 1)
    monkeypatch.setattr(writers_publish, "_THREADS", 1)
    monkeypatch.setattr("shardkit.tools.convert.run._THREADS", 1)


@pytest.fixture
def old(tmp_path: Path) -> Built:
    sides = {"report.html": b"old", "decontamination.jsonl": b"{}\n", "annotations/part-00000.parquet": b"a"}
    return Built(tmp_path / "old-work", "mds", 4, 0, sides)


@pytest.fixture
def new(tmp_path: Path) -> Built:
    return make_new(tmp_path / "new-work", "tar")


def make_new(work: Path, kind: str) -> Built:
    sides = {"report.html": b"new", "provenance/part-00000.parquet": b"p"}
    return Built(work, kind, 3, 500, sides)


def interrupted_at(limit: int, action: Callable[[], None]) -> bool:
    """Run `action` until its operation number `limit` on the file system; whether it got there."""
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **settings: Any) -> Any:
            nonlocal done
            done += 1
            if done > limit:
                raise PulledPlugError
            return real(*arguments, **settings)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            action()
        except PulledPlugError:
            return True
    return False


class Place(Protocol):
    """Where a dataset goes, and what is there."""

    store: Store

    def put_old(self, old: Built) -> None: ...
    def interrupted_at(self, limit: int, action: Callable[[], None]) -> bool:
        """Run `action` until its operation number `limit` on the place; whether it got there."""


class Folder:
    """A folder of this machine, whose files are linked, synced, renamed and removed."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, LocalStore(path)

    def put_old(self, old: Built) -> None:
        old.publish(self.path)
        assert (self.path / "index.bin").exists()

    def interrupted_at(self, limit: int, action: Callable[[], None]) -> bool:
        return interrupted_at(limit, action)


class Bucket:
    """A store in memory."""

    def __init__(self) -> None:
        self.memory = fresh_memory()
        self.store: WatchedStore | MemoryStore = self.memory

    def put_old(self, old: Built) -> None:
        send(old, self)

    def interrupted_at(self, limit: int, action: Callable[[], None]) -> bool:
        self.store = WatchedStore(self.memory, limit=limit + 1)
        try:
            action()
        except PulledPlugError:
            return True
        finally:
            self.store = self.memory
        return False


def send(built: Built, place: Bucket, *, replace: bool = False) -> None:
    """A build to a store."""

    @contextmanager
    def reach(*_: object) -> Iterator[Store]:
        yield place.store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers_publish, "transfer_store", reach)
        built.publish(RemoteOutput(place.memory.url), replace=replace)


_LINK = os.link


def refuse_link(source: Path, target: Path, **settings: Any) -> None:
    """As between file systems: nothing of a work folder can be linked."""
    if "work" in str(source):
        raise OSError(18, "Invalid cross-device link")
    _LINK(source, target, **settings)


class Transport:
    """One way from `new`, made ready in `folder`, to a place."""

    def __init__(self, name: str, folder: Path, new: Built) -> None:
        self._name, self._new = name, new
        self._source = folder / "source"
        if name in ("upload", "upload to a folder"):
            new.publish(self._source)
        elif name == "download":
            self._bucket = Bucket()
            send(new, self._bucket)
        elif name == "convert":
            Built(folder / "source-work", "mds", 3, 700, {}).publish(self._source)

    def place(self, path: Path) -> Folder | Bucket:
        return Bucket() if self._name in ("build to a store", "upload") else Folder(path)

    def put(self, place: Folder | Bucket, *, replace: bool = False) -> None:
        if isinstance(place, Bucket) and self._name == "build to a store":
            send(self._new, place, replace=replace)
        elif isinstance(place, Bucket):
            upload(self._source, place.store, threads=1, replace=replace, progress=False)
        elif self._name == "build":
            self._new.publish(place.path, replace=replace)
        elif self._name == "build to another file system":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "link", refuse_link)
                self._new.publish(place.path, replace=replace)
        elif self._name == "upload to a folder":
            upload(self._source, place.path, threads=1, replace=replace, progress=False)
        elif self._name == "download":
            download(self._bucket.memory, place.path, threads=1, replace=replace, progress=False)
        else:
            output = OutputOptions(format="wds" if self._new.manifest.format == "tar" else "mds")
            convert(self._source, place.path, output=output, verify=False, replace=replace, progress=False)


IN_FOLDERS = ("build", "build to another file system", "upload to a folder", "download", "convert")
NAMES = (*IN_FOLDERS, "build to a store", "upload")


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest, tmp_path: Path, new: Built) -> Transport:
    return Transport(request.param, tmp_path, new)


def files(place: Folder | Bucket) -> dict[str, bytes]:
    return objects(place.store)


def expected(transport: Transport, tmp_path: Path) -> dict[str, bytes]:
    """The files of the new dataset where there was nothing."""
    fresh = transport.place(tmp_path / "fresh")
    transport.put(fresh)
    return files(fresh)


def fingerprints(*datasets: dict[str, bytes], folder: Path) -> set[str]:
    found = set()
    for number, dataset in enumerate(datasets):
        for name, data in dataset.items():
            (folder / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / str(number) / name).write_bytes(data)
        found.add(open_dataset(folder / str(number)).fingerprint)
    return found


def test_after_a_replacement_the_place_holds_exactly_the_new_dataset_and_what_was_never_ours(
    transport: Transport, tmp_path: Path, old: Built
) -> None:
    place = transport.place(tmp_path / "out")
    place.put_old(old)
    before = files(place)
    assert {"decontamination.jsonl", "annotations/part-00000.parquet"} <= before.keys()
    with pytest.raises(Exception, match="use --replace"):
        transport.put(place)
    assert files(place) == before
    place.store.put("notes/mine.txt", b"mine")
    transport.put(place, replace=True)
    assert files(place) == expected(transport, tmp_path) | {"notes/mine.txt": b"mine"}


def interrupt_everywhere(
    transport: Transport,
    tmp_path: Path,
    old: Built,
    new: Built,
    ways: Sequence[Way | None],
    limits: range = range(1000),
) -> None:
    """A replacement that ends at operations, in turn by a kill (None) and ways of power cuts."""
    goal = expected(transport, tmp_path)
    known: set[str] = set()
    for limit in limits:
        place = transport.place(tmp_path / f"out-{limit}")
        place.put_old(old)
        known = known or fingerprints(files(place), goal, folder=tmp_path / "known")
        way = ways[limit % len(ways)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", os.fsync)  # is put back at the end
            disk = None
            if way is not None and isinstance(place, Folder):
                disk = Disk([place.path, new.work], tmp_path / f"kept-{limit}")
                disk.install()
            interrupted = place.interrupted_at(limit, partial(transport.put, place, replace=True))
        if disk is not None and way is not None:
            disk.cut(way, limit)
        check_reader(place.store, known)
        if not interrupted:
            assert files(place) == goal, "the dataset was whole before the power was cut"
        transport.put(place, replace=True)
        assert files(place) == goal, f"operation {limit}, {way}"
        if not interrupted:
            break
    assert 20 < limit < 900


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_replacement_that_ends_at_any_operation_shows_no_false_index_and_is_made_good(
    tmp_path: Path, old: Built, name: str
) -> None:
    new = make_new(tmp_path / "new-work", "mds")  # whose files have the names of the old ones
    transport = Transport(name, tmp_path, new)
    # Changes of a folder are slow: one in three, others for each transport.
    limits = range(NAMES.index(name) % 3, 1000, 3) if name in IN_FOLDERS else range(1000)
    interrupt_everywhere(transport, tmp_path, old, new, (None, "some", "all", "data"), limits)


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["mds", "tar"])
@pytest.mark.parametrize("way", [None, "all", "some", "data"])
def test_every_way_to_end_at_every_operation(
    tmp_path: Path, old: Built, name: str, kind: str, way: Way | None
) -> None:
    if way is not None and name not in IN_FOLDERS:
        pytest.skip("a store has no power of its own")
    new = make_new(tmp_path / "new-work", kind)
    interrupt_everywhere(Transport(name, tmp_path, new), tmp_path, old, new, [way])


def test_shards_get_numbers_over_all_parts(tmp_path: Path) -> None:
    rows = np.zeros((4, 4), np.uint16)
    parts = []
    for part, count in enumerate((2, 0, 1)):
        folder = tmp_path / str(part)
        folder.mkdir()
        names = [f"part-{part:05d}.{n:05d}.mds" for n in range(count)]
        shards = [mds.write_rows_shard(folder, n, rows, compression="zstd:3") for n in names]
        parts.append((Artifact(folder), shards))
    named = global_shards(parts)
    assert [shard.raw.basename for _, shard in named] == [f"shard.0000{n}.mds" for n in range(3)]
    assert [shard.stored.basename for _, shard in named] == [f"shard.0000{n}.mds.zstd" for n in range(3)]
    assert all(file.path.exists() for file, _ in named)


def test_a_new_folder_holds_the_dataset_and_nothing_else(tmp_path: Path, old: Built) -> None:
    output = tmp_path / "some" / "out"
    old.publish(output)
    assert set(tree(output)) == {*old.links, *old.texts, "index.json", "index.bin"}
    assert verify(output).ok
    found = find_published(output)
    assert found is not None
    assert found.problem is None


def test_what_is_cut_short_after_its_index_is_finished_without_publishing_again(
    tmp_path: Path, old: Built
) -> None:
    new = make_new(tmp_path / "new-work", "mds")
    new.publish(tmp_path / "fresh")
    goal, finished = tree(tmp_path / "fresh"), 0
    assert "index.bin" in goal
    for limit in range(1000):
        output = tmp_path / f"out-{limit}"
        old.publish(output)
        interrupted = interrupted_at(limit, partial(new.publish, output, replace=True))
        found = find_published(output)
        contents = None if found is None else found.contents
        if contents is not None and contents.manifest.fingerprint == new.manifest.fingerprint:
            finished += 1
            finish_published(output, contents)
            assert tree(output) == goal
        if not interrupted:
            break
    assert finished > 5


def test_another_file_system_gets_the_same_files(tmp_path: Path, old: Built) -> None:
    places = [Path(place) for place in ("/dev/shm", gettempdir()) if Path(place).is_dir()]
    others = [place for place in places if place.stat().st_dev != tmp_path.stat().st_dev]
    if not others:
        pytest.skip("no second file system to write to")
    old.publish(tmp_path / "out")
    with TemporaryDirectory(dir=others[0]) as folder:
        old.publish(Path(folder) / "out")
        assert tree(Path(folder) / "out") == tree(tmp_path / "out")


def test_a_folder_of_other_files_is_refused(tmp_path: Path, old: Built) -> None:
    output = tmp_path / "home"
    output.mkdir()
    (output / "letter.txt").write_text("dear")
    for replaced in (False, True):
        with pytest.raises(BuildError, match=r"holds files that are not a dataset \(first: letter\.txt\)"):
            old.publish(output, replace=replaced)
    assert set(tree(output)) == {"letter.txt"}
    with pytest.raises(BuildError, match="is not a folder"):
        old.publish(output / "letter.txt")


def test_a_full_disk_is_said_and_made_good(
    tmp_path: Path, old: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(placer: Placer, file: FileInfo) -> None:
        raise StoreError(file.basename, "cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Placer, "place", full)
        with pytest.raises(BuildError, match=r"No space left on device.*run the same command again"):
            old.publish(tmp_path / "out")
    old.publish(tmp_path / "out")
    assert verify(tmp_path / "out").ok


def test_damage_is_looked_for_in_the_files_of_reused_tasks(tmp_path: Path) -> None:
    with Journal(Work.at(tmp_path)) as journal:
        made = Commit("pack", "a", tmp_path, "digest", facts_of({}, {"file": Output(13, "0" * 32)}))
        made = dataclasses.replace(made, folder=tmp_path / made.key)
        made.folder.mkdir(parents=True)
        (made.folder / "file").write_text("changed since")
        assert journal.remove_damaged(made) == "file"
    assert not made.folder.exists()


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_every_item_is_handled_once(threads: int) -> None:
    lock, seen = threading.Lock(), []

    def handle(item: int) -> None:
        with lock:
            seen.append(item)

    assert run_all(iter(range(200)), handle, threads) == []
    assert sorted(seen) == list(range(200))


def test_as_many_items_as_threads_are_handled_at_once() -> None:
    meeting = threading.Barrier(4, timeout=WAIT_SECONDS)

    def handle(item: int) -> None:
        meeting.wait()

    assert run_all(range(8), handle, 4) == []


def test_failures_do_not_stop_the_rest_and_are_told_with_their_items() -> None:
    done = []

    def handle(item: int) -> None:
        if item % 3 == 0:
            raise ValueError(item)
        done.append(item)

    errors = run_all(range(12), handle, 2)
    assert sorted(item for item, _ in errors) == [0, 3, 6, 9]
    assert {str(error) for _, error in errors} == {"0", "3", "6", "9"}
    assert len(done) == 8


def test_where_everything_fails_it_ends_soon() -> None:
    def handle(item: int) -> None:
        raise ValueError(item)

    threads = 4
    errors = run_all(range(10_000), handle, threads)
    assert MAX_ERRORS <= len(errors) < MAX_ERRORS + threads


def test_an_interruption_is_raised_without_waiting_for_the_other_threads() -> None:
    release, busy = threading.Event(), threading.Event()

    def handle(item: int) -> None:
        if item == 0:
            busy.set()
            assert release.wait(WAIT_SECONDS)
        else:
            assert busy.wait(WAIT_SECONDS)
            raise PulledPlugError

    try:
        with pytest.raises(PulledPlugError):
            run_all(range(100), handle, 2)
    finally:
        release.set()


def test_what_goes_wrong_with_the_items_themselves_is_raised() -> None:
    def items() -> object:
        yield 1
        raise PulledPlugError

    with pytest.raises(PulledPlugError):
        run_all(items(), lambda item: None, 2)  # type: ignore[arg-type]


def test_a_bucket_has_the_index_bin_of_a_folder_however_it_got_there(tmp_path: Path, old: Built) -> None:
    old.publish(tmp_path / "out")
    table = (tmp_path / "out" / "index.bin").read_bytes()
    built, uploaded = fresh_memory(), fresh_memory()
    old.publish(RemoteOutput(built.url))
    (tmp_path / "out" / "index.bin").unlink()
    upload(tmp_path / "out", uploaded, progress=False)
    assert built.get("index.bin") == uploaded.get("index.bin") == table
    report = download(uploaded, tmp_path / "back", progress=False)
    assert report.left == ()
    assert (tmp_path / "back" / "index.bin").read_bytes() == table
