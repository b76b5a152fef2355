"""Estimates of the tasks, requests and bytes per stage of a build whose work folder is in a store.

Each step estimates its stages from sizes (`Step.needs`): the number of tasks, and what a task reads and
writes. The estimate of an exchange's merges uses the same `Limits` as the exchange itself. Shares of the text
and of the documents were measured on web text (tests/benchmarks/bench_requests.py), and a test compares the
totals with a build in a store that counts requests.

A stage reads whole objects (`scans`), ranges of keys of exchanged runs (`slices`), or pieces of runs in place
(`pieces`). A task writes its files and its commit, one object each, by multipart upload if they are large.
The store copies the shards of an output in a store. Requests of the driver (for index, card and report) are
not included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil, exp
from typing import Any

from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.storage.object_file import FIRST_RANGE_BYTES, MOST_RANGE_BYTES
from shardkit.storage.s3_upload import PART_BYTES
from shardkit.writers.dedup.outcomes import SPLITS_PER_GROUP
from shardkit.writers.exchange.addresses import ADDRESSES, address_tasks
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, EMPTY_BYTES, Limits, Table
from shardkit.writers.execution.artifacts import RUN_SUFFIX
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import RunTasks, Stage, Task
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.fasttext import LanguageConfig
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import SAMPLE
from shardkit.writers.stages.selection import Selection

DOCUMENTS = 0.43  # bytes of documents.arrow per byte of kept text
_GATHERED = 0.82  # what joined splits have on average, as a share of what they should have
LOSERS = 0.1  # assumed share of the documents that are removed as duplicates
_GUESSED_FOOTER_BYTES = 700  # assumed footer size; runs of up to a block and a footer take one request


def compared_lines(text_bytes: float, words: int | None) -> int:
    """Return the number of lines to compare in kept text, or with `words` the number of sampled windows.

    Assumes 120 bytes of text per line. Windows begin (words // 3 + 2) / 2 words of 6 bytes apart.
    """
    return ceil(text_bytes / (120 if words is None else words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of datasets that a build makes, and of its optional stages."""

    tokenized: int = 1
    """How many times the documents are tokenized: once for each part and each `output.where`."""
    packed: int = 1
    """Number of datasets of tokens."""
    texts: int = 0
    """Number of datasets of text."""
    parts: int = 0
    """Number of parts in `split`, without train."""
    has_families: bool = False
    """Whether `split.by` keeps documents together."""
    scores: int = 0
    """Number of `scores` filters."""
    has_indexes: bool = False
    """Whether `dedup.near` compares with indexes."""
    has_vectors: bool = False
    """Whether `dedup.semantic` takes vectors from files."""
    stores: int = 0
    """Number of datasets of tokens that store whole documents (format tokens and those of other trainers)."""
    trainers: int = 0
    """Number of datasets in formats of other trainers."""
    beside: int = 0
    """Number of files that these have beside each shard, added up."""
    passes: int = 0
    """Number of passes of filters after duplicate removal."""
    steps: tuple[str, ...] = ()
    """Names of the steps over all documents in order; empty: not known."""
    samples: tuple[bool, ...] = ()
    """For each `sample`, whether it takes a number of documents or tokens, and not a share."""
    has_buckets: bool = False
    amounts: int = 0
    """Number of sources with an amount."""
    counted: int = 0
    """Number of sources whose amount is not a share."""
    side_files: int = 0
    """Number of files with dropped documents and annotations that cleaning writes per split."""
    columns: int = 0
    """Number of files with a value per kept document (language, scores) that cleaning writes per split."""
    annotate: bool = False
    """Whether the first pass writes annotations, so that no splits are joined."""
    annotated: int = 0
    """Number of passes of filters after duplicate removal that write annotations."""

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
            has_families=recipe.split is not None and recipe.split.by is not None,
            scores=sum(isinstance(config, ScoresConfig) for _, config in recipe.filter_chain()),
            has_indexes=any(
                step.name == "near" and bool(step.settings.against) for step in recipe.global_steps
            ),
            has_vectors=recipe.dedup.semantic is not None and bool(recipe.dedup.semantic.embed.vectors),
            passes=len(recipe.passes) - 1,
            steps=tuple(step.name for step in recipe.global_steps),
            samples=tuple(step.settings.counts for step in recipe.global_steps if step.name == SAMPLE),
            stores=sum(not one.output.has_rows for one in packed),
            trainers=sum(one.output.is_for_trainer for one in packed),
            beside=sum(
                len(TRAINER_FORMATS[one.output.format].endings(masked=one.is_masked)) - 1
                for one in packed
                if one.output.is_for_trainer
            ),
            has_buckets=recipe.buckets is not None and recipe.buckets.is_fitted,
            amounts=sum(one.chooses for one in recipe.amounts.values()),
            counted=sum(one.counts for one in recipe.amounts.values()),
            side_files=recipe.annotate + bool(first),
            columns=(BucketsConfig in first) + (LanguageConfig in first),
            annotate=recipe.annotate,
            annotated=sum(map(bool, recipe.passes[1:])) if recipe.annotate else 0,
        )


def task_memory(memory: int) -> int:
    """Return a task's memory budget in bytes: a fifth of `memory`; libraries and page cache use the rest."""
    return memory // 5


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sizes of the documents that pass the filters, and settings of the build.

    `scale` divides all limits and block sizes, so that a test on small data behaves like large data.
    """

    splits: int
    documents: int
    text_bytes: int
    tokens: int
    packed_bytes: int = 0
    """Bytes of the text that remains and is packed; 0: `text_bytes`."""
    token_bytes: int = 4
    memory: int = 2_000_000_000
    shard_bytes: int = 1 << 26
    steps: Sequence[str] = ("exact", "near")
    """The names of the steps over all documents, in order."""
    lines: int = 0
    """Number of lines to compare; 0 without line deduplication."""
    is_sent: bool = False
    """Whether the output is in a store, so that tasks send the shards."""
    bands: int = 14
    shape: Shape = field(default_factory=Shape)
    scale: int = 1
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        limits = DEFAULT_LIMITS.within(self.memory)
        object.__setattr__(self, "limits", limits.divided(self.scale) if self.scale > 1 else limits)

    @property
    def gathered(self) -> int:
        """The number of splits behind cleaning, which joins those that keep little (stages/gather.py)."""
        wanted = self.limits.gathered(self.text_bytes)
        each = self.documents / self.splits, self.text_bytes / self.splits
        weight = self.limits.gathered_weight(ceil(each[0]), ceil(each[1]), wanted)
        if self.shape.annotate or self.splits < self.limits.gather_splits or 4 * weight >= wanted:
            return self.splits
        return ceil(self.splits / max(2, _GATHERED * wanted / weight))

    @property
    def task_memory(self) -> int:
        """The memory budget of a task of duplicate removal, in bytes."""
        return task_memory(self.memory // self.scale)


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Totals over all tasks of a stage: tasks, read and write requests, and bytes read and written."""

    stage: str
    tasks: int
    gets: int
    puts: int
    read_bytes: int
    written_bytes: int
    grown_bytes: int = 0
    """The most by which the work folder grows while the stage runs."""
    left_bytes: int = 0
    """By how much the work folder has grown when the stage is finished: runs that it read are gone."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """The sizes of `count` runs of an exchange: `segments` files per run, `bytes` in all, bytes per row."""

    count: int
    bytes: float
    row_bytes: float
    segments: int = 1


@dataclass(slots=True)
class Needs:
    """Collects the requests and bytes of all stages of a build of `corpus`.

    `nth` is how often the build ran the step that is being added, this time included; `is_first` tells
    whether it is the first step over all documents. `looked_up` is the number of requests per split for
    scores. `shards`, `tables` (other files) and `output_bytes` are totals over all datasets.
    """

    corpus: Corpus
    stages: list[StageNeeds] = field(default_factory=list)
    nth: int = 1
    is_first: bool = True
    looked_up: int = 0
    shards: int = 0
    tables: int = 0
    output_bytes: float = 0.0
    consumed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By the name of a stage that is still to be added: (bytes of runs that it is the last to read, number of
    pieces, each of which goes when the tasks that read it are finished)."""

    def last_reader(self, reader: Stage[..., Any], size: float, files: int) -> None:
        """Note that stage `reader`, to be added later, is the last to read `files` with `size` bytes."""
        self.consumed.setdefault(reader.name, []).append((size, files))

    def by_split(self, stage: Stage[..., Any], table: Table, runs: int, rows: float) -> None:
        """Add stage `stage` of `outcomes.by_split`, which writes one file per group of splits."""
        groups = ceil(self.corpus.gathered / SPLITS_PER_GROUP)
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
        *,
        last: Stage[..., Any] | None = None,
    ) -> _Runs:
        """Add the merges of an exchange of `runs` with `rows` rows in all; return the merged runs.

        `readers` is the number of tasks of stage `reader` that read them. `payload_bytes` is per row. `last`
        is the last stage that reads them, if it is another one.
        """
        limits = self.corpus.limits
        row_bytes = table.row_bytes + payload_bytes
        found = _Runs(runs, rows * row_bytes + runs * EMPTY_BYTES, row_bytes)
        level, own = 0, 0.0 if table.stays else found.bytes
        while limits.merges(found.count, int(found.bytes), readers, in_place=table.in_place):
            level += 1
            groups = ceil(found.count / limits.fan_in)
            ranges = limits.merge_tasks(int(found.bytes / groups))
            fan_in = found.count / groups
            piece = _Runs(ceil(fan_in), found.bytes / groups, row_bytes, found.segments)
            gets, read = self.slices(piece, ranges, limits.merge_memory_bytes)
            stage = reader.step(f"{table.name}-merge-{level}")
            self.consumed[stage.name], own = [(own, max(groups // 2, found.segments))], found.bytes
            self.add(stage, groups * ranges, gets * groups, read * groups, files=1, written=found.bytes)
            found = _Runs(groups, found.bytes, row_bytes, ranges)
        self.last_reader(last or reader, own, found.segments)
        return found

    def pieces(self, reader: Stage[..., Any], table: Table, runs: _Runs, ranges: int) -> tuple[float, float]:
        """Return (requests, bytes) of `ranges` tasks of stage `reader` that read runs of `table` in place.

        Adds the stage that writes addresses of the runs' blocks, and merges of addresses.
        """
        limits = self.corpus.limits
        if not limits.has_addresses(runs.count, ranges):
            return self.slices(runs, ranges)
        files = runs.count * runs.segments
        block = limits.block_bytes_in(table, 0) + runs.row_bytes / 2
        blocks = files * max(1.0, runs.bytes / files / block + 0.5)
        met = runs.count * ranges
        some = 1 - exp(-runs.bytes / met / max(1.0, runs.row_bytes))  # share of the pieces that have any row
        addresses = blocks + some * runs.count * (ranges - 1)  # a block with keys of two ranges has two
        tasks = address_tasks(runs.bytes, limits)
        stage = reader.step(f"{table.name}-addresses")
        written = addresses * ADDRESSES.row_bytes + tasks * _GUESSED_FOOTER_BYTES
        self.add(stage, tasks, files, files * _GUESSED_FOOTER_BYTES + blocks * 40, files=1, written=written)
        self.consumed[reader.name] = [(size, 1) for size, _ in self.consumed[reader.name]]  # all at the end
        moved = self.exchange(reader, ADDRESSES, tasks, addresses, ranges)
        gets, read = self.slices(moved, ranges)
        piece = runs.bytes / met + block
        gets += some * met * max(1.0, piece / limits.read_bytes)
        return gets, read + some * met * piece

    def slices(self, runs: _Runs, readers: int, memory_bytes: int | None = None) -> tuple[float, float]:
        """Return (requests, bytes) of `readers` tasks that each read a range of keys from all runs."""
        limits = self.corpus.limits
        memory = limits.read_memory_bytes if memory_bytes is None else memory_bytes
        met = runs.count * readers
        footers = met * (1 + (runs.segments - 1) / readers)
        file_bytes = runs.bytes / runs.count / runs.segments
        if file_bytes <= limits.block_bytes + _GUESSED_FOOTER_BYTES:
            return footers, footers * file_bytes  # the request for the footer reads the whole file
        piece = runs.bytes / met
        block = limits.block_bytes + runs.row_bytes  # a block ends after the row that exceeds its size
        chunk = max(limits.chunk_bytes(memory, runs.count) - block / 2, block)
        some = 1 - exp(-piece / max(1.0, runs.row_bytes))  # share of the pieces that have any row
        chunks = some * met * max(1.0, piece / chunk + 0.5)
        footer_bytes = min(file_bytes, 65_536, 40 * (file_bytes / limits.block_bytes + 16))
        return footers + chunks, footers * footer_bytes + some * met * (piece + block)

    def scans(self, size: float, objects: int) -> tuple[float, float]:
        """Return (requests, bytes) to read whole `objects` (a number) with a total of `size` bytes."""
        first, most = FIRST_RANGE_BYTES / self.corpus.scale, MOST_RANGE_BYTES / self.corpus.scale
        left, requests = size / objects, 0.0
        while first < most and left > 0:
            left, first, requests = left - first, 2 * first, requests + 1
        requests += max(0.0, left / most)
        return (requests + 1) * objects, size  # plus one for the index at the file's end

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
        """Add a stage with totals over its `tasks`, except `files`, the average number of files per task.

        `sent` is the number of write requests outside of the work folder.
        """
        objects, name = tasks * files, stage.nth(self.nth).name
        if objects and (size := written / objects) > PART_BYTES:  # sent in parts, with a beginning and an end
            sent += round(objects * (1 + ceil(size / PART_BYTES)))
        puts = round(objects + tasks) + sent
        consumed, inside = self.consumed.pop(stage.name, []), written if objects else 0.0
        grown = inside / min((pieces for _, pieces in consumed), default=1)
        left = inside - sum(size for size, _ in consumed)
        sizes = (ceil(size) for size in (read, written, grown, left))
        self.stages.append(StageNeeds(name, tasks, ceil(gets), puts, *sizes))


def together(stages: Sequence[StageNeeds]) -> StageNeeds:
    """Return the sums over all stages as one entry, named all."""
    names = ("tasks", "gets", "puts", "read_bytes", "written_bytes")
    return StageNeeds("all", *(sum(getattr(stage, name) for stage in stages) for name in names))


def most_held(stages: Sequence[StageNeeds]) -> int:
    """Return the most bytes that the work folder has at a time."""
    held = most = 0
    for stage in stages:
        most, held = max(most, held + stage.grown_bytes), held + stage.left_bytes
    return most


MERGE = re.compile(r"(.+)-([^-]+)-merge-(\d+)(-\d+)?")  # reader, table, level, number of the step


class Order:
    """Runs tasks, and keeps the order of stages, and which runs of other stages each is the last to read."""

    def __init__(self, run: RunTasks) -> None:
        self._run = run
        self.consumed: dict[str, set[tuple[str, str]]] = {}  # (stage, file) by the stage that reads it

    def run(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        commits = self._run(*groups)
        for task in chain.from_iterable(groups):
            own = self.consumed.setdefault(_reader(task.stage), set())
            paths = chain.from_iterable(file.paths for file in task.consumed)
            files = {(path.parent.parent.name, path.name) for path in paths}
            own |= {(stage, name) for stage, name in files if not MERGE.fullmatch(stage)}
        return commits

    def merged(self, merges: Mapping[str, int]) -> tuple[list[str], dict[str, set[tuple[str, str]]]]:
        """Return all stages in order, with these `merges` before their readers, and what each consumes."""
        stages, consumed = list[str](), dict[str, set[tuple[str, str]]]()
        for reader, files in self.consumed.items():
            consumed[reader] = {*files}
            for stage in (one for one in merges if _reader(one) == reader):
                found = MERGE.fullmatch(stage)
                assert found is not None
                name, level = f"{found[2]}{RUN_SUFFIX}", int(found[3])
                earlier = f"{found[1]}-{found[2]}-merge-{level - 1}{found[4] or ''}"
                of_table = {(one, file) for one, file in consumed[reader] if file == name}
                consumed[stage] = {(earlier, name)} if level > 1 else of_table
                consumed[reader] = consumed[reader] - of_table - {(earlier, name)} | {(stage, name)}
                stages.append(stage)
            stages.append(reader)
        return stages, consumed


def _reader(stage: str) -> str:
    """Return the stage that reads what a stage of merges writes; the stage itself if it does not merge."""
    found = MERGE.fullmatch(stage)
    return stage if found is None else found[1] + (found[4] or "")
