"""Ray Train restarts a killed worker, and a run on more workers, at the exact next sample."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from shardkit.loaders import StreamingLoader

GLOBAL_BATCH = 12
KILLED_AT, SAVED_AT = 7, 5


def train_loop(options: dict[str, Any]) -> None:
    """Write down the sample ids of each step, and die once at step `KILLED_AT`."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    loader = StreamingLoader(
        options["data"], batch_size=GLOBAL_BATCH // workers, endless=True, return_ids=True
    )
    first_step = 1
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            saved = json.loads((Path(path) / "state.json").read_text())
        loader.load_state_dict(saved["loader"])
        first_step = saved["step"] + 1
    log = options["folder"] / f"from-{first_step:03d}-rank-{rank}-of-{workers}"
    for step, batch in zip(count(first_step), loader, strict=False):
        with log.open("a") as file:
            file.write(json.dumps([step, batch["sample_id"].tolist()]) + "\n")
        if step == KILLED_AT and first_step == 1:
            wait_for(options["storage"] / "checkpoint_manager_snapshot.json")
            os.kill(os.getpid(), signal.SIGKILL)
        if step in (SAVED_AT, options["steps"]):
            with tempfile.TemporaryDirectory() as path:
                state = {"loader": loader.state_dict(), "step": step}
                (Path(path) / "state.json").write_text(json.dumps(state))
                ray.train.report({}, Checkpoint.from_directory(path) if rank == 0 else None)
        if step >= options["steps"]:
            break
    loader.close()


def wait_for(file: Path) -> None:
    """Wait until Ray's controller knows a checkpoint, a moment after its `report` has returned."""
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_of(folder: Path) -> dict[int, list[int]]:
    """{step: sorted sample ids over all ranks} of the last attempt at each step."""
    found: dict[int, dict[str, list[int]]] = {}
    for file in sorted(folder.glob("from-*")):
        attempt, _, _ = file.name.partition("-rank-")
        for step, ids in map(json.loads, file.read_text().splitlines()):
            if attempt not in found.get(step, {}):
                found[step] = {attempt: []}
            found[step][attempt] += ids
    return {step: sorted(*attempts.values()) for step, attempts in found.items()}


@pytest.mark.extended
@pytest.mark.usefixtures("ray_workers")
def test_a_killed_worker_and_more_workers_lose_and_repeat_no_sample(data: Path, tmp_path: Path) -> None:
    """Other numbers of workers: tests/trainers/trial.py."""
    folder, storage = tmp_path / "ids", tmp_path / "ray"
    folder.mkdir()
    settings = {"data": data, "folder": folder, "storage": storage / "run"}
    for workers, steps in ((1, 10), (2, 14)):  # 168 samples of epochs of 150
        ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config=settings | {"steps": steps},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name="run", storage_path=str(storage), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    assert sorted(file.name for file in folder.iterdir()) == [
        "from-001-rank-0-of-1",
        f"from-{SAVED_AT + 1:03d}-rank-0-of-1",
        *(f"from-011-rank-{rank}-of-2" for rank in range(2)),
    ]
    with StreamingLoader(
        data, batch_size=GLOBAL_BATCH, rank=0, world_size=1, endless=True, return_ids=True
    ) as loader:
        expected = [sorted(batch["sample_id"].tolist()) for batch in islice(loader, 14)]
    assert steps_of(folder) == dict(enumerate(expected, 1))
