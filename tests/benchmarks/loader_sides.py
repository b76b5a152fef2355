"""One loader of `bench_loaders.py`, in a process of its own: `loader_sides.py SIDE FOLDER SECONDS [BATCH]`.

Each line on stdin asks for one epoch; the answer on stdout is its figures as JSON. Imports nothing but what
its side needs, so that a peer may live in an environment without shardkit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 4096
BATCH = 8  # unless another is given
STREAMS = 5

Epoch = Callable[[], Iterable[Any]]


def gather(folder: Path) -> Epoch:
    """Rows of one file, by shuffled number, into a fresh array a batch: what there is to reach."""
    rows = np.memmap(folder / "whole.bin", dtype=np.uint32, mode="r").reshape(-1, LENGTH)
    generator = np.random.default_rng(0)

    def epoch() -> Iterator[Any]:
        order = generator.permutation(len(rows))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield rows[order[start : start + BATCH]]

    return epoch


def shardkit_loader(folder: Path, kind: str = "mds", **options: Any) -> Epoch:
    from shardkit.loaders import Stream, StreamingLoader
    from shardkit.loaders.config import grouped

    data: Any = folder / kind
    if kind == "mixture":
        data = [Stream(folder / "streams" / str(i), weight=w) for i, w in enumerate((5, 3, 2, 1, 1))]
    loader = StreamingLoader(data, batch_size=BATCH, dtype="stored", rank=0, world_size=1, **grouped(options))
    return lambda: loader


def shardkit_thread(folder: Path) -> Epoch:
    """Every batch is made by the background thread, as during training."""
    from shardkit.loaders import producer

    vars(producer)["BUSY_SECONDS"] = -1.0
    return shardkit_loader(folder)


def shardkit_workers(folder: Path) -> Epoch:
    from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(folder / "mds", batch_size=BATCH, dtype="stored", rank=0, world_size=1)
    loader = StreamingDataLoader(dataset, num_workers=2, persistent_workers=True)
    return lambda: loader


def mosaicml(folder: Path, **options: Any) -> Epoch:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from support.peers import import_streaming

    streaming = import_streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, **options)

    def epoch() -> Iterator[Any]:
        batch = []
        for sample in dataset:
            batch.append(sample["tokens"])
            if len(batch) == BATCH:
                yield np.stack(batch)
                batch = []

    return epoch


def litdata(folder: Path, workers: int = 0) -> Epoch:
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    def make() -> Any:
        loader = TokensLoader(block_size=LENGTH)
        return StreamingDataset(str(folder / "litdata"), item_loader=loader, shuffle=True)

    if workers:
        loader = StreamingDataLoader(make(), batch_size=BATCH, num_workers=workers, persistent_workers=True)
        return lambda: loader
    dataset = make()

    def epoch() -> Iterator[Any]:
        batch = []
        for sample in dataset:
            batch.append(sample)
            if len(batch) == BATCH:
                yield torch.stack(batch)
                batch = []

    return epoch


def webdataset(folder: Path) -> Epoch:
    import webdataset as wds

    shards = sorted(str(file) for file in (folder / "tar").glob("*.tar"))
    pipeline = wds.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(1000).decode()
    return lambda: pipeline.to_tuple("tokens.npy").batched(BATCH)


def datasets(folder: Path) -> Epoch:
    """Hugging Face: a shuffle is a table of indices over memory-mapped Arrow files; "numpy" makes int64."""
    from datasets import load_from_disk

    rows = load_from_disk(str(folder / "datasets")).with_format("numpy")
    seeds = itertools.count()
    return lambda: rows.shuffle(seed=next(seeds)).iter(batch_size=BATCH, drop_last_batch=True)


def grain(folder: Path, threads: int | None = None) -> Epoch:
    """Rows of the plain file by number; `threads` read ahead (None: as many as grain takes itself)."""
    import grain

    class Rows:
        def __init__(self) -> None:
            self._rows = np.memmap(folder / "whole.bin", dtype=np.uint32, mode="r").reshape(-1, LENGTH)

        def __len__(self) -> int:
            return len(self._rows)

        def __getitem__(self, number: int) -> Any:
            return self._rows[number]

    options = grain.ReadOptions() if threads is None else grain.ReadOptions(num_threads=threads)
    seeds = itertools.count()

    def epoch() -> Iterable[Any]:
        shuffled = grain.MapDataset.source(Rows()).shuffle(seed=next(seeds))
        batches: Iterable[Any] = shuffled.batch(BATCH, drop_remainder=True).to_iter_dataset(options)
        return batches

    return epoch


SIDES: dict[str, Callable[[Path], Epoch]] = {
    "gather": gather,
    "shardkit": shardkit_loader,
    "shardkit_thread": shardkit_thread,
    "shardkit_workers": shardkit_workers,
    "shardkit_tar": lambda folder: shardkit_loader(folder, "tar"),
    "shardkit_mixture": lambda folder: shardkit_loader(folder, "mixture"),
    "mosaicml": mosaicml,
    "mosaicml_tuned": lambda folder: mosaicml(folder, predownload=1 << 20),
    "litdata": litdata,
    "litdata_workers": lambda folder: litdata(folder, 2),
    "webdataset": webdataset,
    "datasets": datasets,
    "grain": grain,
    "grain_unthreaded": lambda folder: grain(folder, 0),
}


def timed(epoch: Epoch, most_seconds: float) -> dict[str, float]:
    """One epoch, or as much of it as `most_seconds` allow: samples a second and the waits for a batch."""
    waits, began = [], time.perf_counter()
    before, cpu = began, time.process_time()
    for _ in epoch():
        now = time.perf_counter()
        waits.append(now - before)
        before = now
        if now - began > most_seconds:
            break
    seconds = time.perf_counter() - began
    first, rest = waits[0], waits[1:]
    steady = sum(rest)  # the start of workers and the first plan are reported apart
    return {
        "samples_per_s": BATCH * len(rest) / steady,
        "first_batch_s": first,
        "p99_ms": 1e3 * float(np.quantile(rest, 0.99)),
        "cpu_us_per_sample": 1e6 * (time.process_time() - cpu) / (BATCH * len(waits)),
        "peak_rss_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "seconds": seconds,
    }


def main() -> None:
    global BATCH
    side, folder, most_seconds = SIDES[sys.argv[1]], Path(sys.argv[2]), float(sys.argv[3])
    BATCH = int(sys.argv[4]) if len(sys.argv) > 4 else BATCH
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # peers print
        epoch = side(folder)
        for _ in sys.stdin:
            print(json.dumps(timed(epoch, most_seconds)), file=answers, flush=True)


if __name__ == "__main__":
    main()
