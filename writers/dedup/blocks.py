"""The blocks that candidate pairs are verified in: ranges of document numbers that fit a memory budget.

A block [lower, upper) takes the pairs whose first number lies in it. While it is worked on, the sets of its
documents and its pairs are held; the other sides of the pairs pass by in chunks. Where blocks are cut decides
no result. A document whose own set, or whose own pairs, exceed the budget is a block of its own.

Cuts come from two greedy passes, one by bytes of sets, one by pairs, and the blocks are what both leave: at
most twice as many as would do. Pairs are counted by samples of the sorted runs, so planning reads little of
them; of sets it reads the table once, in slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_file import Rows
from shardkit.writers.dedup.candidates import PAIR_RUNS_FILE, PAIRS_FILE
from shardkit.writers.dedup.population import PAIR
from shardkit.writers.dedup.shingle_store import SET, ShingleReader

__all__ = ["MAX_BLOCK_DOCUMENTS", "BlockBudget", "PairRuns", "plan_blocks"]

MAX_BLOCK_DOCUMENTS = 1 << 24  # so that (other number, place in the block) fit 64 bits
_PAIR_BYTES = 100  # in verify_block at its peak: 83 measured where every pair verifies
_DOCUMENT_BYTES = 128  # beside the hashes
_MAX_SAMPLE_STEP = 1024

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """How a task's memory is divided: bytes of the block's own sets, its pairs, bytes of a passing chunk."""

    sets_bytes: int
    pairs: int
    chunk_bytes: int

    @classmethod
    def of(cls, memory_bytes: int) -> Self:
        """Half for the sets, three eighths for the pairs, the rest for what passes and is read."""
        return cls(memory_bytes // 2, max(1, memory_bytes * 3 // 8 // _PAIR_BYTES), memory_bytes // 16)


class PairRuns:
    """The sorted runs of one candidates task."""

    def __init__(self, folder: Path) -> None:
        self.pairs = Rows(folder / PAIRS_FILE, PAIR, header=False)
        edges: list[int] = Rows(folder / PAIR_RUNS_FILE, "<i8").read().tolist()
        assert edges[-1] == len(self.pairs), folder
        self.runs = [(begin, end) for begin, end in pairwise(edges) if begin < end]

    def first_from(self, run: tuple[int, int], number: int) -> int:
        """Where the run's pairs (a, b) with a >= number begin."""
        begin, end = run
        with self.pairs:
            while begin < end:
                middle = (begin + end) // 2
                if int(self.pairs.read(middle, middle + 1)["a"][0]) < number:
                    begin = middle + 1
                else:
                    end = middle
        return begin


def plan_blocks(
    shingle_folders: Sequence[Path], pair_folders: Sequence[Path], memory_bytes: int
) -> list[tuple[int, int]]:
    """Consecutive [lower, upper) that hold every pair's first number; none if there are no pairs."""
    budget = BlockBudget.of(memory_bytes)
    tasks = [PairRuns(folder) for folder in pair_folders]
    last = -1
    for task in tasks:
        for _, end in task.runs:
            last = max(last, int(task.pairs.read(end - 1, end)["a"][0]))
    if last < 0:
        return []
    samples, step = _sample(tasks, budget.pairs)
    runs = sum(len(task.runs) for task in tasks)
    cuts = [
        range(0, last + 1, MAX_BLOCK_DOCUMENTS),
        # So many pairs of a run may precede its first sample in a block.
        pair_cuts(samples, step, budget.pairs - (step - 1) * runs),
        set_cuts(ShingleReader(shingle_folders).tables(), budget.sets_bytes),
    ]
    edges = sorted({cut for some in cuts for cut in some if cut <= last} | {0, last + 1})
    return list(pairwise(edges))


def pair_cuts(samples: _U64, step: int, pairs: int) -> list[int]:
    """Where to cut so that a block has at most `pairs` pairs; `samples` (ascending) stand for `step` each."""
    most = max(1, pairs // step)
    cuts = []
    at = 0
    while at + most < len(samples):
        # The first document that is too many begins the next block; alone it may be too large.
        number = int(samples[at + most])
        if number == int(samples[at]):
            number += 1
        cuts.append(number)
        at = int(np.searchsorted(samples, np.uint64(number)))
    return cuts


def set_cuts(tables: Iterable[npt.NDArray[np.void]], sets_bytes: int) -> list[int]:
    """Where to cut so that the sets of a block (SET rows, ascending numbers) take at most so many bytes."""
    cuts = []
    held = 0  # bytes of the block so far, in tables before this one
    for rows in tables:
        assert rows.dtype == SET
        ends = np.cumsum(rows["stored"].astype(np.int64) * 8 + _DOCUMENT_BYTES)
        before = -held
        while True:
            at = int(np.searchsorted(ends, before + sets_bytes, "right"))
            if at == len(rows):
                break
            start = int(ends[at - 1]) if at else 0
            if start == before:  # the block is empty: a document that is too large alone
                at += 1
                if at == len(rows):
                    break
                start = int(ends[at - 1])
            cuts.append(int(rows["number"][at]))
            before = start
        held = int(ends[-1]) - before if len(rows) else held
    return cuts


def _sample(tasks: Sequence[PairRuns], budget_pairs: int) -> tuple[_U64, int]:
    """(ascending first numbers of every step-th pair of each run, step), the error at most a quarter."""
    runs = max(1, sum(len(task.runs) for task in tasks))
    step = min(_MAX_SAMPLE_STEP, max(1, budget_pairs // (4 * runs)))
    found = [task.pairs.sample(begin, end, step)["a"] for task in tasks for begin, end in task.runs]
    samples = np.concatenate(found)
    samples.sort()
    return samples, step
