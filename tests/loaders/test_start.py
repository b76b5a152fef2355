"""The start of a large job: nodes begin one after another and ask for little; being refused fails nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.placement import (
    NODE_REQUESTS,
    SINGLE_ROWS,
    Place,
    first_rows,
    node_count,
    replicas_on_machine,
    start_delay,
)
from shardkit.loaders.streams import open_streams
from shardkit.storage.memory import MemoryStore
from support.remote_harness import fresh_url, make_remote_kind, put_folder
from support.start_model import start_job


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_large_job_starts_within_what_one_prefix_answers(replicas: int) -> None:
    """A sixteenth of 2,048 nodes, at a sixteenth of 5,500 requests a second."""
    start = start_job(128, 8, 5500 / 16, job_nodes=2048, replicas=replicas)
    assert start.rows == 2 * replicas
    assert start.failures == []
    assert len(start.first_row_seconds) == 128 * 8
    assert max(start.first_row_seconds) < 20
    assert max(start.answered) <= NODE_REQUESTS
    assert sum(start.requests) < 1.1 * sum(start.answered), "few are refused"


def test_ranks_that_all_begin_at_once_are_refused_for_long_and_none_fails() -> None:
    start = start_job(4, 8, 5500 / 512, spread=False)
    assert start.failures == []
    assert len(start.first_row_seconds) == 32
    assert sum(start.requests) > 1.1 * sum(start.answered)


def test_the_delay_follows_from_the_machine_and_is_spread_evenly() -> None:
    delays = [start_delay(f"machine-{number}", 2048) for number in range(2048)]
    assert delays == [start_delay(f"machine-{number}", 2048) for number in range(2048)]
    assert 14 < max(delays) < 15
    assert max(sum(second <= delay < second + 1 for delay in delays) for second in range(15)) < 200
    assert start_delay("machine", 64) == 0.0
    assert start_delay("machine", 64, datasets=200) > 0.0
    assert start_delay("machine", 1 << 20) <= 15.0


@pytest.mark.parametrize(
    ("processes", "nodes", "rows"), [(1, 1, SINGLE_ROWS), (8, 128, SINGLE_ROWS), (8, 2048, 2), (64, 2048, 1)]
)
def test_where_nodes_are_many_their_processes_share_the_first_rows(
    processes: int, nodes: int, rows: int
) -> None:
    assert first_rows(processes, nodes) == rows


@pytest.mark.parametrize(
    ("world", "local", "data_parallel", "ranks", "replicas"),
    [
        (128, 8, 16, (3,), 8),  # TP 8
        (512, 8, 16, (3,), 8),  # PP 4, CP 2, TP 4
        (16, 8, 8, (0, 1, 2, 3), 2),  # TP 2
        (16, 8, 16, tuple(range(8)), 1),
        (64, 1, 16, (3,), 1),  # each on a machine of its own
    ],
)
def test_replicas_on_a_machine_follow_from_the_ranks_that_share_it(
    world: int,
    local: int,
    data_parallel: int,
    ranks: tuple[int, ...],
    replicas: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, f"{value}")
    assert replicas_on_machine(Place(ranks[0], data_parallel), ranks) == replicas


def test_processes_that_nothing_is_known_of_are_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert replicas_on_machine(Place(3, 16), (3,)) == 1


def test_a_loader_waits_its_delay_before_it_asks_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    place = Place(0, 16384, machine="a machine")
    assert node_count(place) == 2048
    store = MemoryStore(fresh_url())
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        put_folder(make_remote_kind(tmp_path / "data", "mds"), store)  # nothing was asked for before

    open_streams(store.url, LoaderConfig(), 8, place=place, sleep=sleep)
    assert slept == [start_delay("a machine", 2048)]
    open_streams(tmp_path / "data", LoaderConfig(), 8, place=place, sleep=sleep)
    assert len(slept) == 1, "a local dataset is read at once"
