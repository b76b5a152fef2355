"""Shows the funnel: the losses of each step of a build, by rule, source and language, from the card alone.

What steps cost is not in the card, whose bytes do not depend on machines: it comes from the file that
`shardkit build --timings` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from shardkit.card import Count, DatasetCard
from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.tools.explore.explored import Explored, Params
from shardkit.writers.report.costs import StepCost, better_place

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
    seconds: float | None = None
    """CPU seconds of the step; None if unknown."""
    share: float | None = None
    """Share of these seconds in the CPU time of all steps; None if that of some step is unknown."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """Holds what a step judged, removed and took; None: not known.

    `bytes` is the text that it removed; `seconds` are of CPU, in all workers together, and `share` is their
    share in those of all steps, if all are known.
    """

    label: str
    documents: int
    dropped: int
    bytes: int | None
    seconds: float | None
    share: float | None

    @property
    def seconds_per_million(self) -> float | None:
        """CPU seconds for a million documents."""
        return None if self.seconds is None or not self.documents else 1e6 * self.seconds / self.documents


def show_funnel(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the first page, which shows the funnel."""
    card = explored.card
    if card is None or not explored.has_funnel:
        return {
            "funnel": None,
            "shards": len(explored.dataset.manifest.shards),
            "rows": len(explored.dataset),
        }
    rows = funnel_rows(card, explored.costs)
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
        "costs": cost_rows(card, explored.costs),
        "advice": better_place(explored.costs),
    }


def read_costs(path: Path, fingerprint: str) -> list[StepCost]:
    """Read the costs of steps from the file that `shardkit build --timings` wrote for a dataset.

    Raises ShardError if it is no such file, or that of another dataset.
    """
    try:
        facts = load_json(path.read_bytes())
        made = {facts["fingerprint"], *(one["fingerprint"] for one in facts.get("others", []))}
        costs = TypeAdapter(list[StepCost]).validate_python(facts["costs"])
    except OSError as error:
        raise ShardError(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = "is no JSON of `shardkit build --timings FILE`, whose FILE must not end in .html"
        raise ShardError(path, problem) from error
    if fingerprint not in made:
        raise ShardError(path, f"has the times of a build of other data: {', '.join(map(str, made))[:100]}")
    if not costs:
        raise ShardError(path, "has no costs: the build had no steps, or found its output up to date")
    return costs


def cost_rows(card: DatasetCard, costs: Sequence[StepCost]) -> list[CostRow]:
    """Return the steps in their order; the text that steps of one name removed is not known for each."""
    removed, total = card.funnel.dropped, _total(costs)
    rows = list[CostRow]()
    for cost in costs:
        is_alone = sum(one.step == cost.step for one in costs) == 1
        reasons = [name for name in removed if name.partition("/")[0] in _labels(cost)] if is_alone else []
        size = sum(removed[name].bytes for name in reasons) if reasons or not cost.dropped else None
        share = _share(cost.seconds, total)
        rows.append(CostRow(cost.step, cost.documents, cost.dropped, size, cost.seconds, share))
    return rows


def _labels(cost: StepCost) -> tuple[str, ...]:
    """Return the names that the funnel may have for a step."""
    return cost.step, f"{cost.step}_duplicate", f"duplicate_{cost.step}", f"not_{cost.step}d"


def _total(costs: Sequence[StepCost]) -> float | None:
    """Return the CPU seconds of all these; None if some are unknown."""
    known = [cost.seconds for cost in costs if cost.seconds is not None]
    return sum(known) if len(known) == len(costs) else None


def _share(seconds: float | None, total: float | None) -> float | None:
    return None if seconds is None or not total else seconds / total


def funnel_rows(card: DatasetCard, costs: Sequence[StepCost] = ()) -> list[FunnelRow]:
    """Return the funnel's steps in the order of the build; a filter is followed by its rules."""
    total = _total(costs)
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
        spent = [one for one in costs if step.kind == "dropped" and step.label in _labels(one)]
        seconds = _total(spent) if spent else None
        share = _share(seconds, total)
        found.append(FunnelRow(label, step.kind, 0, lost, left, page, seconds=seconds, share=share))
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
