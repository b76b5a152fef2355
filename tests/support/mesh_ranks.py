"""Ranks of device meshes, as real processes on pretended machines: `python mesh_ranks.py FOLDER`.

torch is imported once and every rank is a fork, all topologies at the same time. Each process makes its mesh,
reads a remote dataset through the cache folder of its machine, and goes on until it hears of the error that
the last loader raises. What it saw goes to FOLDER/TOPOLOGY.RANK.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.errors import PeerError
from shardkit.loaders import StreamingLoader, watch
from shardkit.loaders.config import grouped
from shardkit.storage.memory import MemoryStore
from support.remote_harness import fresh_url, make_remote_kind, put_folder
from support.stop_ranks import free_port

STEPS = 6
BATCH_SIZE = 4
LANES = 16
SAMPLES = 120


@dataclass(frozen=True)
class Topology:
    """Processes in a mesh, their machines, and the loader's arguments in each; None: it makes no loader."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    machines: str
    arguments: Callable[[DeviceMesh], dict[str, Any] | None]
    failing: int
    """The process whose loop fails in the end."""

    @property
    def processes(self) -> int:
        return prod(self.shape)


def numbers(mesh: DeviceMesh) -> dict[str, Any] | None:
    """Return the numbers of Megatron's `mpu`; None for tensor parallel ranks but the first."""
    if mesh.get_local_rank("tp"):
        return None
    return {"rank": mesh.get_local_rank("dp"), "world_size": mesh["dp"].size()}


TOPOLOGIES = {
    "whole_mesh": Topology((3, 2), ("dp", "tp"), "aaaabb", lambda mesh: {"mesh": mesh}, 5),
    "slice": Topology((2, 2), ("pp", "dp"), "abab", lambda mesh: {"mesh": mesh["dp"]}, 3),
    "numbers": Topology((2, 2), ("dp", "tp"), "aabb", numbers, 2),
}


def read(topology: Topology, rank: int, url: str, folder: Path) -> dict[str, Any]:
    """Return what one process sees: its part of the data, and in the end the error of another."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=topology.processes)
    mesh = init_device_mesh("cpu", topology.shape, mesh_dim_names=topology.dims)
    machine = topology.machines[rank]
    arguments = topology.arguments(mesh)
    if arguments is None:
        with watch() as peers:
            return {"error": wait_for_error(peers.check)}
    with StreamingLoader(
        url,
        batch_size=BATCH_SIZE,
        endless=True,
        return_ids=True,
        cache_dir=folder / f"machine-{machine}",
        usage_log=folder / "logs",
        **grouped({"lanes": LANES, **arguments}),
    ) as loader:
        loader._place = replace(loader._place, machine=f"{folder.name}-{machine}")
        batches = iter(loader)
        seen = {
            "ids": [batch["sample_id"].tolist() for batch in islice(batches, STEPS)],
            "rank": loader.rank,
            "world_size": loader.world_size,
            "ranks_of_machine": loader.machine_ranks,
            "lanes": loader.shard_uses().lanes_read((0,), is_shared=True),
            "logs": loader.usage is not None,
            "error": None,
        }
        torch.distributed.barrier(mesh["dp"].get_group())  # for all to have logged their steps
        if rank != topology.failing:
            wait_for_error(loader._stop_together.check)  # without taking, and logging, more batches
            return seen | {"error": wait_for_error(lambda: next(batches))}
        loader._stop_together.report(ValueError("boom"), loader.position // loader.plan.global_batch)
    return seen


def wait_for_error(step: Callable[[], object]) -> str:
    while True:
        try:
            step()
        except PeerError as error:
            return str(error)
        time.sleep(0.05)


def main(folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    url = fresh_url()
    put_folder(make_remote_kind(folder / "data", "mds", samples=SAMPLES, shards=12), MemoryStore(url))
    processes = []
    gc.freeze()  # so that the ranks share the memory of what was imported
    for name, topology in TOPOLOGIES.items():
        os.environ["MASTER_PORT"] = str(free_port())
        (folder / name).mkdir()
        for rank in range(topology.processes):
            processes.append(os.fork())
            if processes[-1] == 0:
                seen = read(topology, rank, url, folder / name)
                (folder / f"{name}.{rank}").write_text(json.dumps(seen))
                torch.distributed.barrier()  # the store ends with rank 0
                os._exit(0)  # at once: to tear down what was imported takes longer than all of the above
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    assert not any(codes), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
