"""Lengths of texts are measured once, by all processes together, and again only where they are damaged."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.cache import kept_results
from shardkit.datasets import text_index
from shardkit.datasets.text_index import Lengths, TextIndex

SHARDS = 23


def lengths_of(number: int) -> Lengths:
    return np.random.default_rng(number).integers(2, 900, number * 5 % 13).astype(np.uint32)


def count(lengths: Lengths) -> int:
    return -(-int(lengths.sum()) // 512)


class Measured:
    """Measures shards, and says which."""

    def __init__(self, *, fails_at: int | None = None, seconds: float = 0.0) -> None:
        self.numbers: list[int] = []
        self._fails_at, self._seconds = fails_at, seconds

    def __call__(self, number: int) -> Lengths:
        if number == self._fails_at:
            raise ValueError("shard cannot be read")
        time.sleep(self._seconds)
        self.numbers.append(number)
        return lengths_of(number)


def index(folder: Path | None, **settings: Any) -> TextIndex:
    return TextIndex(folder, [100] * SHARDS, **{"block_bytes": 300, "threads": 2} | settings)


def expected() -> list[int]:
    return [count(lengths_of(number)) for number in range(SHARDS)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_second_start_measures_nothing_and_another_length_only_counts(tmp_path: Path, threads: int) -> None:
    first, second, other = Measured(), Measured(), Measured()
    rows, digest, _ = index(tmp_path / "key", threads=threads).rows("512", first, count)
    assert rows.tolist() == expected()
    assert sorted(first.numbers) == list(range(SHARDS))
    again, same, _ = index(tmp_path / "key").rows("512", second, count)
    halves, also, _ = index(tmp_path / "key").rows("256", other, lambda lengths: 2 * count(lengths))
    assert (again.tolist(), same, also) == (expected(), digest, digest)
    assert halves.tolist() == [2 * number for number in expected()]
    assert second.numbers == other.numbers == []


def test_a_pass_that_was_interrupted_continues(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard cannot be read"):
        index(tmp_path / "key", threads=1).rows("512", broken := Measured(fails_at=13), count)
    rest = Measured()
    rows, *_ = index(tmp_path / "key").rows("512", rest, count)
    assert rows.tolist() == expected()
    assert 13 in rest.numbers
    whole = {
        number
        for number in broken.numbers
        if {*range(number // 3 * 3, number // 3 * 3 + 3)} <= {*broken.numbers}
    }
    assert not whole & {*rest.numbers}


@pytest.mark.parametrize("name", ["lengths-00002", "rows-512"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_a_damaged_file_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    _, digest, _ = index(tmp_path / "key").rows("512", Measured(), count)
    file = tmp_path / "key" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": bytes(data[:-3]), "flipped": bytes(data), "empty": b""}[damage])
    again = Measured()
    rows, same, _ = index(tmp_path / "key").rows("512" if name != "lengths-00002" else "256", again, count)
    assert (rows.tolist(), same) == (expected(), digest)
    assert sorted(again.numbers) == ([6, 7, 8] if name == "lengths-00002" else [])


def test_an_index_of_other_shards_is_not_taken(tmp_path: Path) -> None:
    index(tmp_path / "key").rows("512", Measured(), count)
    fewer = TextIndex(tmp_path / "key", [100] * 7, block_bytes=300)
    rows, *_ = fewer.rows("512", lengths_of, count)
    assert rows.tolist() == expected()[:7]


def test_nulls_are_counted_at_each_start_and_make_no_rows(tmp_path: Path) -> None:
    def measure(number: int) -> Lengths:
        return np.append(lengths_of(number), np.zeros(number % 3, np.uint32)).astype(np.uint32)

    for name in ("512", "512", "256"):
        rows, _, nulls = index(tmp_path / "key").rows(name, measure, count)
        assert (rows.tolist(), nulls) == (expected(), sum(number % 3 for number in range(SHARDS)))


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        rows, *_ = index(None).rows("512", one := Measured(), count)
        assert rows.tolist() == expected()
        assert len(one.numbers) == SHARDS


def test_a_full_disk_costs_only_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        for module in (text_index, kept_results):
            patch.setattr(module, "publish_hashed", full)
        rows, digest, _ = index(tmp_path / "key").rows("512", Measured(), count)
    assert rows.tolist() == expected()
    again, same, _ = index(tmp_path / "key").rows("512", one := Measured(), count)
    assert (again.tolist(), same, len(one.numbers)) == (expected(), digest, SHARDS)


def _measure_together(folder: Path, start: Any, found: Any) -> None:
    start.wait(60)
    one = Measured(seconds=0.02)
    rows, digest, _ = index(folder, threads=1).rows("512", one, count)
    found.put((rows.tolist(), digest, len(one.numbers)))


def test_processes_measure_together() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        context = multiprocessing.get_context("spawn")
        start, found = context.Event(), context.Queue()
        workers = [
            context.Process(target=_measure_together, args=(Path(name) / "key", start, found))
            for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        start.set()
        answers = [found.get(timeout=120) for _ in workers]
        for worker in workers:
            worker.join(60)
    assert all(rows == expected() for rows, _, _ in answers)
    assert len({digest for _, digest, _ in answers}) == 1
    assert sum(measured for _, _, measured in answers) == SHARDS


def test_a_process_that_hangs_holds_up_the_others_for_a_bounded_time(tmp_path: Path) -> None:
    is_measuring, go_on = threading.Event(), threading.Event()

    def hangs(number: int) -> Lengths:
        is_measuring.set()
        go_on.wait(60)
        return lengths_of(number)

    stuck = threading.Thread(target=lambda: index(tmp_path / "key", threads=1).rows("512", hangs, count))
    stuck.start()
    assert is_measuring.wait(60)
    try:
        began = time.monotonic()
        rows, *_ = index(tmp_path / "key", wait_seconds=0.3).rows("512", lengths_of, count)
        assert rows.tolist() == expected()
        assert time.monotonic() - began < 20
    finally:
        go_on.set()
        stuck.join(60)


def test_the_oldest_indexes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        index(tmp_path / name).rows("512", lengths_of, count)
        time.sleep(0.02)
    monkeypatch.setattr(text_index, "MAX_BYTES", 1)
    index(tmp_path / "d").rows("512", lengths_of, count)
    assert [folder.name for folder in tmp_path.iterdir()] == ["d"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 1500))
def test_blocks_are_all_shards_in_order(sizes: list[int], block_bytes: int) -> None:
    blocks = TextIndex(None, sizes, block_bytes=block_bytes)._blocks()
    assert [number for block in blocks for number in block] == list(range(len(sizes)))
    for block in blocks:
        assert len(block) == 1 or sum(sizes[number] for number in block) <= block_bytes
