"""The steps of a recipe in order: passes of filters, and the schemes of duplicate removal between them.

`filters` and `dedup` are short for one order: all filters first, then the schemes `url`, `exact`, `lines` and
`near`. `steps` lists the same entries in another order, so that an expensive filter reads only the documents
that duplicate removal kept. Consecutive filters run in one pass over a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shardkit.writers.dedup.config import DedupConfig, DedupSchemes
from shardkit.writers.filters.ask import AskConfig
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.by_language import ByLanguage
from shardkit.writers.filters.config import FilterEntry, entry_named
from shardkit.writers.filters.fasttext import LanguageConfig

FilterPass = tuple[tuple[str, FilterSettings], ...]
"""The (name, settings) of all filters that run in one pass, in order, with profiles expanded."""


class StepEntry(FilterEntry, DedupSchemes):
    """An entry of `steps`: one key, which names a filter or a scheme of duplicate removal, with settings."""

    @property
    def scheme(self) -> str | None:
        """The name of this step's scheme of duplicate removal; None if the step is a filter."""
        return next(iter(self.asked), None)

    def contents(self) -> list[dict[str, Any]]:
        """Return the step's settings that affect outputs as {name: settings}, one per filter of a profile."""
        if self.scheme is not None:
            return [{self.scheme: getattr(self, self.scheme).content()}]
        return [config.entry(name) for name, config in self.filters()]


def step_named(name: str) -> dict[str, object]:
    """Return the entry for a step given by its name only. Raises ValueError if no filter or scheme has it."""
    return {name: {}} if name in DedupSchemes.schemes() else entry_named(name, "step", DedupSchemes.schemes())


def filter_named(name: str) -> dict[str, object]:
    """Return the entry for a filter given by its name only. Raises ValueError if there is no such filter."""
    if name in DedupSchemes.schemes():
        raise ValueError(
            f"there is no filter {name!r}; `dedup` has it, or `steps`, which lists filters and duplicate "
            "removal in the order in which they run"
        )
    return entry_named(name)


def moves_of(steps: Sequence[StepEntry]) -> tuple[FilterPass | str, ...]:
    """Return passes of filters and names of schemes, in order. The first item is a pass, perhaps empty.

    `exact` compares keys that a pass writes. If a step other than `url` follows the last pass, an empty pass
    is inserted before `exact`.
    """
    moves: list[FilterPass | str] = [()]
    for step in steps:
        before = moves[-1]
        if step.scheme is None:
            moves[-1:] = [before, step.filters()] if isinstance(before, str) else [(*before, *step.filters())]
            continue
        if step.scheme == "exact" and isinstance(before, str) and before != "url":
            moves.append(())
        moves.append(step.scheme)
    return tuple(moves)


def removal_of(steps: Sequence[StepEntry], given: DedupConfig) -> DedupConfig:
    """Return `given` with the schemes of `steps`. Raises ValueError if their order is not possible."""
    found: dict[str, Any] = {}
    for step in steps:
        if (scheme := step.scheme) is None:
            continue
        settings = getattr(step, scheme)
        if scheme == "url" and found:
            raise ValueError(f"steps: url must come before {next(iter(found))}; only filters may precede it")
        if scheme in found and scheme != "exact":
            raise ValueError(f"steps: {scheme} is listed twice; only exact can be repeated")
        if found.setdefault(scheme, settings) != settings:
            raise ValueError("steps: exact is listed twice with different settings; use the same ones")
    return given.model_copy(update=found)


def is_short(moves: Sequence[FilterPass | str]) -> bool:
    """Whether `filters` and `dedup` express this order: all filters first, then schemes in default order."""
    behind = [DedupSchemes.schemes().index(move) if isinstance(move, str) else -1 for move in moves[1:]]
    return -1 not in behind and all(first < second for first, second in pairwise(behind))


def cheapest(filters: FilterPass, dedup: DedupConfig) -> tuple[FilterPass | str, ...]:
    """Return the moves of `filters` and `dedup` with slow filters behind `exact`; the same documents survive.

    A filter is moved if it `can_wait`, if no editor follows it, which would change what it judges, and if no
    later filter needs the languages or the score that it finds. Raises ValueError if that would change what
    survives.
    """
    if dedup.exact is None or dedup.exact.text != "raw":
        raise ValueError(
            "order: cheapest needs dedup.exact with text: raw: only equal texts are judged alike"
        )
    if dedup.url is not None:
        raise ValueError(
            "order: cheapest is not possible with dedup.url: if a filter drops the document that is kept of "
            "several with one URL, another one would stay in its place; list the steps in `steps`"
        )
    editors = [number for number, (_, config) in enumerate(filters) if config.may_edit]
    needs_languages = any(isinstance(config, ByLanguage) for _, config in filters)
    first = 1 + editors[-1] if editors else 0
    waits = [
        number
        for number, (_, config) in enumerate(filters)
        if number >= first
        and config.can_wait
        and not (needs_languages and isinstance(config, LanguageConfig))
        and not _is_read(config, filters[number + 1 :])
    ]
    stays = tuple(one for number, one in enumerate(filters) if number not in waits)
    behind = tuple(filters[number] for number in waits)
    later = tuple(name for name in dedup.schemes() if name in dedup.asked and name != "exact")
    return stays, "exact", *([behind] if behind else []), *later


def _is_read(config: FilterSettings, later: FilterPass) -> bool:
    """Whether `buckets` among later filters reads the score of an `ask`."""
    if not isinstance(config, AskConfig) or config.score is None:
        return False
    read = [score.column for _, one in later if isinstance(one, BucketsConfig) for score in one.scores]
    return config.score.name in read
