"""The steps of a recipe in order: passes of filters, and between them steps over all documents.

`filters` and `dedup` are short for one order: all filters first, then the schemes `url`, `exact`, `lines`,
`near` and `semantic`. `steps` lists the same entries in another order, also repeatedly, so that an expensive
filter reads only the documents that duplicate removal and `sample` left. Consecutive filters run in one pass
over a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shardkit.settings import Shorthand, StrictModel
from shardkit.writers.dedup.config import DedupConfig, DedupSchemes
from shardkit.writers.filters.ask import AskConfig
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.by_language import ByLanguage
from shardkit.writers.filters.config import FilterEntry, entry_named
from shardkit.writers.filters.fasttext import LanguageConfig
from shardkit.writers.recipe.inputs import GroupConfig
from shardkit.writers.recipe.outputs import SampleConfig, SplitConfig, short_split

FilterPass = tuple[tuple[str, FilterSettings], ...]
"""The (name, settings) of all filters that run in one pass, in order, with profiles expanded."""


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """A step over all documents: a scheme of duplicate removal, or `sample`.

    It is the `nth` step of this name in the recipe, from 1.
    """

    name: str
    settings: Any
    nth: int = 1


Move = FilterPass | GlobalStep
SAMPLE = "sample"
_ONCE = {  # schemes that cannot be repeated, with the reason
    "url": "its keys are computed for all documents at once",
    "semantic": "the vectors of documents are computed once",
}
_LAST = {  # steps that no other step may follow, except those listed after them here
    "group": "documents are joined when rows are packed, and steps judge and compare single documents",
    "split": "a document that a later step removes would be missing from its part",
}


class StepEntry(FilterEntry, DedupSchemes):
    """An entry of `steps`: one key with settings, which names a filter, or a step over all documents."""

    sample: Annotated[SampleConfig | None, Shorthand(text="share", number="share")] = Field(
        default=None,
        description="Keep a share or a number of the documents of each source, so that later steps read only "
        "these.",
        examples=["10%", {"documents": "10M", "by": "topic"}],
    )
    group: Annotated[GroupConfig | None, Shorthand(text="by")] = Field(
        default=None,
        description="As `group` of the recipe; no step but `split` may follow.",
        examples=["repo"],
    )
    split: Annotated[SplitConfig | None, BeforeValidator(short_split)] = Field(
        default=None,
        description="As `split` of the recipe; no step may follow.",
        examples=[{"validation": "0.1%"}],
    )

    @property
    def over_all(self) -> str | None:
        """The name of this step over all documents; None if the step is a filter."""
        return next((name for name in OVER_ALL if getattr(self, name) is not None), None)

    def scaled(self, share: float) -> StepEntry:
        """Return the step for a sample of `share` of the documents."""
        sample = self.sample
        return self if sample is None else self.model_copy(update={"sample": sample.scaled(share)})

    def contents(self) -> list[dict[str, Any]]:
        """Return the settings that affect outputs as {name: settings}, one per filter of a profile.

        `group` and `split` have none here: they are keys of the recipe, too.
        """
        if (name := self.over_all) is not None:
            return [] if name in _LAST else [{name: getattr(self, name).content()}]
        return [config.entry(name) for name, config in self.filters()]


OVER_ALL = (*DedupSchemes.schemes(), SAMPLE, *_LAST)


def step_named(name: str) -> dict[str, object]:
    """Return the entry for a step given by its name only. Raises ValueError if no step has it."""
    return {name: {}} if name in DedupSchemes.schemes() else entry_named(name, "step", OVER_ALL)


def filter_named(name: str) -> dict[str, object]:
    """Return the entry for a filter given by its name only. Raises ValueError if there is no such filter."""
    if name in OVER_ALL:
        raise ValueError(
            f"there is no filter {name!r}; `dedup` has it, or `steps`, which lists filters and duplicate "
            "removal in the order in which they run"
        )
    return entry_named(name)


def moves_of(steps: Sequence[StepEntry]) -> tuple[Move, ...]:
    """Return passes of filters and steps over all documents, in order; first a pass, perhaps empty.

    A pass writes the remaining documents anew, and the keys that `exact` compares. So an empty pass is
    inserted before `exact` if a step other than `url` follows the last pass, and before a step that is
    repeated without a pass between.
    """
    moves: list[Move] = [()]
    numbers: Counter[str] = Counter()
    since: list[str] = []  # names of the steps since the last pass
    for step in steps:
        name = step.over_all
        if name is None:
            before = moves[-1]
            moves[-1:] = [before, step.filters()] if since else [(*before, *step.filters())]  # type: ignore[misc]
            since = []
        elif name not in _LAST:
            if name in since or (name == "exact" and since not in ([], ["url"])):
                moves.append(())
                since = []
            numbers[name] += 1
            since.append(name)
            moves.append(GlobalStep(name, getattr(step, name), numbers[name]))
    return tuple(moves)


def removal_of(steps: Sequence[StepEntry], given: DedupConfig) -> DedupConfig:
    """Return `given` with the schemes of `steps`; of a repeated one, the last settings.

    Raises ValueError if the order is not possible.
    """
    found: dict[str, Any] = {}
    last: str | None = None
    for step in steps:
        name = step.over_all
        if last is not None and name not in [*_LAST][[*_LAST].index(last) + 1 :]:
            follower = name or step.filters()[0][0]
            raise ValueError(f"steps: {follower} cannot come after {last}: {_LAST[last]}")
        if name in _LAST:
            last = name
        elif name is not None:
            if name in found and name in _ONCE:
                raise ValueError(f"steps: {name} is listed twice; {_ONCE[name]}")
            if name == "url" and found:
                raise ValueError(
                    f"steps: url must come before {next(iter(found))}; only filters may precede it, since it "
                    "compares all documents that have a URL"
                )
            found[name] = getattr(step, name)
    found.pop(SAMPLE, None)
    return given.model_copy(update=found)


def ends_of(steps: Sequence[StepEntry]) -> dict[str, StrictModel]:
    """Return the settings of `group` and `split` that `steps` has, by name."""
    return {name: getattr(step, name) for step in steps if (name := step.over_all) in _LAST}


def fields_made(move: Move) -> set[str]:
    """Return the fields that documents get from a pass of filters or a step over all documents."""
    if isinstance(move, GlobalStep):
        field = move.settings.field if move.name == "semantic" else None
        return set() if field is None else {field}
    found: set[str] = set()
    for _, config in move:
        if isinstance(config, LanguageConfig):
            found.add("language")
        elif isinstance(config, BucketsConfig):
            found.add(config.field)
        found |= {*config.added_fields}
    return found


def is_short(moves: Sequence[Move]) -> bool:
    """Whether `filters` and `dedup` express this order: all filters first, then schemes in default order."""
    names = [move.name if isinstance(move, GlobalStep) else "" for move in moves[1:]]
    places = {name: number for number, name in enumerate(DedupSchemes.schemes())}
    behind = [places.get(name, -1) for name in names]
    return -1 not in behind and all(first < second for first, second in pairwise(behind))


def of_schemes(dedup: DedupConfig) -> tuple[GlobalStep, ...]:
    """Return the schemes that are set, in their default order."""
    return tuple(GlobalStep(name, getattr(dedup, name)) for name in dedup.schemes() if name in dedup.asked)


def cheapest(filters: FilterPass, dedup: DedupConfig) -> tuple[Move, ...]:
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
    exact, *later = of_schemes(dedup)
    return stays, exact, *([behind] if behind else []), *later


def _is_read(config: FilterSettings, later: FilterPass) -> bool:
    """Whether `buckets` among later filters reads the score of an `ask`."""
    if not isinstance(config, AskConfig) or config.score is None:
        return False
    read = [score.column for _, one in later if isinstance(one, BucketsConfig) for score in one.scores]
    return config.score.name in read
