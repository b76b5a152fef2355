"""A card's funnel as steps in the order in which a build takes them, for whoever draws it.

    read -> quarantined -> lost while reading -> each filter -> duplicates by kind -> empty -> kept

Rules of one filter are one step: which of them took how much is in the card's `filters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FunnelStep", "funnel_steps"]

_DUPLICATES = ("exact_duplicate", "duplicate_lines", "near_duplicate")


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """What a step lost, and what it left: documents and bytes of text.

    `kind` is "read", "quarantined", "dropped" or "kept". Editors lose bytes of documents that stay, and may
    add some: then `lost_bytes` is negative.
    """

    kind: str
    label: str
    lost_documents: int
    lost_bytes: int
    documents: int
    bytes: int


def funnel_steps(card: Mapping[str, Any]) -> list[FunnelStep]:
    """The steps of a card's `funnel`; those that lost nothing are left out. KeyError if it is not ours."""
    funnel = card["funnel"]
    documents, size = funnel["read"]["documents"], funnel["read"]["bytes"]
    steps = [FunnelStep("read", "read", 0, 0, documents, size)]
    losses = [
        ("quarantined", reason, [lost]) for reason, lost in sorted(funnel["quarantined"].items())
    ] + _dropped(card)
    for kind, label, lost in losses:
        lost_documents = sum(one["documents"] for one in lost)
        lost_bytes = sum(one["bytes"] for one in lost)
        documents, size = documents - lost_documents, size - lost_bytes
        if lost_documents or lost_bytes:
            steps.append(FunnelStep(kind, label, lost_documents, lost_bytes, documents, size))
    kept = funnel["kept"]
    return [*steps, FunnelStep("kept", "kept", 0, 0, kept["documents"], kept["bytes"])]


def _dropped(card: Mapping[str, Any]) -> list[tuple[str, str, list[Mapping[str, int]]]]:
    """(kind, label, losses) of each filter or other step that drops."""
    groups: dict[str, list[Mapping[str, int]]] = {}
    for reason, lost in card["funnel"]["dropped"].items():
        groups.setdefault(reason.partition("/")[0], []).append(lost)
    ranks = {name: (1, number) for number, name in enumerate(_filters(card))}
    ranks |= {name: (2, number) for number, name in enumerate((*_DUPLICATES, "empty"))}
    names = sorted(groups, key=lambda name: (*ranks.get(name, (0, 0)), name))
    return [("dropped", name, groups[name]) for name in names]


def _filters(card: Mapping[str, Any]) -> Sequence[str]:
    """Names of the recipe's filters in their order, each once."""
    entries = (card.get("recipe") or {}).get("filters") or ()
    return list(dict.fromkeys(name for entry in entries for name in entry))
