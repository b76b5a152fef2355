"""What the filters of a build cost in CPU, and which of them would cost less behind later steps.

Costs are of this machine and in the result of a build only: a dataset does not depend on them. A statistic
that several filters use, such as the words of a text, is counted for the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.rows.filtered import FilterCost
from shardkit.writers.stages.flow import Documents
from shardkit.writers.stages.graph import names_over_all

WORTH_SECONDS = 10.0  # of CPU that a better place of a filter must save to be named
WORTH_SHARE = 0.2  # of the CPU of all filters


@dataclass(frozen=True, slots=True)
class StepCost:
    """A filter or a step over all documents, in the order of the build.

    `documents` is how many it judged, `dropped` how many of these it removed, `seconds` its CPU time in all
    workers together. That of a step over all documents (`is_global`) is of the tasks that this build ran, and
    None if it found some of them finished. A filter that `edits` changes what later steps see. `spent` is as
    in FilterCost.
    """

    step: str
    documents: int
    dropped: int
    seconds: float | None = None
    edits: bool = False
    spent: Mapping[str, float] = field(default_factory=dict)
    is_global: bool = False

    def describe_spent(self) -> str:
        """Return the answers, requests, tokens and seconds of a filter that pays for documents, as text."""
        spent = {name: round(amount) for name, amount in self.spent.items()}
        requests, failed = spent.get("requests", 0), spent.get("failed_requests", 0)
        tokens = f"{spent.get('tokens_in', 0):,} tokens in, {spent.get('tokens_out', 0):,} out"
        return (
            f"{spent.get('documents', 0):,} documents, {spent.get('reused', 0):,} of them with answers kept "
            f"before; {requests:,} requests ({failed:,} failed), {tokens}, {spent.get('seconds', 0):,} s"
        )


def step_costs(documents: Documents, cpu_seconds: Mapping[str, float | None]) -> list[StepCost]:
    """Return the filters and the duplicate removal of a build in their order.

    `cpu_seconds` are those of stages, by name; None for a stage of which some tasks were finished before.
    """
    passes = (step.filtering for step in documents.written if step.filtering)
    compared = iter(documents.compared)
    found: list[StepCost] = []
    for move in documents.recipe.moves:
        if isinstance(move, GlobalStep):
            names = names_over_all(move, documents.recipe, cpu_seconds)
            spent = [cpu_seconds[name] for name in names]
            seconds = None if None in spent else sum(one or 0.0 for one in spent)
            found.append(StepCost(move.name, *next(compared), seconds, is_global=True))
            continue
        totals: dict[str, FilterCost] = {}
        for split in next(passes):
            for name, cost in split.costs.items():
                totals.setdefault(name, FilterCost()).add(cost)
        settings = dict(move)
        found += [
            StepCost(*(name, cost.documents, cost.dropped, cost.seconds, settings[name].may_edit), cost.spent)
            for name, cost in sorted(totals.items(), key=lambda item: [*settings].index(item[0]))
        ]
    return found


def better_place(
    costs: Sequence[StepCost], *, worth_seconds: float = WORTH_SECONDS, worth_share: float = WORTH_SHARE
) -> str | None:
    """Return a sentence on the filter that would save most behind later steps; None if none saves enough.

    Behind them it would judge what they leave: seconds x (judged - dropped by later steps) / judged.
    """
    total = sum(cost.seconds or 0.0 for cost in costs if not cost.is_global)
    best, sentence = max(worth_seconds, worth_share * total), None
    for number, cost in enumerate(costs):
        later = [one for one in costs[number + 1 :] if one.dropped]
        if cost.seconds is None or cost.is_global or cost.edits or not cost.documents:
            continue
        if any(one.edits for one in later):
            continue
        dropped = sum(one.dropped for one in later)
        saved = cost.seconds * dropped / cost.documents
        if saved > best:
            best = saved
            names = " and ".join(one.step for one in sorted(later, key=lambda one: -one.dropped)[:2])
            sentence = (
                f"{cost.step} took {cost.seconds:,.0f} s of CPU for {cost.documents:,} documents, "
                f"{dropped / cost.documents:.0%} of which later steps removed (most by {names}); behind "
                f"these (`steps` in the recipe) it would take about {cost.seconds - saved:,.0f} s"
            )
    return sentence
