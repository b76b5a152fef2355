"""Documents that duplicate removal took from each source: the limit on them, and the card's entry."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

from shardkit.card import Count, DedupFacts, GroupFacts, SourceLoss, StageLoss
from shardkit.errors import BuildError
from shardkit.writers.dedup.outcomes import GROUP_SIZES
from shardkit.writers.stages.flow import Documents

ALARM_DOCUMENTS = 1000  # smaller inputs may lose any share of their documents


def check_losses(documents: Documents) -> None:
    """Raise BuildError if a source lost a larger share of its documents than dedup.max_removed_fraction."""
    compared, removed = _by_source(documents)
    most = documents.recipe.dedup.max_removed_fraction
    for number, label in enumerate(documents.recipe.sources):
        of_source = {reason: counts[number].documents for reason, counts in removed.items()}
        total, there = sum(of_source.values()), compared[number].documents
        if there >= ALARM_DOCUMENTS and total > most * there:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in of_source.items() if count)
            raise BuildError(
                f"input {label!r}: {total:,} of {there:,} documents ({total / there:.1%}) are "
                f"duplicates ({reasons}), more than dedup.max_removed_fraction = {most:g}; check the "
                f"input, or raise the limit if this is intended"
            )


def dedup_facts(documents: Documents) -> DedupFacts | None:
    """Return the card's entry on duplicate removal, shown by report/dedup.py; None without any."""
    if not documents.lost:
        return None
    compared, removed = _by_source(documents)
    groups = list(documents.groups) or [0] * len(_CLASSES)
    if documents.near is None and documents.semantic_facts is None:
        groups[0] = documents.single - sum(groups)
    stages = {reason: sum(losses, Count()) for reason, losses in documents.lost.items()}
    return DedupFacts(
        near=next(reversed(documents.near_facts), None),
        earlier_near=[*documents.near_facts[:-1]],
        stages=[StageLoss(stage=reason, **asdict(total)) for reason, total in stages.items()],
        sources=[
            SourceLoss(
                source=label,
                removed={reason: counts[number] for reason, counts in removed.items()},
                **asdict(compared[number]),
            )
            for number, label in enumerate(documents.recipe.sources)
        ],
        groups=[GroupFacts(name, count) for name, count in zip(_CLASSES, groups, strict=True)],
        largest_group=documents.largest_group,
        semantic=documents.semantic_facts,
    )


def _by_source(documents: Documents) -> tuple[list[Count], dict[str, list[Count]]]:
    """Return the compared documents of each source, and by reason the documents that each source lost."""
    return (
        documents.by_source([one.kept for one in documents.written[0].ledgers]),
        {reason: documents.by_source(losses) for reason, losses in documents.lost.items()},
    )


def _class_names() -> list[str]:
    names = ["1", "2"]
    names += [f"{low + 1:,}-{high:,}" for low, high in pairwise(GROUP_SIZES[1:])]
    return [*names, f"over {GROUP_SIZES[-1]:,}"]


_CLASSES = _class_names()
