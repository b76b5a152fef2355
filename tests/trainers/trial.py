"""A real trainer on our loader: trained, killed with SIGKILL, resumed on another number of ranks, audited.

    python tests/trainers/trial.py torchtitan [--python PATH] [--folder DIR] [--ranks 2,1] [--json]

Each trainer has a script in examples/trainers/ that trains a tiny model on the CPU and knows these options:

    --data PATH --folder RUN --steps N --global-batch G --checkpoint-every C

It continues from the newest checkpoint in RUN, appends {"step", "loss"} to RUN/losses.jsonl on rank 0 (steps
count from 1; the loss is the mean over the global batch), and gives its loader usage_log=RUN/usage. A trial
runs it three times: to the end without interruption; in another folder until it is killed, all ranks at once,
at a step that is no checkpoint; there again, on the other number of ranks, to the end. Then the audit proves
from the usage logs that every step had the samples of its positions, and the losses are compared.

Without --python, the trainer is installed into a virtual environment of its own under ~/.cache, once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "trainers"
TORCH = "torch==2.13.0"  # first and by this pin: other ways pull the CUDA packages
RUN_SECONDS = 600.0
FAR_STEPS = 1_000_000
VOCABULARY = 256
ROWS = (150, 97, 121)  # of each shard: no multiple of any batch
LOSS_TOLERANCE = 1e-4  # relative: other ranks sum in another order; another sample changes far more


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trial needs to know of a trainer."""

    script: str
    requirements: tuple[str, ...]
    """The trainer's package first; none: the script runs a clone of its repository."""
    alone: tuple[str, ...] = ()
    """Packages installed without what they require, because they require another torch."""
    row_tokens: int = 65
    """Tokens of a stored row."""
    launcher: str = "torchrun"
    """"torchrun"; "plain": processes with RANK, WORLD_SIZE, …; "own": a script that takes `--workers`."""
    changed_lines: int = 0
    """Lines that a user of the trainer changes."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the script."""


COMPOSER = (  # what Composer imports
    *("torchmetrics", "torch_optimizer", "requests", "numpy<2.3", "psutil", "coolname<3", "tqdm"),
    *("tabulate==0.9.0", "py-cpuinfo", "packaging<25.1", "importlib-metadata<9", "pillow<12"),
    "mosaicml-cli<0.8",
)

TRAINERS: dict[str, Trainer] = {
    "accelerate": Trainer("train_accelerate.py", ("accelerate==1.15.0",), changed_lines=3),
    "automodel": Trainer(
        "train_automodel.py",
        ("transformers==5.18.0", "torchao", "torchdata", "datasets", "pyyaml", "tiktoken", "ninja"),
        alone=("nemo-automodel==0.7.0", "flashoptim", "megatron-fsdp==0.5.0"),
        changed_lines=10,
    ),
    "composer": Trainer(
        "train_composer.py",
        COMPOSER,
        alone=("mosaicml==0.32.1", "torchvision==0.28.0"),
        row_tokens=64,
        changed_lines=2,
    ),
    "dcp": Trainer(
        "../train_fsdp.py",
        ("torch==2.13.0",),
        changed_lines=1,
        arguments=("--vocabulary", "256", "--layers", "1", "--width", "32"),
    ),
    "fabric": Trainer("train_fabric.py", ("lightning==2.6.6",), changed_lines=2),
    "grpo": Trainer("train_grpo.py", ("trl==1.16.0",), changed_lines=20),
    "hugging-face": Trainer(
        "train_hugging_face.py", ("transformers==5.23.0", "accelerate==1.15.0"), changed_lines=2
    ),
    "jax": Trainer("train_jax.py", ("jax==0.10.2",), launcher="plain", changed_lines=10),
    "lightning": Trainer("train_lightning.py", ("lightning==2.6.6",), changed_lines=2),
    "litgpt": Trainer("train_litgpt.py", ("litgpt==0.5.13", "requests")),
    "llm-foundry": Trainer(
        "train_llm_foundry.py",
        (
            *COMPOSER,
            *("omegaconf==2.4.0", "catalogue==2.0.10", "transformers==4.51.3", "accelerate==1.8.1"),
            *(
                "mosaicml-streaming==0.12.0",
                "datasets==3.6.0",
                "mlflow==2.22.5",
                "GitPython",
                "einops",
                "zstd",
            ),
            *("slack_sdk", "typer", "beautifulsoup4", "tenacity"),
        ),
        alone=("llm-foundry==0.22.0", "mosaicml==0.32.1", "torchvision==0.28.0"),
        row_tokens=64,
        changed_lines=6,
    ),
    "maxtext": Trainer("train_maxtext.py", ("maxtext",), launcher="plain", changed_lines=5),
    "megatron": Trainer("train_megatron.py", ("megatron-core==0.16.1",), changed_lines=3),
    "nanochat": Trainer("train_nanochat.py", (), changed_lines=4),
    "nanogpt": Trainer("train_nanogpt.py", (), changed_lines=6),
    "olmo-core": Trainer("train_olmo_core.py", ("ai2-olmo-core==3.0.0",), row_tokens=64, changed_lines=9),
    "ray": Trainer("train_ray.py", ("ray[train]==2.60.0",), launcher="own", changed_lines=3),
    "torchtitan": Trainer("train_torchtitan.py", ("torchtitan==0.3.0", "triton"), changed_lines=2),
    "trl": Trainer("train_trl.py", ("trl==1.16.0",), changed_lines=4),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    trainer: str
    version: str
    changed_lines: int
    ranks: str
    killed_at: int
    resumed_at: int
    last_step: int
    audit: str
    largest_loss_difference: float
    """Relative, over all steps that the killed or resumed run and the uninterrupted one have in common."""


def make_data(folder: Path, row_tokens: int) -> Path:
    """An MDS dataset of random documents that end in token 0."""
    from shardkit.formats import mds

    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    shards = []
    for number, count in enumerate(ROWS):
        rows = rng.integers(1, VOCABULARY, (count, row_tokens), dtype=np.uint16)
        rows[rng.random(rows.shape) < 0.06] = 0
        doubled = (rows[:, 1:] == 0) & (rows[:, :-1] == 0)  # an eos after an eos would be padding
        rows[:, 1:][doubled] = 1
        shards.append(mds.write_rows_shard(folder, f"shard.{number:05d}.mds", rows, hashes=("xxh64",)))
    mds.write_index(folder, shards)
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"eos_id": 0}}))
    return folder


@dataclass(frozen=True, slots=True)
class Job:
    """A script with its arguments, on some ranks."""

    trainer: Trainer
    python: str
    folder: Path
    arguments: Sequence[str]

    @property
    def log(self) -> Path:
        return self.folder / "losses.jsonl"

    def losses(self) -> dict[int, float]:
        """{step: loss}; of a step that was run twice, the later one."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {int(each["step"]): float(each["loss"]) for each in records}

    @contextmanager
    def running(self, ranks: int, steps: int) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The job's processes, each the leader of a group that is killed in the end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        script = [str(EXAMPLES / self.trainer.script), *self.arguments, "--folder", str(self.folder)]
        script += ["--steps", str(steps), *self.trainer.arguments]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "trainers" / "site")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        port = str(free_port())
        if self.trainer.launcher == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
            commands = [([self.python, *launcher, *script], environment)]
        elif self.trainer.launcher == "own":
            commands = [([self.python, *script, "--workers", str(ranks)], environment)]
        else:
            places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            commands = [([self.python, *script], environment | common | place) for place in places]
        with (self.folder / "output.txt").open("ab") as output:
            processes = [
                subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
                for command, env in commands
            ]
        try:
            yield processes
        finally:
            for process in processes:
                kill_with_children(process)

    def run(self, ranks: int, steps: int) -> None:
        """Run to the end."""
        with self.running(ranks, steps) as processes:
            for process in processes:
                if process.wait(RUN_SECONDS):
                    raise SystemExit(f"{self.trainer.script} failed: {self.tail()}")

    def run_until_killed(self, ranks: int, step: int) -> int:
        """Kill all ranks once `step` was logged; return the last step that was logged."""
        with self.running(ranks, FAR_STEPS) as processes:
            deadline = time.monotonic() + RUN_SECONDS
            while max(self.losses(), default=0) < step:
                if any(process.poll() is not None for process in processes):
                    raise SystemExit(f"{self.trainer.script} ended before step {step}: {self.tail()}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"{self.trainer.script} did not reach step {step}: {self.tail()}")
                time.sleep(0.005)
        return max(self.losses())

    def tail(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-4000:]


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started, also into other sessions."""
    import psutil

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed(name: str, trainer: Trainer) -> str:
    """The Python of a virtual environment that has the trainer."""
    home = Path("~/.cache/shardkit-trainers").expanduser() / name
    python, done = home / "bin" / "python", home / "requirements.json"
    wanted = json.dumps([*trainer.alone, *trainer.requirements])
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        if trainer.launcher != "plain":
            subprocess.run([*pip, TORCH], check=True)
        if trainer.alone:
            subprocess.run([*pip, "--no-deps", *trainer.alone], check=True)
        subprocess.run([*pip, *trainer.requirements, f"{ROOT}"], check=True)
        done.write_text(wanted)
    return str(python)


def version_of(python: str, trainer: Trainer) -> str:
    if not (packages := trainer.alone + trainer.requirements):
        return "from its repository"
    package = packages[0].split("==")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def audit(data: Path, logs: Path) -> str:
    """What `shardkit audit --logs` says in one line."""
    command = [sys.executable, "-m", "shardkit", "audit", str(data), "--logs", str(logs)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    return "exact" if done.returncode == 0 else f"WRONG: {(done.stdout + done.stderr)[-2000:]}"


def run_trial(
    name: str, folder: Path, *, python: str | None = None, ranks: tuple[int, int] = (2, 1), batch: int = 12
) -> Outcome:
    """Train, kill, resume on other ranks, audit."""
    trainer = TRAINERS[name]
    python = python or installed(name, trainer)
    data = make_data(folder / "data", trainer.row_tokens)
    arguments = ["--data", str(data), "--global-batch", str(batch), "--checkpoint-every", "5"]
    killed = Job(trainer, python, folder / "killed", arguments)
    killed_at = killed.run_until_killed(ranks[0], 12)
    before = killed.losses()
    resumed_lines = len(killed.log.read_text().splitlines())
    last = killed_at + 8
    killed.run(ranks[1], last)
    resumed = [json.loads(line) for line in killed.log.read_text().splitlines()[resumed_lines:]]
    whole = Job(trainer, python, folder / "whole", arguments)
    whole.run(ranks[1], last)
    expected = whole.losses()
    pairs = [(loss, expected[step]) for step, loss in before.items() if step in expected]
    pairs += [(float(each["loss"]), expected[int(each["step"])]) for each in resumed]
    return Outcome(
        trainer=name,
        version=version_of(python, trainer),
        changed_lines=trainer.changed_lines,
        ranks=f"{ranks[0]} -> {ranks[1]}",
        killed_at=killed_at,
        resumed_at=int(resumed[0]["step"]),
        last_step=max(killed.losses()),
        audit=audit(data, killed.folder / "usage"),
        largest_loss_difference=max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", choices=sorted(TRAINERS))
    parser.add_argument("--python", help="an environment that has the trainer (default: one of our own)")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: removed)")
    parser.add_argument("--ranks", default="2,1", help="killed on, resumed on (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first, second = map(int, arguments.ranks.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        outcome = run_trial(
            arguments.trainer,
            folder,
            python=arguments.python,
            ranks=(first, second),
            batch=arguments.global_batch,
        )
    if arguments.json:
        print(json.dumps(asdict(outcome)))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:24} {value}")
    # The audit cannot know which samples a step should have had that the killed run had already delivered.
    sys.exit(outcome.audit != "exact" or outcome.largest_loss_difference > LOSS_TOLERANCE)


if __name__ == "__main__":
    main()
