"""The datasets of a simulation, and which rank must get which of their rows at each step.

`Expectation` is worked out by docs/spec alone, with the plain reader of tests/spec, which imports nothing of
the package: no code of the loader decides what a loader is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.row_costs import count_row_costs, write_row_costs
from shardkit.formats import mds, tar
from shardkit.order.balance import DocumentIds
from spec.arithmetic import level, squares
from spec.reader import Dataset, Run
from support.loader_data import EOS, parts, token_rows

__all__ = [
    "DATASETS", "LANES", "LENGTH", "SEED", "Expectation", "Step", "dataset_files", "dataset_rows", "is_shard",
]  # fmt: skip

DATASETS = ("mds-240-24", "zstd-180-15", "mds-96-6", "tar-50-5")
"""Of each its kind, and its number of rows and of shards."""
LENGTH = 8
SEED = 17
LANES = 2
Rows = npt.NDArray[Any]
_kept: list[TemporaryDirectory[str]] = []


def is_shard(key: str) -> bool:
    """Whether an object of the bucket is a shard, which its index proves."""
    return ".mds" in key or key.endswith(".tar")


@lru_cache(maxsize=16)
def dataset_rows(name: str) -> Rows:
    """The rows of a dataset, whose documents have all lengths."""
    kind, samples, shards = name.split("-")
    rows = token_rows(int(samples), LENGTH) + np.uint16(len(kind) + int(shards))
    chance = np.random.default_rng(int(samples))
    rows[:, 1:][chance.random((len(rows), LENGTH - 1)) < chance.random((len(rows), 1)) / 2] = EOS
    return rows


@lru_cache(maxsize=16)
def dataset_files(name: str) -> Path:
    """The folder with a dataset and its table of row costs; it is kept until the process ends."""
    kind, _, shards = name.split("-")
    folder = TemporaryDirectory(prefix="shardkit-simulation-")
    _kept.append(folder)
    root, rows = Path(folder.name), dataset_rows(name)
    pieces = list(enumerate(parts(len(rows), int(shards))))
    if kind == "tar":
        infos = [
            tar.write_rows_shard(
                root, f"shard-{number:05d}.tar", rows[low:high], key_start=low, hashes=("xxh64",)
            )
            for number, (low, high) in pieces
        ]
        tar.write_shard_list(root, infos)
    else:
        compression = "zstd" if kind == "zstd" else None
        infos = [
            mds.write_rows_shard(
                root,
                f"shard.{number:05d}.mds",
                rows[low:high],
                compression=compression,
                hashes=("xxh64",),
            )
            for number, (low, high) in pieces
        ]
        mds.write_index(root, infos)
    ids = DocumentIds(eos_id=EOS)
    with closing(open_dataset(root)) as dataset:
        write_row_costs(dataset, ids, count_row_costs(dataset, ids, progress=False))
    return root


@dataclass(frozen=True)
class Step:
    """What all ranks together get at one step."""

    start: int
    """The position where it begins; behind the run's where the rest of an epoch is dropped."""
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    """Of each rank its (stream, row)s in their order; (-1, -1) is padding."""
    after: int


class Expectation:
    """The steps of a run with these settings, for any number of ranks, from any position."""

    def __init__(
        self,
        names: Sequence[str],
        schedule: Sequence[tuple[int, Sequence[int]]],
        *,
        window: int,
        tail: str,
        epoch_samples: int | None,
        is_balanced: bool,
    ) -> None:
        self._datasets = [Dataset(dataset_files(name)) for name in names]
        self._names, self._is_balanced = tuple(names), is_balanced
        sizes = [sum(dataset.sizes) for dataset in self._datasets]
        self.epoch_samples = epoch_samples or sum(sizes)
        none = [0] * len(names)
        streams = {
            "name": [""] * len(names),
            "fingerprint": [dataset.fingerprint for dataset in self._datasets],
            "samples": sizes,
            "excluded": [""] * len(names),
            "lanes": none,
            "window": none,
        }
        state = {
            "version": 4, "position": 0, "order_version": 3, "seed": SEED, "shuffle": "window",
            "lanes": LANES, "window": window, "tail": tail, "epoch_samples": self.epoch_samples,
            "schedule": list(schedule) if len(names) > 1 else None, "global_batch": None, "streams": streams,
        }  # fmt: skip
        self.tail = tail
        self._run = Run(state, self._datasets, [()] * len(names))
        self._steps: dict[tuple[int, int, int], Step] = {}

    def step(self, position: int, world_size: int, batch_size: int) -> Step:
        """The next step of a run that has come to `position`."""
        key = position, world_size, batch_size
        if key not in self._steps:
            found = [self._run.batch(position, rank, world_size, batch_size) for rank in range(world_size)]
            batches, after = [batch for batch, _ in found], found[0][1]
            if self._is_balanced and not any(-1 in batch for batch in batches):
                batches = self._leveled(batches)
            ranks = tuple(tuple(map(self._split, batch)) for batch in batches)
            self._steps[key] = Step(self.start(position, world_size * batch_size), ranks, after)
        return self._steps[key]

    def start(self, position: int, size: int) -> int:
        """Where a batch of `size` begins in a run at `position`."""
        left = self.epoch_samples - position % self.epoch_samples
        return position + left if self.tail == "drop" and left < size else position

    def epoch(self, position: int, size: int) -> int:
        """The epoch of the batch that comes next: that in which it begins."""
        return self.start(position, size) // self.epoch_samples

    def batches_left(self, position: int, size: int) -> int:
        """How many batches begin in the epoch of the next one, that one included."""
        left = self.epoch_samples - self.start(position, size) % self.epoch_samples
        return left // size if self.tail == "drop" else -(-left // size)

    def _leveled(self, batches: list[list[int]]) -> list[list[int]]:
        costs = [[self._squares[sample] for sample in batch] for batch in batches]
        samples = [sample for batch in batches for sample in batch]
        return [[samples[place] for place in rank] for rank in level(costs, [0] * len(batches))]

    @cached_property
    def _squares(self) -> list[int]:
        """What each sample costs."""
        return [squares(row.tolist(), EOS) for name in self._names for row in dataset_rows(name)]

    def _split(self, sample: int) -> tuple[int, int]:
        if sample < 0:
            return -1, -1
        firsts = self._run.order.first_samples
        stream = next(n for n in reversed(range(len(self._datasets))) if firsts[n] <= sample)
        return stream, sample - firsts[stream]
