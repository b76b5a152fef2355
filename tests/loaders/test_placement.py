"""Where rank and world size come from, and which ranks share a machine: learned, in any topology."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.datasets.dataset import open_dataset
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.placement import (
    Place,
    announce,
    await_ranks,
    check_place,
    find_place,
    group_store,
    local_processes,
    ranks_of_machine,
    usage_log_role,
)
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from shardkit.order.order import Order, OrderSpec, rank_slice
from shardkit.order.residency import lanes_of_ranks
from shardkit.storage.memory import MemoryStore
from support import mesh_ranks
from support.audit_runs import log_report
from support.loader_data import make_dataset, write_card
from support.remote_harness import fresh_url, make_remote_kind, put_folder

ProcessGroups = Callable[[int, int], None]  # the fixture `process_groups`

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local: int) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local}
    for name, value in {**environment, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))


def memory_store() -> Any:
    """A store of torch.distributed in this process; its stubs lack some of what it does."""
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


# One source of rank and world size.


def test_a_lone_process_is_rank_0_of_1() -> None:
    assert find_place() == Place(0, 1, "default")


def test_torchruns_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 5, 8, local=4)
    assert find_place() == Place(5, 8, "environment")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 5, 8, local=8)
    assert find_place(1, 3) == Place(1, 3)
    assert find_place(np.int64(1), np.uint8(3)) == Place(1, 3)


def test_torch_distributed_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, process_groups: ProcessGroups
) -> None:
    torchrun(monkeypatch, 5, 8, local=8)
    process_groups(2, 4)
    place = find_place()
    assert (place.rank, place.world_size, place.source) == (2, 4, "torch.distributed")


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2)])
def test_half_an_answer_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ValueError, match="together"):
        find_place(rank, world_size)


def test_half_an_environment_is_refused_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE is missing"):
        find_place()
    place = find_place(1, 2)
    assert (local_processes(place), ranks_of_machine(place)) == (2, (1,))


def test_an_environment_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK must be a whole number"):
        find_place()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 1)])
def test_bad_numbers_are_refused(rank: Any, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"rank|world_size"):
        find_place(rank, world_size)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None, rank: int) -> DeviceMesh:
    """A mesh as this rank sees it, without process groups."""
    ranks = torch.arange(prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


@pytest.mark.parametrize(
    ("shape", "names", "rank", "expected"),
    [
        ((16, 8), ("dp", "tp"), 9, (1, 16, False)),
        ((16, 8), ("dp", "tp"), 16, (2, 16, True)),
        ((2, 4, 2, 4), ("dp_replicate", "dp_shard", "cp", "tp"), 41, (5, 8, False)),
        ((4, 4, 4), ("pp", "dp", "tp"), 0, (0, 4, True)),
        ((4, 4, 4), ("pp", "dp", "tp"), 16, (0, 4, False)),
        ((2, 3, 4), ("dp_shard", "tp", "dp_replicate"), 19, (7, 8, False)),  # row-major in the mesh's order
        ((4, 2), ("data_parallel", "tensor_parallel"), 7, (3, 4, False)),
        ((8,), ("batch",), 3, (3, 8, None)),
        ((8,), None, 3, (3, 8, None)),
    ],
)
def test_a_mesh_gives_the_data_parallel_rank_by_the_names_of_its_dims(
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    rank: int,
    expected: tuple[int, int, bool | None],
) -> None:
    place = find_place(mesh=mesh_of(shape, names, rank))
    assert (place.rank, place.world_size, place.is_first_replica) == expected


def test_slices_flattened_dims_and_groups_of_a_mesh_give_the_same_rank(process_groups: ProcessGroups) -> None:
    process_groups(13, 16)
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    data = mesh["dp_replicate", "dp_shard"]
    flat = data._flatten("batch")
    found = [find_place(mesh=each) for each in (mesh, data, flat)] + [find_place(group=flat.get_group())]
    assert {(place.rank, place.world_size) for place in found} == {(6, 8)}
    assert [place.source for place in found] == ["mesh", "mesh", "mesh", "group"]
    assert found[1].members == found[3].members == tuple(range(1, 16, 2))


def test_meshes_that_do_not_say_how_data_is_divided_are_refused(process_groups: ProcessGroups) -> None:
    with pytest.raises(ValueError, match=r"'fsdp', 'tp'\) of sizes \(2, 2\).*dp_replicate, dp_shard.*group="):
        find_place(mesh=mesh_of((2, 2), ("fsdp", "tp"), 0))
    with pytest.raises(ValueError, match="unnamed"):
        find_place(mesh=mesh_of((2, 2), None, 0))
    with pytest.raises(ValueError, match="not in the mesh"):
        find_place(mesh=mesh_of((2, 2), ("dp", "tp"), 4))
    not_a_mesh: Any = [0, 1]
    with pytest.raises(TypeError, match="DeviceMesh, not list"):
        find_place(mesh=not_a_mesh)
    with pytest.raises(ValueError, match="only one of rank and world_size, mesh"):
        find_place(0, 1, mesh=mesh_of((2,), ("dp",), 0))
    process_groups(0, 4)
    with pytest.raises(ValueError, match="not in the group"):
        find_place(group=torch.distributed.new_group([1, 2]))


def test_a_loader_takes_each_of_them_and_numpys_numbers(
    tmp_path: Path, process_groups: ProcessGroups
) -> None:
    path = make_dataset(tmp_path / "mds", "mds", samples=40, shards=4)
    process_groups(5, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    sizes: dict[str, Any] = {"batch_size": np.int64(2), "seed": np.int64(3)}
    given: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"group": mesh["dp"].get_group()},
        {"rank": np.int64(2), "world_size": np.int32(4)},
    ]
    batches = []
    for place in given:
        with StreamingLoader(
            path, return_ids=True, **grouped({"stop_together": False, **sizes, **place})
        ) as loader:
            assert (loader.rank, loader.world_size, loader.batch_size) == (2, 4, 2)
            batches.append(next(iter(loader))["sample_id"].tolist())
    assert batches[0] == batches[1] == batches[2]


# A loader that was made too early.


def test_a_loader_made_before_the_process_group_is_refused_when_it_is_iterated(
    tmp_path: Path, process_groups: ProcessGroups
) -> None:
    path = make_dataset(tmp_path / "mds", "mds", samples=40, shards=4)
    early, stated = (
        StreamingLoader(path, batch_size=2),
        StreamingLoader(path, batch_size=2, rank=0, world_size=1),
    )
    process_groups(3, 4)
    with pytest.raises(RuntimeError, match=r"created as rank 0 of 1 .* is rank 3 of 4: create the"):
        iter(early)
    next(iter(stated))
    stated.close()


def test_processes_started_together_without_ranks_are_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert find_place() == Place(0, 1, "default"), "the launcher's rank is not taken for a trainer's"
    with pytest.warns(RuntimeWarning, match=r"4 processes were started together \(OMPI_COMM_WORLD_SIZE\)"):
        check_place(find_place())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_place(find_place(0, 1))


# Which ranks share a machine.


@dataclass(frozen=True)
class Topology:
    """Processes in a mesh; `machines`: of each process, its machine."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    machines: tuple[int, ...]
    batch_size: int = 8

    @cached_property
    def places(self) -> list[Place]:
        found = [find_place(mesh=mesh_of(self.shape, self.dims, rank)) for rank in range(prod(self.shape))]
        return [replace(p, machine=f"host{m}") for p, m in zip(found, self.machines, strict=True)]

    @cached_property
    def global_batch(self) -> int:
        return self.places[0].world_size * self.batch_size

    @property
    def order(self) -> OrderSpec:
        return OrderSpec(1, 64, 100)

    def fair_share(self, machine: int) -> list[int]:
        """The lanes of the rows that the ranks of a machine take of global batches, which lie by lane."""
        order, size = Order([1000] * 100, self.order), self.global_batch
        parts = (
            rank_slice(size, p.rank, p.world_size)
            for p, m in zip(self.places, self.machines, strict=True)
            if m == machine
        )
        read = [order.global_batches(0, size, 64, part=part).lane for part in parts]
        lanes: list[int] = np.unique(read).tolist()
        return lanes

    @cached_property
    def lanes_followed(self) -> list[list[int]]:
        """By each process, as a loader computes them of what it has learned."""
        store = memory_store()
        for process, place in enumerate(self.places):
            announce(store, place, process=process)
        world_size = self.places[0].world_size
        return [
            lanes_of_ranks(
                self.order, self.global_batch, await_ranks(store, place, wait_seconds=5), world_size
            )
            for place in self.places
        ]


def packed(*processes: int) -> tuple[int, ...]:
    """So many processes on each machine, consecutive ones."""
    return tuple(machine for machine, count in enumerate(processes) for _ in range(count))


TOPOLOGIES = [
    Topology("DP 8", (8,), ("dp",), packed(8)),
    Topology("DP 64", (64,), ("dp",), packed(*[8] * 8)),
    Topology("DP 32, dealt out in turn", (32,), ("dp",), tuple(rank % 4 for rank in range(32))),
    Topology("HSDP 8 x 8", (8, 8), ("dp_replicate", "dp_shard"), packed(*[8] * 8)),
    Topology("DP 16 x TP 8", (16, 8), ("dp", "tp"), packed(*[8] * 16)),
    Topology("DP 32 x TP 4", (32, 4), ("dp", "tp"), packed(*[8] * 16)),
    Topology("DP 4 x TP 16", (4, 16), ("dp", "tp"), packed(*[8] * 8)),
    Topology("TP 8 x DP 8 (DP innermost)", (8, 8), ("tp", "dp"), packed(*[8] * 8)),
    Topology("PP 4 x DP 4 x TP 4", (4, 4, 4), ("pp", "dp", "tp"), packed(*[8] * 8)),
    Topology(
        "HSDP 2 x 4 x CP 2 x TP 4",
        (2, 4, 2, 4),
        ("dp_replicate", "dp_shard", "cp", "tp"),
        packed(*[8] * 8),
    ),
    Topology("DP 6 x TP 2, uneven", (6, 2), ("dp", "tp"), packed(5, 4, 3)),
    Topology("PP 4 x DP 16 x CP 2 x TP 4", (4, 16, 2, 4), ("pp", "dp", "cp", "tp"), packed(*[8] * 64)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_the_processes_of_a_machine_follow_its_fair_share_of_lanes(topology: Topology) -> None:
    shares = {machine: topology.fair_share(machine) for machine in set(topology.machines)}
    followed = topology.lanes_followed
    assert followed == [shares[machine] for machine in topology.machines]


def test_the_examples_of_the_documentation_run(tmp_path: Path, process_groups: ProcessGroups) -> None:
    path = make_dataset(tmp_path / "mds", "mds", samples=600)
    write_card(path)
    process_groups(9, 128)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for text in blocks:
        text = re.sub(r'"s3://[^"]*"', repr(str(path)), text).replace("/nvme", str(tmp_path))
        exec(text.replace('"cuda"', '"cpu"'), names)
    assert (names["loader"].rank, names["loader"].world_size) == (1, 16)
    assert not names["evaluation"].config.stop_together
    assert names["balanced"].stats().balance.max_over_mean > 1
    for name in ("loader", "balanced", "evaluation"):
        names[name].close()


class CountedStore:
    """A store in memory that counts the requests of one process."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("world_size", [16, 1024])
def test_what_learning_costs_does_not_grow_with_the_world(world_size: int) -> None:
    shared = memory_store()
    stores = [CountedStore(shared) for _ in range(world_size)]
    places = [
        Place(rank, world_size, "torch.distributed", tuple(range(world_size)), machine=f"host{rank // 8}")
        for rank in range(world_size)
    ]
    for rank, (store, place) in enumerate(zip(stores, places, strict=True)):
        announce(store, place, process=rank)
    for rank, (store, place) in enumerate(zip(stores, places, strict=True)):
        assert await_ranks(store, place, wait_seconds=5) == tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
    assert {store.requests for store in stores[:-1]} == {4}
    assert stores[-1].requests == 5


def test_of_ranks_given_as_numbers_one_replica_is_waited_for_and_all_that_read_are_known() -> None:
    store = memory_store()
    places = [Place(process // 2, 2, machine=f"host{process % 2}") for process in range(4)]
    for process in (0, 3):  # as in Megatron, where not every replica makes a loader
        announce(store, places[process], process=process)
    assert await_ranks(store, places[0], wait_seconds=0.01) == (0,)
    announce(store, places[2], process=2)
    assert await_ranks(store, places[0], wait_seconds=0.01) == (0, 1)


def test_processes_that_do_not_come_are_counted_in_a_warning() -> None:
    store = memory_store()
    places = [replace(find_place(mesh=mesh_of((4, 2), ("dp", "tp"), rank)), machine="a") for rank in range(8)]
    for process in (0, 3, 4):
        announce(store, places[process], process=process)
    with pytest.warns(RuntimeWarning, match="5 of 8 processes have not begun to read in 0.01 s"):
        assert await_ranks(store, places[0], wait_seconds=0.01) == (0, 1, 2)


def test_a_run_that_torchrun_starts_again_learns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    for restart, machine in (("0", "a"), ("1", "b")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        places = [
            Place(rank, 2, "torch.distributed", (0, 1), machine=machine * (rank + 1)) for rank in (0, 1)
        ]
        for process, place in enumerate(places):
            announce(store, place, process=process)
        assert [await_ranks(store, place, wait_seconds=1) for place in places] == [(0,), (1,)]


def test_a_process_asks_once_for_each_place(process_groups: ProcessGroups) -> None:
    process_groups(0, 2)
    place = find_place()
    with pytest.warns(RuntimeWarning, match="1 of 2 processes have not begun"):
        assert ranks_of_machine(place, wait_seconds=0.01) == (0,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks_of_machine(place, wait_seconds=0.01) == (0,)
        assert ranks_of_machine(Place(0, 1), wait_seconds=0.01) == (0,), "nothing to learn"


def test_without_a_process_group_only_torchruns_numbers_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchrun(monkeypatch, 13, 16, local=8)
    assert ranks_of_machine(find_place()) == tuple(range(8, 16))
    assert ranks_of_machine(Place(13, 16)) == tuple(range(8, 16)), "the same numbers, given"
    assert ranks_of_machine(Place(1, 2)) == (1,), "TP 8: LOCAL_WORLD_SIZE counts replicas"
    assert local_processes(Place(1, 2)) == 8
    monkeypatch.delenv("LOCAL_RANK")
    assert ranks_of_machine(find_place()) == (13,)


def test_dataloader_workers_are_given_what_their_parent_has_learned(
    tmp_path: Path, process_groups: ProcessGroups
) -> None:
    url = fresh_url()
    put_folder(make_remote_kind(tmp_path / "mds", "mds"), MemoryStore(url))
    options: dict[str, Any] = {"batch_size": 2, "cache_dir": tmp_path / "cache", "stop_together": False}
    early = StreamingDataset(url, **grouped(options))
    process_groups(2, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dataset = StreamingDataset(url, mesh=mesh, **grouped(options))
    store, place = group_store(), dataset.loader._place
    assert store is not None
    for process in (0, 1, 3):
        announce(store, replace(place, rank=process // 2), process=process)
    loader = StreamingDataLoader(dataset, num_workers=1)
    batches, iterator = len(loader), iter(loader)
    copy = pickle.loads(pickle.dumps(dataset))  # as a spawned worker gets it
    assert copy.loader.machine_ranks == (0, 1)
    assert (copy.loader.rank, copy.loader.world_size) == (1, 2)
    assert len(list(iterator)) == batches
    for each in (loader, copy):
        each.close()
    with pytest.raises(RuntimeError, match="created as rank 0 of 1"):
        iter(StreamingDataLoader(early, num_workers=1))
    early.close()


# Who writes the usage log.


def test_one_of_the_replicas_writes_the_usage_log(tmp_path: Path, process_groups: ProcessGroups) -> None:
    assert usage_log_role(Place(0, 2), tmp_path) == "writer", "a process alone has no replicas"
    process_groups(1, 4)
    assert usage_log_role(Place(1, 4), tmp_path) == "writer", "as many ranks as processes: no replicas"
    assert usage_log_role(find_place(mesh=mesh_of((2, 2), ("dp", "tp"), 1)), tmp_path) == "replica"
    assert usage_log_role(find_place(mesh=mesh_of((2, 2), ("dp", "tp"), 2)), tmp_path) == "writer"
    assert usage_log_role(Place(0, 2), tmp_path) == "writer", "who comes first"
    assert usage_log_role(Place(0, 2), tmp_path) == "writer", "again"
    process_groups(0, 4)
    assert usage_log_role(Place(0, 2), tmp_path) == "replica"
    assert usage_log_role(Place(0, 2), tmp_path / "other") == "writer"


def test_replicas_that_cannot_agree_all_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 5, 8, local=8)
    assert usage_log_role(Place(2, 4), tmp_path) == "unknown"
    assert usage_log_role(find_place(), tmp_path) == "writer"


# Real processes, on pretended machines.


@dataclass
class Seen:
    """What the processes of one topology of mesh_ranks.py saw; None for those without a loader."""

    folder: Path
    processes: list[dict[str, Any]]

    def loaders(self) -> dict[int, dict[str, Any]]:
        return {number: seen for number, seen in enumerate(self.processes) if "ids" in seen}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("ranks")
    tests = Path(mesh_ranks.__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    subprocess.run([sys.executable, mesh_ranks.__file__, folder], check=True, timeout=200, env=environment)
    return {
        name: Seen(
            folder,
            [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(topology.processes)],
        )
        for name, topology in mesh_ranks.TOPOLOGIES.items()
    }


@pytest.mark.parametrize("name", mesh_ranks.TOPOLOGIES)
def test_replicas_get_the_same_batches_and_all_ranks_together_each_sample_once(
    seen: dict[str, Seen], name: str
) -> None:
    of_rank: dict[int, list[list[int]]] = {}
    for each in seen[name].loaders().values():
        assert of_rank.setdefault(each["rank"], each["ids"]) == each["ids"]
    topology = mesh_ranks.TOPOLOGIES[name]
    ranks = topology.shape[topology.dims.index("dp")]
    assert sorted(of_rank) == list(range(ranks))
    delivered = [row for batches in of_rank.values() for batch in batches for row in batch]
    assert len(set(delivered)) == len(delivered) == ranks * mesh_ranks.BATCH_SIZE * mesh_ranks.STEPS


@pytest.mark.parametrize("name", mesh_ranks.TOPOLOGIES)
def test_processes_follow_the_lanes_of_their_machine(seen: dict[str, Seen], name: str) -> None:
    machines, loaders = mesh_ranks.TOPOLOGIES[name].machines, seen[name].loaders()
    for number, each in loaders.items():
        beside = {other["rank"] for at, other in loaders.items() if machines[at] == machines[number]}
        assert each["ranks_of_machine"] == sorted(beside)
        order, size = Order([1000], OrderSpec(1, mesh_ranks.LANES, 1)), 4 * each["world_size"]
        parts = (rank_slice(size, rank, each["world_size"]) for rank in beside)
        read = [order.global_batches(0, size, mesh_ranks.LANES, part=part).lane for part in parts]
        assert each["lanes"] == np.unique(read).tolist()


@pytest.mark.parametrize("name", mesh_ranks.TOPOLOGIES)
def test_one_replica_of_each_rank_logs_and_the_audit_is_clean(seen: dict[str, Seen], name: str) -> None:
    logging = [each["rank"] for each in seen[name].loaders().values() if each["logs"]]
    assert len(set(logging)) == len(logging)
    folder = seen[name].folder
    report = log_report(folder / name / "logs", open_dataset(folder / "data"))
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert report.walks[0].steps == mesh_ranks.STEPS


@pytest.mark.parametrize("name", mesh_ranks.TOPOLOGIES)
def test_the_error_of_one_loader_reaches_every_process_of_the_world(seen: dict[str, Seen], name: str) -> None:
    failing = mesh_ranks.TOPOLOGIES[name].failing
    errors = [each["error"] for each in seen[name].processes]
    assert errors.pop(failing) is None
    assert set(errors) == {f"rank {failing} stopped at step {mesh_ranks.STEPS}: ValueError: boom"}
