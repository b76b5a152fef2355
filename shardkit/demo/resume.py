"""Proof that a killed training run continues exactly: same samples, same losses, bit by bit.

One run is killed with SIGKILL between two checkpoints and started again; another is never interrupted. Each
logs every step. The steps that the killed run repeats after its checkpoint must come out equal, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardkit.demo.proof import NO_TORCH, Proof
from shardkit.errors import ShardkitError

__all__ = ["compare_runs", "prove_resume"]

CHECKPOINT_EVERY = 5
KILL_AFTER_STEP = 2 * CHECKPOINT_EVERY + 2  # two steps past the second checkpoint
MORE_STEPS = 10  # that both runs train beyond the kill
FAR_STEPS = 1_000_000  # the killed run must not end by itself
RUN_SECONDS = 300  # each takes a few seconds; a hang must not last for ever
POLL_SECONDS = 0.005


def prove_resume(data: Path, folder: Path, vocabulary: int) -> Proof:
    """Train, kill, resume and compare with an uninterrupted run; both leave their files under `folder`."""
    name = "resume after SIGKILL is exact"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    killed, whole = folder / "killed", folder / "uninterrupted"
    killed.mkdir(parents=True)
    whole.mkdir()
    _train_and_kill(data, killed, vocabulary)
    kill_step = max(record["step"] for record in _records(killed))
    last_step = kill_step + MORE_STEPS
    runs = [_start(data, run, vocabulary, last_step) for run in (killed, whole)]
    try:
        for run in runs:
            _wait(run)
    finally:
        _kill_all(runs)
    return compare_runs(name, _records(killed), _records(whole), kill_step, last_step)


def compare_runs(
    name: str, interrupted: list[dict[str, Any]], whole: list[dict[str, Any]], kill_step: int, last_step: int
) -> Proof:
    """The proof from both logs: `interrupted` holds what ran before the kill, then what ran after it."""
    expected = {record["step"]: record for record in whole}
    different = sorted({r["step"] for r in interrupted if r != expected.get(r["step"])})
    complete = sorted({r["step"] for r in interrupted}) == sorted(expected) == list(range(1, last_step + 1))
    resumed = interrupted[kill_step:]  # the first run logged each step up to the kill once
    figures = {
        "killed_after_step": kill_step,
        "resumed_from_step": resumed[0]["step"] - 1 if resumed else None,
        "last_step": last_step,
        "steps_compared": len(interrupted),
        "steps_repeated": len(interrupted) - len({r["step"] for r in interrupted}),
        "different_steps": different,
        "first_loss": whole[0]["loss"],
        "last_loss": whole[-1]["loss"],
    }
    if different or not complete:
        evidence = f"steps that differ from the uninterrupted run: {different or 'some are missing'}"
        return Proof(name, False, evidence, figures)
    evidence = (
        f"killed after step {kill_step}, resumed from step {figures['resumed_from_step']}: {len(resumed)} "
        f"steps, same sample ids, same losses bit by bit ({whole[0]['loss']:.2f} to {whole[-1]['loss']:.2f})"
    )
    return Proof(name, True, evidence, figures)


def _train_and_kill(data: Path, folder: Path, vocabulary: int) -> None:
    run = _start(data, folder, vocabulary, FAR_STEPS)
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while len(_records(folder)) < KILL_AFTER_STEP:
            if run.poll() is not None or time.monotonic() > deadline:
                _kill_all([run])
                raise ShardkitError(f"the training run did not reach step {KILL_AFTER_STEP}:\n{_errors(run)}")
            time.sleep(POLL_SECONDS)
        run.send_signal(signal.SIGKILL)
        run.wait()
    finally:
        _kill_all([run])


def _start(data: Path, folder: Path, vocabulary: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardkit.demo.train", str(data), "--folder", str(folder)]
    command += ["--vocabulary", str(vocabulary), "--steps", str(steps), "--every", str(CHECKPOINT_EVERY)]
    # One thread sums in one order; and torch must not leave its cache folder in the system's.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def _wait(run: subprocess.Popen[str]) -> None:
    try:
        _, errors = run.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ShardkitError(f"the training run took more than {RUN_SECONDS} seconds") from error
    if run.returncode != 0:
        raise ShardkitError(f"the training run failed with exit code {run.returncode}:\n{errors[-2000:]}")


def _kill_all(runs: list[subprocess.Popen[str]]) -> None:
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.wait()


def _errors(run: subprocess.Popen[str]) -> str:
    assert run.stderr is not None
    return run.stderr.read()[-2000:]


def _records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's log so far."""
    log = folder / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
