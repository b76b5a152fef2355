"""The harness that proves exact resume: `assert_exact_resume(make_loader)`.

A reference run records every batch and the state after it. Then the run is begun again from every one of
those states: all that follows must be equal, keys, types and values. A run begun from a state and stopped
again must give states from which a third run goes on exactly. States pass through JSON, as in a checkpoint.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped

Batch = dict[str, Any]
State = dict[str, Any]


class Resumable(Protocol):
    """A loader, or what wraps one."""

    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


Maker = Callable[[], AbstractContextManager[Resumable]]
RankMaker = Callable[[int, int], AbstractContextManager[Resumable]]


def batches(loader: Resumable | Iterable[Batch]) -> Iterator[Batch]:
    """All batches from here on, epoch after epoch."""
    while True:
        yield from loader


def run(loader: Resumable, steps: int) -> list[tuple[Batch, State]]:
    """The next `steps` batches, each with the state that a checkpoint taken while holding it would keep."""
    return [(batch, saved(loader)) for batch in islice(batches(loader), steps)]


def saved(loader: Resumable) -> State:
    """The state as it comes out of a checkpoint."""
    state: State = json.loads(json.dumps(loader.state_dict()))
    return state


def run_ranks(
    make: RankMaker,
    world_size: int,
    steps: int | None,
    state: State | None = None,
    *,
    samples: Callable[[Batch], list[Any]] = lambda batch: batch["sample_id"].tolist(),
) -> list[tuple[list[Any], State]]:
    """(the global batch's samples, the state after it) of the next steps of all ranks; None: of an epoch."""
    of_ranks = []
    for rank in range(world_size):
        with make(rank, world_size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            source = iter(loader) if steps is None else islice(batches(loader), steps)
            of_ranks.append([(samples(batch), saved(loader)) for batch in source])
    found = []
    for step in zip(*of_ranks, strict=True):  # strict: all ranks have equally many steps
        assert all(state == step[0][1] for _, state in step), "all ranks must keep the same state"
        found.append(([sample for own, _ in step for sample in own], step[0][1]))
    return found


def assert_same(got: Iterable[Batch], expected: Sequence[tuple[Batch, State]], where: str) -> None:
    """The batches are those of a run, in number too."""
    for number, (batch, (wanted, _)) in enumerate(zip(got, expected, strict=True)):
        assert_equal(batch, wanted, f"{where}, batch {number}")


def assert_equal(got: Batch, expected: Batch, where: str) -> None:
    assert got.keys() == expected.keys(), f"{where}: keys {list(got)}, expected {list(expected)}"
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            same = got[key].dtype == value.dtype and same_values(got[key], value)
        else:
            same = plain(got[key]) == plain(value)
        assert same, f"{where}: {key!r} differs: {got[key]!r:.300} instead of {value!r:.300}"


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Two tensors have one shape and equal values; NaN, which stands for a missing value, equals itself."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def plain(value: object) -> object:
    """Something that == compares, for values of any column."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if hasattr(value, "tobytes"):
        return value.tobytes()
    return value


def assert_exact_resume(make_loader: Maker, *, steps: int, tail_steps: int | None = None) -> None:
    """Restore at each of `steps` and compare what follows, or the first `tail_steps` batches of it."""
    with make_loader() as loader:
        reference = run(loader, steps)
    for step in range(steps):
        rest = reference[step + 1 :][:tail_steps]
        with make_loader() as loader:
            loader.load_state_dict(reference[step][1])
            assert loader.state_dict() == reference[step][1], f"state {step} changes by loading it"
            for number, (got, expected) in enumerate(
                zip(run(loader, len(rest)), rest, strict=True), step + 1
            ):
                assert_equal(got[0], expected[0], f"resumed after batch {step}, batch {number}")
                assert got[1] == expected[1], f"resumed after batch {step}, state {number}"
    assert_resumes_twice(make_loader, reference)


def assert_resumes_twice(make_loader: Maker, reference: list[tuple[Batch, State]]) -> None:
    """Stop, resume, stop and resume again: the third run still goes on as the first would have."""
    third = len(reference) // 3
    with make_loader() as loader:
        state = run(loader, third)[-1][1]
    with make_loader() as loader:
        loader.load_state_dict(state)
        state = run(loader, third)[-1][1]
    rest = reference[2 * third :]
    with make_loader() as loader:
        loader.load_state_dict(state)
        for number, (got, expected) in enumerate(zip(run(loader, len(rest)), rest, strict=True), 2 * third):
            assert_equal(got[0], expected[0], f"resumed twice, batch {number}")


def assert_exact_resume_in_new_process(
    arguments: dict[str, Any], folder: Path, *, steps: int, at: list[int]
) -> None:
    """Like `assert_exact_resume`, each resumed run in a process of its own; `arguments`: the loader's."""
    with StreamingLoader(**grouped(arguments)) as loader:
        reference = run(loader, steps)
    for step in at:
        rest = [batch for batch, _ in reference[step + 1 :]]
        request = folder / f"request-{step}.pickle"
        request.write_bytes(pickle.dumps((arguments, reference[step][1], len(rest))))
        subprocess.run([sys.executable, __file__, str(request)], check=True, timeout=120)
        found = pickle.loads(request.with_suffix(".result").read_bytes())
        for number, (got, expected) in enumerate(zip(found, rest, strict=True), step + 1):
            assert_equal(got, expected, f"new process after batch {step}, batch {number}")


def main(request: Path) -> None:
    arguments, state, steps = pickle.loads(request.read_bytes())
    with StreamingLoader(**grouped(arguments)) as loader:
        loader.load_state_dict(state)
        found = [batch for batch, _ in run(loader, steps)]
    request.with_suffix(".result").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
