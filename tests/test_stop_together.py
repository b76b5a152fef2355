"""An error of one rank stops all, a normal end stops nobody, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.loaders import stop_together
from shardkit.loaders.stop_together import MESSAGE_CHARACTERS, PeerError, StopTogether

RANKS = Path(__file__).with_name("stop_ranks.py")
GRACE_SECONDS = 0.6  # of stop_ranks.py
SOON_SECONDS = 15.0  # for what happens within milliseconds on a machine that is not overloaded


@dataclass
class Rank:
    """How a rank ended: its exit code (negative: the signal), after how long, and what it printed."""

    code: int
    seconds: float
    output: str

    def printed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


Run = Callable[[str], list[Rank]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a scenario of stop_ranks.py in three processes."""
    folder = tmp_path_factory.mktemp("ranks")
    driver = subprocess.Popen(
        [sys.executable, str(RANKS), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    stdin, stdout = driver.stdin, driver.stdout

    def scenario(name: str) -> list[Rank]:
        stdin.write(f"{name}\n")
        stdin.flush()
        ends = json.loads(stdout.readline())
        outputs = [(folder / f"{name}.{rank}").read_text() for rank in range(len(ends))]
        return [Rank(end["code"], end["seconds"], text) for end, text in zip(ends, outputs, strict=True)]

    yield scenario
    stdin.close()
    driver.wait(60)
    stdout.close()


def test_ranks_that_hang_in_a_collective_are_ended_and_say_why(run: Run) -> None:
    first, _, third = run("hang")
    assert first.code == -signal.SIGTERM
    assert third.code == 1  # it handles SIGTERM, and never comes to run the handler
    for number, rank in ((0, first), (2, third)):
        line = next(line for line in rank.output.splitlines() if line.startswith("shardkit: "))
        assert f"rank 1 stopped at step 812: ValueError: boom; rank {number} has not come back" in line
        assert "stop_ranks.py:" in line
        assert " in hang" in line
        assert rank.seconds < GRACE_SECONDS + SOON_SECONDS


@pytest.mark.parametrize(
    ("scenario", "step", "message"),
    [
        ("come_back", 812, "rank 0 stopped at step 812: ValueError: boom"),
        ("uncaught", None, "rank 0 stopped: ValueError: boom"),
    ],
)
def test_ranks_that_come_to_their_loader_get_the_peers_error_and_time_to_save(
    run: Run, scenario: str, step: int | None, message: str
) -> None:
    failed, *others = run(scenario)
    assert failed.code == 1
    for rank in others:
        assert rank.printed() == [{"error": message, "rank": 0, "step": step}, {"saved": True}]
        assert rank.code == 0
        assert "shardkit:" not in rank.output


@pytest.mark.extended
def test_ranks_that_end_one_after_another_disturb_nobody(run: Run) -> None:
    for rank in run("one_ends"):
        assert rank.code == 0
        assert rank.printed() == [{"left": []}]
        assert "shardkit:" not in rank.output


class Board:
    """A store in memory, which can be lost."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.looks = 0
        self.lost = False

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            self.looks += 1
            self.changed.notify_all()
            if self.lost:
                raise RuntimeError("Connection reset by peer")
            return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if self.values.get(key, "") == expected:
                self.set(key, desired)
            return self.values[key].encode()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SOON_SECONDS)


Start = Callable[..., StopTogether]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    board = Board()
    monkeypatch.setattr(stop_together, "_connect", lambda: board)
    return board


@pytest.fixture
def start(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts ranks of this process that share `board`; closes them in the end."""
    started = []
    monkeypatch.setattr(stop_together, "_SLACK_SECONDS", 0.2)

    def rank(number: int = 0, world_size: int = 2, grace_seconds: float | None = None) -> StopTogether:
        stop = StopTogether(grace_seconds=grace_seconds, poll_seconds=0.01)
        stop.watch(number, world_size)
        started.append(stop)
        return stop

    yield rank
    for stop in started:
        stop.close()
    assert not threads()


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been done to this process."""
    endings: list[str] = []
    monkeypatch.setattr(stop_together, "END_SECONDS", 0.01)
    monkeypatch.setattr(os, "kill", lambda process, number: endings.append(signal.Signals(number).name))
    monkeypatch.setattr(os, "_exit", lambda code: endings.append(f"exit {code}"))
    return endings


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-stop"]


def heard(stop: StopTogether) -> PeerError:
    deadline = time.monotonic() + SOON_SECONDS
    while time.monotonic() < deadline:
        try:
            stop.check()
        except PeerError as error:
            return error
        time.sleep(0.001)
    raise AssertionError("no error was heard")


def test_the_peers_hear_rank_step_and_message(start: Start) -> None:
    ranks = [start(number, 3) for number in range(3)]
    began = time.monotonic()
    ranks[1].report(ValueError("no such shard"), step=12345)
    assert time.monotonic() - began < SOON_SECONDS
    for stop in (ranks[0], ranks[2]):
        error = heard(stop)
        assert str(error) == "rank 1 stopped at step 12,345: ValueError: no such shard"
        assert (error.rank, error.step, error.problem) == (1, 12345, "ValueError: no such shard")
    ranks[1].check()


def test_reporting_returns_only_when_the_peers_have_heard(start: Start, board: Board) -> None:
    first, second = start(0), start(1)
    first.report(ValueError("boom"))
    assert sum("/heard/1" in key for key in board.values) == 1
    assert str(heard(second)) == "rank 0 stopped: ValueError: boom"


def test_reporting_to_peers_that_are_gone_ends_by_itself(start: Start) -> None:
    stop = start(0)
    began = time.monotonic()
    stop.report(ValueError("boom"))
    assert time.monotonic() - began < SOON_SECONDS


def test_the_first_error_of_a_run_is_the_one_that_is_told(start: Start) -> None:
    first, second = start(0, 3), start(1, 3)
    first.report(ValueError("first"))
    second.report(ValueError("second"))
    assert "first" in str(heard(start(2, 3)))


def test_who_starts_to_listen_later_hears_too(start: Start) -> None:
    start(0).report(ValueError("boom"))
    assert heard(start(1)).rank == 0


def test_a_run_that_torchrun_starts_again_does_not_hear_the_former_ones_error(
    start: Start, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    start(0).report(ValueError("boom"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    stop, looks = start(1), board.looks
    board.wait_for(lambda: board.looks > looks + 3)
    stop.check()


def test_what_came_from_a_peer_is_not_told_again(start: Start, board: Board) -> None:
    stop = start(0)
    stop.report(PeerError(1, 5, "boom"))
    assert board.values == {}


def test_a_long_message_is_cut(start: Start) -> None:
    first, second = start(0), start(1)
    first.report(ValueError("x" * 100_000))
    assert len(heard(second).problem) == MESSAGE_CHARACTERS


def test_a_listener_is_told_at_once_to_end_a_wait_for_data(start: Start) -> None:
    first, second = start(0), start(1)
    told: list[PeerError] = []
    arrived = threading.Event()
    second.on_peer_error(told.append)
    second.on_peer_error(lambda error: arrived.set())
    first.report(ValueError("boom"), step=3)
    assert arrived.wait(SOON_SECONDS)
    assert str(told[0]) == "rank 0 stopped at step 3: ValueError: boom"


def test_a_loop_that_stays_away_is_ended_in_steps(
    start: Start, endings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = start(0), start(1, grace_seconds=0.05)
    first.report(ValueError("boom"), step=7)
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == ["SIGTERM", "exit 1"]
    line = capfd.readouterr().err
    assert line.startswith("shardkit: rank 0 stopped at step 7: ValueError: boom; rank 1 has not come back")
    assert " (it is at " in line
    assert line.count("\n") == 1


def test_a_loop_that_an_abort_sets_free_is_left_to_end_by_itself(
    start: Start, endings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(0), start(1, grace_seconds=0.05)

    def abort() -> bool:
        second.close()  # what a loader's `with` does when the collective raises
        return True

    monkeypatch.setattr(stop_together, "_abort_process_groups", abort)
    first.report(ValueError("boom"))
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == []


@pytest.mark.parametrize(
    ("backend", "aborted"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False)]
)
def test_collectives_are_aborted_where_the_backend_can(
    monkeypatch: pytest.MonkeyPatch, backend: str, aborted: bool
) -> None:
    calls: list[str] = []
    functions = SimpleNamespace(_abort_process_group=lambda: calls.append("abort"))
    distributed = SimpleNamespace(get_backend=lambda: backend, distributed_c10d=functions)
    monkeypatch.setattr(stop_together, "_distributed", lambda: distributed)
    assert stop_together._abort_process_groups() is aborted
    assert calls == ["abort"] * aborted


def test_an_abort_that_hangs_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    functions = SimpleNamespace(_abort_process_group=lambda: hang.wait(SOON_SECONDS))
    distributed = SimpleNamespace(get_backend=lambda: "nccl", distributed_c10d=functions)
    monkeypatch.setattr(stop_together, "_distributed", lambda: distributed)
    monkeypatch.setattr(stop_together, "END_SECONDS", 0.01)
    assert not stop_together._abort_process_groups()
    hang.set()


def test_a_loop_that_takes_the_error_is_left_alone(start: Start, endings: list[str]) -> None:
    first, second = start(0), start(1, grace_seconds=SOON_SECONDS)
    first.report(ValueError("boom"))
    heard(second)
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == []


def test_an_error_taken_by_one_loader_counts_for_the_others_of_its_process(
    start: Start, endings: list[str], board: Board
) -> None:
    training, validation = start(1, grace_seconds=0.5), start(1, grace_seconds=0.5)
    start(0).report(ValueError("boom"))
    heard(validation)
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == []
    training.close()


def test_closing_in_the_grace_time_ends_the_watch(start: Start, endings: list[str]) -> None:
    first, second = start(0), start(1, grace_seconds=SOON_SECONDS)
    first.report(ValueError("boom"))
    second.close()
    assert not second.watching
    assert endings == []


def test_without_grace_time_nothing_is_ended(start: Start, endings: list[str]) -> None:
    first, second = start(0), start(1, grace_seconds=None)
    first.report(ValueError("boom"))
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == []
    assert heard(second).rank == 0


def test_a_store_that_is_lost_is_no_error(start: Start, board: Board, endings: list[str]) -> None:
    stop = start(0, grace_seconds=0.01)
    board.lost = True
    for thread in threads():
        thread.join(SOON_SECONDS)
    stop.check()
    stop.report(ValueError("boom"))
    assert not stop.watching
    assert endings == []


def test_closing_twice_ends_the_thread_once(start: Start) -> None:
    stop = start(0)
    assert stop.watching
    stop.close()
    stop.close()
    assert not threads()
    stop.check()
    stop.watch(0, 2)
    assert stop.watching


def test_a_thread_ends_with_its_garbage_collected_owner(board: Board) -> None:
    class Loader:
        def __init__(self) -> None:
            self.stop = StopTogether(poll_seconds=0.01)
            self.stop.on_peer_error(self.end)
            self.stop.watch(0, 2)

        def end(self, error: PeerError) -> None: ...

    loader = Loader()
    board.wait_for(lambda: board.looks > 1)
    (thread,) = threads()
    del loader
    gc.collect()
    thread.join(SOON_SECONDS)
    assert not thread.is_alive()


def test_a_forked_child_leaves_its_parents_watch_alone(start: Start, board: Board) -> None:
    stop = start(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the case in question
        child = os.fork()
    if child == 0:
        began = time.monotonic()
        stop.report(ValueError("boom"))
        stop.close()
        os._exit(0 if time.monotonic() - began < 1 and not board.values else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stop.watching


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_runs_with_one_rank_or_without_torch_distributed(world_size: int) -> None:
    stop = StopTogether()
    stop.watch(0, world_size)
    assert not stop.watching
    assert not threads()
    stop.check()
    stop.report(ValueError("boom"))
    stop.close()


@pytest.mark.parametrize("bad", [{"grace_seconds": 0}, {"poll_seconds": 0}, {"poll_seconds": 61}])
def test_bad_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        StopTogether(**bad)


def test_a_peers_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(PeerError(3, None, "ValueError: boom")))
    assert (str(copy), copy.rank, copy.step) == ("rank 3 stopped: ValueError: boom", 3, None)
