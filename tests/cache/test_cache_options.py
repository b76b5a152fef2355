"""Options of a cache: which kind, how large, and how the default memory is divided."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.cache.memory import CacheMemory
from shardkit.cache.protocol import CacheFolderError
from shardkit.cache.shards import open_cache

GIB = 1 << 30
LIMIT = "sys/fs/cgroup/memory.max"


def memory_of(
    system: Path, processes: int = 1, *, free: int = 16, limit_file: str = LIMIT, limit: str = "max"
) -> int:
    """The capacity of a default cache on a machine with `free` GiB, half of which caches files."""
    meminfo = f"MemFree:   {free << 19} kB\nMemAvailable:   {free << 20} kB\n"
    for name, text in (("proc/meminfo", meminfo), (limit_file, f"{limit}\n")):
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    cache = open_cache(CacheOptions(processes=processes), system=system)
    assert isinstance(cache, CacheMemory)
    return cache.capacity


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_the_processes_of_a_machine_divide_a_share_of_the_free_memory(tmp_path: Path, processes: int) -> None:
    assert memory_of(tmp_path, processes) == 4 * GIB // processes


def test_the_default_memory_has_an_upper_limit(tmp_path: Path) -> None:
    assert memory_of(tmp_path, free=512) == 8 * GIB
    assert memory_of(tmp_path, 2, free=512) == 4 * GIB


@pytest.mark.parametrize("file", [LIMIT, "sys/fs/cgroup/memory/memory.limit_in_bytes"])
def test_a_container_counts_what_it_may_use(tmp_path: Path, file: str) -> None:
    assert memory_of(tmp_path, limit_file=file, limit=f"{2 * GIB}") == GIB // 2


def test_this_machine_and_one_that_does_not_tell_have_some_memory(tmp_path: Path) -> None:
    for system in (Path("/"), tmp_path):
        assert 0 < open_cache(CacheOptions(), system=system).capacity <= 8 * GIB


def test_a_folder_is_used_with_the_capacity_given(tmp_path: Path) -> None:
    cache = open_cache(CacheOptions(folder=tmp_path / "deep" / "cache", capacity="1.5 GB", processes=8))
    assert isinstance(cache, CacheFolder)
    assert cache.capacity == 1_500_000_000  # of the folder, however many processes share it
    assert (tmp_path / "deep" / "cache" / SUBFOLDER).is_dir()


def test_a_folder_by_default_has_its_disk_but_a_reserve(tmp_path: Path) -> None:
    cache = open_cache(CacheOptions(folder=str(tmp_path)))
    free = cache.free_disk_bytes()
    assert free is not None
    assert 0 <= cache.capacity < free


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheFolderError, match="give another cache_dir"):
        open_cache(CacheOptions(folder=tmp_path / "file"))


@pytest.mark.parametrize(
    ("capacity", "expected"), [(0, 0), (12_345, 12_345), ("64MiB", 1 << 26), ("2gb", 2 * 10**9)]
)
def test_a_capacity_is_a_number_or_a_text(capacity: int | str, expected: int) -> None:
    assert open_cache(CacheOptions(capacity=capacity, processes=4)).capacity == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": "much"}, {"capacity": "-1"}, {"capacity": -1}, {"capacity": True},
        {"connections": 0}, {"processes": 0}, {"processes": -1},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"size|at least 1"):
        CacheOptions(**wrong)


def test_options_are_plain_data(tmp_path: Path) -> None:
    options = CacheOptions(folder=tmp_path, capacity="1GB", connections=4, processes=2)
    assert pickle.loads(pickle.dumps(options)) == options
    assert options != CacheOptions(folder=tmp_path, capacity="2GB", connections=4, processes=2)
