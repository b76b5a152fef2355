"""What a loader says of itself: figures that add up, a file of them, errors that reach its peers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardkit.cache.fetcher import FetchLimits
from shardkit.cache.folder import CacheFolder
from shardkit.loaders import StreamingLoader
from shardkit.loaders.producer import LoaderTimeoutError
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.store import ObjectInfo
from support.ended_threads import ended_threads
from support.remote_harness import Remote, fresh_url, make_remote_kind, put_folder, quick_policy
from support.stores import FaultRule, FaultyStore

SHARDS = 5
SAMPLES = 53
EPOCH = -(-SAMPLES // 4)  # batches of 4
SOON_SECONDS = 30.0


class Counted(MemoryStore):
    """A memory store that counts requests for its objects, and the bytes of the bodies that it handed out."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lock = threading.Lock()
        self.requests = self.bytes = 0

    def head(self, key: str) -> ObjectInfo:
        with self._lock:
            self.requests += 1
        return super().head(key)

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        body = super().open(key, start, stop, version=version)
        with self._lock:
            self.requests += 1
            self.bytes += (body.info.bytes if stop is None else stop) - start
        return body


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("telemetry")
    return {
        kind: make_remote_kind(root / kind, kind, samples=SAMPLES, shards=SHARDS)
        for kind in ("mds", "mds_zstd")
    }


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with ended_threads():
        yield


def remote_of(folder: Path, *rules: FaultRule, **how: Any) -> tuple[Counted, Remote]:
    store = Counted(fresh_url())
    put_folder(folder, store)
    remote = Remote.open(store, around=partial(FaultyStore, rules=rules), **how)
    store.requests = store.bytes = 0
    return store, remote


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
def test_the_figures_of_a_remote_run_are_those_of_cache_and_store(
    folders: dict[str, Path], kind: str
) -> None:
    store, remote = remote_of(folders[kind])
    with remote.loader() as loader:
        assert loader.stats().verdict == "no steps yet"
        for _ in range(2):
            assert sum(1 for _ in loader) in (EPOCH, EPOCH - 1)
        stats = loader.stats()
    assert stats.steps == 2 * EPOCH - 1  # the batch at the epochs' edge belongs to the first
    assert stats.samples == 4 * stats.steps
    cache, counted = stats.cache, stats.store
    assert cache is not None
    assert counted is not None
    shards = remote.dataset.manifest.shards
    assert cache.fetched_bytes == sum(info.stored.bytes for info in shards)
    assert cache.used_bytes == sum(info.raw.bytes for info in shards)
    assert cache.decompressed_bytes == (cache.used_bytes if kind == "mds_zstd" else 0)
    assert cache.capacity_bytes == 1 << 30
    assert cache.hits + cache.misses >= SHARDS
    assert (cache.evictions, cache.refetched_bytes, cache.bypassed, cache.quarantined) == (0, 0, 0, 0)
    assert (cache.row_reads > 0) == (kind == "mds")
    assert counted.requests == store.requests == SHARDS + cache.row_reads + (kind == "mds"), "and blocks.bin"
    assert counted.read_bytes == store.bytes
    assert (counted.errors, counted.retries, counted.throttled, counted.hedges) == (0, 0, 0, 0)
    assert counted.first_byte_p99_seconds is not None
    assert re.match(r"fed: |input-bound: ", stats.verdict)


def test_faults_and_damage_are_in_the_figures_and_in_the_verdict(folders: dict[str, Path]) -> None:
    _, remote = remote_of(
        folders["mds"],
        FaultRule(fault="throttle", key="00001", count=2),
        FaultRule(fault="corrupt", key="00003", after_bytes=200, count=1),
        limits=FetchLimits(single_rows=0),
    )
    with remote.loader() as loader:
        assert sum(1 for _ in loader) == EPOCH
        stats = loader.stats()
    assert stats.cache is not None
    assert stats.store is not None
    assert stats.cache.quarantined == 1
    assert (stats.store.throttled, stats.store.errors, stats.store.retries) == (2, 2, 2)
    assert stats.store.requests == SHARDS + 2 + 1
    assert "; 1 damaged shards" in stats.verdict


def test_a_local_run_has_neither_cache_nor_store(folders: dict[str, Path]) -> None:
    with StreamingLoader(folders["mds"], batch_size=4, rank=0, world_size=1) as loader:
        assert sum(1 for _ in loader) == EPOCH
        stats = loader.stats()
    assert (stats.cache, stats.store) == (None, None)
    assert (stats.steps, stats.samples) == (EPOCH, 4 * EPOCH)
    assert 0 < stats.first_wait_seconds <= stats.wait_seconds <= stats.seconds


def test_a_batch_that_does_not_come_says_where_the_run_is_and_what_has_come(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    _, remote = remote_of(
        folders["mds"],
        FaultRule(fault="throttle", count=1),
        FaultRule(fault="stall", after_bytes=100, seconds=SOON_SECONDS),
        cache=CacheFolder(tmp_path, 1 << 20),
        policy=quick_policy(deadline_seconds=SOON_SECONDS),
        limits=FetchLimits(single_rows=0),
    )
    below = remote.store._store
    assert isinstance(below, FaultyStore)
    begun = threading.Thread(target=remote.shards.load, args=(0,))
    begun.start()
    while "100 of" not in remote.shards.progress():
        begun.join(0.001)
    with remote.loader(rank=1, world_size=2, shuffle="none", lanes=1, timeout_seconds=0.3) as loader:
        with pytest.raises(LoaderTimeoutError) as caught:
            next(iter(loader))
        below.release()
        begun.join(SOON_SECONDS)
    name = rf"{re.escape(remote.dataset.location)}/shard\.00000\.mds"
    came = rf"{name}: 100 of [\d,]+ bytes received; last status 503; free disk [\d.]+ \w+"
    place = r"rank 1 of 2, step 0 \(up to position 0\); opening shard\.00000\.mds"
    late = f"a shard did not arrive within 0.3 s: {came}"
    assert re.match(f"{place}(; waiting for {came})?: {late}", str(caught.value))


RANKS = """
import os, signal, sys, torch
from shardkit.loaders import Run, StreamingLoader

def run(rank):
    signal.alarm(40)  # whatever happens, nobody is left behind
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    run = Run(stop_grace_seconds=0.3)
    with StreamingLoader(sys.argv[1 + rank], batch_size=2, shuffle="none", run=run) as loader:
        try:
            for batch in loader:
                torch.distributed.all_reduce(torch.ones(1))
        except Exception:
            signal.pause()  # as with NCCL, whose connections outlive the loop: the others' collective hangs

children = []
for rank in range(2):
    children.append(os.fork())
    if not children[-1]:
        run(rank)
        os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])
os.kill(children[0], signal.SIGKILL)
os.waitpid(children[0], 0)
print("rank 1 ended with", code)
"""


@pytest.mark.extended
def test_an_error_in_one_loader_ends_the_rank_that_waits_for_it_in_a_collective(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A shard is missing on the disk of rank 0; rank 1 has it and goes on to its all_reduce."""
    dataset = tmp_path / "dataset"
    shutil.copytree(folders["mds"], dataset)
    (dataset / "shard.00001.mds").unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(dataset), str(folders["mds"])],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        },
    )
    assert f"rank 1 ended with {-signal.SIGTERM}" in done.stdout, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("shardkit: ")]
    error = r"ShardNotFoundError: \S+/dataset/shard\.00001\.mds: "
    assert re.search(f"rank 0 stopped at step [1-9]: {error}", line)
    assert "the loop of rank 1 has not returned to its loader for 0.3 s" in line
    assert " in run" in done.stderr
