"""Stages `url` and `exact`: remove all but one of the documents with the same key.

A pass of filters wrote a key of each document's text (`dedup/exact.py`) and, with `dedup.url`, of its URL
(`dedup/urls.py`). Each task decides one partition of the keys of all splits; its outcomes go back to the
splits (`dedup/outcomes.py`). The number of partitions depends on the number of documents.

A document that was removed for an equal URL must not win over a document with the same text. So stage
`url_left`, one task per split, writes the keys of the remaining documents again, each with the number of
documents that it represents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import RecipeError
from shardkit.writers.dedup.config import UrlDedupConfig
from shardkit.writers.dedup.exact import KEYS, WEIGHTED_KEYS, Order, find_copies, partition_bounds
from shardkit.writers.dedup.outcomes import (
    GROUP_SIZES,
    OUTCOME,
    OUTCOMES,
    SplitRemovals,
    SplitTable,
    SplitTables,
    by_split,
    count_groups,
    document_keys,
    latest_outcomes,
    outcomes,
    write_tables,
)
from shardkit.writers.dedup.urls import URL_KEYS
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.needs import Needs

URL_DUPLICATE, EXACT_DUPLICATE = "url_duplicate", "exact_duplicate"  # reasons for dropping, in ledgers


@dataclass(frozen=True, slots=True)
class ExactDuplicates:
    """The removals of one partition: number of documents (`losers`), and `bytes` of their texts.

    `groups` counts the documents that represent several, in the classes of `count_groups`. Documents that
    already represented several after the stage before are subtracted from their former class.
    """

    losers: int
    bytes: int
    groups: Sequence[int]
    largest_group: int


def drop_equal_urls(config: UrlDedupConfig, documents: Documents, build: Build) -> Documents:
    """Remove all but one of the documents with the same URL. Raises RecipeError if no document has a URL."""
    step = documents.step_with(URL_KEYS.file)
    urls = sum(one.urls for one in step.filtering)
    if not urls:
        raise RecipeError(
            "dedup.url: no document has a URL; set inputs[].url to the field with the URL, or remove "
            "dedup.url"
        )
    order: Order = "longest" if config.keep == "longest" else "first"
    removed = remove_equal(
        build.run, EQUAL_URLS, URL_KEYS, step.commits, urls, order, build.memory_bytes, build.limits
    )
    return _without(URL_DUPLICATE, removed, documents)


def drop_equal_texts(documents: Documents, build: Build) -> Documents:
    """Remove all but one of the documents with the same text.

    Of documents that an earlier step found to be duplicates, only the kept ones are compared; these also
    represent the removed ones.
    """
    run, memory_bytes, limits = build.run, build.memory_bytes, build.limits
    step = documents.step_with(KEYS.file)
    table, written = KEYS, step.commits
    if documents.compared:  # a step over all documents was before
        table = WEIGHTED_KEYS
        written = keys_left(run, URL_LEFT, written, documents.removals, memory_bytes, limits)
    rows = step.kept.documents
    removed = remove_equal(run, EQUAL_TEXTS, table, written, rows, "first", memory_bytes, limits)
    return _without(EXACT_DUPLICATE, removed, documents)


def keys_left(
    run: RunTasks,
    stage: Stage[..., Left],
    written: Sequence[Commit],
    removals: Sequence[SplitRemovals],
    memory_bytes: int,
    limits: Limits,
) -> list[Commit]:
    """Write the WEIGHTED_KEYS of the remaining documents, with one task per split; return the commits."""
    tasks = []
    for commit, removed in zip(written, removals, strict=True):
        piece = exchange(run, stage, KEYS, [commit], readers=1, limits=limits).slice(0, 1 << 64)
        tasks.append(stage.task(commit.name, piece.bytes, piece, removed, memory_bytes))
    [left] = run(tasks)
    return left


def remove_equal(
    run: RunTasks,
    stages: EqualStages,
    table: Table,
    written: Sequence[Commit],
    rows: int,
    order: Order,
    memory_bytes: int,
    limits: Limits,
) -> tuple[list[ExactDuplicates], list[SplitTable]]:
    """Run the two stages; return the removals of each partition of keys, and the outcomes of each split.

    `written` are the commits, one per split, with runs of `table`, which have `rows` rows in total.
    """
    partitions, tasks = limits.partitions(rows, table.dtype), []
    keys = exchange(run, stages.find, table, written, readers=partitions, limits=limits)
    for number in range(partitions):
        piece = keys.slice(*partition_bounds(number, partitions))
        name = partition_name(number, partitions)
        tasks.append(stages.find.task(name, piece.bytes, piece, memory_bytes, order))
    [commits] = run(tasks)
    tables = by_split(run, stages.sort, OUTCOMES, commits, len(written), limits=limits)
    return [stages.find.result(commit) for commit in commits], tables


def _without(
    reason: str, removed: tuple[list[ExactDuplicates], list[SplitTable]], documents: Documents
) -> Documents:
    found, tables = removed
    counted = [documents.groups, *(one.groups for one in found)]
    return replace(
        documents.without(reason, tables),
        single=documents.left.documents - sum(one.losers for one in found),
        groups=[sum(classes) for classes in zip_longest(*counted, fillvalue=0)],
        largest_group=max(documents.largest_group, *(one.largest_group for one in found)),
    )


def find_exact(
    folder: Path, keys: Slice, memory_bytes: MemoryBytes, order: Order = "first"
) -> ExactDuplicates:
    """Write the outcomes of one partition of keys into `folder`, with similarity 1 (NaN for equal URLs)."""
    losers = size = 0
    largest, groups = 1, np.zeros(len(GROUP_SIZES) + 1, np.int64)
    file, limits = folder / OUTCOMES.file, keys.limits
    similarity = np.nan if keys.table == URL_KEYS else 1
    with RunWriter(file, OUTCOMES, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for found in find_copies(keys, memory_bytes, order=order):
            lost, kept, copies = found.lost, found.winners, found.represented
            places = document_keys(lost["split"], lost["row"])
            ranks = found.kept["id"]
            writer.write(outcomes(places, bytes=lost["bytes"], kept=ranks, similarity=similarity))
            writer.write(outcomes(document_keys(kept["split"], kept["row"]), copies=copies))
            losers, size = losers + len(lost), size + int(lost["bytes"].sum())
            groups += count_groups(copies)
            if keys.table == WEIGHTED_KEYS:
                before = np.concatenate([lost["copies"], kept["copies"]])
                groups -= count_groups(before[before > 1])
            largest = max(largest, int(copies.max(initial=1)))
    return ExactDuplicates(losers, size, groups.tolist(), largest)


@dataclass(frozen=True, slots=True)
class Left:
    """The number of documents of a split that were not removed for an equal URL."""

    documents: int


def write_left(folder: Path, keys: Slice, removals: SplitRemovals, memory_bytes: MemoryBytes) -> Left:
    """Write the WEIGHTED_KEYS of one split into `folder`: its KEYS without documents in `removals`."""
    decided = latest_outcomes(table.read(OUTCOME) for table in removals.tables.values())
    documents = 0
    file, limits = folder / WEIGHTED_KEYS.file, keys.limits
    with RunWriter(file, WEIGHTED_KEYS, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for rows, _ in keys.stream(memory_bytes // 4):
            weighted = np.empty(len(rows), WEIGHTED_KEYS.dtype)
            for name in KEYS.dtype.names or ():
                weighted[name] = rows[name]
            weighted["copies"], weighted["split"] = 1, -1  # `split` is set by the exchange
            if len(decided):
                places = np.minimum(np.searchsorted(decided["row"], rows["row"]), len(decided) - 1)
                known = decided["row"][places] == rows["row"]
                weighted["copies"][known] = decided["copies"][places[known]]
            weighted = weighted[weighted["copies"] > 0]
            writer.write(weighted)
            documents += len(weighted)
    return Left(documents)


@dataclass(frozen=True)
class EqualStages:
    """Two stages: `find` finds documents with equal keys, and `sort` brings the outcomes to their splits."""

    find: Stage[[Slice, int, Order], ExactDuplicates]
    sort: Stage[[Slice], SplitTables]


_URLS, _TEXTS = "equal URLs", "exact duplicates"
EQUAL_URLS = EqualStages(
    Stage("url", _URLS, find_exact, cost=2), Stage("url_removed", _URLS, write_tables, cost=0.2)
)
URL_LEFT = Stage("url_left", _TEXTS, write_left, cost=1)
EQUAL_TEXTS = EqualStages(
    Stage("exact", _TEXTS, find_exact, cost=2), Stage("exact_removed", _TEXTS, write_tables, cost=0.2)
)


def url_needs(n: Needs) -> None:
    """Add the requests and bytes of comparing URLs."""
    _add(n, EQUAL_URLS, URL_KEYS)


def text_needs(n: Needs) -> None:
    """Add the requests and bytes of comparing texts, and of stage `url_left` before it."""
    c = n.corpus
    if not n.is_first:
        read, written = (c.documents * table.row_bytes for table in (KEYS, WEIGHTED_KEYS))
        n.add(URL_LEFT, c.gathered, 2 * c.gathered, read, files=1, written=written)
    _add(n, EQUAL_TEXTS, KEYS if n.is_first else WEIGHTED_KEYS)


def _add(n: Needs, stages: EqualStages, table: Table) -> None:
    c = n.corpus
    readers = c.limits.partitions(c.documents, KEYS.dtype)
    keys = n.exchange(stages.find, table, c.gathered, c.documents, readers)
    n.add(stages.find, readers, *n.slices(keys, readers), files=1)
    n.by_split(stages.sort, OUTCOMES, readers, c.documents * 0.01)


def urls_step(move: GlobalStep) -> Step:
    """Return the step over equal URLs."""
    stages = EQUAL_URLS.find, EQUAL_URLS.sort
    return Step(lambda recipe: stages, partial(drop_equal_urls, move.settings), url_needs)


def texts_step(move: GlobalStep) -> Step:
    """Return a step over equal texts."""

    def stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
        own = EQUAL_TEXTS.find, EQUAL_TEXTS.sort
        return own if recipe.global_steps[0] == move else (URL_LEFT, *own)

    return Step(stages, drop_equal_texts, text_needs)
