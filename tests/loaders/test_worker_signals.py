"""Signals that are meant for the trainer leave DataLoader workers alone; workers end with their parent."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardkit.loaders import worker_signals
from support import signalled_trainer
from support.loader_data import make_dataset

SECONDS = 60.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("signals") / "data", "mds")


@contextmanager
def trainer(
    data: Path, method: str, kind: str, number: int
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A trainer with a session of its own, and the processes of its workers, once it has made steps."""
    tests = Path(signalled_trainer.__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, signalled_trainer.__file__, str(data), method, kind, str(number)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("ready"):
                yield process, [int(word) for word in line.split()[1:]]
                return
        raise AssertionError(output)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


CASES = [
    ("fork", "blocks", signal.SIGTERM),
    ("fork", "collate", signal.SIGTERM),
    ("spawn", "blocks", signal.SIGTERM),
    *(
        pytest.param(method, kind, number, marks=pytest.mark.extended)
        for method, kind, number in (
            ("fork", "plain", signal.SIGTERM),
            ("fork", "persistent", signal.SIGUSR1),
            ("forkserver", "blocks", signal.SIGTERM),
            *(("fork", "blocks", n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)),
            *(("spawn", "collate", n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)),
            *(("forkserver", "persistent", n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)),
        )
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "kind", "number"), CASES)
def test_a_signal_to_the_whole_group_reaches_the_trainer_which_saves(
    data: Path, method: str, kind: str, number: int
) -> None:
    with trainer(data, method, kind, number) as (process, workers):
        assert len(workers) == 2
        for _ in range(3):  # schedulers repeat it
            os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        saved = next(line for line in output.splitlines() if line.startswith("saved")).split()
        assert int(saved[1]) > 0
        assert set(map(int, saved[2:])) == set(workers), "the same workers were alive"


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(method, marks=pytest.mark.extended) for method in ("spawn", "forkserver"))],
)
def test_a_trainer_that_is_killed_leaves_no_worker(data: Path, method: str) -> None:
    with trainer(data, method, "blocks", signal.SIGTERM) as (process, workers):
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while (left := [worker for worker in workers if is_running(worker)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_end_of_a_process_is_seen_beyond_1024_descriptors() -> None:
    """`select.select` refuses descriptors from 1,024 on, which long trainers have."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    low = os.pidfd_open(process.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
    try:
        assert not worker_signals._has_ended(process.pid, high)
        process.communicate(b"\n", SECONDS)
        assert worker_signals._has_ended(process.pid, high)
    finally:
        process.kill()
        os.close(high)
        os.close(low)
