"""The ledger of a cache folder: the same for all processes, right after any end, and no listing for room."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from shardkit.cache import folder as folder_module
from shardkit.cache.entry import sealed_size
from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.cache.ledger import Ledger
from shardkit.cache.protocol import Contents
from shardkit.files import allocate
from support.cache_entries import RAW, fill, room

COST = sealed_size(RAW)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / SUBFOLDER


def listed(root: Path) -> dict[str, int]:
    """What a listing of the folder finds, by name."""
    return {
        file.name: file.stat().st_size for part in ("shards", "filling") for file in (root / part).iterdir()
    }


def known(root: Path) -> dict[str, int]:
    """What a process that starts to read the ledger knows."""
    ledger = Ledger(root)
    assert ledger.follow(locked=False)
    assert ledger.used_bytes == sum(ledger.sizes.values())
    return dict(ledger.sizes)


def nothing(contents: Contents) -> list[str]:
    return []


def test_room_is_made_without_listing_the_entries(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheFolder(tmp_path, 20 * COST)
    for number in range(20):
        fill(cache, f"e{number}")
    listed_folders: list[str] = []
    scandir, stat = os.scandir, Path.stat
    looks: list[str] = []

    def counted(folder: str) -> object:
        listed_folders.append(Path(folder).name)
        return scandir(folder)

    def counted_stat(file: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        looks.append(file.parent.name)
        return stat(file, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.setattr(Path, "stat", counted_stat)
    for number in range(20):
        room(cache, f"more{number}", RAW, lambda contents, n=number: [f"e{n}"]).commit()  # type: ignore[misc]
    monkeypatch.undo()
    assert "shards" not in listed_folders
    assert "shards" not in looks, "nor looking at each"
    assert cache.counters()["evictions"] == 20
    assert known(root) == listed(root)


def test_processes_see_each_others_entries_and_room(tmp_path: Path, root: Path) -> None:
    one, other = CacheFolder(tmp_path, 3 * COST), CacheFolder(tmp_path, 3 * COST)
    fill(one, "a")
    slot = room(other, "b")
    assert one.reserve("c", 2 * RAW, nothing) is None
    slot.discard()
    fill(other, "b")
    assert one.contents().keys() == other.contents().keys() == {"a", "b"}
    fill(one, "c")
    room(
        other, "d", RAW, lambda contents: [next(iter(contents))]
    ).commit()  # the least recently used is first
    assert one.contents().keys() == {"b", "c", "d"}
    assert known(root) == listed(root)


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "torn", "nonsense", "shorter", "of a later version", "a path"]
)
def test_a_ledger_that_makes_no_sense_is_made_from_a_listing(tmp_path: Path, root: Path, damage: str) -> None:
    cache = CacheFolder(tmp_path, 3 * COST)
    fill(cache, "a")
    fill(cache, "b")
    file = root / "ledger"
    text = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "torn": text[:-3],
            "nonsense": text + b"\0\0\0\n",
            "shorter": text[: text.rindex(b"\n", 0, -1) - 2],
            "of a later version": text.replace(b"-1 ", b"-2 ", 1),
            "a path": text + b"+ 10 ..%2Fother\n",
        }.get(damage, b"")
    )
    if damage == "gone":
        file.unlink()
    for one in (cache, CacheFolder(tmp_path, 3 * COST)):
        assert one.reserve("c", 2 * RAW, nothing) is None, "two of three are taken"
        assert one.contents().keys() == {"a", "b"}
        assert known(root) == listed(root)


def test_what_happened_without_the_ledger_is_noticed_at_the_next_start(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, 3 * COST)
    for name in "abc":
        fill(cache, name)
    (root / "shards" / "a").unlink()  # evicted by a process that was killed before it could say so
    (root / "shards" / "c").rename(root / "shards" / "d")
    cache = CacheFolder(tmp_path, 3 * COST)
    assert known(root) == listed(root)
    assert cache.contents().keys() == {"b", "d"}
    fill(cache, "e")


def test_a_filling_process_that_was_killed_gives_its_room_back(tmp_path: Path, root: Path) -> None:
    cache = CacheFolder(tmp_path, 2 * COST)
    child = os.fork()
    if child == 0:
        CacheFolder(tmp_path, 2 * COST).reserve("a", RAW, nothing)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert [name.partition("~")[0] for name in known(root)] == ["a"]
    fill(cache, "b")
    fill(cache, "c")
    assert known(root) == listed(root)


def test_a_process_killed_while_it_makes_a_file_leaves_no_room_that_others_take_for_free(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as soon as the file has its size: before, nobody knew of it until room was short."""

    def allocate_and_die(descriptor: int, size: int) -> None:
        allocate(descriptor, size)
        os.kill(os.getpid(), 9)

    cache = CacheFolder(tmp_path, 3 * COST)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(folder_module, "allocate", allocate_and_die)
        cache.reserve("a", RAW, nothing)
    os.waitpid(child, 0)
    assert known(root) == listed(root)
    for name in "bcd":
        fill(cache, name)
        assert sum(listed(root).values()) <= 3 * COST


def test_the_ledger_is_bounded_and_readers_survive_its_being_written_anew(tmp_path: Path, root: Path) -> None:
    CacheFolder(tmp_path, 1)
    one, other = Ledger(root, history_lines=20), Ledger(root, history_lines=20)
    chance = random.Random(5)
    expected: dict[str, int] = {}
    for number in range(500):
        ledger = chance.choice([one, other])
        assert ledger.follow(locked=True)
        gone = chance.sample([*expected], 1) if len(expected) > 4 else []
        ledger.record({f"e {number}%": number}, gone)
        expected = {name: size for name, size in expected.items() if name not in gone} | {
            f"e {number}%": number
        }
        assert ledger.sizes == expected
        assert ledger.used_bytes == sum(expected.values())
    assert (root / "ledger").read_bytes().count(b"\n") <= 20 + 4 * len(expected)


def test_a_folder_that_is_removed_and_made_again_has_a_ledger_again(tmp_path: Path, root: Path) -> None:
    one, other = CacheFolder(tmp_path, 3 * COST), CacheFolder(tmp_path, 3 * COST)
    fill(one, "a")
    assert other.contents().keys() == {"a"}
    shutil.rmtree(root)
    fill(one, "b")
    assert other.contents().keys() == one.contents().keys() == {"b"}


@pytest.mark.extended
def test_a_reservation_takes_less_than_2_ms_with_100_000_entries(tmp_path: Path, root: Path) -> None:
    CacheFolder(tmp_path, 1)
    for number in range(100_000):
        (root / "shards" / f"e{number:06}").touch()
    cache = CacheFolder(tmp_path, 1 << 40)
    seconds = []
    for number in range(50):
        began = time.process_time()
        slot = room(cache, f"new{number}")
        seconds.append(time.process_time() - began)
        slot.commit()
    assert sorted(seconds)[25] < 0.002
