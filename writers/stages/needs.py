"""What a build asks of the store that its work folder is in: tasks, requests and bytes, stage by stage.

Each step states this from sizes (`Step.needs`): how many tasks its stages have, what a task reads and how
many files it writes. What an exchange merges, in how many tasks and by requests of which size, is asked of
the `Limits` that the exchange itself uses. Shares of the text and of the documents were counted on web text
(tests/benchmarks/bench_requests.py), and a test compares the sum with a build in a store that counts.

A stage reads objects from one end to the other (`scans`), or ranges of keys of exchanged runs (`slices`).
A task writes its files and its commit, one object each. The shards of an output in a store are sent by tasks,
in parts if they are large; what the driver sends (index, card, report) is not in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Any

from shardkit.storage.object_file import FIRST_RANGE_BYTES, MOST_RANGE_BYTES
from shardkit.writers.dedup.outcomes import SPLITS_PER_GROUP
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, EMPTY_BYTES, Limits, Table
from shardkit.writers.execution.stage import Stage
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.selection import Selection

DOCUMENTS = 0.43  # bytes of documents as they are stored, of a byte of kept text
LOSERS = 0.1  # removed duplicates, of the documents
_GUESSED_FOOTER_BYTES = 700  # with which a small run is read whole


def compared_lines(text_bytes: float, words: int | None) -> int:
    """How many lines kept text has that are long enough to be compared, or sampled windows of shared `words`.

    These begin (words // 3 + 2) / 2 words of 6 bytes apart.
    """
    return ceil(text_bytes / (120 if words is None else words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The datasets that a build makes, and its optional stages outside of duplicate removal."""

    tokenized: int = 1
    """How often the documents are read to be tokenized: once for each part and each `where` of rows."""
    packed: int = 1
    """Datasets of tokens."""
    texts: int = 0
    """Datasets of text."""
    parts: int = 0
    """Parts that `split` draws."""
    scores: int = 0
    """Filters that look up scores."""
    stores: int = 0
    """Datasets of tokens that hold whole documents."""
    passes: int = 0
    """Passes of filters behind duplicate removal."""
    has_buckets: bool = False
    side_files: int = 0
    """Files of scores and annotations that cleaning writes beside documents and keys, for each split."""

    @classmethod
    def of(cls, recipe: Recipe) -> Shape:
        """Return the shape of a recipe's build."""
        first = {type(config) for _, config in recipe.passes[0]}
        packed = [one for one in recipe.datasets() if not one.output.is_text]
        return cls(
            tokenized=len({(one.part, Selection.of(one)) for one in packed}),
            packed=len(packed),
            texts=len(recipe.datasets()) - len(packed),
            parts=0 if recipe.split is None else len(recipe.split.parts),
            scores=sum(isinstance(config, ScoresConfig) for _, config in recipe.filter_chain()),
            passes=len(recipe.passes) - 1,
            stores=sum(one.output.format == "tokens" for one in packed),
            has_buckets=recipe.buckets is not None and recipe.buckets.is_fitted,
            side_files=recipe.annotate + sum(kind in first for kind in (ScoresConfig, BucketsConfig)),
        )


def task_memory(memory: int) -> int:
    """Bytes that a task over all documents may hold; libraries and page cache need the rest of `memory`."""
    return memory // 5


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What comes out of the filters, and how it is cut. `scale` divides all sizes, as of small data."""

    splits: int
    documents: int
    text_bytes: int
    tokens: int
    token_bytes: int = 4
    memory: int = 2_000_000_000
    shard_bytes: int = 1 << 26
    dedup: Collection[str] = ("exact", "near")
    """Keys of the recipe's `dedup` that ask for duplicate removal."""
    lines: int = 0
    """Lines that are compared; 0: none are removed."""
    is_sent: bool = False
    """Whether the output is in a store, too."""
    bands: int = 14
    shape: Shape = field(default_factory=Shape)
    scale: int = 1
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        limits = DEFAULT_LIMITS.within(self.memory)
        object.__setattr__(self, "limits", limits.divided(self.scale) if self.scale > 1 else limits)

    @property
    def task_memory(self) -> int:
        """The bytes of memory that a task of duplicate removal may hold."""
        return task_memory(self.memory // self.scale)


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What the tasks of a stage ask for, all together."""

    stage: str
    tasks: int
    gets: int
    puts: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of an exchange, in `segments` files each, together of `bytes` in rows of `row_bytes`."""

    count: int
    bytes: float
    row_bytes: float
    segments: int = 1


@dataclass(slots=True)
class Needs:
    """Collects what the stages of a build of `corpus` ask for, step by step.

    `looked_up` are requests of a split for scores; `shards` of `output_bytes` and `tables` beside them are
    what the datasets have.
    """

    corpus: Corpus
    stages: list[StageNeeds] = field(default_factory=list)
    looked_up: int = 0
    shards: int = 0
    tables: int = 0
    output_bytes: float = 0.0

    def by_split(self, stage: Stage[..., Any], table: Table, runs: int, rows: float) -> None:
        """Add `outcomes.by_split`: one file for a group of splits."""
        groups = ceil(self.corpus.splits / SPLITS_PER_GROUP)
        found = self.exchange(stage, table, runs, rows, groups)
        self.add(stage, groups, *self.slices(found, groups), files=1)

    def exchange(
        self,
        reader: Stage[..., Any],
        table: Table,
        runs: int,
        rows: float,
        readers: int,
        payload_bytes: float = 0.0,
    ) -> _Runs:
        """Add the merges that the limits ask for; what `readers` meet then. `payload_bytes` are of a row."""
        limits = self.corpus.limits
        row_bytes = table.dtype.itemsize + payload_bytes
        found = _Runs(runs, rows * row_bytes + runs * EMPTY_BYTES, row_bytes)
        level = 0
        while limits.merges(found.count, int(found.bytes), readers):
            level += 1
            groups = ceil(found.count / limits.fan_in)
            ranges = limits.merge_tasks(int(found.bytes / groups))
            fan_in = found.count / groups
            piece = _Runs(ceil(fan_in), found.bytes / groups, row_bytes, found.segments)
            gets, read = self.slices(piece, ranges, limits.merge_memory_bytes)
            stage = reader.step(f"{table.name}-merge-{level}")
            self.add(stage, groups * ranges, gets * groups, read * groups, files=1, written=found.bytes)
            found = _Runs(groups, found.bytes, row_bytes, ranges)
        return found

    def slices(self, runs: _Runs, readers: int, memory_bytes: int | None = None) -> tuple[float, float]:
        """Requests and bytes of `readers` that each read a range of keys of all runs."""
        limits = self.corpus.limits
        memory = limits.read_memory_bytes if memory_bytes is None else memory_bytes
        met = runs.count * readers
        footers = met * (1 + (runs.segments - 1) / readers)
        file_bytes = runs.bytes / runs.count / runs.segments
        if file_bytes <= limits.block_bytes + _GUESSED_FOOTER_BYTES:
            return footers, footers * file_bytes  # the footer's request has all of it
        piece = runs.bytes / met
        block = limits.block_bytes + runs.row_bytes  # is full with the row that exceeds it
        chunk = max(limits.chunk_bytes(memory, runs.count) - block / 2, block)
        some = 1 - exp(-piece / max(1.0, runs.row_bytes))  # of the pieces have any row
        chunks = some * met * max(1.0, piece / chunk + 0.5)
        footer_bytes = min(file_bytes, 65_536, 40 * (file_bytes / limits.block_bytes + 16))
        return footers + chunks, footers * footer_bytes + some * met * (piece + block)

    def scans(self, size: float, objects: int) -> tuple[float, float]:
        """Requests and bytes that read `objects` of together `size` from one end to the other."""
        first, most = FIRST_RANGE_BYTES / self.corpus.scale, MOST_RANGE_BYTES / self.corpus.scale
        left, requests = size / objects, 0.0
        while first < most and left > 0:
            left, first, requests = left - first, 2 * first, requests + 1
        requests += max(0.0, left / most)
        return (requests + 1) * objects, size  # and the end of the file, with its index

    def add(
        self,
        stage: Stage[..., Any],
        tasks: int,
        gets: float,
        read: float = 0,
        *,
        files: float = 0,
        written: float = 0,
        sent: int = 0,
    ) -> None:
        """Add a stage. `files` is what a task writes on average; `sent` are requests that write elsewhere."""
        puts = round(tasks * (files + 1)) + sent
        self.stages.append(StageNeeds(stage.name, tasks, ceil(gets), puts, ceil(read), ceil(written)))


def together(stages: Sequence[StageNeeds]) -> StageNeeds:
    """All of them as one."""
    names = ("tasks", "gets", "puts", "read_bytes", "written_bytes")
    return StageNeeds("all", *(sum(getattr(stage, name) for stage in stages) for name in names))
