"""A worker that is stopped, hangs or cannot send ends the wait for it with an error that names it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support import stuck_workers
from support.loader_data import make_dataset

TIMEOUT = r"LoaderTimeoutError: rank 0 of 1, step \d+ \(position \d+\): no batch from worker .*"
MOST_SECONDS = 40.0  # of an interpreter on a busy machine; without limits these cases hang


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """A dataset that is not in /dev/shm, as temporary folders of tests may be."""
    with TemporaryDirectory() as folder:
        yield make_dataset(Path(folder) / "data", "mds")


def run(data: Path, case: str, method: str, *before: str) -> list[str]:
    """What the loop prints, by a command that may have another one `before` it."""
    tests = Path(stuck_workers.__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    done = subprocess.run(
        [*before, sys.executable, stuck_workers.__file__, str(data), case, method],
        check=False,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert time.monotonic() - began < MOST_SECONDS
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "method", "says"),
    [
        ("stop", "fork", TIMEOUT + r"process \d+, stopped\) within 1\.5 s .*last batch of any worker came"),
        pytest.param("hang", "fork", TIMEOUT + r"process \d+, waiting\)", marks=pytest.mark.extended),
        ("unsendable", "fork", TIMEOUT + r"could not be sent: .* /dev/shm"),
        # torch raises it wherever the loop is: at a batch, or in the step.
        ("killed", "fork", r"RuntimeError: (rank 0 of 1, step \d+ .*|)DataLoader worker "),
        pytest.param("anew", "fork", TIMEOUT + "stopped", marks=pytest.mark.extended),
        pytest.param("close", "fork", None, marks=pytest.mark.extended),
        pytest.param("exit", "fork", None, marks=pytest.mark.extended),
        pytest.param("stop", "spawn", TIMEOUT + "stopped", marks=pytest.mark.extended),
        pytest.param("stop", "forkserver", TIMEOUT + "stopped", marks=pytest.mark.extended),
        pytest.param("exit", "spawn", None, marks=pytest.mark.extended),
    ],
)
def test_no_wait_for_a_worker_is_endless_and_no_worker_is_left(
    data: Path, case: str, method: str, says: str | None
) -> None:
    lines = run(data, case, method)
    assert case in ("exit", "killed") or lines[-1] == "left 0"
    assert says is None or re.match(says, lines[0]), lines


def test_workers_of_an_iterator_in_a_cycle_of_garbage_end_by_themselves(data: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(data, batch_size=4), num_workers=1)
    batches: Any = iter(loader)
    next(batches)
    [worker] = multiprocessing.active_children()
    cycle = [batches, loader]
    cycle.append(cycle)
    del batches, loader, cycle
    gc.collect()
    worker.join(MOST_SECONDS)
    assert worker.exitcode == 0


def small_shared_memory(size: str) -> tuple[str, ...]:
    """A command that runs another one with a /dev/shm of its own, one page of which is taken."""
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/x"
    before = ("unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh")
    try:
        subprocess.run([*before, "true"], check=True, capture_output=True, timeout=MOST_SECONDS)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    return before


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
def test_a_batch_that_does_not_fit_into_dev_shm_ends_the_wait_with_its_name(data: Path, method: str) -> None:
    lines = run(data, "full", method, *small_shared_memory("1m"))
    assert re.match(TIMEOUT + r"need space in /dev/shm, which has .* free of 1\.05 MB", lines[0]), lines
    assert lines[-1] == "left 0"


@pytest.mark.extended
def test_workers_that_cannot_start_for_a_full_dev_shm_say_so(data: Path) -> None:
    with pytest.raises(AssertionError, match="/dev/shm has no space for the locks of DataLoader workers"):
        run(data, "full", "fork", *small_shared_memory("4k"))
