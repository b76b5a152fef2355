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
from script_server import ForkedScript, ScriptServer
from servers.ceph import free_port

from shardkit import mds

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FAR_STEPS = 1_000_000
RUN_SECONDS = 120
POLL_SECONDS = 0.005
VOCABULARY = 64
SEQUENCE_LENGTH = 64
CHECKPOINT_EVERY = 5
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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


def script_server(*modules: str) -> ScriptServer:
    """Forks what runs the examples; `modules` may be those of the examples' folder."""
    return ScriptServer(modules, path=EXAMPLES, environment=ENVIRONMENT)


class Ranks:
    """The processes of one run."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]] | Sequence[ForkedScript]) -> None:
        self.processes = processes

    def poll(self) -> int | None:
        """The exit code of the first that has failed, 0 if all have ended well."""
        codes = [process.poll() for process in self.processes]
        return next((code for code in codes if code), None if None in codes else 0)

    def wait(self, seconds: float) -> int:
        """The first exit code that is not 0, once all have ended."""
        codes = [process.wait(seconds) for process in self.processes]
        return next((code for code in codes if code), 0)


@dataclass(frozen=True)
class Training:
    """One training job: a script, its arguments, and the folder with its checkpoint and its log."""

    script: str
    folder: Path
    arguments: Sequence[str]
    ranks: int | None = None  # None: plain python; a number: torchrun with so many processes
    server: ScriptServer | None = None  # runs the script in forks of it, torchrun's ranks without torchrun

    def command(self, steps: int) -> list[str]:
        launcher = [sys.executable]
        if self.ranks is not None:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [*launcher, *self.script_command(steps)]

    def script_command(self, steps: int) -> list[str]:
        files = ["--checkpoint", "checkpoint.ckpt", "--log-file", "log.jsonl"]  # in `folder`, where it runs
        every = ["--checkpoint-every", str(CHECKPOINT_EVERY), "--steps", str(steps)]
        return [str(EXAMPLES / self.script), *self.arguments, *SIZES, *files, *every]

    def start(self, steps: int) -> Ranks:
        self.folder.mkdir(exist_ok=True)
        if self.server is not None:
            return self._fork(self.server, steps)
        with (self.folder / "output.txt").open("a") as output:
            process = subprocess.Popen(
                self.command(steps),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=os.environ | ENVIRONMENT,
            )
        return Ranks([process])

    def _fork(self, server: ScriptServer, steps: int) -> Ranks:
        count = self.ranks or 1
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(count)}
        places = [{"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(count)} for n in range(count)]
        command, output = self.script_command(steps), self.folder / "output.txt"
        environments = [{}] if self.ranks is None else [group | place for place in places]
        return Ranks(
            [server.start(command, cwd=self.folder, output=output, environment=e) for e in environments]
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
            victim = psutil.Process(process.processes[0].pid)
            if self.ranks is not None:  # torchrun's last rank; it ends the others
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


def end_tree(ranks: Ranks) -> None:
    """Leave none of the processes behind that we started."""
    for process in ranks.processes:
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
