"""Batches on the device ahead of the loop, and the state of what the loop has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.loaders import StreamingLoader
from shardkit.loaders.cuda import CudaPrefetcher
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.loader_data import make_dataset
from support.resume import Batch, State, assert_equal, assert_exact_resume, batches, run

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
)
devices = pytest.mark.parametrize("device", ["cpu", GPU])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), "columns")


def make(path: Path, **more: Any) -> StreamingLoader:
    return StreamingLoader(path, batch_size=4, rank=0, world_size=1, return_ids=True, window=9, **more)


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
    dataset = StreamingDataset(path, batch_size=4, rank=0, world_size=1, return_ids=True, window=9)
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
    assert [next(iterator)["number"], next(iterator)["number"]] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="network"):
            next(iterator)
        assert ahead.state_dict() == {"given": 2}
        iterator = iter(ahead)
    assert [batch["number"] for batch in iterator] == [3, 4, 5, 6]


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
