"""The steps of a recipe in order: passes of filters, and the schemes of duplicate removal between them.

`filters` and `dedup` are short for one order: all filters first, then the schemes `url`, `exact`, `lines` and
`near`. `steps` lists the same entries in another order, so that an expensive filter reads only the documents
that duplicate removal kept. Consecutive filters run in one pass over a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field

from shardkit.settings import Shorthand
from shardkit.writers.dedup.config import (
    DedupConfig,
    ExactDedupConfig,
    LinesDedupConfig,
    NearDedupConfig,
    UrlDedupConfig,
)
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.config import FilterEntry, entry_named

FilterPass = tuple[tuple[str, FilterSettings], ...]
"""The (name, settings) of all filters that run in one pass, in order, with profiles expanded."""


class StepEntry(FilterEntry):
    """An entry of `steps`: one key, which names a filter or a scheme of duplicate removal, with settings."""

    url: Annotated[UrlDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="Remove documents of equal URLs."
    )
    exact: Annotated[ExactDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="Remove equal texts."
    )
    lines: Annotated[LinesDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="Cut repeated lines out of documents."
    )
    near: Annotated[NearDedupConfig | None, Shorthand(switch=True, number="similarity")] = Field(
        default=None, description="Remove near-duplicates.", examples=[0.8]
    )

    @property
    def scheme(self) -> str | None:
        """The name of this step's scheme of duplicate removal; None if the step is a filter."""
        return next((name for name in DedupConfig.schemes() if getattr(self, name) is not None), None)

    def contents(self) -> list[dict[str, Any]]:
        """Return the step's settings that affect outputs as {name: settings}, one per filter of a profile."""
        if self.scheme is not None:
            return [{self.scheme: getattr(self, self.scheme).content()}]
        return [config.entry(name) for name, config in self.filters()]


def step_named(name: str) -> dict[str, object]:
    """Return the entry for a step given by its name only. Raises ValueError if no filter or scheme has it."""
    return {name: {}} if name in DedupConfig.schemes() else entry_named(name, "step", DedupConfig.schemes())


def filter_named(name: str) -> dict[str, object]:
    """Return the entry for a filter given by its name only. Raises ValueError if there is no such filter."""
    if name in DedupConfig.schemes():
        raise ValueError(
            f"there is no filter {name!r}; `dedup` has it, or `steps`, which lists filters and duplicate "
            "removal in the order in which they run"
        )
    return entry_named(name)


def moves_of(steps: Sequence[StepEntry]) -> tuple[FilterPass | str, ...]:
    """Return passes of filters and names of schemes, in order. The first item is a pass, perhaps empty."""
    moves: list[FilterPass | str] = [()]
    for step in steps:
        if step.scheme is not None:
            moves.append(step.scheme)
            continue
        before = moves[-1]
        if isinstance(before, str):
            moves.append(step.filters())
        else:
            moves[-1] = (*before, *step.filters())
    return tuple(moves)


def removal_of(steps: Sequence[StepEntry], given: DedupConfig) -> DedupConfig:
    """Return the settings `given` with the schemes of `steps`. Raises ValueError if they are out of order."""
    schemes = DedupConfig.schemes()
    named = [step.scheme for step in steps if step.scheme is not None]
    places = [schemes.index(name) for name in named]
    for number, (before, place) in enumerate(pairwise(places)):
        if place <= before:
            raise ValueError(
                f"steps: {named[number + 1]} stands behind {named[number]}; each way to find duplicates runs "
                f"once, in the order {', '.join(schemes)}, with filters anywhere between"
            )
    return given.model_copy(update={step.scheme: getattr(step, step.scheme) for step in steps if step.scheme})
