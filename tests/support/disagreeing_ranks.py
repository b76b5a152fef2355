"""Two or more ranks that differ in one thing, as real processes: `python disagreeing_ranks.py FOLDER CASE …`.

torch is imported once and every rank is a fork, all cases at the same time. What a rank saw goes to
FOLDER/CASE.PROCESS: the batches that it got, and the error, if one came.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Stream, grouped
from shardkit.loaders.lengths import LengthLoader
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.loader_data import make_dataset, make_rows, write_card
from support.stop_ranks import free_port

SAMPLES = 120
_AT_ONCE = 96  # processes: most of the time they wait for the store
DEFAULTS: dict[str, Any] = {"batch_size": 4, "seed": 17, "timeout_seconds": 30.0}

Take = Callable[[Path, int], Any]
"""Iterates as one process does; returns what it saw."""


@dataclass(frozen=True)
class Case:
    take: Take
    named: tuple[str, ...] = ()
    """What the error of every process names; (): there is none."""
    processes: int = 2


def options_of(rank: int, different: dict[str, Any]) -> dict[str, Any]:
    return DEFAULTS | (different if rank else {})


def plain(**different: Any) -> Take:
    """A StreamingLoader, of which rank 1 has other options."""

    def take(data: Path, rank: int) -> int:
        with StreamingLoader(data, **grouped(options_of(rank, different))) as loader:
            return sum(1 for _ in loader)

    return take


def mixture(weight: float, **different: Any) -> Take:
    def take(data: Path, rank: int) -> int:
        specs = [Stream(data, name="a"), Stream(data.with_name("other"), weight if rank else 1, name="b")]
        if different.get("reversed") and rank:
            specs.reverse()
        if different.get("exclude") and rank:
            specs[0] = Stream(data, name="a", exclude=[3])
        if different.get("choose") and rank:
            specs[1] = Stream(data.with_name("other"), name="b", choose=100)
        with StreamingLoader(specs, **grouped(DEFAULTS)) as loader:
            return sum(1 for _ in loader)

    return take


def other_data(data: Path, rank: int) -> int:
    with StreamingLoader(data.with_name("other") if rank else data, **grouped(DEFAULTS)) as loader:
        return sum(1 for _ in loader)


def other_folder(data: Path, rank: int) -> int:
    """The same dataset, which each machine has in a folder of its own."""
    with StreamingLoader(data.with_name(f"copy-{rank}"), **grouped(DEFAULTS)) as loader:
        return sum(1 for _ in loader)


def sought(data: Path, rank: int) -> int:
    with StreamingLoader(data, **grouped(DEFAULTS)) as loader:
        if rank:
            loader.seek(8)
        return sum(1 for _ in loader)


def state_of_one(data: Path, rank: int) -> int:
    """One rank alone loads a state between two epochs."""
    with StreamingLoader(data, **grouped(DEFAULTS)) as loader:
        state = loader.state_dict()
        batches = sum(1 for _ in loader)
        if rank:
            loader.load_state_dict(state)
        return batches + sum(1 for _ in loader)


def left_early(data: Path, rank: int) -> int:
    """One rank alone has left an epoch before its end."""
    with StreamingLoader(data, **grouped(DEFAULTS)) as loader:
        for number, _ in enumerate(loader):
            if rank and number == 3:
                break
        return sum(1 for _ in loader)


def with_workers(different: dict[str, Any], workers: int = 1) -> Take:
    def take(data: Path, rank: int) -> int:
        dataset = StreamingDataset(data, **grouped(options_of(rank, different)))
        loader = StreamingDataLoader(dataset, num_workers=workers)
        try:
            return sum(1 for _ in loader)
        finally:
            loader.close()

    return take


def workers_sought(data: Path, rank: int) -> int:
    loader = StreamingDataLoader(StreamingDataset(data, **grouped(DEFAULTS)), num_workers=1)
    if rank:
        loader.seek(8)
    return sum(1 for _ in loader)


def numbers(ranks: Callable[[int], tuple[int, int]], **different: Any) -> Take:
    def take(data: Path, process: int) -> int:
        rank, world_size = ranks(process)
        options = options_of(process, different)
        with StreamingLoader(data, rank=rank, world_size=world_size, **grouped(options)) as loader:
            return sum(1 for _ in loader)

    return take


def mesh(different_process: int, part: str | None = None, **different: Any) -> Take:
    """Ranks of a mesh of 2 x 2, of which one process differs."""

    def take(data: Path, process: int) -> int:
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        options = DEFAULTS | (different if process == different_process else {})
        with StreamingLoader(data, mesh=whole[part] if part else whole, **grouped(options)) as loader:
            return sum(1 for _ in loader)

    return take


def groups(data: Path, process: int) -> int:
    """Two models, each with its own seed, train in one world."""
    parts = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    with StreamingLoader(
        data, group=parts[process // 2], **grouped(DEFAULTS | {"seed": process // 2})
    ) as loader:
        return sum(1 for _ in loader)


def only_first_replica(data: Path, process: int) -> int:
    """Read on the first of the tensor parallel ranks only; return the number of batches."""
    rank, replica = divmod(process, 2)
    if replica:
        return 0
    with StreamingLoader(data, rank=rank, world_size=2, **grouped(DEFAULTS)) as loader:
        return sum(1 for _ in loader)


def other_loaders_of_replicas(data: Path, process: int) -> int:
    """A pipeline's last stage evaluates before it trains, and wants labels; the first one does not."""
    stage, rank = divmod(process, 2)
    place: dict[str, Any] = {"rank": rank, "world_size": 2}
    if stage:
        with StreamingLoader(
            data.with_name("other"), restart=True, **grouped({**place, **DEFAULTS})
        ) as evaluation:
            list(evaluation)
    with StreamingLoader(data, labels=bool(stage), **grouped({**place, **DEFAULTS})) as loader:
        return sum(1 for _ in loader)


def epochs(data: Path, rank: int) -> int:
    """Training and evaluation in turn, and an iteration that all ranks leave early; nothing is wrong."""
    other = data.with_name("other")
    with (
        StreamingLoader(data, **grouped(DEFAULTS)) as training,
        StreamingLoader(other, restart=True, tail="pad", **grouped(DEFAULTS)) as evaluation,
    ):
        batches = 0
        for _ in range(2):
            batches += sum(1 for _ in training) + sum(1 for _ in evaluation)
        next(iter(training))
        if rank:  # where every iteration starts at the first sample, one rank alone may look once more
            next(iter(evaluation))
        return batches


def own_options(data: Path, rank: int) -> int:
    """Read with other options on each rank, where they may differ; return the number of batches."""
    options: dict[str, Any] = {
        "prefetch_batches": rank,
        "timeout_seconds": 30.0 + rank,
        "return_ids": rank == 0,
    }
    with StreamingLoader(data, **grouped(DEFAULTS | options)) as loader:
        return sum(1 for _ in loader)


def stays_away(data: Path, rank: int) -> int:
    with StreamingLoader(data, **grouped(DEFAULTS | {"timeout_seconds": 1.0})) as loader:
        if rank:
            torch.distributed.barrier()
            return 0
        try:
            return sum(1 for _ in loader)
        finally:
            torch.distributed.barrier()


def fails_before(data: Path, rank: int) -> int:
    """A rank's loop ends with an error before its first batch."""
    with StreamingLoader(data, **grouped(DEFAULTS)) as loader:
        if rank:
            raise KeyError("no such checkpoint")
        return sum(1 for _ in loader)


def lengths(**different: Any) -> Take:
    def take(data: Path, rank: int) -> int:
        options: dict[str, Any] = {"tokens_per_batch": 32, "seed": 17} | (different if rank else {})
        with LengthLoader([data, data.with_name("long")], **grouped(options)) as loader:
            return sum(1 for _ in loader)

    return take


CASES: dict[str, Case] = {
    "same": Case(plain()),
    "seed": Case(plain(seed=18), ("seed: ", "17 on rank 0", "18 on rank 1")),
    "batch_size": Case(plain(batch_size=8), ("batch_size: ", "4 on rank 0", "8 on rank 1")),
    "shuffle": Case(plain(shuffle="none"), ("shuffle: ", "'window' on rank 0", "'none' on rank 1")),
    "tail": Case(plain(tail="pad"), ("tail: ", "'carry' on rank 0", "'pad' on rank 1")),
    "window": Case(plain(window=64), ("window: ", "64 on rank 1")),
    "lanes": Case(plain(lanes=3), ("lanes: ", "3 on rank 1")),
    "epoch_samples": Case(plain(epoch_samples=96), ("epoch_samples: ", "96 on rank 1")),
    "endless": Case(plain(endless=True), ("endless: ", "True on rank 1")),
    "restart": Case(plain(restart=True), ("restart: ", "True on rank 1")),
    "global_batch": Case(plain(global_batch=16), ("global_batch: ", "None on rank 0")),
    "dtype": Case(plain(dtype="int32"), ("dtype: ", "'int64' on rank 0", "'int32' on rank 1")),
    "labels": Case(plain(labels="shifted"), ("labels: ", "'shifted' on rank 1")),
    "eos_id": Case(plain(eos_id=1), ("eos_id: ", "1 on rank 1")),
    "columns": Case(plain(columns=["tokens"]), ("columns: ",)),
    "balance": Case(plain(balance="attention"), ("balance: ", "None on rank 0")),
    "seek": Case(sought, ("position: ", "0 on rank 0", "8 on rank 1")),
    "state_of_one": Case(state_of_one, ("position: ", "0 on rank 1")),
    "left_early": Case(left_early, ("position: ", "32 on rank 1")),
    "data": Case(other_data, ("streams.fingerprint[0]: ", "streams.samples[0]: ")),
    "folder": Case(other_folder),
    "own_options": Case(own_options),
    "weights": Case(mixture(3), ("schedule: [[0, [1, 1]]] on rank 0, [[0, [1, 3]]] on rank 1",)),
    "streams": Case(mixture(1, reversed=True), ("streams.fingerprint[0]: ", "streams.fingerprint[1]: ")),
    "exclude": Case(mixture(1, exclude=True), ("streams.excluded[0]: ",)),
    "choose": Case(mixture(1, choose=True), ("repeat or choose[1]: None on rank 0, 100 on rank 1",)),
    "workers": Case(with_workers({"seed": 18}), ("seed: ", "18 on rank 1")),
    "no_workers": Case(with_workers({"seed": 18}, workers=0), ("seed: ", "18 on rank 1")),
    "workers_sought": Case(workers_sought, ("position: ", "8 on rank 1")),
    "numbers": Case(numbers(lambda p: (p, 2), seed=18), ("seed: ", "18 on rank 1")),
    "same_rank": Case(numbers(lambda p: (0, 2)), ("both rank 0 of 2",)),
    "mesh": Case(mesh(3, seed=18), ("seed: ", "18 on rank 1 (process 3)"), 4),
    "slice": Case(mesh(3, "dp", seed=18), ("seed: ", "18 on rank 1 (process 3)"), 4),
    "same_mesh": Case(mesh(0), (), 4),
    "same_slice": Case(mesh(0, "dp"), (), 4),
    "groups": Case(groups, (), 4),
    "only_first_replica": Case(only_first_replica, (), 4),
    "other_loaders_of_replicas": Case(other_loaders_of_replicas, (), 4),
    "epochs": Case(epochs),
    "lengths": Case(lengths()),
    "lengths_seed": Case(lengths(seed=18), ("seed: ", "18 on rank 1")),
    "lengths_schedule": Case(lengths(length_schedule=[(0, "long")]), ("schedule: ",)),
}
ONE_SIDED = {
    "stays_away": stays_away,
    "fails_before": fails_before,
    "world_size": numbers(lambda p: (p, 2 + 2 * p)),
}
"""Where the two ranks see different things."""


def run(take: Take, data: Path, process: int, processes: int, output: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=process, world_size=processes)
    seen: dict[str, Any]
    try:
        seen = {"batches": take(data, process)}
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {error}"}
    output.write_text(json.dumps(seen))
    torch.distributed.barrier()  # the store ends with rank 0
    os._exit(0)  # at once: to tear down what was imported takes longer than all of the above


def make_data(folder: Path) -> Path:
    for name in ("data", "copy-0", "copy-1"):
        write_card(make_dataset(folder / name, "mds", samples=SAMPLES))
    write_card(make_dataset(folder / "other", "mds", samples=SAMPLES - 16))
    make_rows(folder / "long", 40, 16)
    return folder / "data"


def main(folder: Path, names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    data = make_data(folder)
    running: dict[int, str] = {}
    gc.freeze()  # so that the ranks share the memory of what was imported
    takes = {name: (CASES[name].take, CASES[name].processes) for name in names}
    takes |= {name: (take, 2) for name, take in ONE_SIDED.items()}
    for name, (take, processes) in takes.items():
        os.environ["MASTER_PORT"] = str(free_port())
        for process in range(processes):
            child = os.fork()
            if child == 0:
                run(take, data, process, processes, folder / f"{name}.{process}")
            running[child] = f"{name}.{process}"
        while len(running) > _AT_ONCE:
            finish(running)
    while running:
        finish(running)


def finish(running: dict[int, str]) -> None:
    child, status = os.wait()
    name = running.pop(child)
    assert not status, f"{name}: {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
