"""The batch file on a real Slurm of four nodes gives a local build's bytes, whatever befalls its job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servers.slurm import SlurmCluster, why_not
from shardkit.writers import build
from support.ray_cluster import RAY_ENVIRONMENT
from support.small_build import RECIPE, make_corpus, tree

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "clusters" / "ray-on-slurm.sbatch"
BUILD = RECIPE + "work: work\nmemory: 512MB\n"
JOB_SECONDS = 300.0  # five times what it takes on two idle cores, on which four nodes have to start
ENVIRONMENT = RAY_ENVIRONMENT | {"RAY_worker_niceness": "0"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    pytest.importorskip("ray", reason="pip install 'shardkit[ray]'")
    with SlurmCluster(nodes=4, cpus=1) as slurm:
        yield slurm


class Job:
    """A build by the batch file, on small nodes."""

    def __init__(self, slurm: SlurmCluster, folder: Path, nodes: int) -> None:
        self.slurm, self.folder, self.recipe = slurm, folder, make_corpus(folder / "corpus", 200, BUILD)
        (folder / "bin").mkdir()
        (folder / "bin" / "shardkit").write_text(f'#!/bin/sh\nexec {sys.executable} -m shardkit "$@"\n')
        (folder / "bin" / "shardkit").chmod(0o755)
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        size = (f"--nodes={nodes}", "--cpus-per-task=1", "--mem-per-cpu=1000M", "--time=10")
        arguments = (*size, str(SCRIPT), str(self.recipe))
        self.number = slurm.submit(*arguments, cwd=folder, **ENVIRONMENT, PATH=path)

    @property
    def log(self) -> str:
        file = self.folder / f"shardkit-{self.number}.log"
        return file.read_text() if file.exists() else ""

    def await_log(self, found: Callable[[str], object]) -> None:
        """Wait until the log is as wanted."""
        deadline = time.monotonic() + JOB_SECONDS
        while not found(self.log):
            assert time.monotonic() < deadline, self.log
            assert self.slurm.state(self.number) in ("PENDING", "CONFIGURING", "RUNNING"), self.log
            time.sleep(0.1)

    def check(self) -> None:
        """It ends, with the bytes of a build here."""
        assert self.slurm.wait(self.number, JOB_SECONDS) == "COMPLETED", self.log
        expected = build(self.recipe, overrides=["work=alone", "output.path=expected"], progress=False)
        assert tree(self.folder / "corpus" / "out") == tree(expected.output)


def test_slurm_takes_the_file_as_it_is(slurm: SlurmCluster) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = ["sbatch", "--test-only", "--nodes=4", "--cpus-per-task=1", str(SCRIPT), "recipe.yaml"]
    done = subprocess.run(
        command, env=environment | slurm.environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert re.search(r"to start at .* using 4 processors on nodes n\[1-4\]", done.stderr)


@pytest.mark.usefixtures("inline_builds")
def test_a_build_on_four_nodes_of_which_one_dies_gives_a_local_builds_bytes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, nodes=4)
    job.await_log(lambda log: "read and filter" in log)
    slurm.kill_node("n4")
    job.check()
    slurm.start_node("n4")


@pytest.mark.usefixtures("inline_builds")
def test_a_job_that_is_preempted_starts_again_and_continues(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, nodes=2)
    job.await_log(lambda log: "tokenizer 1 of 1 tasks" in log)
    other = slurm.submit("--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 1", cwd=tmp_path)
    assert slurm.wait(other, JOB_SECONDS) == "COMPLETED"
    job.check()
    assert re.search(r"terminated; tasks finished: \d+; run the same command again to continue", job.log)
    assert int(slurm.show(job.number, "Restarts")) == 1
