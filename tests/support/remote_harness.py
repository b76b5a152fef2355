"""Datasets in stores, and loaders over them: what the tests of remote loaders share.

`put_folder` makes a store's dataset of a local one; `fresh_url` names a store that no other test uses.
`Remote` is a dataset opened by hand, so that a test can put any store below and look at what became of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.cache.fetcher import Fetcher, FetchLimits
from shardkit.cache.memory import CacheMemory
from shardkit.cache.planner import FetchPlan
from shardkit.cache.protocol import Cache
from shardkit.cache.shards import CachedShards
from shardkit.card import block_checksums
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.locate import find_remote
from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import write_blocks
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.manifest import LOSS_MASK, ShardInfo
from shardkit.order.order import Order, OrderSpec
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import Store
from support.loader_data import make_dataset, parts, token_rows

__all__ = [
    "QUICK",
    "REMOTE_KINDS",
    "SOON_SECONDS",
    "Remote",
    "advance",
    "fetch_threads",
    "fresh_url",
    "in_order",
    "kept",
    "make_remote_kind",
    "put_folder",
    "quick_policy",
    "tree_digest",
    "wait_until",
    "write_hashed",
]

REMOTE_KINDS = [
    "mds", "mds_zstd", "tar", "tar_masked",  # as we write them, with hashes
    "mds_foreign", "mds_zstd_foreign", "tar_foreign", "columns",  # as others do: indexes without hashes
]  # fmt: skip
QUICK: Mapping[str, Any] = {"rank": 0, "world_size": 1, "return_ids": True, "window": 9, "connections": 4}
"""Arguments of a loader for small tests: few threads, all of `sample_id`."""
SOON_SECONDS = 30.0  # for what happens within milliseconds on a machine that is not overloaded

_numbers = itertools.count()


def quick_policy(**changes: Any) -> RetryPolicy:
    """Tries again within milliseconds, gives up within seconds."""
    quick: dict[str, Any] = {
        "backoff_seconds": 0.001,
        "longest_backoff_seconds": 0.01,
        "deadline_seconds": 5.0,
        "hedge": False,
        "jitter": lambda: 0.5,
    }
    return RetryPolicy(**(quick | changes))


def fresh_url() -> str:
    """The URL of a memory store that no other test has used."""
    return f"memory://remote-{os.getpid()}-{next(_numbers)}/data"


def put_folder(folder: Path, store: Store) -> None:
    """Every file of a folder, those that describe the dataset last."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda f: (f.suffix == ".json", f)):
        store.put(file.relative_to(folder).as_posix(), file)


def make_remote_kind(folder: Path, kind: str, *, samples: int = 53, shards: int = 5) -> Path:
    """A dataset of a kind that can be read from a store, of `token_rows(samples)` (but for "columns")."""
    if kind == "columns" or (kind.startswith("mds") and kind.endswith("_foreign")):
        return make_dataset(folder, kind.removesuffix("_foreign"), samples=samples, shards=shards)
    if kind == "tar_foreign":
        make_dataset(folder, "foreign_tar", samples=samples, shards=shards)
        listed = [
            {"url": f"part-{number:05d}.tar", "nsamples": high - low}
            for number, (low, high) in enumerate(parts(samples, shards))
        ]
        listing = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed}
        (folder / "shards.json").write_text(json.dumps(listing))
        return folder
    write_hashed(folder, kind, token_rows(samples), parts(samples, shards))
    return folder


def write_hashed(
    folder: Path, kind: str, rows: npt.NDArray[Any], pieces: Sequence[tuple[int, int]]
) -> list[ShardInfo]:
    """Shards of `rows` with hashes and block checksums; `pieces`: (first row, last + 1) of each."""
    folder.mkdir(parents=True)
    infos = []
    for number, (low, high) in enumerate(pieces):
        if kind.startswith("tar"):
            columns = {"tokens": rows[low:high]}
            if kind == "tar_masked":
                columns[LOSS_MASK] = (rows[low:high] % 3 > 0).astype(np.uint8)
            name = f"shard-{number:05d}.tar"
            info = tar.write_columns_shard(folder, name, columns, key_start=low, hashes=["xxh64"])
        else:
            compression = "zstd" if kind == "mds_zstd" else None
            info = mds.write_rows_shard(
                folder, f"shard.{number:05d}.mds", rows[low:high], compression=compression, hashes=["xxh64"]
            )
        infos.append(info)
    write = tar.write_shard_list if kind.startswith("tar") else mds.write_index
    write(folder, infos, write_blocks(folder, infos))
    return infos


@dataclass(frozen=True, slots=True)
class Remote:
    """A dataset over any store, with the layers in reach."""

    store: ResilientStore
    shards: CachedShards
    dataset: Dataset

    @classmethod
    def open(
        cls,
        below: Store,
        cache: Cache | None = None,
        *,
        policy: RetryPolicy | None = None,
        connections: int = 4,
        limits: FetchLimits | None = None,
        around: Callable[[Store], Store] | None = None,
    ) -> Remote:
        """Open it as `open_dataset` does; `around` wraps the store once index and card have been read."""
        found = find_remote(below)
        store = ResilientStore(
            around(below) if around else below, policy or quick_policy(), connections=connections
        )
        shards = CachedShards(
            store,
            found.manifest,
            CacheMemory(1 << 30) if cache is None else cache,
            Fetcher(connections, limits),
            blocks=block_checksums(found.manifest, found.card),
        )
        return cls(store, shards, Dataset(None, found.manifest, card=found.card, shards=shards))

    def loader(self, **arguments: Any) -> StreamingLoader:
        return StreamingLoader(self.dataset, **grouped({"batch_size": 4} | dict(QUICK) | arguments))


def tree_digest(folder: Path) -> dict[str, tuple[int, int, str]]:
    """{path: (size, time of last change, digest)} of all that is in a folder."""
    return {
        str(file.relative_to(folder)): (
            file.stat().st_size,
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        )
        for file in sorted(folder.rglob("*"))
    }


def fetch_threads() -> list[threading.Thread]:
    """The threads that fetch shards in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-fetch"]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what happens soon, in another thread."""
    deadline = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kept(shards: CachedShards) -> int:
    """Shards that are in the cache, whole."""
    return sum(not held.filling for held in shards.cache.contents().values())


def advance(plan: FetchPlan, shards: CachedShards, position: int) -> None:
    """Move the loop of a plan, as `CacheRun.at` does."""
    plan.planner.loop.read = position
    if position >= plan.planner.wake_at:
        shards.fetcher.wake()


def in_order(shards: CachedShards) -> Order:
    """One shard after the other."""
    return Order(shards._manifest.shard_samples, OrderSpec(1, 1, 1, "none"))
