"""Limits on waiting count the time in which a process could run: one that was stopped goes on."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.storage.retry import RetryPolicy
from shardkit.storage.running_clock import (
    GAP_SECONDS,
    LOOK_SECONDS,
    RunningClock,
    running_seconds,
    wait_until,
)
from support.remote_harness import make_remote_kind

STOPPED_SECONDS = GAP_SECONDS + 3.0
CHILD = """
import sys, threading, time
from pathlib import Path
from support.noted_store import NotedStore
from support.remote_harness import Remote, quick_policy

folder, held = sys.argv[1:]

def holds(read):
    return read.shard is not None and (held == "shards" or read.stop is not None)

store = NotedStore(Path(folder), holds=holds)
remote = Remote.open(store, policy=quick_policy(deadline_seconds=3.0, answer_seconds=3.0))

def let_through():
    assert store.reached.wait(30)
    print("waiting", flush=True)
    for _ in range(20):
        time.sleep(0.1)
    store.let_through()

threading.Thread(target=let_through, daemon=True).start()
loader = remote.loader(timeout_seconds=3.0)
print(len(next(iter(loader))["sample_id"]), flush=True)
loader.close()
"""


def test_gaps_in_which_nothing_ran_are_left_out_and_shorter_ones_count() -> None:
    now = [100.0]
    clock = RunningClock(lambda: now[0], has_thread=False)
    began = clock()
    for seconds in (1.0, GAP_SECONDS, 4.0):
        now[0] += seconds
        assert clock() == now[0]
    now[0] += 900.0
    assert clock() == began + 5.0 + GAP_SECONDS
    now[0] += 1.0
    assert clock() == began + 6.0 + GAP_SECONDS


def test_a_wait_is_made_of_short_ones_and_ends_by_the_clock_alone() -> None:
    now, waited = [0.0], []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        now[0] += seconds
        return False

    assert not wait_until(wait, 25.0, lambda: now[0])
    assert waited == [LOOK_SECONDS, LOOK_SECONDS, 5.0]
    assert wait_until(lambda seconds: True, 0.0, lambda: now[0]), "what has come is taken, late or not"


def test_the_clock_runs_as_time_does_and_its_policy_can_be_pickled() -> None:
    before, began = time.monotonic(), running_seconds()
    time.sleep(0.05)
    assert running_seconds() - began == pytest.approx(time.monotonic() - before, abs=0.04)
    assert pickle.loads(pickle.dumps(RetryPolicy())).clock is running_seconds


@pytest.mark.extended
@pytest.mark.parametrize(("held", "kind"), [("rows", "mds"), ("shards", "mds_zstd")])
def test_a_loader_stopped_for_longer_than_all_its_timeouts_goes_on(
    tmp_path: Path, held: str, kind: str
) -> None:
    folder = make_remote_kind(tmp_path / "data", kind)
    command = [sys.executable, "-c", CHILD, str(folder), held]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waiting\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == b"4\n"
        assert child.wait(30) == 0
