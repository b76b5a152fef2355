"""Runs training scripts as users do, kills them at a step, starts them again, and reads their logs.

A run that is to be killed is given far more steps than it can reach, and how far it came is read from its
log afterwards, so that no assertion depends on timing. Most runs are forks of a process that has imported
torch (`script_server.py`); a few are programs, and torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from servers.ceph import free_port
from shardkit.formats import mds
from support.script_server import ForkedScript, ScriptServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAR_STEPS = 1_000_000
RUN_SECONDS = 120
POLL_SECONDS = 0.005
VOCABULARY = 64
SEQUENCE_LENGTH = 64
CHECKPOINT_EVERY = 5
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted ranks read killed ones' addresses
}
Record = dict[str, Any]  # of the log: step, loss, sample ids in rank order
TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where `make test` installs torchvision: beside the environment, because other libraries look for it."""
# Makes a torchvision for CUDA work beside a torch without it.
_DECLARED = [str(EXAMPLES.parent / "tests" / "trainers" / "site")] if "+cpu" in version("torch") else []
WITH_TORCHVISION = {
    "PYTHONPATH": os.pathsep.join(
        [*_DECLARED, *filter(None, [os.environ.get("PYTHONPATH")]), str(TORCHVISION)]
    )
}
SIZES = ["--layers", "1", "--heads", "2", "--width", "16", "--vocabulary", str(VOCABULARY)]


def make_dataset(folder: Path, samples: Sequence[int] = (23, 17, 30), seed: int = 5) -> Path:
    """A small MDS dataset of rows whose documents end in token 0; one shard for each of `samples`."""
    rng = np.random.default_rng(seed)
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


@dataclass(frozen=True)
class Training:
    """One training job: a script, its arguments, and the folder with its checkpoints and its log."""

    script: str
    folder: Path
    arguments: Sequence[str]
    ranks: int | None = None  # None: plain python; a number: torchrun with so many processes
    server: ScriptServer | None = None  # runs the script in forks of it, torchrun's ranks without torchrun
    torchrun: Sequence[str] = ()  # further options of it
    sizes: Sequence[str] = tuple(SIZES)  # options of the model
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables, of programs

    def copy(self, name: str, ranks: int | None, server: ScriptServer, *arguments: str) -> Training:
        """The job as it is now in another folder, to be continued there by forks, with further arguments."""
        folder = self.folder.with_name(name)
        shutil.copytree(self.folder, folder, symlinks=True)
        return Training(self.script, folder, [*self.arguments, *arguments], ranks, server)

    def command(self, steps: int) -> list[str]:
        launcher = [sys.executable]
        if self.ranks is not None:
            size = ["--standalone", "--nproc-per-node", str(self.ranks)]
            launcher += ["-m", "torch.distributed.run", *size, *self.torchrun]
        return [*launcher, *self.script_command(steps)]

    def script_command(self, steps: int) -> list[str]:
        files = ["--checkpoint", "checkpoint.ckpt", "--log-file", "log.jsonl"]  # in `folder`, where it runs
        every = ["--checkpoint-every", str(CHECKPOINT_EVERY), "--steps", str(steps)]
        return [str(EXAMPLES / self.script), *self.arguments, *self.sizes, *files, *every]

    def start(self, steps: int) -> Run:
        self.folder.mkdir(exist_ok=True)
        if self.server is not None:
            return Run(self, self._fork(self.server, steps))
        with (self.folder / "output.txt").open("a") as output:
            process = subprocess.Popen(
                self.command(steps),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env={**os.environ, **ENVIRONMENT, **self.environment},
            )
        return Run(self, [process])

    def _fork(self, server: ScriptServer, steps: int) -> list[ForkedScript]:
        count = self.ranks or 1
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(count)}
        places = [{"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(count)} for n in range(count)]
        command, output = self.script_command(steps), self.folder / "output.txt"
        environments = [{}] if self.ranks is None else [group | place for place in places]
        return [server.start(command, cwd=self.folder, output=output, environment=e) for e in environments]

    def run(self, steps: int) -> None:
        """Train until `steps`; the script must end by itself and well."""
        with self.start(steps) as run:
            run.wait()

    def run_until_killed(self, step: int, rank: int = -1) -> int:
        """Train; once `step` is logged, kill a rank with SIGKILL; the last step that was logged."""
        with self.start(FAR_STEPS) as run:
            run.wait_for(lambda: self.last_step() >= step, f"step {step}")
            run.kill(rank)
            run.wait_for_end()
        return self.last_step()

    def run_until_killed_between_checkpoints(self, step: int) -> int:
        """Repeat `run_until_killed` until the next start must repeat a step; return the last step."""
        while (last := self.run_until_killed(step)) % CHECKPOINT_EVERY == 0:
            step = last + 2
        return last

    def records(self) -> list[Record]:
        log = self.folder / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def last_step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-4000:]


class Run:
    """The processes of one run: its only one, forked ranks, or torchrun. None is left behind."""

    def __init__(
        self, training: Training, processes: Sequence[subprocess.Popen[str]] | Sequence[ForkedScript]
    ) -> None:
        self.training, self.processes = training, processes
        self._deadline = time.monotonic() + RUN_SECONDS

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def wait(self) -> None:
        """Wait until all have ended; AssertionError unless all end well."""
        self.wait_for(lambda: not any(code is None for code in self.codes()), "the end", ended_well=True)

    def wait_for(self, condition: Callable[[], bool], wanted: str, *, ended_well: bool = False) -> None:
        """Wait for a condition; AssertionError if a process fails before, or ends although it should not."""
        while not condition():
            fine = {None, 0} if ended_well else {None}
            codes = self.codes()
            assert fine.issuperset(codes), f"exit codes {codes} before {wanted}: {self.training.output()}"
            self._pause(wanted)

    def workers(self) -> set[int]:
        """Process ids of torchrun's ranks."""
        return {child.pid for child in psutil.Process(self.processes[0].pid).children()}

    def kill(self, rank: int) -> None:
        """SIGKILL for a rank. What torchrun does to the other ranks then, it does itself, or we do."""
        victim = self.processes[0].pid
        if self.training.server is not None:
            victim = self.processes[rank].pid
        elif self.training.ranks is not None:
            workers = psutil.Process(victim).children()
            victim = sorted(workers, key=lambda worker: int(worker.environ()["RANK"]))[rank].pid
        os.kill(victim, signal.SIGKILL)
        for process in self.processes:
            if self.training.server is not None and process.pid != victim and process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)

    def wait_for_end(self) -> None:
        """Wait until all have ended; AssertionError if all end well."""
        while None in self.codes():
            self._pause("the end of all processes")
        assert any(self.codes())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for child in children:
                child.kill()
            psutil.wait_procs(children, timeout=10)
            if process.poll() is None:
                process.kill()
            process.wait()

    def _pause(self, wanted: str) -> None:
        assert time.monotonic() < self._deadline, f"waited too long for {wanted}: {self.training.output()}"
        time.sleep(POLL_SECONDS)


def by_step(records: Sequence[Record]) -> dict[int, Record]:
    """One record a step; a step logged twice (repeated after a resume) must have been logged alike."""
    steps: dict[int, Record] = {}
    for record in records:
        assert steps.setdefault(record["step"], record) == record, "a repeated step came out differently"
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return steps
