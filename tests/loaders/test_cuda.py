"""Batches on the device ahead of the loop, and the state of what the loop has."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Order, grouped
from shardkit.loaders.cuda import Copied, CudaCopies, CudaPrefetcher, HostCopies
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.loader_data import make_dataset
from support.remote_harness import wait_until
from support.resume import Batch, State, assert_equal, assert_exact_resume, batches, run

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
)
devices = pytest.mark.parametrize("device", ["cpu", GPU])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), "columns")


def make(path: Path, **more: Any) -> StreamingLoader:
    return StreamingLoader(
        path, batch_size=4, rank=0, world_size=1, return_ids=True, **grouped({"window": 9, **more})
    )


def on_cpu(batch: Batch) -> Batch:
    return {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def reference(path: Path, steps: int) -> list[tuple[Batch, State]]:
    with make(path) as loader:
        return run(loader, steps)


@devices
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_and_states_are_the_loaders_however_far_ahead(path: Path, device: str, depth: int) -> None:
    expected = reference(path, 33)
    with make(path) as loader:
        ahead = CudaPrefetcher(loader, device, depth=depth)
        step = 0
        while step < 33:
            length = len(ahead)
            for batch in islice(ahead, 1 + step % 5):  # left early, gone on
                assert batch["tokens"].device.type == device
                assert_equal(on_cpu(batch), expected[step][0], f"batch {step}")
                assert ahead.state_dict() == expected[step][1], f"state {step}"
                assert len(ahead) == length
                step += 1
                if step == 33:
                    break
        ahead.load_state_dict(expected[4][1])
        assert ahead.state_dict() == expected[4][1]
        for step, batch in enumerate(islice(batches(ahead), 12), 5):
            assert_equal(on_cpu(batch), expected[step][0], f"loaded, batch {step}")


@devices
def test_a_run_resumed_at_any_step_goes_on_exactly(path: Path, device: str) -> None:
    @contextmanager
    def ahead() -> Iterator[CudaPrefetcher]:
        with make(path) as loader:
            yield CudaPrefetcher(loader, device, depth=3)

    assert_exact_resume(ahead, steps=18, tail_steps=5)


@devices
def test_it_goes_over_a_dataloader_with_workers(path: Path, device: str) -> None:
    expected = reference(path, 16)
    dataset = StreamingDataset(
        path, batch_size=4, rank=0, world_size=1, return_ids=True, order=Order(window=9)
    )
    loader = StreamingDataLoader(
        dataset, num_workers=1, multiprocessing_context="fork", pin_memory=device == "cuda"
    )
    ahead = CudaPrefetcher(loader, device)
    for step, batch in enumerate(islice(batches(ahead), 16)):
        assert_equal(on_cpu(batch), expected[step][0], f"batch {step}")
        assert ahead.state_dict() == expected[step][1]
    loader.close()


class Breaks:
    """Gives batches 1 to 6; before the fourth, two errors."""

    def __init__(self) -> None:
        self.given = self.errors = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.given < 6:
            if self.given == 3 and self.errors < 2:
                self.errors += 1
                raise OSError("the network is down")
            self.given += 1
            yield {"number": self.given}

    def state_dict(self) -> State:
        return {"given": self.given}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def test_an_error_of_the_loader_loses_no_batch() -> None:
    ahead = CudaPrefetcher(Breaks(), "cpu", depth=2)
    iterator = iter(ahead)
    assert [next(iterator)["number"] for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="network"):
            next(iterator)
        assert ahead.state_dict() == {"given": 3}
        iterator = iter(ahead)
    assert [batch["number"] for batch in iterator] == [4, 5, 6]
    with pytest.raises(StopIteration):
        next(iterator)


class Numbers:
    """Gives batches 1 to `last`, going on where it was; `before` is called with each number first."""

    def __init__(self, last: int, before: Callable[[int], object] = lambda number: None) -> None:
        self.given, self.last, self.before = 0, last, before

    def __iter__(self) -> Iterator[Batch]:
        while self.given < self.last:
            self.before(self.given + 1)
            self.given += 1
            yield {"number": self.given, "tokens": torch.full((2,), self.given)}

    def state_dict(self) -> State:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


def test_a_ready_batch_is_not_held_back_by_a_late_one() -> None:
    arrives = threading.Event()

    def before(number: int) -> None:
        if number == 4:
            assert arrives.wait(30), "batch 3 was held back until batch 4 had come"

    for depth in (1, 2, 3):
        arrives.clear()
        iterator = iter(CudaPrefetcher(Numbers(5, before), "cpu", depth=depth))
        assert [next(iterator)["number"] for _ in range(3)] == [1, 2, 3]
        arrives.set()
        assert [batch["number"] for batch in iterator] == [4, 5]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_batches_are_taken_ahead(depth: int) -> None:
    numbers = Numbers(9)
    ahead = CudaPrefetcher(numbers, "cpu", depth=depth)
    for number, _ in enumerate(ahead, 1):
        time.sleep(0.02)
        assert numbers.given <= number + depth - 1


@pytest.mark.parametrize("depth", [2, 3])
def test_the_thread_makes_no_batch_while_the_loop_takes_one(depth: int) -> None:
    """Both need Python's lock, which the calls of CUDA in `finish` let go of and ask for again.

    On a busy machine, a thread that was held up before it looked may still make one: not in each of ten runs.
    """

    class Watched(HostCopies):
        def finish(self, copied: Copied) -> None:
            time.sleep(0.05)  # without the lock, as those calls
            given.append(numbers.given)

    for _ in range(10):
        given: list[int] = []
        numbers = Numbers(8)
        iterator = iter(CudaPrefetcher(numbers, "cpu", depth=depth, copies=Watched()))
        for number in range(1, 6):
            next(iterator)
            wait_until(partial(lambda source, due: source.given == due, numbers, number + depth - 1))
        del iterator
        if given[1:] == [depth + n for n in range(4)]:
            return
    raise AssertionError(f"made while the loop was in `finish`: {given}")


class FailingCopies(HostCopies):
    """Fails to copy where `fails` says so: at its n-th attempts."""

    def __init__(self, fails: set[int]) -> None:
        self.fails, self.attempts = fails, 0

    def start(self, batch: Batch) -> Copied:
        self.attempts += 1
        if self.attempts in self.fails:
            raise torch.OutOfMemoryError("no memory on the device")
        return super().start(batch)


@pytest.mark.parametrize("again", [False, True])
def test_a_batch_whose_copy_fails_is_copied_again(again: bool) -> None:
    """By the same iterator, or by the next."""
    ahead = CudaPrefetcher(Numbers(6), "cpu", copies=FailingCopies({1, 4, 5}))
    iterator, got, errors = iter(ahead), [], 0
    while True:
        try:
            got.append(next(iterator)["number"])
            assert ahead.state_dict() == {"given": got[-1]}
        except torch.OutOfMemoryError:
            errors += 1
            iterator = iter(ahead) if again else iterator
        except StopIteration:
            break
    assert (got, errors) == ([1, 2, 3, 4, 5, 6], 3)


class Interrupt(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is raised."""


@contextmanager
def interrupts(rng: random.Random) -> Iterator[list[bool]]:
    """Signals at random moments, which interrupt this thread once when [0] of what it gives is set."""
    armed, ended, loop = [False], threading.Event(), threading.get_ident()

    def handler(number: int, frame: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupt

    def send() -> None:
        while not ended.wait(rng.random() * 0.003):
            signal.pthread_kill(loop, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield armed
    finally:
        armed[0] = False
        ended.set()
        sender.join()
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_at_any_moment_loses_no_batch(depth: int) -> None:
    """The loop goes on after the batch that its state names, which is the last one it has."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    numbers = Numbers(1_000_000, lambda number: time.sleep(rng.choice([0, 0, 0, 0.0005])))
    ahead = CudaPrefetcher(numbers, "cpu", depth=depth)
    batch: Batch = {"number": 0}
    hits = 0
    with interrupts(rng) as armed:
        while hits < 60:
            before = batch["number"]
            try:
                armed[0] = True
                for batch in ahead:
                    assert batch["number"] == before + 1, f"seed {seed}: {before}, then {batch['number']}"
                    before += 1
            except Interrupt:
                hits += 1
            assert ahead.state_dict() == {"given": batch["number"]}, f"seed {seed}"


@pytest.mark.parametrize("workers", [None, 0])
def test_an_interrupt_loses_no_sample_of_a_real_loader(path: Path, workers: int | None) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    expected = [batch["sample_id"].tolist() for batch, _ in reference(path, 90)]
    if workers is None:
        loader: Any = make(path)
    else:
        loader = StreamingDataLoader(
            StreamingDataset(path, batch_size=4, rank=0, world_size=1, return_ids=True, order=Order(window=9))
        )
    ahead = CudaPrefetcher(loader, "cpu")
    got: list[list[int]] = []
    hits = 0
    with interrupts(rng) as armed:
        while len(got) < 90:
            batch = None
            try:
                armed[0] = True
                for batch in ahead:
                    got.append(batch["sample_id"].tolist())
                    batch = None
                    time.sleep(0.0005)
            except Interrupt:
                hits += 1
            armed[0] = False
            if batch is not None and got[-1:] != [batch["sample_id"].tolist()]:
                got.append(batch["sample_id"].tolist())  # interrupted before the loop did
    assert hits > 5
    assert got[:90] == expected, f"seed {seed}"
    loader.close()


def test_the_thread_ends_with_the_prefetcher(path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "shardkit-copy" for thread in threading.enumerate())

    with make(path) as loader:
        ahead = CudaPrefetcher(loader, "cpu")
        next(iter(ahead))
        assert threads() == 1
        ahead.close()
        assert threads() == 0
        next(iter(ahead))
        assert threads() == 1
        del ahead
        assert threads() == 0


def test_a_paused_prefetcher_leaves_the_loader_alone() -> None:
    numbers = Numbers(100)
    ahead = CudaPrefetcher(numbers, "cpu", depth=4)
    iterator = iter(ahead)
    next(iterator)
    with ahead.paused():
        given = numbers.given
        time.sleep(0.05)
        assert numbers.given == given
    assert [batch["number"] for batch in iterator] == list(range(2, 101))


def test_weights_and_position_change_under_a_prefetcher_as_without_it(path: Path, tmp_path: Path) -> None:
    streams = [Stream(path, name="a"), Stream(make_dataset(tmp_path / "b", "columns", samples=31), name="b")]

    def run_changed(loader: StreamingLoader, source: Any) -> list[Batch]:
        got = [on_cpu(batch) for batch in islice(source, 3)]
        with source.paused() if isinstance(source, CudaPrefetcher) else nullcontext():
            loader.set_weights({"a": 3, "b": 1}, at_position=40)
        got += [on_cpu(batch) for batch in islice(source, 14)]
        if isinstance(source, CudaPrefetcher):
            source.close()
        loader.seek(8)
        return got + [on_cpu(batch) for batch in islice(source, 5)]

    def mixed() -> StreamingLoader:
        options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "return_ids": True}
        return StreamingLoader(streams, endless=True, **grouped(options))

    with mixed() as plain, mixed() as other:
        expected = run_changed(plain, plain)
        found = run_changed(other, CudaPrefetcher(other, "cpu", depth=3))
        for number, (batch, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_equal(batch, wanted, f"batch {number}")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeStream:
        return self

    def query(self) -> bool:
        return True

    wait_event = wait_stream


class FakeEvent:
    """An event that has happened 40 ms after the previous one was recorded, in the GPU's time."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        stream.log.append(f"event on {stream.name}")
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        return 40.0 * (later.at - self.at)


class FakeCuda:
    """Streams that log what waits for what; the current one is named for its thread and device.

    That of the copies is on cuda:0."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.entered: FakeStream | None = None

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream("copies", self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        if self.entered is not None and device == torch.device("cuda:0"):
            return self.entered
        thread = "thread" if threading.current_thread().name == "shardkit-copy" else "loop"
        return FakeStream(f"{thread} on {device}", self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.entered = stream
        yield
        self.entered = None

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"{threading.current_thread().name} uses {device}")


class FakeTensor(torch.Tensor):
    """On the device `place`, with the log of its `cuda`."""

    place: torch.device
    cuda_: FakeCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    def is_pinned(self, *args: Any) -> bool:
        return False

    def pin_memory(self, *args: Any) -> FakeTensor:
        self.cuda_.log.append(f"pinned by {threading.current_thread().name}")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeTensor:  # type: ignore[override]
        assert non_blocking
        assert self.cuda_.entered is not None
        self.cuda_.log.append(f"{self.cuda_.entered.name} copies from {self.place}")
        return fake_tensor(self.cuda_, str(device))

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        self.cuda_.log.append(f"memory on {self.place} kept for {stream.name}")


def fake_tensor(cuda: FakeCuda, place: str) -> FakeTensor:
    made = torch.zeros(2).as_subclass(FakeTensor)
    made.place, made.cuda_ = torch.device(place), cuda
    return made


def test_copies_wait_for_what_made_their_tensors_and_the_loop_for_the_copies() -> None:
    """In the order of the calls, for tensors of the host, another GPU and the target GPU."""
    cuda = FakeCuda()
    batch = {"host": fake_tensor(cuda, "cpu"), "far": [fake_tensor(cuda, "cuda:1")], "n": 3}
    batch["here"] = fake_tensor(cuda, "cuda:0")
    ahead = CudaPrefetcher([batch], "cpu", copies=CudaCopies(torch.device("cuda:0"), cuda=cuda))
    (found,) = ahead
    assert found["n"] == 3
    assert [found["host"].place, found["far"][0].place] == [torch.device("cuda:0")] * 2
    assert found["here"] is batch["here"]
    waits = {"copies waits for thread on cuda:0", "copies waits for thread on cuda:1"}
    assert set(cuda.log[2:4]) == waits
    assert cuda.log[:2] == ["copies waits for loop on cuda:0", "shardkit-copy uses cuda:0"]
    assert cuda.log[4:] == [
        "pinned by shardkit-copy",
        "copies copies from cpu",
        "memory on cuda:1 kept for copies",
        "copies copies from cuda:1",
        "loop on cuda:0 waits for copies",
        "memory on cuda:0 kept for loop on cuda:0",
        "memory on cuda:0 kept for loop on cuda:0",
        "memory on cuda:0 kept for loop on cuda:0",
    ]


def test_a_copy_that_the_gpu_waits_for_is_timed_on_the_gpu_and_no_other_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    cuda.Event = FakeEvent  # type: ignore[attr-defined]
    batches = [{"x": fake_tensor(cuda, "cpu")} for _ in range(100)]

    def passed(late: bool) -> tuple[float, int]:
        monkeypatch.setattr(FakeStream, "query", lambda self: not late)
        ahead = CudaPrefetcher(batches, "cpu", copies=CudaCopies(torch.device("cuda:0"), cuda=cuda))
        cuda.log.clear()
        assert sum(1 for _ in ahead) == 100
        return ahead.stats().copy_seconds, sum(line.startswith("event") for line in cuda.log)

    seconds, events = passed(late=False)
    assert (seconds < 1.0, events) == (True, 0)
    seconds, events = passed(late=True)
    assert 100 * 0.04 <= seconds < 100 * 0.04 + 1.0  # what the loop itself waited for pinning comes on top
    assert events == 200


def test_what_cannot_work_is_refused(path: Path) -> None:
    with make(path) as loader:
        for depth in (0, 65):
            with pytest.raises(ValueError, match="depth"):
                CudaPrefetcher(loader, "cpu", depth=depth)
        with pytest.raises(ValueError, match="device"):
            CudaPrefetcher(loader, "meta")
        ahead = CudaPrefetcher(loader, "cpu")
        first = iter(ahead)
        next(first)
        iter(ahead)
        with pytest.raises(RuntimeError, match="stale iterator"):
            next(first)
    plain = CudaPrefetcher([{"tokens": torch.zeros(2)}], "cpu")
    with pytest.raises(TypeError, match="list has no state_dict"):
        plain.state_dict()
    with pytest.raises(TypeError, match="list has no state_dict"):
        plain.load_state_dict({})
    assert len(plain) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loops_thread_waits_for_nothing_and_batches_stay_whole() -> None:
    """Steps of 10 ms of GPU time each, queued up at once; the memory of dropped batches is used again."""

    def numbers() -> Iterator[Batch]:
        for number in range(40):
            yield {"tokens": torch.full((64, 4096), number), "number": number}

    ahead = CudaPrefetcher(list(numbers()), "cuda", depth=2)
    found = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in ahead:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            found.append((batch["tokens"].sum(), batch["number"]))
            del batch
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for total, number in found:
        assert int(total) == number * 64 * 4096
