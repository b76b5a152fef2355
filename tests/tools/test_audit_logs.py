"""The audit of usage logs: real runs are clean across restarts; each way to break sharding is caught."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardkit.cli.main import main
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.errors import ShardError, StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.order.exclusions import Exclusions
from shardkit.tools.audit.findings import AuditReport
from support.audit_runs import RemappedOrder, State, kinds, log_report, logged_run
from support.loader_data import make_dataset

Ints = npt.NDArray[np.int64]
SAMPLES = 130
BATCH = 12  # over all ranks
OPTIONS: dict[str, Any] = {"lanes": 4, "window": 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "mds", "mds", samples=SAMPLES, shards=5)


@pytest.fixture(scope="module")
def dataset(path: Path) -> Dataset:
    return open_dataset(path)


def run(
    path: Path, logs: Path, world_size: int, steps: int, state: State | None = None, **more: Any
) -> State:
    size = BATCH // world_size
    return logged_run(
        path, logs, world_size=world_size, batch_size=size, steps=steps, state=state, **(OPTIONS | more)
    )


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_a_run_that_was_killed_and_went_on_with_other_ranks_is_clean(
    path: Path, dataset: Dataset, tmp_path: Path, tail: str
) -> None:
    state = run(path, tmp_path, 3, steps=17, keep=13, close=False, tail=tail)
    state = run(path, tmp_path, 4, steps=9, state=state, close=False, tail=tail)
    run(path, tmp_path, 1, steps=20, state=state, tail=tail)
    report = log_report(tmp_path, dataset)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    [walk] = report.walks
    assert (walk.steps, walk.superseded) == (13 + 9 + 20, 4)
    assert walk.epochs_proved == {"carry": 3, "drop": 4, "pad": 3}[tail]
    assert [(one["world_size"], one["steps"]) for one in report.runs] == [(3, 13), (4, 9), (1, 20)]
    assert bool(walk.dropped) == (tail == "drop")
    assert bool(walk.padding) == (tail == "pad")


def test_a_mixture_whose_weights_change_is_clean(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    other_path = make_dataset(tmp_path / "other", "mds", samples=31, shards=2)
    removed = Exclusions.of([3, (10, 14)])
    streams = [Stream(path, 3, exclude=removed), Stream(other_path, 1)]
    logs = tmp_path / "logs"
    for rank in range(2):
        loader = StreamingLoader(streams, batch_size=6, rank=rank, world_size=2, usage_log=logs, endless=True)
        for number, _ in enumerate(loader):
            if number == 9:
                loader.set_weights([1, 2], at_position=loader.position + 20)
            if number == 40:
                break
        loader.close()
    report = log_report(logs, dataset, open_dataset(other_path), exclusions=[removed, None])
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert report.walks[0].samples == 41 * 12
    assert report.walks[0].epochs_proved > 8
    assert [one["start"] for one in report.runs] == [0, 120]


def test_a_run_in_progress_is_watched_until_something_is_wrong(path: Path, tmp_path: Path) -> None:
    state = run(path, tmp_path, 2, steps=15)
    command = [sys.executable, "-m", "shardkit", "audit", str(path), "--logs", str(tmp_path), "--every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stderr is not None
            assert watching.stdout is not None
            assert "step 15 (position 180): 180 samples, 1 whole epochs" in watching.stderr.readline()
            state = run(path, tmp_path, 2, steps=5, state=state)
            while "step 20 (position 240)" not in (line := watching.stderr.readline()):
                assert "step 15 " in line
            run(path, tmp_path, 2, steps=5, state=state, breaks={1: shifted(1)})
            assert "FAILED" in watching.stdout.read()
            assert watching.wait(60) == 1
        finally:
            watching.kill()


def test_a_watch_ends_with_ctrl_c_and_the_whole_report(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path, 2, steps=15)
    command = [sys.executable, "-m", "shardkit", "audit", str(path), "--logs", str(tmp_path), "--every", "60"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heeds, **pipes) as watching:
        try:
            assert watching.stderr is not None
            assert "step 15 " in watching.stderr.readline()
            watching.send_signal(signal.SIGINT)
            out, _ = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert watching.returncode == 0
    assert "OK: every sample exactly once" in out


def spoil(remap: Callable[[Ints], Ints]) -> Callable[[StreamingLoader], None]:
    def broken(loader: StreamingLoader) -> None:
        arrangement = loader._arrangement
        arrangement.order = RemappedOrder(arrangement.order, remap)  # type: ignore[assignment]

    return broken


def shifted(steps: int) -> Callable[[StreamingLoader], None]:
    """A loader that begins so many steps behind where its state says."""

    def broken(loader: StreamingLoader) -> None:
        position, batches = loader._cursor
        loader._cursor = (position + steps * BATCH, batches + steps)

    return broken


def broken_run(
    path: Path, logs: Path, dataset: Dataset, remap: Callable[[Ints], Ints], **more: Any
) -> AuditReport:
    """Two ranks, of which both deliver other positions than their own."""
    breaks = dict.fromkeys(range(2), spoil(remap))
    run(path, logs, 2, steps=2 * SAMPLES // BATCH + 1, breaks=breaks, **more)
    return log_report(logs, dataset)


def test_a_rank_that_takes_anothers_part_is_named(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    def wrong_part(loader: StreamingLoader) -> None:
        loader._plan = replace(loader._plan, rank=0)

    run(path, tmp_path, 3, steps=11, breaks={2: wrong_part})
    report = log_report(tmp_path, dataset)
    assert {"lost", "repeated", "part", "epoch"} <= kinds(report)
    assert {(f.rank, f.problem) for f in report.findings.kept if f.kind == "part"} == {
        (2, "received the part of rank 0")
    }
    assert {f.rank for f in report.findings.kept if f.kind == "repeated"} == {2}
    assert report.findings.counts["lost"] == report.findings.counts["repeated"] > 30


def test_a_step_skipped_at_a_restart_is_named(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    state = run(path, tmp_path, 3, steps=7, keep=5, close=False)
    run(path, tmp_path, 2, steps=8, state=state, breaks=dict.fromkeys(range(2), shifted(1)))
    report = log_report(tmp_path, dataset)
    assert {"resume", "gap"} <= kinds(report)
    problems = " ".join(finding.problem for finding in report.findings.kept)
    assert "its state is at position 60, but its first step at 72 (skipping 12 samples)" in problems
    assert "positions 60 to 71 (12 samples) were not delivered by any run" in problems


def test_a_step_repeated_at_a_restart_is_named(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    state = run(path, tmp_path, 3, steps=5)
    run(path, tmp_path, 2, steps=8, state=state, breaks=dict.fromkeys(range(2), shifted(-1)))
    report = log_report(tmp_path, dataset)
    assert kinds(report) == {"resume"}
    assert "repeating 12 samples" in report.findings.kept[0].problem


def test_one_rank_a_step_ahead_is_named(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    state = run(path, tmp_path, 3, steps=5)
    run(path, tmp_path, 2, steps=8, state=state, breaks={1: shifted(1)})
    report = log_report(tmp_path, dataset)
    assert {f.rank for f in report.findings.kept if f.kind == "resume"} == {1}


def test_padding_with_repeated_samples_is_found(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    def as_a_distributed_sampler(positions: Ints) -> Ints:
        within = positions % SAMPLES
        return np.where(within >= SAMPLES - 3, positions - SAMPLES + 3, positions)

    report = broken_run(path, tmp_path, dataset, as_a_distributed_sampler, tail="pad")
    assert report.findings.counts["lost"] == report.findings.counts["repeated"] == 3 * 2
    assert report.walks[0].epochs_wrong == 2


def test_a_skipped_shard_is_named_with_its_rows(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    def breaks(loader: StreamingLoader) -> None:
        order: Any = loader._arrangement.order
        starts = dataset.manifest.shard_starts

        def without_shard_2(positions: Ints) -> Ints:
            found = order.locate(positions)
            moved = positions.copy()
            for place in np.argwhere(found.shard == 2):
                which = tuple(place)
                other = starts[3] + found.row[which] % (starts[4] - starts[3])
                moved[which] = order.positions_of(np.array([other]), int(found.epoch[which]))[0]
            return moved

        spoil(without_shard_2)(loader)

    run(path, tmp_path, 2, steps=12, breaks={0: breaks, 1: breaks})
    report = log_report(tmp_path, dataset)
    lost = [finding for finding in report.findings.kept if finding.kind == "lost" and finding.epoch == 0]
    rows = int(dataset.manifest.shard_samples[2])
    assert {(f.shard, f.row) for f in lost} == {("shard.00002.mds", row) for row in range(rows)}
    wrong = {finding.shard: finding.problem for finding in report.findings.kept if finding.kind == "shard"}
    assert wrong["shard.00002.mds"] == f"0 samples delivered, {rows} to {2 * rows} expected"
    assert "shard.00003.mds" in wrong


def test_samples_swapped_between_steps_are_found(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    def swap(positions: Ints) -> Ints:
        return np.where(positions == 30, 100, np.where(positions == 100, 30, positions))

    report = broken_run(path, tmp_path, dataset, swap)
    assert kinds(report) == {"moved", "part"}
    assert {f.step: f.problem for f in report.findings.kept if f.kind == "moved"} == {
        3: "belongs to step 9",
        9: "belongs to step 3",
    }
    assert report.walks[0].epochs_proved == 2


@pytest.mark.parametrize("says_so", [True, False])
def test_another_seed_on_one_rank_is_found_whether_its_log_says_so_or_not(
    path: Path, dataset: Dataset, tmp_path: Path, says_so: bool
) -> None:
    def reseed(loader: StreamingLoader) -> None:
        settings = loader._settings
        loader._arrange(replace(settings, order=replace(settings.order, seed=18)))
        if says_so:
            assert loader.usage is not None
            loader.usage.begin(loader._settings, 0)

    run(path, tmp_path, 3, steps=11, breaks={1: reseed})
    report = log_report(tmp_path, dataset)
    assert {"lost", "repeated", "epoch"} <= kinds(report)
    assert {f.rank for f in report.findings.kept if f.kind == "part"} == {1}
    assert ("settings" in kinds(report)) == says_so
    if says_so:
        [found] = [f for f in report.findings.kept if f.kind == "settings"]
        assert (found.rank, found.problem.rpartition(": ")[2]) == (1, "seed 17 became 18")


def test_a_missing_rank_file_is_named_and_the_rest_is_checked(
    path: Path, dataset: Dataset, tmp_path: Path
) -> None:
    state = run(path, tmp_path, 3, steps=4)
    next(tmp_path.glob("rank-00001-*")).unlink()
    run(path, tmp_path, 2, steps=30, state=state)
    report = log_report(tmp_path, dataset)
    assert kinds(report) == {"rank"}
    assert report.findings.kept[0].rank == 1
    assert report.walks[0].epochs_proved == 2
    assert report.walks[0].partial[0][1:] == (0, SAMPLES - 48)


def test_a_log_that_ends_early_is_named(path: Path, dataset: Dataset, tmp_path: Path) -> None:
    state = run(path, tmp_path, 2, steps=9, close=False)
    short = next(tmp_path.glob("rank-00001-*"))
    short.write_bytes(short.read_bytes()[:-100])
    run(path, tmp_path, 3, steps=5, state=state)
    report = log_report(tmp_path, dataset)
    assert kinds(report) == {"rank"}
    assert report.findings.kept[0].rank == 1
    assert "its log ends with the step at position" in report.findings.kept[0].problem
    assert any("truncated" in notice for notice in report.findings.notices)


def test_ranks_stopped_a_step_apart_at_the_end_are_no_fault_unless_they_closed(
    path: Path, dataset: Dataset, tmp_path: Path
) -> None:
    for close in (False, True):
        logs = tmp_path / str(close)
        for rank, steps in ((0, 7), (1, 8)):
            loader = StreamingLoader(
                str(path), batch_size=6, rank=rank, world_size=2, usage_log=logs, **grouped(OPTIONS)
            )
            for number, _ in enumerate(loader, 1):
                if number == steps:
                    break
            if close:
                loader.close()
        report = log_report(logs, dataset)
        assert report.ok is not close
        assert report.walks[0].steps == 7
        assert close or any("only some ranks have the last 1 step" in n for n in report.findings.notices)


def test_runs_that_crash_at_once_are_told_apart_by_time(
    path: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**18]
    monkeypatch.setattr("shardkit.loaders.usage_log.time.time_ns", lambda: now[0])
    loader = StreamingLoader(
        str(path), batch_size=4, rank=0, world_size=3, usage_log=tmp_path, **grouped(OPTIONS)
    )
    next(iter(loader))  # the other two died before their first step
    now[0] += 60 * 10**9
    run(path, tmp_path, 3, steps=12)
    report = log_report(tmp_path, dataset)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert [one["ranks"] for one in report.runs] == [1, 3]


def replicated_run(
    path: Path,
    logs: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: dict[int, int],
    spoiled: int | None = None,
) -> None:
    """Processes of which 0 to 2 are replicas of rank 0 and 3 is rank 1; `steps` of each that logs."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for process, count in steps.items():
        monkeypatch.setenv("RANK", str(process))
        rank = process // 3
        loader = StreamingLoader(
            str(path),
            batch_size=6,
            rank=rank,
            world_size=2,
            usage_log=logs,
            **grouped({"prefetch_batches": 0, **OPTIONS}),
        )
        if process == spoiled:
            spoil(lambda positions: positions + 6)(loader)
        for number, _ in enumerate(loader, 1):
            if number == count:
                break


def test_replicas_that_all_log_count_as_one_also_in_runs_that_start_alike(
    path: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicated_run(path, tmp_path, monkeypatch, {0: 3, 1: 5, 2: 4, 3: 5})  # killed at different steps
    replicated_run(path, tmp_path, monkeypatch, {0: 8, 1: 8, 3: 8})  # again from the start; one died at once
    report = log_report(tmp_path, dataset)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert [(one["ranks"], one["steps"], one["superseded"]) for one in report.runs] == [(2, 0, 5), (2, 8, 0)]


def test_replicas_that_were_given_different_samples_are_named_by_their_files(
    path: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicated_run(path, tmp_path, monkeypatch, {0: 6, 1: 6, 2: 4, 3: 6}, spoiled=2)
    report = log_report(tmp_path, dataset)
    assert kinds(report) == {"replica"}
    [found] = report.findings.kept
    assert found.rank == 0
    files = {file.name for file in tmp_path.glob("rank-00000-*")}
    named = {word.strip(",") for word in found.problem.split() if word.startswith("rank-")}
    assert len(named) == 2
    assert named < files
    assert "differ from their step 1 on" in found.problem


def test_logs_of_other_data_are_refused(path: Path, tmp_path: Path) -> None:
    other = open_dataset(make_dataset(tmp_path / "other", "mds", samples=31, shards=2))
    with pytest.raises(ShardError, match="is not a folder of usage logs"):
        log_report(tmp_path / "nothing", other)
    (tmp_path / "logs").mkdir()
    with pytest.raises(ShardError, match="has no usage logs"):
        log_report(tmp_path / "logs", other)
    run(path, tmp_path / "logs", 2, steps=3)
    with pytest.raises(StateError, match="give the dataset that the run read"):
        log_report(tmp_path / "logs", other)
    with pytest.raises(StateError, match="the run has 1 datasets, but 2 were given"):
        log_report(tmp_path / "logs", other, other)


def test_the_command_names_the_offender_and_exits_with_one(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(path), "--world-sizes", "1,2", "--resume-at", "3,9", "--json"]) == 0
    assert '"ok": true' in capfd.readouterr().out
    run(path, tmp_path, 2, steps=13)
    assert main(["audit", str(path), "--logs", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    assert "OK: every sample exactly once per epoch" in out
    assert err == ""
    next(tmp_path.glob("rank-00001-*")).unlink()
    assert main(["audit", str(path), "--logs", str(tmp_path)]) == 1
    assert "no log of rank 1" in capfd.readouterr().out
    for arguments in ([], ["x", "--stream", "y"], [str(path), "--global-batch", "5", "--world-sizes", "2"]):
        with pytest.raises(SystemExit) as caught:
            main(["audit", *arguments])
        assert caught.value.code == 2


LOOP = """
import itertools, json, os, signal, sys
from shardkit.loaders import StreamingLoader
path, logs, rank, world_size, steps, start, kill = sys.argv[1:]
loader = StreamingLoader(
    path, batch_size=12 // int(world_size), rank=int(rank), world_size=int(world_size),
    usage_log=logs, endless=True,
)
if start != "-":
    loader.load_state_dict(json.loads(start))
for number, batch in enumerate(itertools.islice(loader, int(steps)), 1):
    if number == 20:
        print(json.dumps(loader.state_dict()), flush=True)
if kill == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
loader.close()
"""


@pytest.mark.extended
def test_processes_that_are_killed_and_resumed_by_another_number_are_clean(
    path: Path, dataset: Dataset, tmp_path: Path
) -> None:
    def launch(world_size: int, start: str, end: str) -> str:
        command = [sys.executable, "-c", LOOP, str(path), str(tmp_path)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(25 + rank), start, end],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        states = {rank.communicate(timeout=120)[0] for rank in ranks}
        assert len(states) == 1
        return states.pop()

    state = launch(3, "-", "kill")
    launch(2, state, "kill")
    report = log_report(tmp_path, dataset)
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert [one["steps"] for one in report.runs] == [20, 25]
    assert report.walks[0].superseded == 7
    assert report.walks[0].epochs_proved == 45 * 12 // SAMPLES
