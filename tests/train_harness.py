"""Runs training scripts as users do, kills them at a step, starts them again, and reads their logs.

A run that is to be killed is given far more steps than it can reach, and how far it came is read from its
log afterwards, so that no assertion depends on timing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shardkit import mds

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FAR_STEPS = 1_000_000
RUN_SECONDS = 120
POLL_SECONDS = 0.005
VOCABULARY = 64
SEQUENCE_LENGTH = 64
CHECKPOINT_EVERY = 5
SIZES = ["--layers", "1", "--heads", "2", "--width", "16", "--vocabulary", str(VOCABULARY)]


def make_dataset(folder: Path, samples: Sequence[int] = (23, 17, 30)) -> Path:
    """A small MDS dataset of rows whose documents end in token 0; one shard for each of `samples`."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    shards = []
    for number, count in enumerate(samples):
        rows = rng.integers(1, VOCABULARY, (count, SEQUENCE_LENGTH), dtype=np.uint16)
        rows[rng.random(rows.shape) < 0.05] = 0
        rows[:, -1] = 0
        shards.append(mds.write_rows_shard(folder, f"shard.{number:05d}.mds", rows, hashes=("xxh64",)))
    mds.write_index(folder, shards)
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"eos_id": 0}}))
    return folder


@dataclass(frozen=True)
class Training:
    """One training job: a script, its arguments, and the folder with its checkpoint and its log."""

    script: str
    folder: Path
    arguments: Sequence[str]
    ranks: int | None = None  # None: plain python; a number: torchrun with so many processes

    def command(self, steps: int) -> list[str]:
        launcher = [sys.executable]
        if self.ranks is not None:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        files = ["--checkpoint", "checkpoint.ckpt", "--log-file", "log.jsonl"]  # in `folder`, where it runs
        every = ["--checkpoint-every", str(CHECKPOINT_EVERY), "--steps", str(steps)]
        return [*launcher, str(EXAMPLES / self.script), *self.arguments, *SIZES, *files, *every]

    def start(self, steps: int) -> subprocess.Popen[str]:
        self.folder.mkdir(exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        output = (self.folder / "output.txt").open("a")
        with output:
            return subprocess.Popen(
                self.command(steps),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=environment,
            )

    def run(self, steps: int) -> None:
        """Train until `steps`; the script must end by itself and well."""
        process = self.start(steps)
        try:
            assert process.wait(RUN_SECONDS) == 0, self.output()
        finally:
            end_tree(process)

    def run_until_killed(self, step: int) -> int:
        """Train; once `step` is logged, kill with SIGKILL (the last rank, under torchrun); the last step."""
        process = self.start(FAR_STEPS)
        deadline = time.monotonic() + RUN_SECONDS
        try:
            while self.last_step() < step:
                assert process.poll() is None, self.output()
                assert time.monotonic() < deadline, f"step {step} was not reached: {self.output()}"
                time.sleep(POLL_SECONDS)
            victim = psutil.Process(process.pid)
            if self.ranks is not None:
                victim = max(victim.children(), key=lambda child: child.pid)
            victim.kill()
            assert process.wait(RUN_SECONDS) != 0
        finally:
            end_tree(process)
        return self.last_step()

    def run_until_killed_between_checkpoints(self, step: int) -> int:
        """As `run_until_killed`, again and again if need be, until the next start must repeat a step."""
        while (last := self.run_until_killed(step)) % CHECKPOINT_EVERY == 0:
            step = last + 2
        return last

    def records(self) -> list[dict[str, Any]]:
        log = self.folder / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def last_step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-4000:]


def end_tree(process: subprocess.Popen[str]) -> None:
    """Leave none of the processes behind that we started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=10)
    if process.poll() is None:
        process.kill()
    process.wait()


def by_step(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """One record a step; a step logged twice (repeated after a resume) must have been logged alike."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        assert steps.setdefault(record["step"], record) == record, "a repeated step came out differently"
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return steps
