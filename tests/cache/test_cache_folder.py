"""The cache folder: killed at any moment, damaged in any way, full, shared, stopped, unusable."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardkit.cache import folder as module
from shardkit.cache.entry import SEAL_BYTES, is_sealed, make_seal, sealed_size
from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.cache.indexes import TarIndexes
from shardkit.cache.protocol import CACHE_COUNTERS, CacheFolderError, Lease
from shardkit.formats.tar.members import Scanned, TarIndex
from shardkit.hashing import hash_bytes
from shardkit.locks import FileLock
from support.cache_entries import RAW, check, content, fill, leased, nobody, oldest, room
from support.other_process import SECONDS, OtherProcess

COST = sealed_size(RAW)
NOBODY = 65_534
NOTHING = dict.fromkeys(CACHE_COUNTERS, 0)
Usage = namedtuple("Usage", "total used free")
Damage = Callable[[Path, Path], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The sub-folder of the cache in `tmp_path`."""
    return tmp_path / SUBFOLDER


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# Killed at any moment.

FILL = f"""
import sys
import numpy as np
from shardkit.cache.folder import CacheFolder
folder, name, stage = sys.argv[1:]

def wait():
    print("here", flush=True)
    sys.stdin.readline()

def victims(contents):
    wait()
    return []

cache = CacheFolder(folder, {COST} + 5)
lease = cache.lease(name)
if stage == "making room":
    cache.reserve("other", 100, lambda contents: []).commit()
    cache.reserve(name, {RAW}, victims)
slot = cache.reserve(name, {RAW}, lambda contents: [])
stage == "reserved" and wait()
data = np.random.default_rng(list(name.encode())).integers(0, 256, {RAW}, dtype=np.uint8)
slot.data[:500] = data[:500]
stage == "half written" and wait()
slot.data[:] = data
stage == "written" and wait()
enter = cache.enter

def entered(*arguments):
    stage == "sealed" and wait()
    enter(*arguments)
    stage == "renamed" and wait()

cache.enter = entered
slot.commit()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", ["making room", "reserved", "half written", "written", "sealed", "renamed"])
def test_a_process_killed_while_it_fills_leaves_nothing_wrong_and_no_room_taken(
    tmp_path: Path, root: Path, stage: str
) -> None:
    before = CacheFolder(tmp_path, COST + 5)  # open all the time, as in another process
    with OtherProcess(FILL, tmp_path, "a", stage) as other:
        assert other.line() == "here"
        filling = names(root / "filling")
        assert len(filling) == (stage not in ("making room", "renamed"))
        # While its writer lives, nobody takes the file away.
        if stage != "making room":
            assert before.reserve("b", RAW, nobody) is None
        assert names(root / "filling") == filling
        assert before.lease("a") is None
        other.kill()
    for cache in (before, CacheFolder(tmp_path, COST + 5)):
        if stage == "renamed":
            check(cache, "a")
        else:
            assert cache.find("a") is None
            assert not cache.has("a")
    room(before, "b", RAW, oldest).discard()
    assert names(root / "filling") == []
    leased(before, "a").release()
    fill(before, "a")
    check(CacheFolder(tmp_path), "a")


def test_abandoned_files_go_when_a_cache_is_opened_or_needs_room_and_no_others(
    tmp_path: Path, root: Path
) -> None:
    cache = CacheFolder(tmp_path, 3 * COST)
    live = room(cache, "live")
    for name in ("x~1~1~1", "y~1~2~2"):
        (root / "filling" / name).write_bytes(bytes(COST))
    assert sum(held.bytes for held in cache.contents().values()) == 3 * COST
    room(cache, "a")
    assert [name.partition("~")[0] for name in names(root / "filling")] == ["a", "live"]
    (root / "filling" / "x~1~1~1").write_bytes(bytes(COST))
    CacheFolder(tmp_path)
    assert [name.partition("~")[0] for name in names(root / "filling")] == ["a", "live"]
    live.data[:] = content("live")
    live.commit()
    check(cache, "live")


def test_no_file_is_taken_for_abandoned_while_it_is_made(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path)
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            CacheFolder(tmp_path)

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        for number in range(100):
            fill(cache, f"name{number}")
    finally:
        ended.set()
        sweeping.join(SECONDS)
    assert len(names(root / "shards")) == 100
    assert names(root / "filling") == []


# Damaged in any way.


def flip_at(at: int) -> Damage:
    def flip(file: Path, spare: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)

    return flip


def cut_at(size: int) -> Damage:
    return lambda file, spare: os.truncate(file, size)


flip, cut = flip_at(RAW // 2), cut_at(COST - 1)


def append(file: Path, spare: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b"more")


def another(file: Path, spare: Path) -> None:
    shutil.copy(file.with_name("b"), file)


def rename_another(file: Path, spare: Path) -> None:
    file.with_name("b").replace(file)


def folder(file: Path, spare: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_bytes(b"x")


def link(file: Path, spare: Path) -> None:
    file.unlink()
    file.symlink_to(spare)  # the right bytes, but outside


def dangling_link(file: Path, spare: Path) -> None:
    file.unlink()
    file.symlink_to(spare.with_name("missing"))


def pipe(file: Path, spare: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Damage] = {
    "flip": flip, "flip_seal": flip_at(-1), "cut": cut, "cut_short": cut_at(SEAL_BYTES - 1),
    "empty": cut_at(0), "append": append, "another": another, "rename_another": rename_another,
    "folder": folder, "link": link, "dangling_link": dangling_link, "pipe": pipe,
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["used-before", "new-to-the-process"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_put_aside_and_can_be_fetched_again(
    tmp_path: Path, root: Path, damage: str, known: bool
) -> None:
    cache = CacheFolder(tmp_path, 10 * COST)
    fill(cache, "a")
    fill(cache, "b")
    check(cache, "a")
    file, spare = root / "shards" / "a", tmp_path / "spare"
    shutil.copy(file, spare)
    os.utime(spare, ns=(1_000, 2_000))
    DAMAGES[damage](file, spare)
    if not file.is_symlink():
        os.utime(file, ns=(0, 1))  # also where the clock is too coarse to show the change
    if not known:
        cache = CacheFolder(tmp_path, 10 * COST)
    assert cache.find("a") is None
    assert cache.counters()["quarantined"] == 1
    assert not cache.has("a")
    assert "a" not in cache.contents()
    assert not file.exists()
    assert [name.partition("~")[0] for name in names(root / "damaged")] == ["a"]
    status = spare.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (1_000, 2_000)
    assert names(root / "leases") == []
    fill(cache, "a")
    check(cache, "a")
    check(CacheFolder(tmp_path), "a")


def test_a_folder_among_the_entries_may_be_evicted(tmp_path: Path, root: Path) -> None:
    CacheFolder(tmp_path, 2 * COST)
    folder = root / "shards" / "folder"
    folder.mkdir()
    (folder / "inside").write_bytes(b"x")
    cache = CacheFolder(tmp_path, 2 * COST)  # processes notice at their start what others have put there
    fill(cache, "a")
    room(cache, "b", RAW, lambda contents: ["folder"])
    assert not folder.exists()


FIND = """
import sys
from shardkit.cache.folder import CacheFolder
cache = CacheFolder(sys.argv[1])
print(cache.find(sys.argv[2]) is None, cache.counters()["quarantined"], flush=True)
"""


def test_another_process_does_not_trust_what_was_damaged_behind_its_back(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path)
    fill(cache, "a")
    flip(root / "shards" / "a", tmp_path)
    with OtherProcess(FIND, tmp_path, "a") as other:
        assert other.line() == "True 1"
    assert cache.find("a") is None
    assert cache.counters()["quarantined"] == 0  # the other has done it


def test_only_the_last_four_damaged_files_are_kept(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path)
    for number, damage in enumerate([folder, flip, folder, flip, flip, folder, cut]):
        fill(cache, f"name{number}")
        damage(root / "shards" / f"name{number}", tmp_path)
        os.utime(root / "shards" / f"name{number}", ns=(0, 1))
        assert cache.find(f"name{number}") is None
    slot = room(cache, "unfit")
    slot.data[:] = 7
    slot.discard(damaged=True)
    kept = names(root / "damaged")
    assert [name.partition("~")[0] for name in kept] == ["name4", "name5", "name6", "unfit"]
    assert (root / "damaged" / kept[-1]).read_bytes()[:RAW] == b"\7" * RAW
    assert names(root / "filling") == []
    assert cache.counters()["quarantined"] == 8


def test_an_entry_fetched_again_meanwhile_is_left_alone(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = CacheFolder(tmp_path), CacheFolder(tmp_path)
    fill(cache, "a")
    flip(root / "shards" / "a", tmp_path)
    os.utime(root / "shards" / "a", ns=(0, 1))
    lease = cache.lease

    def late_lease(name: str, timeout_seconds: float = 0.0) -> Lease | None:
        fill(other, "a")
        return lease(name, timeout_seconds)

    monkeypatch.setattr(cache, "lease", late_lease)
    cache.find("a")
    assert cache.counters()["quarantined"] == 0
    check(cache, "a")


def test_a_stopped_lease_holder_does_not_keep_damage_in_place(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, lock_seconds=0.02)
    fill(cache, "a")
    cut(root / "shards" / "a", tmp_path)
    lease = leased(cache, "a")
    assert cache.find("a") is None
    assert not cache.has("a")
    lease.release()


def test_a_seal_is_read_once_for_each_file(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def counted(entry: npt.NDArray[np.uint8], name: str) -> bool:
        checked.append(name)
        return is_sealed(entry, name)

    monkeypatch.setattr(module, "is_sealed", counted)
    cache, other = CacheFolder(tmp_path), CacheFolder(tmp_path)
    fill(cache, "a")
    for _ in range(3):
        check(cache, "a")
    assert checked == []  # it wrote the seal itself
    for _ in range(3):
        check(other, "a")
    assert checked == ["a"]
    fill(cache, "a")
    check(other, "a")
    assert checked == ["a", "a"]


# Full.

SHARE = f"""
import random, sys
import numpy as np
from shardkit.cache.folder import CacheFolder
folder, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
cache = CacheFolder(folder, 5 * {COST})
names = [f"name{{number}}" for number in range(15)]
wanted = {{n: np.random.default_rng(list(n.encode())).integers(0, 256, {RAW}, dtype=np.uint8) for n in names}}
for turn in range(150):
    if turn == 10:
        print("going", flush=True)
    name = chance.choice(names)
    found = cache.find(name)
    assert found is None or np.array_equal(found, wanted[name])
    lease = cache.lease(name)
    if found is not None or lease is None and chance.random() < 0.9:
        continue
    slot = cache.reserve(name, {RAW}, lambda contents: chance.sample([*contents], len(contents)))
    if slot is not None:
        slot.data[:] = wanted[name]
        slot.commit() if chance.random() < 0.8 else slot.discard(damaged=chance.random() < 0.3)
    if lease is not None:
        lease.release()
assert cache.counters()["evictions"] > 0
"""


def bytes_on_disk(root: Path) -> int:
    """Of entries and of those being filled; nobody may be making room meanwhile."""
    sizes: dict[int, int] = {}
    for folder in ("filling", "shards"):
        for file in (root / folder).iterdir():
            try:
                status = file.stat()
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_processes_together_never_exceed_the_capacity_even_if_one_is_killed(
    tmp_path: Path, root: Path
) -> None:
    cache = CacheFolder(tmp_path, 5 * COST)
    most = 0
    others = [OtherProcess(SHARE, tmp_path, seed) for seed in range(3)]
    try:
        assert others[0].line() == "going"
        others[0].kill()
        ending = threading.Thread(target=lambda: [other.wait() for other in others])
        ending.start()
        lock = FileLock(root / "lock", keep=True)
        while ending.is_alive():
            assert lock.acquire(SECONDS)
            most = max(most, bytes_on_disk(root))
            lock.release()
        most = max(most, bytes_on_disk(root))  # they may have ended before this process had a look
        assert [other.wait() for other in others[1:]] == [0, 0]
    finally:
        for other in others:
            with other:
                pass
    assert 4 * COST <= most <= cache.capacity
    fill(cache, "last")
    assert names(root / "filling") == []
    assert bytes_on_disk(root) <= cache.capacity
    assert len(names(root / "damaged")) <= 4


def test_an_entry_committed_while_the_folder_is_listed_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheFolder(tmp_path)
    slot = room(cache, "a")
    pending = [slot]
    listed = module._list

    def list_and_commit(folder: Path) -> dict[str, os.stat_result]:
        found = listed(folder)
        if pending:
            pending.pop().commit()
        return found

    monkeypatch.setattr(module, "_list", list_and_commit)
    assert {name: held.bytes for name, held in cache.contents().items()} == {"a": COST}


def test_a_reserve_of_the_disk_stays_free(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 100 * COST

    def usage(path: Path) -> Usage:
        used = total - 8 * COST + bytes_on_disk(root)
        return Usage(total, used, total - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for name in ("filling", "shards"):
        (root / name).mkdir(parents=True)
    cache = CacheFolder(tmp_path)
    assert cache.capacity == 6 * COST  # 2 % of the disk stay free
    fill(cache, "a")
    assert CacheFolder(tmp_path).capacity == 6 * COST  # what is in the cache already is not lost for it

    large = CacheFolder(tmp_path, 50 * COST)
    assert large.capacity == 50 * COST
    for name in "bcdef":
        fill(large, name)
    assert large.free_disk_bytes() == 2 * COST
    assert large.reserve("g", RAW, nobody) is None
    assert large.counters()["evictions"] == 0
    fill(large, "g")
    assert large.counters()["evictions"] == 1
    assert large.free_disk_bytes() == 2 * COST


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_a_full_disk_is_no_room_and_leaves_nothing_behind(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    cache = CacheFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert cache.reserve("a", RAW, nobody) is None
    assert names(root / "filling") == []
    assert cache.contents() == {}
    fill(cache, "a")


def test_a_disk_that_turns_out_to_be_full_at_the_end_keeps_no_entry_and_is_no_error(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = CacheFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        fill(cache, "a")
    assert (cache.has("a"), cache.counters()["disk_full"]) == (False, 1)
    assert names(root / "filling") == []
    fill(cache, "a")


@pytest.fixture
def no_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has bytes, and no inode for another file."""
    real = os.open

    def open_existing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_existing)


def test_a_disk_without_inodes_is_a_full_one(
    tmp_path: Path, root: Path, request: pytest.FixtureRequest
) -> None:
    cache = CacheFolder(tmp_path, spare_bytes=10 * COST)
    fill(cache, "a")
    request.getfixturevalue("no_inodes")
    lease = leased(cache, "b")
    assert cache.lease("b") is None
    fill(cache, "b")
    lease.release()
    check(cache, "a")
    check(cache, "b")
    assert names(root / "shards") == ["a"]
    assert cache.counters()["disk_full"] > 0


def test_what_a_full_disk_cannot_take_lies_in_memory_and_the_folder_is_used_again_when_it_can(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = CacheFolder(tmp_path, 10 * COST, spare_bytes=2 * RAW)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for name in "abc":  # the oldest goes
            fill(cache, name)
        assert cache.contents().keys() == {"b", "c"}
        assert not cache.has("a")
        assert cache.find("a") is None
        assert cache.touch("b")
        assert cache.counters() == {**NOTHING, "disk_full": 3, "evictions": 1, "evicted_bytes": RAW}
    fill(cache, "d")
    assert names(root / "shards") == ["d"]
    for name in "bcd":
        check(cache, name)
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.contents().keys() == {"d"}, "memory is each process's own"
    later = time.monotonic() + 100
    monkeypatch.setattr(time, "monotonic", lambda: later)
    fill(cache, "e")
    assert cache.contents().keys() == {"d", "e"}, "memory that nobody uses is given back"


def test_a_cache_that_is_full_by_its_own_limit_takes_no_memory_for_more(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 2 * COST, spare_bytes=10 * COST)
    for name in "ab":
        fill(cache, name)
    assert cache.reserve("c", RAW, nobody) is None
    assert cache.counters() == NOTHING


LIMITED = """
import resource, sys
from shardkit.cache.folder import CacheFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
cache = CacheFolder(sys.argv[1])
print(cache.reserve("a", 1 << 17, lambda contents: []), len(cache.contents()), flush=True)
cache.reserve("a", 1 << 15, lambda contents: []).commit()
print(cache.has("a"), flush=True)
"""


def test_a_limit_of_the_system_on_files_is_no_room(tmp_path: Path, root: Path) -> None:
    with OtherProcess(LIMITED, tmp_path) as other:
        assert other.line() == "None 0"
        assert other.line() == "True"
    assert names(root / "filling") == []


def test_a_disk_that_fails_at_the_end_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    cache = CacheFolder(tmp_path, COST)
    slot = room(cache, "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(
            CacheFolderError, match=r"filling/a~.*Input/output error; the disk may be failing"
        ):
            slot.commit()
    assert names(root / "filling") == []
    assert cache.find("a") is None
    fill(cache, "a")


def test_a_disk_that_fails_while_an_entry_is_filled_is_an_error_that_names_the_file(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*call: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    slot = room(CacheFolder(tmp_path, COST), "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(
            CacheFolderError, match=r"filling/a~.*Input/output error; the disk may be failing"
        ):
            slot.write(0, memoryview(b"data"))
    slot.discard()
    assert names(root / "filling") == []


@pytest.mark.parametrize("damaged", [False, True])
def test_room_that_a_failing_disk_does_not_give_back_is_given_back_by_the_next_who_needs_it(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    def fail(*call: object, **more: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = names(Path("/proc/self/fd"))
    cache = CacheFolder(tmp_path, COST)
    slot = room(cache, "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        patch.setattr(os, "unlink", fail)
        if damaged:
            slot.discard(damaged=True)
        else:
            with pytest.raises(CacheFolderError, match="the disk may be failing"):
                slot.commit()
    assert len(names(root / "filling")) == 1
    assert names(Path("/proc/self/fd")) == before
    fill(cache, "b")
    assert names(root / "filling") == []


def test_the_entry_used_last_stays_though_no_entry_came_or_went_since(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, 2 * COST)
    fill(cache, "a")
    fill(cache, "b")
    for seconds, name in enumerate("ab", 1_000):
        os.utime(root / "shards" / name, (seconds, seconds))
    os.utime(root / "shards", ns=(0, 0))  # nothing has come or gone for a long time
    cache.contents()
    check(cache, "a")
    fill(cache, "c")
    assert cache.contents().keys() == {"a", "c"}


# Shared, stopped, removed.

HOLD_LOCK = """
import pathlib, sys
from shardkit.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]), keep=True)
assert lock.acquire(60)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_process_stopped_while_it_makes_room_costs_others_one_wait(tmp_path: Path, root: Path) -> None:
    hasty = CacheFolder(tmp_path, 4 * COST, lock_seconds=0.05)
    cache = CacheFolder(tmp_path, 4 * COST, lock_seconds=SECONDS)
    fill(cache, "a")
    with OtherProcess(HOLD_LOCK, root / "lock") as other:
        assert other.line() == "held"
        other.stop()
        assert hasty.reserve("b", RAW, oldest) is None
        began = time.monotonic()
        for _ in range(10):
            assert cache.reserve("b", RAW, oldest) is None
        assert time.monotonic() - began < SECONDS
        check(cache, "a")
        assert cache.contents().keys() == {"a"}
        assert cache.counters()["locked_out"] == 10
        spared = CacheFolder(tmp_path, 4 * COST, lock_seconds=0.05, spare_bytes=COST)
        fill(spared, "b")
        check(spared, "b")
        assert spared.counters()["locked_out"] == 1
        leased(cache, "b").release()
        other.kill()
    for thread in threading.enumerate():
        if thread.name == "shardkit-lock":  # the wait that was given up
            thread.join(SECONDS)
    fill(cache, "b")


HOLD_LEASES = """
import sys
from shardkit.cache.folder import CacheFolder
cache = CacheFolder(sys.argv[1], 1000)
leases = [cache.lease(name) for name in "abcdef"]
print("held", flush=True)
for lease in leases:
    sys.stdin.readline()
    lease.release()
    print("released", flush=True)
"""


def test_waits_for_the_leases_of_a_stopped_process_do_not_add_up(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, 1000)
    with OtherProcess(HOLD_LEASES, tmp_path) as other:
        assert other.line() == "held"
        began = time.monotonic()
        waited = []
        for name in "abcde":
            assert cache.lease(name, 0.4) is None
            waited.append(time.monotonic() - began)
        assert 0.4 <= waited[0] <= waited[-1] < 1.6
        other.tell()  # it gives the first one back: it runs
        assert other.line() == "released"
        leased(cache, "a").release()
        began = time.monotonic()
        assert cache.lease("f", 0.4) is None
        assert time.monotonic() - began >= 0.4
    for name in "abcdef":
        lease = cache.lease(name, SECONDS)
        assert lease is not None
        lease.release()


def test_a_cache_that_is_removed_while_it_is_used_is_made_anew(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, 4 * COST)
    fill(cache, "a")
    found = cache.find("a")
    assert found is not None
    slot, lease = room(cache, "b"), leased(cache, "b")
    shutil.rmtree(root)
    assert cache.find("a") is None
    assert not cache.has("a")
    assert cache.contents() == {}
    np.testing.assert_array_equal(found, content("a"))
    slot.data[:] = content("b")
    slot.commit()  # though it is not kept
    lease.release()
    for name in "abc":
        lease = leased(cache, name)
        fill(cache, name)
        lease.release()
        check(cache, name)
        shutil.rmtree(root)
    fill(cache, "d")
    check(cache, "d")


def test_a_pickled_copy_keeps_the_capacity_that_the_first_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheFolder(tmp_path)
    fill(cache, "a")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 39, 1 << 39))
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.capacity == cache.capacity
    check(copy, "a")
    assert copy.counters() == NOTHING


# Other people's files.


def test_nothing_outside_of_the_sub_folder_is_touched(tmp_path: Path, root: Path) -> None:
    mine = [tmp_path / name for name in ("a", "shards/a", "filling/x~1~1~1", "shardkit-cache-2/shards/a")]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"mine")
        os.utime(file, ns=(1_000, 2_000))
    cache = CacheFolder(tmp_path, 2 * COST)
    for name in "abcab":
        fill(cache, name)
        check(cache, name)
    flip(root / "shards" / "a", tmp_path)
    assert CacheFolder(tmp_path).find("a") is None
    assert names(tmp_path) == ["a", "filling", SUBFOLDER, "shardkit-cache-2", "shards"]
    for file in mine:
        status = file.stat()
        assert (status.st_atime_ns, status.st_mtime_ns) == (1_000, 2_000)
        assert file.read_bytes() == b"mine"


@pytest.mark.parametrize("at", [".", SUBFOLDER, f"{SUBFOLDER}/shards", f"{SUBFOLDER}/filling"])
def test_a_file_where_a_folder_should_be_is_an_error_with_advice(tmp_path: Path, at: str) -> None:
    folder = tmp_path / "cache"
    (folder / at).parent.mkdir(parents=True, exist_ok=True)
    (folder / at).write_bytes(b"a file")
    with pytest.raises(
        CacheFolderError, match=r"cache: the cache folder cannot be used: .*cache_dir"
    ) as info:
        CacheFolder(folder)
    assert str(folder) in str(info.value)
    assert (folder / at).read_bytes() == b"a file"


def test_a_folder_that_may_not_be_written_is_an_error_with_advice_at_every_use(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    fill(cache, "a")
    child = os.fork()
    if not child:  # pragma: no cover
        os._exit(_use_without_permission(tmp_path, cache))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _use_without_permission(folder: Path, cache: CacheFolder) -> int:  # pragma: no cover
    """0 if every use ends in a CacheFolderError; runs in a child."""
    threading.Timer(SECONDS, os._exit, [9]).start()
    for name in ("lock", *(f"{part}" for part in ("filling", "leases", "shards"))):
        path = folder / SUBFOLDER / name
        path.chmod(0o500 if path.is_dir() else 0o400)
    (folder / SUBFOLDER).chmod(0o500)
    folder.chmod(0o500)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    uses: list[Callable[[], object]] = [
        lambda: CacheFolder(folder / "new"),
        lambda: cache.lease("b"),
        lambda: cache.reserve("b", RAW, nobody),
    ]
    for number, use in enumerate(uses, 1):
        try:
            use()
        except CacheFolderError as error:
            if "cannot be used: Permission denied; give another cache_dir" in str(error):
                continue
        return number
    return 0


# In the hands of others.

AS_NOBODY = """
import os, sys
from shardkit.cache.folder import CacheFolder
from shardkit.cache.protocol import CacheFolderError
os.setgroups([]), os.setgid(65534), os.setuid(65534), os.umask(0o002)
try:
    cache = CacheFolder(sys.argv[1])
    slot = cache.reserve("b", 100, lambda contents: [])
    slot.data[:] = 1
    slot.commit()
    print("made", cache.find("b") is not None, flush=True)
except CacheFolderError as error:
    print(error, flush=True)
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("at", [".", SUBFOLDER, f"{SUBFOLDER}/shards", f"{SUBFOLDER}/leases"])
def test_a_cache_that_everybody_can_write_is_refused_with_advice(tmp_path: Path, at: str) -> None:
    CacheFolder(tmp_path)
    (tmp_path / at).chmod(0o777)
    with pytest.raises(CacheFolderError, match=r"everybody can write there.*chmod.*give another cache_dir"):
        CacheFolder(tmp_path)
    with (
        pytest.raises(CacheFolderError, match="everybody can write there")
        if at in (".", SUBFOLDER)
        else (contextlib.nullcontext())
    ):
        TarIndexes.in_cache(tmp_path, [])
    (tmp_path / at).chmod(0o755)
    fill(CacheFolder(tmp_path), "a")


@as_root
@pytest.mark.parametrize("at", [".", SUBFOLDER, f"{SUBFOLDER}/shards"])
def test_a_cache_of_another_user_is_refused_with_advice(tmp_path: Path, at: str) -> None:
    CacheFolder(tmp_path)
    os.chown(tmp_path / at, NOBODY, NOBODY)
    with pytest.raises(
        CacheFolderError, match=r"belongs to another user \(number 65534\).*another cache_dir"
    ):
        CacheFolder(tmp_path)


def test_a_folder_like_tmp_may_hold_a_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    fill(CacheFolder(tmp_path), "a")
    assert (tmp_path / SUBFOLDER).stat().st_mode & 0o022 == 0


@as_root
def test_users_share_a_cache_whose_owner_lets_their_group_write() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        shared = Path(folder)
        os.chown(shared, 0, NOBODY)
        shared.chmod(0o2775)
        with OtherProcess(AS_NOBODY, shared) as other:
            assert other.line() == "made True"
        cache = CacheFolder(shared)
        assert cache.find("b") is not None
        fill(cache, "a")
        (shared / SUBFOLDER / "shards").chmod(0o777)
        with pytest.raises(CacheFolderError, match="everybody can write there"):
            CacheFolder(shared)


def test_nobody_else_can_write_what_is_made_without_a_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = CacheFolder(tmp_path / "cache")
        fill(cache, "a")
        lease = cache.lease("b")
        made = [path for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")) if path.exists()]
        assert len(made) >= 8
        assert not [path for path in made if path.stat().st_mode & 0o002]
        assert lease is not None
        lease.release()
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["shards", "filling", "leases", "damaged", "."])
def test_links_to_folders_elsewhere_are_refused_and_nothing_there_is_touched(
    tmp_path: Path, root: Path, name: str
) -> None:
    CacheFolder(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (root / name).rename(elsewhere)
    mine = elsewhere / "mine"
    mine.write_bytes(b"mine")
    (root / name).symlink_to(elsewhere)
    before = names(elsewhere)
    with pytest.raises(CacheFolderError, match=r"is a link"):
        CacheFolder(tmp_path)
    assert names(elsewhere) == before
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("plant", ["pipe", "link", "dangling"])
def test_pipes_and_links_among_the_files_neither_block_nor_lead_elsewhere(
    tmp_path: Path, root: Path, plant: str
) -> None:
    target = tmp_path / "target"
    cache = CacheFolder(tmp_path, 10 * COST)
    fill(cache, "a")
    if plant == "link":
        shutil.copy(root / "shards" / "a", target)
    planted = [root / "shards" / "a", root / "filling" / "x~1~1~1", root / "leases" / "a", root / "lock"]
    for file in planted:
        file.unlink(missing_ok=True)
        if plant == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to(target)
    found: list[object] = []

    def use() -> None:
        for one in (cache, CacheFolder(tmp_path, 10 * COST)):
            with contextlib.suppress(CacheFolderError):
                found.append(one.find("a"))
            with contextlib.suppress(CacheFolderError):
                found.append(one.reserve("b", RAW, nobody))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    assert not [entry for entry in found if isinstance(entry, np.ndarray)]
    assert not (root / "filling" / "x~1~1~1").is_symlink()
    if plant == "link":
        assert is_sealed(np.frombuffer(target.read_bytes(), np.uint8), "a")
    else:
        assert not target.exists()


def test_pipes_and_links_among_the_indexes_of_tars_are_no_indexes(tmp_path: Path, root: Path) -> None:
    indexes = TarIndexes.in_cache(tmp_path, [("s3://bucket/a.tar", "1"), ("s3://bucket/b.tar", "1")])
    none = np.zeros(0, np.int64)
    for number in range(2):
        empty = TarIndex([], np.zeros(1, np.int64), none, none, none.astype(np.int32), ())
        indexes.keep(number, Scanned(0, 0, ()), empty)
        assert indexes.scanned(number) is not None
        assert indexes.index(number) is not None
    first, second = sorted((root / "tars").iterdir())
    first.unlink()
    os.mkfifo(first)
    second.rename(tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    assert [indexes.scanned(number) for number in range(2)] == [None, None]
    assert [indexes.index(number) for number in range(2)] == [None, None]


def test_a_planted_entry_with_a_seal_of_its_own_is_not_delivered(tmp_path: Path, root: Path) -> None:
    raw = content("a")
    name = f"{RAW:x}-xxh64-{hash_bytes(raw.data, ['xxh64'])['xxh64']}"
    wrong = np.zeros(RAW, np.uint8)
    CacheFolder(tmp_path)
    (root / "shards" / name).write_bytes(wrong.tobytes() + make_seal(wrong, name))
    cache = CacheFolder(tmp_path)
    assert cache.find(name) is None
    assert cache.counters()["quarantined"] == 1
    slot = room(cache, name)
    slot.data[:] = raw
    slot.commit()
    again = CacheFolder(tmp_path).find(name)
    assert again is not None
    np.testing.assert_array_equal(again, raw)
