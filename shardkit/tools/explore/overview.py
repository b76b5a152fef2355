"""Shows the funnel: the losses of each step of a build, by rule, source and language, from the card alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.card import Count, DatasetCard
from shardkit.tools.explore.explored import Explored, Params

_LANGUAGES = 20
_LOSSES = 3  # number of largest losses named in the page's headline


@dataclass(frozen=True, slots=True)
class FunnelRow:
    """A step of the funnel (`level` 0) or a rule of a step (`level` 1); its name links to `page`."""

    label: str
    kind: str
    level: int
    lost: Count
    left: Count | None
    page: str | None = None
    rule: str | None = None
    fails: float | None = None
    """Share of documents that fail the rule, including those that other rules drop; None if unknown."""


def show_funnel(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the first page, which shows the funnel."""
    card = explored.card
    if card is None or not explored.has_funnel:
        return {
            "funnel": None,
            "shards": len(explored.dataset.manifest.shards),
            "rows": len(explored.dataset),
        }
    rows = funnel_rows(card)
    read, kept = card.funnel.read, card.funnel.kept
    losses = sorted((row for row in rows if row.lost.documents and _is_leaf(row, rows)), key=_most)
    return {
        "funnel": [row for row in rows if row.level == 0 or row.lost.documents],
        "idle": [row for row in rows if row.level and not row.lost.documents],
        "read": read,
        "kept": kept,
        "losses": losses[:_LOSSES],
        "tokens": card.tokens if card.has("tokens") else None,
        "sources": card.inputs,
        "languages": list(card.languages().items())[:_LANGUAGES],
        "rows": len(explored.dataset),
    }


def funnel_rows(card: DatasetCard) -> list[FunnelRow]:
    """Return the funnel's steps in the order of the build; a filter is followed by its rules."""
    facts = card.filters if card.has("filters") else None
    fails = {rule.rule: rule.alone / max(1, facts.sampled) for rule in facts.rules} if facts else {}
    dropped = card.funnel.dropped
    names = [*fails, *(name for name in sorted(dropped) if "/" in name and name not in fails)]
    found: list[FunnelRow] = []
    shown: set[str] = set()
    for step in card.funnel_steps():
        lost, left = Count(step.lost_documents, step.lost_bytes), Count(step.documents, step.bytes)
        is_duplicates = step.kind == "dropped" and "duplicate" in step.label
        page = "clusters" if is_duplicates else "kept" if step.kind == "kept" else None
        label = f"unreadable: {step.label}" if step.kind == "quarantined" else step.label.replace("_", " ")
        found.append(FunnelRow(label, step.kind, 0, lost, left, page))
        if step.kind == "dropped":
            rules = [name for name in names if name.partition("/")[0] == step.label]
            found += [_rule(name, dropped.get(name, Count()), fails.get(name)) for name in rules]
            shown.update(rules)
    idle = [_rule(name, Count(), fails[name]) for name in fails if name not in shown]
    return [*found[:-1], *idle, found[-1]]


def _rule(name: str, lost: Count, fails: float | None) -> FunnelRow:
    page = "rule" if lost.documents else None
    return FunnelRow(name.partition("/")[2], "dropped", 1, lost, None, page, name, fails)


def _is_leaf(row: FunnelRow, rows: list[FunnelRow]) -> bool:
    """Return whether a row is a rule, or a step without rules below it."""
    after = rows[rows.index(row) + 1 :]
    return row.level == 1 or not after or after[0].level == 0


def _most(row: FunnelRow) -> int:
    return -row.lost.documents
