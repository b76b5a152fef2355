"""Where this process stands among the data-parallel ranks, and which of them share its machine.

A rank of a loader is a *data-parallel* rank: processes with one such rank (tensor, pipeline and context
parallel peers) are replicas, which get the same batches. `find_place` takes rank and world size from exactly
one source, because a rank from one and a world size from another would silently train on wrong parts: a
device mesh, a process group or numbers if given, else torch.distributed, else torchrun's environment, else 0
of 1. torch is asked only if it is imported already. Slurm's and Open MPI's rank variables are not read: both
are also set for tasks that do not train together. Where they say that several processes were started and
nothing else is known, `check_place` warns; it refuses a place that torch.distributed has come to contradict.

`ranks_of_machine` learns which data-parallel ranks share this machine, for the plan of their common cache. It
does not follow from LOCAL_WORLD_SIZE, which counts replicas, nor from the rank, for the ranks of a machine
need not be consecutive. Each process appends its rank to a key named after its machine in the store of the
process group, counts itself, waits until all are counted (30 s at most), and reads its machine's key: four
to six requests a process and a connection, whatever the world size. Nothing that is learned decides an order.

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

WAIT_SECONDS = 30.0  # for the ranks to come to their first batch: they have met in init_process_group already

_CONNECT_SECONDS = 10.0  # the store exists already: the ranks have met through it

# S3 answers so many GETs a second for one prefix, before it divides it, which takes half an hour.
PREFIX_REQUESTS_PER_SECOND = 5500
NODE_REQUESTS = 40  # of all processes of a node until each has its first rows of one dataset
INDEX_REQUESTS = 3  # for a dataset's index and card
SINGLE_ROWS = 32
_MOST_DELAY_SECONDS = (
    15.0  # at 2,048 nodes and one dataset; a job that starts has waited longer for its nodes
)

_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # processes started together

Source = Literal["arguments", "mesh", "group", "torch.distributed", "environment", "default"]


class Store(Protocol):
    """The part of `torch.distributed.Store` that carries errors; RuntimeError when it is gone."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


class CountingStore(Store, Protocol):
    """What learning needs besides."""

    def append(self, key: str, value: str, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def machine_name() -> str:
    """A name that all processes of this machine share, in containers too, and no other machine has."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@dataclass(frozen=True, slots=True)
class Place:
    """Data-parallel rank `rank` of `world_size`."""

    rank: int
    world_size: int
    source: Source = "arguments"
    members: tuple[int, ...] = ()
    """Ranks in the world of all processes of the mesh or group; () if not known, as with numbers."""
    is_first_replica: bool | None = None
    """Whether the other coordinates in the mesh are all 0; None if not known."""
    machine: str = field(default_factory=machine_name)
    """Equal for all processes that share this one's cache folder."""

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
    """The place of this process; ValueError for half an answer, two answers, or numbers out of range."""
    if (rank is None) != (world_size is None):
        missing = "world_size" if world_size is None else "rank"
        raise ValueError(f"give rank and world_size together, or neither: {missing} is missing")
    given = {"rank and world_size": rank, "mesh": mesh, "group": group}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"give only one of {', '.join(names)}: each of them states the rank and world size")
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
            "read the same)"
        )
    if (coordinate := mesh.get_coordinate()) is None:
        raise ValueError("this process is not in the mesh: make the loader only where the mesh is used")
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
        raise ValueError("this process is not in the group: make the loader only on its members")
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
        raise ValueError(f"the environment has only one of RANK and WORLD_SIZE: {missing} is missing")
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
    """(rank, world size) of this process among all, by torch.distributed or torchrun; None if alone."""
    if (found := _from_torch()) is not None:
        return found
    with suppress(ValueError):  # half of an environment matters only to who relies on it
        return _from_environment()
    return None


def local_processes(place: Place) -> int:
    """Processes that share this machine's memory, as the launcher says; without one, all of the world."""
    processes = process_place()
    most = place.world_size if processes is None else max(processes[1], place.world_size)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if (local := _number(name)) and local > 0:
            return min(local, most)
    return most


def node_count(place: Place) -> int:
    """Machines of the job, as far as the launcher says how many processes each has."""
    processes = process_place()
    most = place.world_size if processes is None else max(processes[1], place.world_size)
    return -(-most // local_processes(place))


def start_delay(machine: str, nodes: int, datasets: int = 1) -> float:
    """Seconds that a node waits before it first asks a store, so that nodes do not all ask in one second.

    From 0 to the time in which one prefix answers what all nodes ask for at their start. It follows from the
    name of the machine; a store that refuses requests all the same is asked again (`shardkit.storage.retry`).
    """
    requests = nodes * (NODE_REQUESTS + (datasets - 1) * INDEX_REQUESTS)
    longest = min(_MOST_DELAY_SECONDS, requests / PREFIX_REQUESTS_PER_SECOND)
    if longest < 1.0:
        return 0.0
    digest = hashlib.blake2b(machine.encode(errors="surrogatepass"), digest_size=8).digest()
    return longest * int.from_bytes(digest) / (1 << 64)


def first_rows(processes: int, nodes: int) -> int:
    """Rows that a process may fetch one by one after a start, by two requests each if nothing proves them.

    `SINGLE_ROWS` where the nodes are few; where they are many, all processes of a node have as many together
    as `NODE_REQUESTS` allow.
    """
    if nodes * NODE_REQUESTS <= PREFIX_REQUESTS_PER_SECOND:
        return SINGLE_ROWS
    return max(1, (NODE_REQUESTS - INDEX_REQUESTS) // 2 // processes)


def replicas_on_machine(place: Place, ranks: tuple[int, ...]) -> int:
    """Processes of this machine that get the same batches, this one among them, as far as is known.

    `ranks`: the data-parallel ranks that share the machine.
    """
    processes = process_place()
    everywhere = 1 if processes is None else processes[1] // place.world_size
    return max(1, min(everywhere, local_processes(place) // len(ranks)))


def check_place(place: Place) -> None:
    """Raise RuntimeError if torch.distributed contradicts a place that nobody stated."""
    if place.source in ("arguments", "mesh", "group"):
        return
    now = _from_torch()
    if now is not None and now[1] > 1 and now != (place.rank, place.world_size):
        raise RuntimeError(
            f"this loader was made as rank {place.rank} of {place.world_size} (by {place.source}), but "
            f"torch.distributed says rank {now[0]} of {now[1]}: make it after init_process_group, or give "
            "rank= and world_size="
        )
    if now is None and place.source == "default":
        started = {name: _number(name) or 1 for name in _LAUNCHERS}
        name, count = max(started.items(), key=lambda item: item[1])
        if count > 1:
            warn_user(
                f"{count} processes were started together ({name}), and this loader delivers every sample to "
                "each of them: if they train one model, give rank= and world_size=, or make the loader after "
                "torch.distributed.init_process_group; if not, give rank=0 and world_size=1"
            )


_learned: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], tuple[int, ...]]]
_learned = weakref.WeakKeyDictionary()  # by process group
_learning = threading.Lock()


def ranks_of_machine(place: Place, *, wait_seconds: float = WAIT_SECONDS) -> tuple[int, ...]:
    """The data-parallel ranks whose processes share this machine, in order; this rank is one of them.

    Asks the store of the process group once for each place. Without a store, and in a DataLoader worker, only
    what torchrun's environment says is known.
    """
    distributed = distributed_in_use()
    if distributed is None or place.world_size == 1 or dataloader_workers():
        return _by_environment(place)
    key = (place.rank, place.world_size, place.members, place.machine)
    with _learning:
        known = _learned.setdefault(distributed.group.WORLD, {})
        if key not in known:
            known[key] = _by_environment(place)
            # RuntimeError: the store is gone, or is one of files, which may not have what we call.
            with suppress(RuntimeError):
                if (store := group_store()) is not None:
                    announce(store, place, process=int(distributed.get_rank()))
                    known[key] = await_ranks(store, place, wait_seconds=wait_seconds)
        return known[key]


def announce(store: CountingStore, place: Place, *, process: int) -> None:
    """Tell the store of the place of this process, which has rank `process` in the world.

    All members of a mesh or group are counted, and of ranks given as numbers the first process of each,
    because not every replica need have a loader.
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
    """The ranks of this machine when all are announced; with a warning, those announced in this time."""
    count = _count_key(place)
    try:
        store.wait([f"{count}/all"], timedelta(seconds=wait_seconds))
    except RuntimeError:
        missing = _expected(place) - store.add(count, 0)
        if missing:
            warn_user(
                f"{missing} of {_expected(place)} processes have not begun to read in {wait_seconds:g} s: "
                "the cache plan of this machine leaves out those of them that share it (batches are not "
                "affected); if only some processes of a mesh read data, give rank= and world_size= instead"
            )
    ranks = store.get(f"{_ranks_key(place)}/on/{place.machine}").decode().split(",")
    return tuple(sorted({int(rank) for rank in ranks if rank}))


def _expected(place: Place) -> int:
    return len(place.members) or place.world_size


def _ranks_key(place: Place) -> str:
    # Slices of a mesh share it: each knows its own members only, and they use the machines' caches together.
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
    """Whether this process, or a replica of it, logs to `folder`; unknown without a store to agree in."""
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
    """Return the beginning of this run's keys. Torchrun's store outlives a run that failed."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(["shardkit", *(os.environ.get(name, "") for name in names)])


def group_store() -> CountingStore | None:
    """Return a connection to the store of the default process group; None without torch.distributed."""
    distributed = distributed_in_use()
    if distributed is None:
        return None
    if not hasattr(distributed.Store, "clone"):  # torch before 2.8
        return rendezvous_store()
    connection = distributed.group.WORLD.get_group_store().clone()
    connection.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
    return connection  # type: ignore[no-any-return]


def rendezvous_store() -> CountingStore | None:
    """Return a connection to the store at MASTER_ADDR, which ranks meet over by default; None without one."""
    distributed = distributed_in_use()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if distributed is None or not host or not port:
        return None
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    try:
        store = distributed.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    except RuntimeError:
        return None  # the ranks have met elsewhere: init_process_group was given another address
    return store  # type: ignore[no-any-return]


def distributed_in_use() -> Any:
    """Return torch.distributed if it is in use. Not imported here: who uses it has done so."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


def dataloader_workers() -> int:
    """Return how many workers the torch DataLoader has of which this process is one; 0 outside of workers."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return 0 if worker is None else int(worker.num_workers)
