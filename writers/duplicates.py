"""Removal of repeated documents within a build: exact, repeated lines, near; what each lost, and the alarm.

    exact -> line_keys -> line_losers -> lines -> near-duplicates (near_stages.py)

Each is optional. What comes out is the documents of every split, which may be other files than those that
went in (lines are cut out of documents), and who of them is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shardkit.errors import BuildError
from shardkit.writers.dedup import exact as exact_dedup
from shardkit.writers.dedup import lines as line_stages
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.dedup.near import NearResult, NearStages, SplitDocuments, remove_near
from shardkit.writers.dedup.removals import Removals
from shardkit.writers.dedup.resolve import GROUP_SIZES
from shardkit.writers.dedup.signatures import bands_and_rows
from shardkit.writers.execution.task import Commit
from shardkit.writers.inputs.scan import Split
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages.clean import DOCUMENTS_FILE
from shardkit.writers.stages.tasks import exact_tasks

__all__ = ["EXACT", "LINES", "NEAR", "Deduplicated", "remove_duplicates", "task_memory"]

EXACT, LINES, NEAR = "exact_duplicate", "duplicate_lines", "near_duplicate"  # as ledgers name them
ALARM_DOCUMENTS = 1000  # smaller inputs may lose any part of their documents

Run = Callable[..., list[list[Commit]]]


@dataclass(frozen=True)
class Deduplicated:
    """`documents` are the commits that hold each split's documents.arrow, `cut` their ledgers (lines cut).

    `removed` are the counts by reason that later stages book; `card` is what the dataset's card says.
    """

    documents: Sequence[Commit]
    removals: Removals
    removed: Mapping[str, Count]
    cut: Sequence[Ledger]
    near: NearResult | None
    card: Mapping[str, Any] | None


@dataclass
class _Losses:
    """For each source: documents and bytes that were compared, and what was lost by reason."""

    labels: Sequence[str]
    splits: Sequence[Split]
    compared: list[Count]
    lost: dict[str, list[Count]] = field(default_factory=dict)

    def add(self, reason: str, source: int, count: Count) -> None:
        by_source = self.lost.setdefault(reason, [Count()] * len(self.labels))
        by_source[source] += count

    def add_exact(self, exact: Sequence[Commit]) -> None:
        for commit in exact:
            for split, (documents, size) in commit.counts["splits"].items():
                self.add(EXACT, self.splits[int(split)].source, Count(documents, size))

    def check(self, most: float) -> None:
        """BuildError if a source lost too great a part of its documents."""
        for number, label in enumerate(self.labels):
            removed = {reason: counts[number].documents for reason, counts in self.lost.items()}
            total, documents = sum(removed.values()), self.compared[number].documents
            if documents >= ALARM_DOCUMENTS and total > most * documents:
                reasons = ", ".join(f"{reason} {count:,}" for reason, count in removed.items() if count)
                raise BuildError(
                    f"input {label!r}: {total:,} of {documents:,} documents ({total / documents:.1%}) are "
                    f"duplicates ({reasons}), more than dedup.max_removed_fraction = {most:g}; look at the "
                    f"input, or raise that limit if it is meant"
                )

    def total(self, reason: str) -> Count:
        return sum(self.lost.get(reason, []), Count())

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "source": label,
                "documents": self.compared[number].documents,
                "bytes": self.compared[number].bytes,
                "removed": {reason: _plain(counts[number]) for reason, counts in self.lost.items()},
            }
            for number, label in enumerate(self.labels)
        ]


def task_memory(recipe: Recipe) -> int:
    """Bytes that one task of duplicate removal may hold: the rest of `memory` is libraries and file pages."""
    return recipe.memory // 5


def remove_duplicates(
    recipe: Recipe,
    splits: Sequence[Split],
    cleaned: Sequence[Commit],
    run: Run,
    indexes: Sequence[DedupIndex] = (),
) -> Deduplicated:
    """Run the stages that the recipe asks for; BuildError if a source loses more than it may."""
    config, memory_bytes = recipe.dedup, task_memory(recipe)
    losses = _Losses(recipe.sources, splits, [Count()] * len(recipe.sources))
    for split, commit in zip(splits, cleaned, strict=True):
        losses.compared[split.source] += commit.ledger().kept
    exact: list[Commit] = []
    if config.exact is not None:
        documents = sum(count.documents for count in losses.compared)
        [exact] = run(exact_tasks(cleaned, exact_dedup.partitions_for(documents, 2 * memory_bytes)))
        losses.lost[EXACT] = [Count()] * len(recipe.sources)
        losses.add_exact(exact)
    documents_of, removals, cut = cleaned, Removals({EXACT: [commit.folder for commit in exact]}), []
    removed = {EXACT: losses.total(EXACT)}
    if config.lines is not None:
        described = _describe(cleaned)
        [keys] = run(line_stages.key_tasks(described, exact, config.lines))
        [line_losers] = run(line_stages.loser_tasks(keys, config.lines, memory_bytes))
        [documents_of] = run(line_stages.cut_tasks(described, keys, line_losers, exact, config.lines))
        removals = Removals({}, [commit.folder for commit in documents_of])
        cut = [commit.ledger() for commit in documents_of]
        removed = {}
        for split, ledger in zip(splits, cut, strict=True):
            losses.add(LINES, split.source, ledger.dropped.get(LINES, Count()))
    near = None
    if config.near is not None:
        stages = NearStages(config.near, _describe(documents_of), removals, memory_bytes, recipe.seed)
        near = remove_near(run, stages, indexes)
        removals = Removals({**removals.folders, NEAR: [near.resolved.folder]}, removals.rewritten)
        losses.lost[NEAR] = [Count()] * len(recipe.sources)
        for source, counts in near.counts["sources"].items():
            losses.add(NEAR, int(source), Count(counts["losers"], counts["bytes"]))
        removed[NEAR] = losses.total(NEAR)
    losses.check(config.max_removed_fraction)
    card = _card(recipe, losses, exact, near, indexes)
    return Deduplicated(documents_of, removals, removed, cut, near, card)


def _describe(commits: Sequence[Commit]) -> list[SplitDocuments]:
    described = []
    for commit in commits:
        output = commit.outputs[DOCUMENTS_FILE]
        documents = commit.folder / DOCUMENTS_FILE
        described.append(SplitDocuments(commit.name, documents, output.xxh3_128, output.bytes))
    return described


def _card(
    recipe: Recipe,
    losses: _Losses,
    exact: Sequence[Commit],
    near: NearResult | None,
    indexes: Sequence[DedupIndex],
) -> dict[str, Any] | None:
    """What report/dedup.py describes; None if no duplicates were looked for."""
    if not losses.lost:
        return None
    groups, largest = _groups(losses, exact, near)
    return {
        "near": None if near is None else _near_card(recipe, near, indexes),
        "stages": [{"stage": reason, **_plain(losses.total(reason))} for reason in losses.lost],
        "sources": losses.to_dict(),
        "groups": [{"copies": name, "groups": n} for name, n in zip(_CLASSES, groups, strict=True)],
        "largest_group": largest,
        "recall": None if near is None else near.measured.get("recall"),
        "precision": None if near is None else near.measured.get("precision"),
    }


def _near_card(recipe: Recipe, near: NearResult, indexes: Sequence[DedupIndex]) -> dict[str, Any]:
    config = recipe.dedup.near
    assert config is not None
    bands, rows = bands_and_rows(config)
    skipped = ("sources", "groups", "losers", "bytes", "largest_group")
    return {
        "similarity": config.similarity,
        "containment": config.containment,
        "unit": config.minhash.unit,
        "ngram": config.minhash.ngram,
        "permutations": config.minhash.permutations,
        "bands": bands,
        "rows": rows,
        "scope": config.scope,
        "against": list(config.against),
        "indexes": [index.digest for index in indexes],
        "counts": {name: count for name, count in near.counts.items() if name not in skipped},
    }


def _groups(losses: _Losses, exact: Sequence[Commit], near: NearResult | None) -> tuple[list[int], int]:
    """How many documents that stayed stand for so many, by class; and for how many one stands at most."""
    if near is not None:
        return list(near.counts["groups"]), near.counts["largest_group"]
    groups = [0] * len(_CLASSES)
    for commit in exact:
        groups = [a + b for a, b in zip(groups, commit.counts["groups"], strict=True)]
    kept = sum(count.documents for count in losses.compared) - losses.total(EXACT).documents
    groups[0] = kept - sum(groups)
    return groups, max((commit.counts["largest_group"] for commit in exact), default=1)


def _class_names() -> list[str]:
    names = ["1", "2"]
    names += [f"{low + 1:,}-{high:,}" for low, high in pairwise(GROUP_SIZES[1:])]
    return [*names, f"over {GROUP_SIZES[-1]:,}"]


_CLASSES = _class_names()


def _plain(count: Count) -> dict[str, int]:
    return {"documents": count.documents, "bytes": count.bytes}
