"""Losses of each source by duplicate removal: the limit on them, and their entry in the dataset card.

A build books the removals of its stages `url`, `exact`, `lines` and `near` here; each stage is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from shardkit.card import Count, DedupFacts, GroupFacts, NearFacts, SourceLoss, StageLoss
from shardkit.errors import BuildError
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.dedup.near import NearResult
from shardkit.writers.dedup.removals import GROUP_SIZES, SplitTable
from shardkit.writers.dedup.signatures import bands_and_rows
from shardkit.writers.inputs.scan import Split
from shardkit.writers.ledger import Ledger
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages.exact import ExactDuplicates

__all__ = ["EXACT", "LINES", "NEAR", "URL", "DuplicateLosses"]

# As ledgers name them.
URL, EXACT, LINES, NEAR = "url_duplicate", "exact_duplicate", "duplicate_lines", "near_duplicate"
ALARM_DOCUMENTS = 1000  # smaller inputs may lose any share of their documents


class DuplicateLosses:
    """For each source, documents and bytes that were compared, and losses by reason.

    `cleaned` has the ledger of each split.
    """

    def __init__(self, labels: Sequence[str], splits: Sequence[Split], cleaned: Sequence[Ledger]) -> None:
        self._labels, self._splits = labels, splits
        self._compared = [Count()] * len(labels)
        self._lost: dict[str, list[Count]] = {}
        for split, ledger in zip(splits, cleaned, strict=True):
            self._compared[split.source] += ledger.kept

    def add(self, reason: str, removed: Sequence[SplitTable]) -> None:
        """Book what stage `url`, `exact` or `near` removed from each split."""
        lost = self._start(reason)
        for split, table in zip(self._splits, removed, strict=True):
            lost[split.source] += table.lost

    def add_lines(self, ledgers: Sequence[Ledger]) -> None:
        """Book what stage `lines` cut, one ledger a split."""
        lost = self._start(LINES)
        for split, ledger in zip(self._splits, ledgers, strict=True):
            lost[split.source] += ledger.dropped.get(LINES, Count())

    def _start(self, reason: str) -> list[Count]:
        return self._lost.setdefault(reason, [Count()] * len(self._labels))

    def total(self, reason: str) -> Count:
        """What all sources lost for a reason."""
        return sum(self._lost.get(reason, []), Count())

    def check(self, most: float) -> None:
        """BuildError if a source lost more than the share `most` of its documents."""
        for number, label in enumerate(self._labels):
            removed = {reason: counts[number].documents for reason, counts in self._lost.items()}
            total, documents = sum(removed.values()), self._compared[number].documents
            if documents >= ALARM_DOCUMENTS and total > most * documents:
                reasons = ", ".join(f"{reason} {count:,}" for reason, count in removed.items() if count)
                raise BuildError(
                    f"input {label!r}: {total:,} of {documents:,} documents ({total / documents:.1%}) are "
                    f"duplicates ({reasons}), more than dedup.max_removed_fraction = {most:g}; check the "
                    f"input, or raise the limit if this is intended"
                )

    def card(
        self,
        recipe: Recipe,
        exact: Sequence[ExactDuplicates],
        near: NearResult | None,
        indexes: Sequence[DedupIndex],
    ) -> DedupFacts | None:
        """The card's entry, which report/dedup.py shows; None without duplicate removal.

        `exact` are the partitions of the stages `url` and `exact`.
        """
        if not self._lost:
            return None
        groups, largest = self._groups(exact, near)
        return DedupFacts(
            near=None if near is None else _near_facts(recipe, near, indexes),
            stages=[StageLoss(stage=reason, **asdict(self.total(reason))) for reason in self._lost],
            sources=[
                SourceLoss(
                    source=label,
                    removed={reason: counts[number] for reason, counts in self._lost.items()},
                    **asdict(self._compared[number]),
                )
                for number, label in enumerate(self._labels)
            ],
            groups=[GroupFacts(name, count) for name, count in zip(_CLASSES, groups, strict=True)],
            largest_group=largest,
        )

    def _groups(self, exact: Sequence[ExactDuplicates], near: NearResult | None) -> tuple[list[int], int]:
        """Number of kept documents by class of how many they represent, and the most that one represents."""
        if near is not None:
            return list(near.decided.groups), near.decided.largest_group
        groups, largest = [0] * len(_CLASSES), 1
        for found in exact:
            groups = [a + b for a, b in zip(groups, found.groups, strict=True)]
            largest = max(largest, found.largest_group)
        kept = sum(count.documents for count in self._compared)
        kept -= sum(self.total(reason).documents for reason in (URL, EXACT))
        groups[0] = kept - sum(groups)
        return groups, largest


def _near_facts(recipe: Recipe, near: NearResult, indexes: Sequence[DedupIndex]) -> NearFacts:
    config = recipe.dedup.near
    assert config is not None
    bands, rows = bands_and_rows(config)
    return NearFacts(
        similarity=config.similarity,
        containment=config.containment,
        unit=config.minhash.unit,
        ngram=config.minhash.ngram,
        permutations=config.minhash.permutations,
        bands=bands,
        rows=rows,
        scope=config.scope_name,
        against=list(config.against),
        indexes=[index.digest for index in indexes],
        counts=dict(near.counts),
    )


def _class_names() -> list[str]:
    names = ["1", "2"]
    names += [f"{low + 1:,}-{high:,}" for low, high in pairwise(GROUP_SIZES[1:])]
    return [*names, f"over {GROUP_SIZES[-1]:,}"]


_CLASSES = _class_names()
