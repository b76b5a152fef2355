"""`warm`: fills a node's cache with the shards that a run will read first, before its GPUs are there.

    sk.warm("s3://bucket/data", cache_dir="/nvme/cache", batch_size=8, world_size=64, ranks=range(8))

The order in which the ranks of a node need shards is arithmetic, so a process without GPUs knows it. Shards
are fetched by the loader's own cache and under its names, so a loader that starts there afterwards makes no
request for them. They come in the order of their first use from the given step on, up to `most_bytes` or the
size of the cache, and to make room the entries that this run needs last are evicted. What is there already is
not fetched again: after an interruption, the same call continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import numpy as np

from shardkit.cache.belady import NEVER, Future
from shardkit.cache.planner import FetchPlan, LoopPosition
from shardkit.cache.run import PlanRequest
from shardkit.cache.shards import CachedShards
from shardkit.datasets.dataset import Dataset
from shardkit.loaders.config import LoaderOptions, Stream
from shardkit.loaders.loader import StreamingLoader
from shardkit.order.order import Shuffle
from shardkit.order.run_settings import Tail
from shardkit.order.state import LoaderState
from shardkit.progress import counting
from shardkit.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmReport:
    """Counts what is in the cache after `warm`."""

    position: int
    """Position from which the run will read, in samples of all ranks."""
    shards: int
    """Shards that the node needs and that are in the cache now."""
    bytes: int
    """Size of these shards in the cache."""
    fetched: int
    """Shards among them that were not in the cache before."""
    fetched_bytes: int
    """Bytes fetched for them."""
    covers: int | None
    """Position before which the node needs no shard that is not in the cache; None: as far as is planned."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}


def warm(
    dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
    *,
    batch_size: int,
    world_size: int = 1,
    ranks: Iterable[int] | None = None,
    step: int = 0,
    state: Mapping[str, object] | None = None,
    most_bytes: int | str | None = None,
    seed: int = 17,
    shuffle: Shuffle = "window",
    tail: Tail = "carry",
    progress: bool = True,
    **options: Unpack[LoaderOptions],
) -> WarmReport:
    """Fetch into `cache_dir` the shards that `ranks` of a run read first, and return what is there.

    `dataset`, `batch_size` and all options are those of the run's `StreamingLoader`. `ranks`: the
    data-parallel ranks of this node; None: all. The run begins at `step` (of batch size x world size
    samples) or continues from `state`, which sets `seed`, `shuffle` and `tail`, too. `most_bytes`: size of
    the shards to have in the cache; None: as many as fit. Raises ValueError for a local dataset, which needs
    no cache, and the loader's errors.
    """
    if options.get("cache_dir") is None:
        raise ValueError("warm() fills a folder: give cache_dir, the one that the loaders of this node use")
    if step and state is not None:
        raise ValueError("give either step or state: a state has its own position")
    if step < 0:
        raise ValueError(f"step must be at least 0, not {step:,}")
    own = sorted(set(range(world_size) if ranks is None else ranks))
    if not own or own[0] < 0 or own[-1] >= world_size:
        raise ValueError(f"ranks must be from 0 to {world_size - 1:,} and at least one, not {own}")
    limit = None if most_bytes is None else parse_bytes(most_bytes)
    if state is not None:
        settings = LoaderState.from_dict(state).settings
        seed, shuffle, tail = settings.order.seed, settings.order.shuffle, settings.tail
    began = time.monotonic()
    with StreamingLoader(
        dataset,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        tail=tail,
        rank=own[0],
        world_size=world_size,
        **options,
    ) as loader:
        loader.machine_ranks = tuple(own)
        if state is not None:
            loader.load_state_dict(state)
        elif step:
            loader.seek(step * batch_size * world_size)
        requests = loader.shard_uses().requests()
        if not requests:
            raise ValueError(f"{loader.dataset.location} is on this machine and needs no cache")
        return _fill(requests, loader, limit, began, progress=progress)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A shard, its number in its dataset, its first use, its size in the cache, and who makes room for it."""

    shards: CachedShards
    number: int
    first_use: int
    bytes: int
    plan: FetchPlan


def _fill(
    requests: Sequence[PlanRequest],
    loader: StreamingLoader,
    limit: int | None,
    began: float,
    *,
    progress: bool,
) -> WarmReport:
    position, covers = loader.position, NEVER
    wanted: list[_Wanted] = []
    for request in requests:
        chosen, until = _first_used(request, position, limit)
        wanted, covers = wanted + chosen, min(covers, until)
    before = sum(shards.counts["fetched_bytes"] for request in requests for shards in request.parts)
    fetched = 0
    with (
        counting("warm", len(wanted), "shards", progress=progress) as advance,
        ThreadPoolExecutor(loader.config.connections, "shardkit-warm") as pool,
    ):
        jobs = [pool.submit(_fetch, each, loader.config.timeout_seconds) for each in wanted]
        try:
            for job in as_completed(jobs):
                fetched += job.result()
                advance(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    held = [each for each in wanted if each.shards.is_there(each.number)]
    if len(held) < len(wanted):  # another job needs the room
        covers = min(each.first_use for each in wanted if each not in held)
    after = sum(shards.counts["fetched_bytes"] for request in requests for shards in request.parts)
    return WarmReport(
        position=position,
        shards=len(held),
        bytes=sum(each.bytes for each in held),
        fetched=fetched,
        fetched_bytes=after - before,
        covers=None if covers == NEVER else covers,
        seconds=time.monotonic() - began,
    )


def _first_used(request: PlanRequest, position: int, limit: int | None) -> tuple[list[_Wanted], int]:
    """Return the shards to have in a cache, by first use, and the first use of the shard after them."""
    plan = FetchPlan(
        request.parts,
        request.uses,
        LoopPosition(position),
        lanes=request.lanes,
        pace=None,
        plans=lambda: (),
    )
    count = sum(len(part) for part in request.parts)
    first_uses = Future(request.uses, request.lanes).next_use(position, np.arange(count))
    room = min(plan.cache.capacity, plan.cache.capacity if limit is None else limit)
    chosen: list[_Wanted] = []
    for number in np.argsort(first_uses, kind="stable").tolist():
        if (use := int(first_uses[number])) == NEVER:
            break
        part, own = plan.place(number)
        assert isinstance(part, CachedShards)
        if part.info(own).raw.bytes < 0:
            part.entry(own)  # asks the store for the size
        size = part.known_size(own)
        if size > room:
            return chosen, use
        room -= size
        chosen.append(_Wanted(part, own, use, size, plan))
    return chosen, NEVER


def _fetch(wanted: _Wanted, timeout_seconds: float) -> bool:
    """Have a shard in the cache; return whether it had to be fetched."""
    name = wanted.shards.entry(wanted.number)  # asks the store for a version if the index has no hash
    # The plan evicts what it does not know as its own first.
    wanted.plan.set_entry(wanted.shards, wanted.number, name, wanted.bytes)
    if wanted.shards.is_there(wanted.number):
        return False
    wanted.shards.load(wanted.number, timeout_seconds, wanted.plan)
    wanted.shards.fetcher.wait_for_commit(wanted.shards, wanted.number, timeout_seconds)
    if (error := wanted.shards.cache_error) is not None:
        raise error
    return True
