"""Audit and trace of runs whose ranks are balanced: still exactly once, and found where they really were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset, trace
from shardkit.datasets.provenance.run import Run
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.order.balance import CostModel
from shardkit.order.exclusions import Exclusions
from shardkit.order.state import LoaderState
from support.audit_runs import kinds, log_report, logged_run, plan_report
from support.uneven_data import ids_of_ranks, make_uneven

OPTIONS: dict[str, Any] = {"lanes": 8, "window": 32, "balance": "attention"}
TAILS = ["carry", "drop", "pad"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_uneven(tmp_path_factory.mktemp("data") / "mds")


@pytest.mark.parametrize("tail", TAILS)
def test_the_plan_of_balanced_ranks_is_proved(path: Path, tail: str) -> None:
    with open_dataset(path) as dataset:
        report = plan_report(
            dataset, batch_sizes=(6, 8, 3), world_sizes=(4, 3, 8), tail=tail, resumes=[5, 9], **OPTIONS
        )
        plain = plan_report(
            dataset, batch_sizes=(6, 8, 3), world_sizes=(4, 3, 8), tail=tail, lanes=8, window=32
        )
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert [walk.epochs_proved for walk in report.walks] == [2] * 4
    assert {walk.digest for walk in report.walks[:3]} == {walk.digest for walk in plain.walks}


def test_workers_take_turns_at_balanced_batches(path: Path) -> None:
    with open_dataset(path) as dataset:
        report = plan_report(dataset, batch_sizes=(4,), world_sizes=(2, 3), workers=3, **OPTIONS)
    assert report.ok, [str(finding) for finding in report.findings.kept]


@pytest.mark.parametrize("global_batch", [None, 48])
def test_logs_of_balanced_runs_that_were_killed_are_proved(
    path: Path, tmp_path: Path, global_batch: int | None
) -> None:
    options: dict[str, Any] = OPTIONS | {"global_batch": global_batch}
    state = logged_run(path, tmp_path, world_size=4, batch_size=6, steps=17, keep=13, close=False, **options)
    state = logged_run(
        path, tmp_path, world_size=3, batch_size=8, steps=9, state=state, close=False, **options
    )
    logged_run(path, tmp_path, world_size=8, batch_size=3, steps=20, state=state, **options)
    with open_dataset(path) as dataset:
        report = log_report(tmp_path, dataset)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    [walk] = report.walks
    assert (walk.steps, walk.superseded, walk.epochs_proved) == (42, 4, 3)


def test_ranks_that_are_not_all_balanced_are_caught(path: Path, tmp_path: Path) -> None:
    """Two ranks balanced, two not: rows are lost and repeated, and the audit of the logs says so."""
    for rank in range(4):
        balance = "attention" if rank % 2 else None
        place: dict[str, Any] = {"batch_size": 6, "rank": rank, "world_size": 4}
        with StreamingLoader(
            path, usage_log=tmp_path, endless=True, **grouped({**place, **OPTIONS | {"balance": balance}})
        ) as loader:
            for _, _ in zip(range(12), loader, strict=False):
                pass
    with open_dataset(path) as dataset:
        report = log_report(tmp_path, dataset)
    assert not report.ok
    assert {"lost", "repeated"} <= kinds(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("balance", ["attention", CostModel(linear=10)])
def test_a_row_is_traced_to_the_rank_that_had_it(path: Path, tail: Any, balance: Any) -> None:
    options: dict[str, Any] = OPTIONS | {"tail": tail, "balance": balance}
    states: list[dict[str, Any]] = []
    seen = ids_of_ranks(path, 4, 8, 18, states=states, **options)
    with open_dataset(path) as dataset:
        run = Run.from_state(
            LoaderState.from_dict(states[-1]),
            [dataset],
            batch_size=8,
            world_size=4,
            balance=balance,
        )
        assert_traced(run, seen)


def assert_traced(run: Run, seen: np.ndarray[Any, Any], streams: int = 1, first: int = 0) -> None:
    """`run` knows of every step, and of every row, the rank and place that `seen` has."""
    for step, ranks in enumerate(seen, 1):
        expected = {
            (rank, i): int(row) for rank, batch in enumerate(ranks) for i, row in enumerate(batch) if row >= 0
        }
        assert {(row.rank, row.index): row.row for row in run.batch(step)} == expected
        for (rank, index), row in list(expected.items())[::7]:
            sightings = run.sightings(row, epochs=3)
            assert (step, rank, index) in [(each.step, each.rank, each.index) for each in sightings]


def test_a_step_of_several_batches_is_traced_by_the_state_that_knows_its_size(path: Path) -> None:
    options: dict[str, Any] = OPTIONS | {"global_batch": 24}
    states: list[dict[str, Any]] = []
    seen = ids_of_ranks(path, 4, 1, 30, states=states, **options)
    with open_dataset(path) as dataset:
        state = LoaderState.from_dict(states[-1])
        run = Run.from_state(state, [dataset], batch_size=1, world_size=4, balance="attention")
        assert_traced(run, seen)


def test_rows_of_a_mixture_are_traced_to_their_ranks(path: Path, tmp_path: Path) -> None:
    other = make_uneven(tmp_path / "other", samples=90, shards=3, seed=4)
    removed = Exclusions.of([(10, 30)])
    streams = [Stream(path, 2, exclude=removed), Stream(other, 1)]
    states: list[dict[str, Any]] = []
    seen = ids_of_ranks(streams, 3, 8, 20, states=states, **OPTIONS)
    with open_dataset(path) as dataset, open_dataset(other) as second:
        run = Run.from_state(
            LoaderState.from_dict(states[-1]),
            [dataset, second],
            [removed],
            batch_size=8,
            world_size=3,
            balance="attention",
        )
        for step, ranks in enumerate(seen.tolist(), 1):
            found = {(row.rank, row.index): row.row + 300 * row.stream for row in run.batch(step)}
            assert found == {(r, i): row for r, batch in enumerate(ranks) for i, row in enumerate(batch)}


def test_the_commands_take_the_balance_of_the_loader(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states: list[dict[str, Any]] = []
    options: dict[str, Any] = OPTIONS | {"balance": CostModel(linear=5, quadratic=2)}
    seen = ids_of_ranks(path, 4, 8, 3, states=states, **options)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(states[-1]))
    words = ["trace", str(path), "--step", "3", "--state", str(file), "--json", "--limit", "0"]
    sizes = ["--batch-size", "8", "--world-size", "4"]
    assert main([*words, *sizes, "--loader", "balance=5:2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["rank"], row["index"]): row["row"] for row in rows} == {
        (rank, i): row for rank, batch in enumerate(seen[2].tolist()) for i, row in enumerate(batch)
    }
    keys = ["--loader", "balance=attention", "--loader", "eos_id=0"]
    assert main(["audit", str(path), "--world-sizes", "4,3", *keys]) == 0
    assert "OK: every sample exactly once" in capsys.readouterr().out
    for wrong in (["--loader", "balance=mlp"], ["--loader", "balance=1:x"]):
        with pytest.raises(SystemExit):
            main(["audit", str(path), *wrong])
        assert "LINEAR:QUADRATIC" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["trace", str(path), "--row", "3", "--seed", "1", "--loader", "balance=attention"])
    assert "give --batch-size" in " ".join(capsys.readouterr().err.split())


def test_a_question_about_a_step_takes_the_balance_of_the_loader(path: Path) -> None:
    states: list[dict[str, Any]] = []
    seen = ids_of_ranks(path, 4, 8, 3, states=states, **OPTIONS)
    with open_dataset(path) as dataset:
        run: Any = {"state": states[-1], "batch_size": 8, "world_size": 4}
        answer = trace(dataset, step=2, limit=0, balance="attention", **run).facts
        assert {row["row"] for row in answer["rows"] if row["rank"] == 2} == set(seen[1, 2].tolist())
        found = Run.from_options(dataset, batch_size=8, world_size=4, lanes=8, window=32, balance="attention")
        assert {row.row for row in found.batch(2) if row.rank == 2} == set(seen[1, 2].tolist())
