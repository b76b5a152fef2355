"""Finds the data-parallel rank and world size of this process, and the ranks that share its machine.

A rank of a loader is a *data-parallel* rank: processes with the same rank (tensor, pipeline and context
parallel peers) are replicas, which get the same batches. `find_place` takes rank and world size from exactly
one source, because a rank from one source and a world size from another would silently train on wrong parts.
The source is a device mesh, a process group or numbers if given, else torch.distributed, else torchrun's
environment, else 0 of 1. torch is used only if it is already imported. Slurm's and Open MPI's rank variables
are not read: both are also set for tasks that do not train together. `check_place` warns if only they show
that several processes were started; it raises an error if torch.distributed later contradicts the place.

`ranks_of_machine` finds which data-parallel ranks share this machine, for the plan of their common cache.
They do not follow from LOCAL_WORLD_SIZE, which counts replicas, nor from the rank, because the ranks of a
machine need not be consecutive. Each process appends its rank to a key named after its machine in the store
of the process group, counts itself, waits until all are counted (30 s at most), and reads its machine's key:
four to six requests and one connection per process, at any world size. The result does not affect the order
of samples.

`usage_log_role` chooses one of the replicas to write the usage log.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

from shardkit.errors import warn_user
from shardkit.units import whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


DATA_PARALLEL_DIMS = ("dp_replicate", "dp_shard", "dp", "batch", "data_parallel")

WAIT_SECONDS = 30.0  # longest wait for other ranks' first batch; they already met in init_process_group

_CONNECT_SECONDS = 10.0  # timeout of a connection to the store, through which the ranks already met

# GET requests per second that S3 answers for a prefix before it splits the prefix, which takes half an hour.
PREFIX_REQUESTS_PER_SECOND = 5500
NODE_REQUESTS = 40  # requests of a node until all its processes have their first rows of one dataset
INDEX_REQUESTS = 3  # requests for a dataset's index and card
SINGLE_ROWS = 32  # single rows that a process may fetch at its start in a job of few nodes
_MOST_DELAY_SECONDS = (
    15.0  # reached at 2,048 nodes and one dataset; such a job waits longer than this to get its nodes
)

# Environment variables in which Open MPI and Slurm give the number of processes that they started together.
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

Source = Literal["arguments", "mesh", "group", "torch.distributed", "environment", "default"]


class Store(Protocol):
    """The methods of `torch.distributed.Store` that `peers` uses. They raise RuntimeError if it is gone."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


class CountingStore(Store, Protocol):
    """A `Store` with the further methods that `ranks_of_machine` needs."""

    def append(self, key: str, value: str, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def machine_name() -> str:
    """Return a name that all processes of this machine share, also in containers, unique to the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Place:
    """The data-parallel rank and world size of a process, and where they came from."""

    rank: int
    world_size: int
    source: Source = "arguments"
    members: tuple[int, ...] = ()
    """World ranks of all processes of the mesh or group; () if unknown, as for ranks given as numbers."""
    is_first_replica: bool | None = None
    """Whether this process is at coordinate 0 in all mesh dims that do not divide data; None if unknown."""
    machine: str = field(default_factory=machine_name)
    """Name that is equal for all processes that share this one's cache folder."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be between 0 and {self.world_size - 1}, not {self.rank}")


def find_place(
    rank: SupportsIndex | None = None,
    world_size: SupportsIndex | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
) -> Place:
    """Return the place of this process.

    Raises ValueError for a rank without a world size (or the reverse), for several sources, and for numbers
    out of range.
    """
    if (rank is None) != (world_size is None):
        missing = "world_size" if world_size is None else "rank"
        raise ValueError(f"give rank and world_size together, or neither: {missing} is missing")
    given = {"rank and world_size": rank, "mesh": mesh, "group": group}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"give only one of {', '.join(names)}: each defines rank and world size")
    if mesh is not None:
        return _from_mesh(mesh)
    if group is not None:
        return _from_group(group)
    if rank is not None and world_size is not None:
        return Place(whole_number(rank, "rank"), whole_number(world_size, "world_size"))
    if (found := _from_torch()) is not None:
        return Place(*found, "torch.distributed", tuple(range(found[1])))
    if (found := _from_environment()) is not None:
        return Place(*found, "environment")
    return Place(0, 1, "default")


def _from_mesh(mesh: DeviceMesh) -> Place:
    if not hasattr(mesh, "get_coordinate"):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    shape, names = tuple(mesh.shape), mesh.mesh_dim_names
    if names is None and len(shape) == 1:
        names = ("dp",)
    is_data = [name in DATA_PARALLEL_DIMS for name in names or ()]
    if not any(is_data):
        raise ValueError(
            f"mesh has no data-parallel dim: its dims are {names or 'unnamed'} of sizes {shape}, and data is "
            f"divided along {', '.join(DATA_PARALLEL_DIMS)}; give the process group of the dim that divides "
            "the data, group=mesh['name'].get_group(), or rank= and world_size= (0 and 1 if all processes "
            "read the same data)"
        )
    if (coordinate := mesh.get_coordinate()) is None:
        raise ValueError("this process is not in the mesh: create the loader only in processes of the mesh")
    rank = 0
    for size, at, counts in zip(shape, coordinate, is_data, strict=True):
        rank = rank * size + at if counts else rank
    others = [at for at, counts in zip(coordinate, is_data, strict=True) if not counts]
    return Place(
        rank,
        prod(size for size, counts in zip(shape, is_data, strict=True) if counts),
        "mesh",
        tuple(mesh.mesh.flatten().tolist()),
        is_first_replica=not any(others) if others else None,
    )


def _from_group(group: ProcessGroup) -> Place:
    distributed = distributed_in_use()
    if distributed is None:
        raise ValueError("group was given, but torch.distributed is not initialized")
    rank = int(distributed.get_rank(group))
    if rank < 0:
        raise ValueError("this process is not in the group: create the loader only in processes of the group")
    members = tuple(distributed.get_process_group_ranks(group))
    return Place(rank, len(members), "group", members)


def _from_torch() -> tuple[int, int] | None:
    distributed = distributed_in_use()
    return None if distributed is None else (int(distributed.get_rank()), int(distributed.get_world_size()))


def _from_environment() -> tuple[int, int] | None:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ValueError(f"set both RANK and WORLD_SIZE in the environment, or neither: {missing} is missing")
    return rank, world_size


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a whole number, not {text!r}") from None


def process_place() -> tuple[int, int] | None:
    """Return the world rank and world size from torch.distributed or torchrun; None without either."""
    if (found := _from_torch()) is not None:
        return found
    with suppress(ValueError):  # an incomplete environment is an error in `find_place` only
        return _from_environment()
    return None


def local_processes(place: Place) -> int:
    """Return how many processes share this machine's memory; without launcher variables, the world size."""
    processes = process_place()
    most = place.world_size if processes is None else max(processes[1], place.world_size)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if (local := _number(name)) and local > 0:
            return min(local, most)
    return most


def node_count(place: Place) -> int:
    """Return the number of machines of the job; 1 if no launcher variable gives the processes per machine."""
    processes = process_place()
    most = place.world_size if processes is None else max(processes[1], place.world_size)
    return -(-most // local_processes(place))


def start_delay(machine: str, nodes: int, datasets: int = 1) -> float:
    """Return how many seconds a node waits before its first request, so that nodes do not start together.

    The delay is a hash of the machine's name, scaled to the time that the store needs to answer the initial
    requests of all nodes for one prefix. Requests that it still refuses are retried
    (`shardkit.storage.retry`).
    """
    requests = nodes * (NODE_REQUESTS + (datasets - 1) * INDEX_REQUESTS)
    longest = min(_MOST_DELAY_SECONDS, requests / PREFIX_REQUESTS_PER_SECOND)
    if longest < 1.0:
        return 0.0
    digest = hashlib.blake2b(machine.encode(errors="surrogatepass"), digest_size=8).digest()
    return longest * int.from_bytes(digest) / (1 << 64)


def first_rows(processes: int, nodes: int) -> int:
    """Return how many single rows a process may fetch after its start; each may take two requests.

    Returns `SINGLE_ROWS` in a job of few nodes. In a job of many nodes, the rows of all processes of a node
    take at most `NODE_REQUESTS` requests.
    """
    if nodes * NODE_REQUESTS <= PREFIX_REQUESTS_PER_SECOND:
        return SINGLE_ROWS
    return max(1, (NODE_REQUESTS - INDEX_REQUESTS) // 2 // processes)


def replicas_on_machine(place: Place, ranks: tuple[int, ...]) -> int:
    """Estimate how many processes of this machine, including this one, get the same batches.

    `ranks`: the data-parallel ranks that share the machine.
    """
    processes = process_place()
    everywhere = 1 if processes is None else processes[1] // place.world_size
    return max(1, min(everywhere, local_processes(place) // len(ranks)))


def check_place(place: Place) -> None:
    """Raise RuntimeError if torch.distributed contradicts a place that the user did not give.

    Warns if a launcher started several processes, but nothing tells them their ranks.
    """
    if place.source in ("arguments", "mesh", "group"):
        return
    now = _from_torch()
    if now is not None and now[1] > 1 and now != (place.rank, place.world_size):
        raise RuntimeError(
            f"this loader was created as rank {place.rank} of {place.world_size} (from {place.source}), but "
            f"in torch.distributed this is rank {now[0]} of {now[1]}: create the loader after "
            "init_process_group, or give rank= and world_size="
        )
    if now is None and place.source == "default":
        started = {name: _number(name) or 1 for name in _LAUNCHERS}
        name, count = max(started.items(), key=lambda item: item[1])
        if count > 1:
            warn_user(
                f"{count} processes were started together ({name}), and this loader delivers every sample to "
                "each of them: if they train one model, give rank= and world_size=, or create the loader "
                "after torch.distributed.init_process_group; if not, give rank=0 and world_size=1"
            )


_learned: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], tuple[int, ...]]]
_learned = weakref.WeakKeyDictionary()  # results of `ranks_of_machine`, by process group and place
_learning = threading.Lock()


def ranks_of_machine(place: Place, *, wait_seconds: float = WAIT_SECONDS) -> tuple[int, ...]:
    """Return the data-parallel ranks whose processes share this machine, ascending, including this rank.

    Reads the store of the process group once per place. Without a store, and in a DataLoader worker, uses
    only torchrun's environment variables.
    """
    distributed = distributed_in_use()
    if distributed is None or place.world_size == 1 or dataloader_workers():
        return _by_environment(place)
    key = (place.rank, place.world_size, place.members, place.machine)
    with _learning:
        known = _learned.setdefault(distributed.group.WORLD, {})
        if key not in known:
            known[key] = _by_environment(place)
            # RuntimeError: the store is gone, or is a FileStore, which may lack a method.
            with suppress(RuntimeError):
                if (store := group_store()) is not None:
                    announce(store, place, process=int(distributed.get_rank()))
                    known[key] = await_ranks(store, place, wait_seconds=wait_seconds)
        return known[key]


def announce(store: CountingStore, place: Place, *, process: int) -> None:
    """Write the place of this process, whose world rank is `process`, to the store.

    Counts all members of a mesh or group. For ranks given as numbers, counts only the first process of each
    rank, because not every replica need have a loader.
    """
    key = _ranks_key(place)
    store.append(f"{key}/on/{place.machine}", f"{place.rank},")
    if (
        not place.members
        and store.compare_set(f"{key}/first/{place.rank}", "", f"{process}") != b"%d" % process
    ):
        return
    count = _count_key(place)
    if store.add(count, 1) == _expected(place):
        store.set(f"{count}/all", "1")


def await_ranks(store: CountingStore, place: Place, *, wait_seconds: float) -> tuple[int, ...]:
    """Wait for all processes, return this machine's ranks; after the timeout warn and return known ones."""
    count = _count_key(place)
    try:
        store.wait([f"{count}/all"], timedelta(seconds=wait_seconds))
    except RuntimeError:
        missing = _expected(place) - store.add(count, 0)
        if missing:
            warn_user(
                f"{missing} of {_expected(place)} processes have not begun to read in {wait_seconds:g} s: "
                "the cache plan of this machine ignores those of them that share it (batches are not "
                "affected); if only some processes of a mesh read data, give rank= and world_size= instead"
            )
    ranks = store.get(f"{_ranks_key(place)}/on/{place.machine}").decode().split(",")
    return tuple(sorted({int(rank) for rank in ranks if rank}))


def _expected(place: Place) -> int:
    return len(place.members) or place.world_size


def _ranks_key(place: Place) -> str:
    # All slices of a mesh use one key: a slice knows only its own members, but shares caches with others.
    return f"{run_key()}/ranks/{place.world_size}"


def _count_key(place: Place) -> str:
    members = hashlib.blake2b(repr(place.members).encode(), digest_size=8).hexdigest()
    return f"{_ranks_key(place)}/count/{members}"


def _by_environment(place: Place) -> tuple[int, ...]:
    local, count = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    if local is None or count is None or process_place() != (place.rank, place.world_size):
        return (place.rank,)
    first = place.rank - local
    return tuple(range(max(0, first), min(first + count, place.world_size)))


def usage_log_role(place: Place, folder: str | os.PathLike[str]) -> Literal["writer", "replica", "unknown"]:
    """Return "writer" if this process logs to `folder`, "replica" if another replica does, or "unknown"."""
    if place.is_first_replica is not None:
        return "writer" if place.is_first_replica else "replica"
    process = process_place()
    if process is None or process[1] <= place.world_size:
        return "writer"  # there are no replicas
    where = hashlib.blake2b(os.fsencode(Path(folder).absolute()), digest_size=8).hexdigest()
    key, mine = f"{run_key()}/log/{where}/{place.world_size}/{place.rank}", f"{process[0]}"
    with suppress(RuntimeError):
        if (store := group_store()) is not None:
            return "writer" if store.compare_set(key, "", mine) == mine.encode() else "replica"
    return "unknown"


def run_key() -> str:
    """Return the prefix of this run's store keys; new after a restart, which torchrun's store outlives."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(["shardkit", *(os.environ.get(name, "") for name in names)])


def group_store() -> CountingStore | None:
    """Return a new connection to the store of the default process group; None without torch.distributed."""
    distributed = distributed_in_use()
    if distributed is None:
        return None
    if not hasattr(distributed.Store, "clone"):  # torch before 2.8
        return rendezvous_store()
    connection = distributed.group.WORLD.get_group_store().clone()
    connection.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
    return connection  # type: ignore[no-any-return]


def rendezvous_store() -> CountingStore | None:
    """Return a connection to the store at MASTER_ADDR, where ranks meet by default; None if there is none."""
    distributed = distributed_in_use()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if distributed is None or not host or not port:
        return None
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    try:
        store = distributed.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    except RuntimeError:
        return None  # init_process_group was given another address, so the ranks met elsewhere
    return store  # type: ignore[no-any-return]


def distributed_in_use() -> Any:
    """Return torch.distributed if it is initialized, without importing it; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


def dataloader_workers() -> int:
    """Return the number of workers of this process's torch DataLoader; 0 if this process is not a worker."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return 0 if worker is None else int(worker.num_workers)
