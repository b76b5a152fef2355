"""An error of one rank stops all, a normal end stops nobody."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import PeerError
from shardkit.loaders import StreamingLoader, watch
from shardkit.loaders.config import LoaderConfig, Run, grouped
from shardkit.loaders.peers import MESSAGE_CHARACTERS, PeerWatch, StopTogether
from support.loader_data import make_dataset

RANKS = Path(__file__).resolve().parents[1] / "support" / "stop_ranks.py"
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


Ranks = dict[str, list[Rank]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The three ranks of every scenario of stop_ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, str(RANKS), str(folder)], check=True, timeout=200, env=environment)
    return {
        name: [Rank(**end, output=(folder / f"{name}.{rank}").read_text()) for rank, end in enumerate(ends)]
        for name, ends in json.loads((folder / "ends.json").read_text()).items()
    }


def test_by_default_no_process_is_ended_and_the_loop_gets_the_peers_error_at_its_next_batch(
    ended: Ranks,
) -> None:
    assert LoaderConfig().stop_grace_seconds is None
    first, _, third = ended["stay_away"]
    for rank in (first, third):
        error = "rank 1 stopped at step 812: ValueError: boom"
        assert rank.printed() == [{"error": error, "rank": 1, "step": 812}, {"saved": True}]
        assert rank.code == 0
        assert "shardkit:" not in rank.output


def test_ranks_that_hang_in_a_collective_are_ended_on_request_and_say_why(ended: Ranks) -> None:
    first, _, third = ended["hang"]
    assert first.code == -signal.SIGTERM
    assert third.code == 1  # it handles SIGTERM, and never comes to run the handler
    for number, rank in ((0, first), (2, third)):
        line = next(line for line in rank.output.splitlines() if line.startswith("shardkit: "))
        assert "rank 1 stopped at step 812: ValueError: boom; " in line
        assert f"the loop of rank {number} has not returned to its loader for 0.6 s" in line
        assert re.search(r'stop_ranks.py", line \d+ in hang', rank.output)
        assert rank.seconds < GRACE_SECONDS + SOON_SECONDS


@pytest.mark.parametrize(
    ("scenario", "step", "message"),
    [
        ("come_back", 812, "rank 0 stopped at step 812: ValueError: boom"),
        ("uncaught", None, "rank 0 stopped: ValueError: boom"),
        ("met_by_address", 812, "rank 0 stopped at step 812: ValueError: boom"),
    ],
)
def test_ranks_that_come_to_their_loader_get_the_peers_error_and_time_to_save(
    ended: Ranks, scenario: str, step: int | None, message: str
) -> None:
    failed, *others = ended[scenario]
    assert failed.code == 1
    for rank in others:
        assert rank.printed() == [{"error": message, "rank": 0, "step": step}, {"saved": True}]
        assert rank.code == 0
        assert "shardkit:" not in rank.output


def test_ranks_that_end_one_after_another_disturb_nobody(ended: Ranks) -> None:
    for rank in ended["one_ends"]:
        assert rank.code == 0
        assert rank.printed() == [{"left": []}]
        assert "shardkit:" not in rank.output


class Board:
    """A store in memory, which can be lost."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.looks = 0
        self.most_keys = 0  # in one look
        self.lost = False

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            self.looks += 1
            self.most_keys = max(self.most_keys, len(keys))
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

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.looks += amount == 0
            if self.lost:
                raise RuntimeError("Connection reset by peer")
            count = int(self.values.get(key, "0")) + amount
            self.set(key, str(count))
            return count

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if self.values.get(key, "") == expected:
                self.set(key, desired)
            return self.values[key].encode()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SOON_SECONDS)


Start = Callable[..., StopTogether[Any]]


@pytest.fixture
def board() -> Board:
    return Board()


class Loader:
    """What is told of a peer's error."""

    def __init__(self) -> None:
        self.told: list[PeerError] = []
        self.arrived = threading.Event()

    def tell(self, error: PeerError) -> None:
        self.told.append(error)
        self.arrived.set()


@pytest.fixture
def start(board: Board) -> Iterator[Start]:
    """Starts ranks of this process that share `board`; closes them in the end."""
    started = []

    def rank(
        number: int = 0,
        world_size: int = 2,
        grace_seconds: float | None = None,
        owner: Loader | None = None,
    ) -> StopTogether[Loader]:
        owner = owner or Loader()
        stop = StopTogether(
            owner,
            on_peer_error=Loader.tell,
            grace_seconds=grace_seconds,
            poll_seconds=0.01,
            end_seconds=0.01,
            process=(number, world_size),
            connect=lambda: board,
        )
        stop.watch()
        started.append((owner, stop))
        return stop

    yield rank
    for _, stop in started:
        stop.close()
    assert not threads()


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been done to this process."""
    endings: list[str] = []
    monkeypatch.setattr(os, "kill", lambda process, number: endings.append(signal.Signals(number).name))
    monkeypatch.setattr(os, "_exit", lambda code: endings.append(f"exit {code}"))
    return endings


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-stop"]


def heard(stop: StopTogether[Any] | PeerWatch) -> PeerError:
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
    assert [count for key, count in board.values.items() if key.endswith("/heard")] == ["2"]
    assert str(heard(second)) == "rank 0 stopped: ValueError: boom"


def test_a_rank_counts_once_however_many_loaders_it_has_and_however_many_ranks_fail(
    start: Start, board: Board
) -> None:
    ranks = [start(number, 3) for number in (0, 1, 1, 1, 2)]
    began = time.monotonic()
    for stop in (ranks[0], ranks[-1]):
        stop.report(ValueError("boom"))
    for stop in ranks[1:4]:
        heard(stop)
    assert time.monotonic() - began < SOON_SECONDS
    assert [count for key, count in board.values.items() if key.endswith("/heard")] == ["3"]


def test_the_stores_work_does_not_grow_with_the_ranks(start: Start, board: Board) -> None:
    stop = start(0, 1 << 14)  # which polls every 10 ms in a small world
    time.sleep(0.3)
    assert board.looks <= 2, "4,096 looks a second are left over for 16,384 ranks"
    board.looks = 0
    threading.Thread(target=stop.report, args=(ValueError("boom"),), daemon=True).start()
    board.wait_for(lambda: board.looks >= 3)
    assert board.most_keys == 1
    board.lost = True


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
    loader = Loader()
    first, _ = start(0), start(1, owner=loader)
    first.report(ValueError("boom"), step=3)
    assert loader.arrived.wait(SOON_SECONDS)
    assert str(loader.told[0]) == "rank 0 stopped at step 3: ValueError: boom"


def test_a_loop_that_stays_away_is_ended_in_steps(
    start: Start, endings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = start(0), start(1, grace_seconds=0.05)
    first.report(ValueError("boom"), step=7)
    for thread in threads():
        thread.join(SOON_SECONDS)
    assert endings == ["SIGTERM", "exit 1"]
    line, *stacks = capfd.readouterr().err.splitlines()
    assert line.startswith("shardkit: rank 0 stopped at step 7: ValueError: boom; the loop of rank 1 has not")
    assert any("test_peers.py" in entry for entry in stacks)


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
    stop.watch()
    assert stop.watching


def test_a_thread_ends_with_its_garbage_collected_owner(board: Board) -> None:
    class Holder(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.stop = StopTogether(
                self,
                on_peer_error=Holder.tell,
                poll_seconds=0.01,
                process=(0, 2),
                connect=lambda: board,
            )
            self.stop.watch()

    loader = Holder()
    board.wait_for(lambda: board.looks > 1)
    (thread,) = threads()
    del loader
    gc.collect()
    thread.join(SOON_SECONDS)
    assert not thread.is_alive()


AT_EXIT = """
import atexit, threading, time
from shardkit.loaders.peers import StopTogether

class Owner: ...

class SlowStore:
    def check(self, keys):
        asked.set()
        time.sleep(0.5)
        return False

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # called last
asked, owner = threading.Event(), Owner()
StopTogether(owner, poll_seconds=0.001, process=(0, 2), connect=SlowStore).watch()
asked.wait()
"""


def test_the_interpreter_ends_only_when_the_thread_has_left_the_store() -> None:
    """Torch's store would abort the process: its C++ cannot be stopped inside of a request."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['MainThread']\n", done.stderr


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
    stop = StopTogether(Loader(), process=(0, world_size))
    stop.watch()
    assert not stop.watching
    assert not threads()
    stop.check()
    stop.report(ValueError("boom"))
    stop.close()


@pytest.mark.parametrize("bad", [{"grace_seconds": 0}, {"poll_seconds": 0}, {"poll_seconds": 61}])
def test_bad_limits_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        StopTogether(Loader(), **bad)


def test_a_peers_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(PeerError(3, None, "ValueError: boom")))
    assert (str(copy), copy.rank, copy.step) == ("rank 3 stopped: ValueError: boom", 3, None)


# In loaders, whatever their data-parallel rank, and without one.

ProcessGroups = Callable[[int, int], None]  # the fixture `process_groups`


@pytest.fixture
def peer(process_groups: ProcessGroups) -> Iterator[StopTogether[Loader]]:
    """Rank 1 of the world, listening; this process is rank 0."""
    process_groups(0, 2)
    owner = Loader()
    stop = StopTogether(owner, process=(1, 2), poll_seconds=0.01)
    stop.watch()
    yield stop
    stop.close()


class BrokenColumnError(Exception):
    """What an evaluation meets."""


def evaluate(path: Path, **options: Any) -> None:
    """An evaluation whose loop fails; with one data-parallel rank, as under tensor parallelism only."""
    with StreamingLoader(path, batch_size=2, rank=0, world_size=1, **grouped(options)) as loader:
        next(iter(loader))
        raise BrokenColumnError("boom")


def test_an_error_that_an_evaluation_catches_stops_the_training_of_all_ranks(
    tmp_path: Path, peer: StopTogether[Loader]
) -> None:
    path = make_dataset(tmp_path / "mds", "mds")
    with StreamingLoader(path, batch_size=2, rank=0, world_size=1) as training:
        with pytest.raises(BrokenColumnError):
            evaluate(path)
        assert str(heard(peer)) == "rank 0 stopped at step 1: BrokenColumnError: boom"
        heard(training._stop_together)
        with pytest.raises(PeerError):
            next(iter(training))


def test_a_loader_that_opted_out_neither_tells_errors_nor_hears_them(
    tmp_path: Path, peer: StopTogether[Loader]
) -> None:
    path = make_dataset(tmp_path / "mds", "mds")
    apart = StreamingLoader(path, batch_size=2, run=Run(stop_together=False), rank=0, world_size=1)
    with StreamingLoader(path, batch_size=2, rank=0, world_size=1) as training:
        with pytest.raises(BrokenColumnError):
            evaluate(path, stop_together=False)
        next(iter(training))
        peer.report(ValueError("boom"))
        heard(training._stop_together)
        next(iter(apart))
    apart.close()


def test_a_generator_that_is_dropped_inside_its_loaders_with_is_no_error(
    tmp_path: Path, peer: StopTogether[Loader]
) -> None:
    path = make_dataset(tmp_path / "mds", "mds")

    def batches() -> Iterator[Any]:
        with StreamingLoader(path, batch_size=2, rank=0, world_size=1) as loader:
            yield from loader

    generator = batches()
    next(generator)
    del generator
    time.sleep(0.1)  # ten polls
    peer.check()


def test_a_rank_without_a_loader_hears_errors(process_groups: ProcessGroups) -> None:
    peers = watch()
    peers.check()  # before the process group is made there is nobody to hear
    process_groups(1, 2)
    peers.check()
    owner = Loader()
    other = StopTogether(owner, process=(0, 2), poll_seconds=0.01)
    other.watch()
    other.report(ValueError("boom"), step=3)
    assert str(heard(peers)) == "rank 0 stopped at step 3: ValueError: boom"
    peers.close()
    other.close()
    assert not threads()


def test_an_error_that_leaves_a_watch_reaches_the_others(peer: StopTogether[Loader]) -> None:
    with pytest.raises(BrokenColumnError), watch():
        raise BrokenColumnError("in a pipeline stage")
    assert str(heard(peer)) == "rank 0 stopped: BrokenColumnError: in a pipeline stage"
