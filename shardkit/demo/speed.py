"""How fast the loader is, against a plain copy of the same bytes in the same run.

Each figure is the best of a few rounds, taken in turns, so that a neighbour's burst of work hits all alike.
The loader gathers single rows in shuffled order into new batches; the copy moves all rows in one piece.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.dataset import Dataset, open_dataset

__all__ = ["measure_loader"]

ROUNDS = 5
ROUND_TOKENS = 40_000_000
BATCH_SIZE = 8
MAX_COPY_BYTES = 1 << 28


def measure_loader(path: Path) -> dict[str, float] | None:
    """Tokens per second of the loader as stored and as int64, and of a copy as stored; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from shardkit.loaders import StreamingLoader

    with open_dataset(path) as dataset:
        rows = _rows_in_memory(dataset)
    length: int = rows.shape[1]
    copies = max(1, ROUND_TOKENS // rows.size)
    batches = max(1, copies * rows.size // (BATCH_SIZE * length))

    def load(dtype: str) -> Callable[[], int]:
        loader = StreamingLoader(path, batch_size=BATCH_SIZE, seed=17, endless=True, dtype=dtype)

        def run() -> int:
            for _ in zip(range(batches), loader, strict=False):
                pass
            return batches * BATCH_SIZE * length

        return run

    target = np.empty_like(rows)
    copied: int = copies * rows.size

    def copy() -> int:
        for _ in range(copies):
            np.copyto(target, rows)
        return copied

    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, run in (("stored", load("stored")), ("int64", load("int64")), ("copy", copy)):
            start = time.perf_counter()
            tokens = run()
            rate = tokens / (time.perf_counter() - start)
            best[name] = max(best.get(name, 0.0), rate)
    return {f"{name}_tokens_per_second": rate for name, rate in best.items()}


def _rows_in_memory(dataset: Dataset) -> npt.NDArray[np.generic]:
    """The dataset's rows as one array, of at most MAX_COPY_BYTES."""
    shards = []
    size = 0
    for number in range(len(dataset.manifest.shards)):
        rows = dataset.shard(number).fixed_rows(dataset.token_column or "")
        assert rows is not None, "packed rows have a constant stride"
        shards.append(rows)
        size += rows.nbytes
        if size > MAX_COPY_BYTES:
            break
    return np.concatenate(shards)
