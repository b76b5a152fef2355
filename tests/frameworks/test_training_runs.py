"""Runs on several ranks, killed at random steps, go on exactly: on as many ranks, on others, by torchrun."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.script_server import ScriptServer
from support.train_harness import (
    CHECKPOINT_EVERY,
    FAR_STEPS,
    Record,
    Training,
    by_step,
    make_dataset,
    script_server,
)

pytestmark = pytest.mark.slow
BATCH = 12  # divides by every number of ranks here
IMPORTS = [
    "shardkit.loaders.loader",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
]
WORLD_CHANGES = [(2, 2), (2, 1), (1, 2), (3, 2)]
MOST_DIFFERENCE = 1e-5  # of a loss, relative: other ranks add the same numbers in another order


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with script_server(*IMPORTS) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("training")
    return [str(make_dataset(folder / name, seed=seed)) for seed, name in enumerate(["web", "code"])]


def assert_alike(records: list[Record], expected: dict[int, Record]) -> None:
    """The same set of samples in every step, and the losses up to the order of additions."""
    for record in records:
        twin = expected[record["step"]]
        where = f"step {record['step']}"
        assert sorted(record["sample_ids"]) == sorted(twin["sample_ids"]), where
        assert record["loss"] == pytest.approx(twin["loss"], rel=MOST_DIFFERENCE), where


def leave_half_a_checkpoint(training: Training) -> None:
    """What a kill in the middle of writing the next checkpoint would leave."""
    step = (training.last_step() // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
    folder = training.folder / f"checkpoint.ckpt/step-{step:08d}"
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(b"half")


@pytest.mark.extended
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_a_run_killed_at_any_step_goes_on_with_as_many_ranks_or_others(
    script: str, server: ScriptServer, data: list[str], tmp_path: Path
) -> None:
    """DDP keeps attention inside documents; FSDP mixes two streams, by other weights after the resume."""
    chance = random.Random(f"{script} 1")
    mixed = script == "train_fsdp.py"
    arguments = ["--global-batch-size", str(BATCH), "--data"]
    arguments += [f"{data[0]}=3", f"{data[1]}=1"] if mixed else [data[0], "--inside-documents"]
    killed = {}
    for ranks in (2, 1, 3):
        run = killed[ranks] = Training(script, tmp_path / f"killed-{ranks}", arguments, ranks, server)
        kill_step = CHECKPOINT_EVERY + chance.randint(1, 2 * CHECKPOINT_EVERY)
        run.run_until_killed(kill_step, chance.randrange(ranks))
    change = max(run.last_step() for run in killed.values()) + 1
    last_step = change + 3
    then = ["--schedule", f"{change}=1,2"] if mixed else []
    whole = Training(script, tmp_path / "whole", [*arguments, *then], 2, server)
    whole.run(last_step)
    expected = by_step(whole.records())
    assert len(expected) == last_step

    for before, after in WORLD_CHANGES:
        run = killed[before].copy(f"{before}-{after}", after, server, *then)
        if mixed:
            leave_half_a_checkpoint(run)
        run.run(last_step)
        if mixed:
            assert (run.folder / "checkpoint.ckpt/last").resolve().name == f"step-{last_step:08d}"
        resumed = run.records()[len(killed[before].records()) :]
        first = resumed[0]["step"]
        assert first > CHECKPOINT_EVERY, "it began anew"
        assert [record["step"] for record in resumed] == list(range(first, last_step + 1))
        assert_alike(run.records(), expected)
        if before == after == 2:
            assert by_step(run.records()) == expected, "rank by rank and bit by bit"


@pytest.mark.extended
@pytest.mark.parametrize(
    "script", ["train_ddp.py", pytest.param("train_fsdp.py", marks=pytest.mark.extended)]
)
def test_torchrun_starts_killed_ranks_again_and_they_go_on(
    script: str, server: ScriptServer, data: list[str], tmp_path: Path
) -> None:
    chance = random.Random("elastic 1")
    arguments = ["--global-batch-size", str(BATCH), "--data", data[0]]
    elastic = Training(script, tmp_path / "elastic", arguments, 2, torchrun=["--max-restarts", "3"])
    kill_step = CHECKPOINT_EVERY + chance.randint(1, CHECKPOINT_EVERY)
    with elastic.start(FAR_STEPS) as run:
        run.wait_for(lambda: elastic.last_step() >= kill_step, f"step {kill_step}")
        killed = run.workers()
        run.kill(chance.randrange(2))
        run.wait_for(lambda: len(run.workers() - killed) == 2, "a restart")
        aim = elastic.last_step() + CHECKPOINT_EVERY
        run.wait_for(lambda: elastic.last_step() >= aim, f"step {aim}")
    records = elastic.records()
    assert [record["step"] for record in records].count(1) == 1, "it began anew"
    last_step = elastic.last_step() + 2
    wider = elastic.copy("wider", 3, server)
    wider.run(last_step)
    whole = Training(script, tmp_path / "whole", arguments, 2, server)
    whole.run(last_step)

    expected = by_step(whole.records())
    restarted = by_step(records)
    assert restarted == {step: expected[step] for step in restarted}, "rank by rank and bit by bit"
    assert_alike(wider.records()[len(records) :], expected)
