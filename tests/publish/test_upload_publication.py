"""Publication into a store: killed at any operation it leaves no false index, and the same call goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardkit.publish import TransferError, TransferReport, upload
from shardkit.publish.contents import MARKER_NAME
from shardkit.publish.publication import RefusedError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import StoreError
from support.small_dataset import files_of, make_dataset
from support.stores import PulledPlugError, WatchedStore, check_reader, fresh_memory, objects


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "out"
    make_dataset(folder, shards=4)
    return folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "out"
    make_dataset(folder, shards=3, first=1000)
    return folder


Watch = Callable[[int], None]


def send(
    source: Path, store: WatchedStore | MemoryStore, *, replace: bool = False, threads: int = 1
) -> TransferReport:
    return upload(source, store, threads=threads, replace=replace, progress=False)


def killed_at(
    limit: int,
    memory: MemoryStore,
    source: Path,
    *,
    late: bool,
    watch: Watch,
    threads: int,
) -> list[str] | None:
    """What a killed upload had put, or None if it came to its end."""
    store = WatchedStore(memory, limit=limit, late=late, watch=watch)
    try:
        send(source, store, threads=threads)
    except PulledPlugError:
        return store.puts
    return None


def reader(memory: MemoryStore, *folders: Path) -> Watch:
    """Looks at `memory` after every operation."""
    prints = {send(folder, fresh_memory()).fingerprint for folder in folders}
    return lambda number: check_reader(memory, prints)


def operations_of(source: Path) -> int:
    """How many operations an undisturbed upload makes."""
    store = WatchedStore(fresh_memory())
    send(source, store)
    return store.operations


def data_files(puts: list[str]) -> list[str]:
    return sorted(name for name in puts if name != MARKER_NAME)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("late", "threads"), [(False, 1), (True, 1), (True, 5)], ids=["before", "after", "after-5-threads"]
)
def test_an_upload_killed_at_any_operation_leaves_no_false_index_and_sends_only_what_is_missing(
    old: Path, late: bool, threads: int
) -> None:
    expected = files_of(old)
    counts: set[int] = set()
    for limit in range(1, 1000):
        memory = fresh_memory()
        watch = reader(memory, old)
        puts = killed_at(limit, memory, old, late=late, watch=watch, threads=threads)
        again = WatchedStore(memory, watch=watch)
        send(old, again)
        assert objects(memory) == expected
        if puts is None:
            break
        assert data_files(puts + again.puts) == sorted(expected), f"{limit}: a file was sent twice, or never"
        counts.add(len(data_files(again.puts)))
    assert limit > 15
    every = set(range(len(expected) + 1))
    # Threads that end at the same time pass over a count.
    assert counts == every if threads == 1 else {0, len(expected)} <= counts <= every


def test_a_replacement_that_was_killed_after_its_claim_goes_on_without_being_told_again(
    old: Path, new: Path
) -> None:
    prints = {send(folder, fresh_memory()).fingerprint for folder in (old, new)}
    memory = fresh_memory()
    send(old, memory)
    limit = 1
    while "index.json" in objects(memory):
        with pytest.raises(PulledPlugError):
            send(new, WatchedStore(memory, limit=limit), replace=True)
        limit += 1
    send(new, memory)
    check_reader(memory, prints)
    assert objects(memory) == files_of(new)


def test_another_dataset_is_refused_at_every_stage_of_the_first_one(old: Path, new: Path) -> None:
    for limit in range(1, 1000):
        memory = fresh_memory()
        try:
            send(old, WatchedStore(memory, limit=limit))
            killed = False
        except PulledPlugError:
            killed = True
        before = objects(memory)
        if before:
            with pytest.raises(StoreError, match="use --replace"):
                send(new, memory)
            assert objects(memory) == before
        send(new, memory, replace=True)
        assert objects(memory) == files_of(new)
        if not killed:
            return


class Intruder:
    """Sends `source` into `memory` just after operation `moment` of somebody else, and looks as a reader."""

    def __init__(self, memory: MemoryStore, source: Path, moment: int, look: Watch) -> None:
        self._memory, self._source, self._moment, self._look = memory, source, moment, look
        self.replace = False
        self.error: Exception | None = None

    def __call__(self, number: int) -> None:
        if number == self._moment:
            try:
                send(self._source, self._memory, replace=self.replace)
            except StoreError as error:
                self.error = error
        self._look(number)


def first_and(intruder: Intruder, memory: MemoryStore, source: Path) -> Exception | None:
    """The error of an upload that `intruder` comes into."""
    try:
        send(source, WatchedStore(memory, watch=intruder))
    except (StoreError, TransferError) as error:
        return error
    return None


def test_of_two_datasets_that_come_at_once_one_wins_and_is_whole(old: Path, new: Path) -> None:
    winners = set()
    for moment in range(1, operations_of(old) + 1):
        memory = fresh_memory()
        intruder = Intruder(memory, new, moment, reader(memory, old, new))
        error = first_and(intruder, memory, old)
        assert (error is None) != (intruder.error is None), f"{moment}: {error}, {intruder.error}"
        winner = old if error is None else new
        assert objects(memory) == files_of(winner), moment
        winners.add(winner)
    assert winners == {old, new}


def test_the_same_dataset_from_two_sides_at_once_is_no_quarrel(old: Path) -> None:
    for moment in range(1, operations_of(old) + 1):
        memory = fresh_memory()
        intruder = Intruder(memory, old, moment, reader(memory, old))
        error = first_and(intruder, memory, old)
        assert error is None or "run" in str(error)
        assert intruder.error is None
        assert objects(memory) == files_of(old), moment


def test_a_replacement_that_is_forced_meanwhile_is_noticed_and_can_be_made_good(old: Path, new: Path) -> None:
    count = operations_of(old)
    for moment in range(1, count + 1):
        memory = fresh_memory()
        # Two writers at once, as the user wanted: a reader may see a mixture until the winner runs again.
        intruder = Intruder(memory, new, moment, lambda number: None)
        intruder.replace = True
        error = first_and(intruder, memory, old)
        assert intruder.error is None
        assert objects(memory)["index.json"] == files_of(new)["index.json"]
        if moment < count - 1:  # the last two: after the index, and after the marker
            assert error is not None, moment
        send(new, memory)
        check_reader(memory, {send(new, fresh_memory()).fingerprint})
        assert objects(memory).items() >= files_of(new).items(), moment


def test_objects_that_nobody_claimed_are_not_overwritten(old: Path) -> None:
    memory = fresh_memory()
    memory.put("report.html", b"somebody's report")
    memory.put("shard.00000.mds", files_of(old)["shard.00000.mds"])  # as another tool may have put it
    before = objects(memory)
    for _ in range(2):  # the first refusal leaves nothing that the second might take for a claim
        with pytest.raises(StoreError, match=r"report\.html: exists with other content; use --replace"):
            send(old, memory)
        assert objects(memory) == before
    memory.delete("report.html")
    assert send(old, memory).skipped == 1
    assert objects(memory) == files_of(old)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": ["../x"]}', b'{"files": 7}', b'{"files": [7]}'])
def test_a_marker_that_cannot_be_is_not_believed(old: Path, content: bytes) -> None:
    memory = fresh_memory()
    memory.put(MARKER_NAME, content)
    for replace in (False, True):
        with pytest.raises(StoreError, match="is not a valid marker"):
            send(old, memory, replace=replace)
    assert objects(memory) == {MARKER_NAME: content}


def test_a_broken_index_is_replaced_only_when_told(old: Path) -> None:
    memory = fresh_memory()
    memory.put("index.json", b"{")
    with pytest.raises(StoreError, match="holds an index that cannot be read"):
        send(old, memory)
    send(old, memory, replace=True)
    assert objects(memory) == files_of(old)


def files_after_a_takeover(number: int, old: Path, new: Path) -> list[str]:
    """Data files that a transfer of `old` puts after one of `new` came at its operation `number`."""
    memory, before = fresh_memory(), 0

    def take_over(operation: int) -> None:
        nonlocal before
        if operation == number:
            before = len(store.puts)
            send(new, memory, replace=True)

    store = WatchedStore(memory, watch=take_over)
    with suppress(RefusedError, TransferError):
        send(old, store)
        assert number >= store.operations - 1, "a transfer that lost its place reported success"
    assert objects(memory)["index.json"] == (new / "index.json").read_bytes()
    return data_files(store.puts[before:])


def test_a_transfer_ends_at_its_next_file_when_another_dataset_takes_the_place(old: Path, new: Path) -> None:
    written = [len(files_after_a_takeover(n, old, new)) for n in range(1, operations_of(old) + 1)]
    assert max(written) == 1  # that which was put just after its look at the marker
