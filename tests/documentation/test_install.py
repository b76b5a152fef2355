"""The page on installing: the image has what the package needs, and the batch file trains on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.slurm import SlurmCluster, why_not
from support.pages import ROOT
from support.train_harness import ENVIRONMENT, SIZES, Record, Training, by_step, make_dataset

IMAGE = (ROOT / "examples" / "Dockerfile").read_text()
BATCH = ROOT / "examples" / "slurm_train.sbatch"
STEPS, JOB_SECONDS = 1500, 300.0  # more steps than are done before the job is preempted
TRAIN = ["--global-batch-size", "4", "--steps", str(STEPS), "--checkpoint-every", "5", *SIZES]


def test_the_image_copies_what_the_package_is_built_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", IMAGE, re.MULTILINE) for name in line.split()}
    folders = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    stated = project["project"]
    assert copied == {"pyproject.toml", "shardkit", *folders, stated["readme"], *stated["license-files"]}
    assert all((ROOT / name).exists() for name in copied)
    [extras] = re.findall(r"^ARG EXTRAS=(\S+)$", IMAGE, re.MULTILINE)
    assert {*extras.split(",")} <= stated["optional-dependencies"].keys()
    [entry] = re.findall(r"^ENTRYPOINT (.+)$", IMAGE, re.MULTILINE)
    assert {*json.loads(entry)} == stated["scripts"].keys()


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=2, cpus=1) as slurm:
        yield slurm


def submit(slurm: SlurmCluster, folder: Path, data: Path, *options: str) -> str:
    """Submit the batch file as the page does, for a small model on CPUs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = str(ROOT / "examples" / "train_ddp.py")
    size = ("--nodes=2", "--mem-per-cpu=1500M", *options)
    arguments = (*size, str(BATCH), script, "--data", str(data), *TRAIN)
    return slurm.submit(*arguments, cwd=folder, **ENVIRONMENT, PATH=path, PYTHONPATH=str(ROOT))


def records(folder: Path) -> list[Record]:
    log = folder / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_training_job_of_slurm_that_is_preempted_goes_on_with_the_exact_next_samples(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    data = make_dataset(tmp_path / "data")
    number = submit(slurm, tmp_path, data, "--time=10")
    log = tmp_path / f"train-{number}.log"
    deadline = time.monotonic() + JOB_SECONDS
    while len(records(tmp_path)) < 12:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    other = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1", cwd=tmp_path)
    assert slurm.wait(other, JOB_SECONDS) == "COMPLETED"
    assert slurm.wait(number, JOB_SECONDS) == "COMPLETED", log.read_text()
    assert len(records(tmp_path)) >= STEPS
    assert int(slurm.show(number, "Restarts")) == 1
    whole = Training("train_plain.py", tmp_path / "whole", ["--data", str(data), "--batch-size", "4"])
    whole.run(STEPS)
    expected, found = by_step(whole.records()), by_step(records(tmp_path))
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    for step, record in expected.items():
        assert found[step]["sample_ids"] == record["sample_ids"]
