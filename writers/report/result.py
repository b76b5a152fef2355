"""The result of a build: the dataset, and the times of its stages.

Times come from the progress reports and are in the result only. A dataset does not depend on the machines
that built it, so its card and report have no times, which belong to one run on one machine.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardkit.card import DatasetCard, FunnelStep
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.display import Described, Facts, counted
from shardkit.errors import BuildError
from shardkit.progress import Listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.units import format_bytes
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.report.costs import StepCost, better_place
from shardkit.writers.rows.ledger import Ledger
from shardkit.writers.stages.publish import REPORT_NAME

_MOST_LOSSES = 8  # maximum number of steps listed one by one: those that removed the most bytes
_MOST_STEPS = 3


@dataclass(frozen=True)
class StageTime:
    """Times and counts of one stage in this run. `start` is in seconds since the build began; stages overlap.

    `documents` and `bytes` of text were read in this run; 0 for stages that do not count them. `step` is the
    step of the build that the stage belongs to. `cpu_seconds` are those of all tasks that ran, together.
    """

    stage: str
    start: float
    seconds: float
    tasks: int = 0
    tasks_reused: int = 0
    documents: int = 0
    bytes: int = 0
    step: str = ""
    cpu_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of text read per second; 0 for stages that do not count text."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {name: round(fields[name], 3) for name in ("start", "seconds", "cpu_seconds")}


class StageClock:
    """A listener that passes reports on to `listener`, and stores each stage's start and last report."""

    def __init__(self, listener: Listener[StageProgress], begin: float) -> None:
        self._listener = listener
        self._begin = begin  # start of the build by time.perf_counter
        self._starts: dict[str, float] = {}
        self._last: dict[str, StageProgress] = {}

    def __enter__(self) -> Self:
        self._listener.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.__exit__(kind, error, trace)

    def __call__(self, progress: StageProgress, /) -> None:
        elapsed = time.perf_counter() - self._begin
        self._starts.setdefault(progress.stage, max(0.0, elapsed - progress.seconds))
        self._last[progress.stage] = progress
        self._listener(progress)

    def times(self, seconds: Mapping[str, float]) -> tuple[StageTime, ...]:
        """Return the times of all stages in order of their start; call it at the end of publishing.

        `seconds` are the seconds per stage that the build measured. They include stages without tasks: the
        scan, which is first, and publishing, which is last.
        """
        elapsed = time.perf_counter() - self._begin
        found = [
            StageTime(
                stage,
                self._starts[stage],
                last.seconds,
                last.tasks,
                last.tasks_reused,
                last.documents,
                last.bytes,
                last.step,
                last.cpu_seconds,
            )
            for stage, last in self._last.items()
        ]
        for stage in seconds.keys() - self._last.keys():
            start = 0.0 if stage == "scan" else max(0.0, elapsed - seconds[stage])
            found.append(StageTime(stage, start, seconds[stage]))
        return tuple(sorted(found, key=lambda one: (one.start, one.stage)))


@dataclass(frozen=True)
class Ran:
    """Statistics of a run: seconds by stage, the number of tasks and of reused tasks, times of stages."""

    seconds: Mapping[str, float]
    tasks: int
    tasks_reused: int
    stages: tuple[StageTime, ...]
    costs: tuple[StepCost, ...] = ()


@dataclass(frozen=True, repr=False)
class BuildResult(Described):
    """The result of a build. Times are those of this run; `tasks_reused` of its `tasks` were finished before.

    `stages` has the start and the counts of each stage, ordered by start; stages overlap. It is empty if the
    dataset was `up_to_date`. `steps` has the documents that each step removed, in the order of the pipeline;
    the rules of a filter are one step.
    """

    location: str
    """The folder or the URL of the dataset."""
    fingerprint: str
    format: str
    samples: int
    shards: int
    sequence_length: int
    """Tokens per row; 0 for text, and for documents that are not packed."""
    tokens: int
    padding: int
    funnel: Ledger
    seconds: Mapping[str, float]
    total_seconds: float
    tasks: int
    tasks_reused: int
    up_to_date: bool = False
    stages: tuple[StageTime, ...] = ()
    costs: tuple[StepCost, ...] = ()
    steps: tuple[FunnelStep, ...] = ()
    others: tuple[BuildResult, ...] = ()
    """The other datasets of a recipe with several outputs or a split, in the recipe's order."""

    @classmethod
    def of_card(
        cls, location: str, card: DatasetCard, total_seconds: float, ran: Ran | None = None
    ) -> BuildResult:
        """Create the result for the dataset with this card; `ran` is None if the dataset was up to date."""
        funnel, data = card.funnel, card.data
        return cls(
            location,
            fingerprint=card.fingerprint,
            format=card.format,
            samples=card.samples,
            shards=card.shards,
            sequence_length=data.get("sequence_length") or 0,
            tokens=data.get("tokens") or 0,
            padding=data.get("padding") or 0,
            funnel=Ledger(funnel.read, funnel.kept, funnel.dropped, funnel.quarantined),
            seconds={"scan": total_seconds} if ran is None else dict(ran.seconds),
            total_seconds=total_seconds,
            tasks=0 if ran is None else ran.tasks,
            tasks_reused=0 if ran is None else ran.tasks_reused,
            up_to_date=ran is None,
            stages=() if ran is None else ran.stages,
            costs=() if ran is None else ran.costs,
            steps=tuple(card.funnel_steps()),
        )

    def open(self, *, storage: StorageOptions | None = None) -> Dataset:
        """Open the dataset with `open_dataset`; `storage` has the settings of stores."""
        return open_dataset(self.location, storage=storage)

    @property
    def output(self) -> Path:
        """The folder of the dataset; raises BuildError if the dataset is remote."""
        if is_remote(self.location):
            raise BuildError(f"{self.location} is not a folder on this machine; use BuildResult.location")
        return Path(self.location)

    @property
    def text_bytes_per_second(self) -> float:
        """Bytes of UTF-8 text read per second of the whole build."""
        return self.funnel.read.bytes / self.total_seconds if self.total_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens written per second of the whole build."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return (
            {"output": self.location}
            | {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "location"}
            | {
                "funnel": self.funnel.to_dict(),
                "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
                "stages": [stage.to_dict() for stage in self.stages],
                "costs": [asdict(cost) for cost in self.costs],
                "steps": [asdict(step) for step in self.steps],
                "others": [other.to_dict() for other in self.others],
                "total_seconds": round(self.total_seconds, 3),
                "text_bytes_per_second": round(self.text_bytes_per_second),
                "tokens_per_second": round(self.tokens_per_second),
            }
        )

    def describe(self) -> tuple[str, Facts]:
        """Return the title and the facts to display: the funnel, sizes, places and next steps."""
        losses = [step for step in self.steps if step.lost_documents or step.lost_bytes]
        most = len(losses) if len(losses) == _MOST_LOSSES + 1 else _MOST_LOSSES  # never "1 other step"
        shown = {id(s) for s in sorted(losses, key=lambda s: -abs(s.lost_bytes))[:most]}
        read, kept = self.funnel.read, self.funnel.kept
        facts = [("read", f"{counted(read.documents, 'document')}, {format_bytes(read.bytes)} of text")]
        facts += [
            (step.label, _lost(step.lost_documents, step.lost_bytes, read.documents))
            for step in losses
            if id(step) in shown
        ]
        if others := [step for step in losses if id(step) not in shown]:
            lost = sum(step.lost_documents for step in others), sum(step.lost_bytes for step in others)
            facts.append((f"{len(others)} other steps", _lost(*lost, read.documents)))
        place = shlex.quote(self.location)
        facts.append(("kept", f"{counted(kept.documents, 'document')}, {format_bytes(kept.bytes)} of text"))
        next_steps = [("next", f"shardkit view {place} (in the browser), or: shardkit info {place}")]
        if not self.sequence_length:
            facts.append(("written", f"{counted(kept.documents, 'document')} in {self._shards()}"))
        else:
            facts.append(
                ("rows", f"{self.samples:,}, each of {self.sequence_length:,} tokens, in {self._shards()}")
            )
            next_steps += [
                ("", f"import shardkit as sk; dataset = sk.open({self.location!r})"),
                ("", "loader = sk.StreamingLoader(dataset, batch_size=8)"),
            ]
        if self.tokens:
            share = 100 * self.padding / max(1, self.tokens + self.padding)
            facts.append(("tokens", f"{self.tokens:,}, and {share:.2f}% padding"))
        for other in self.others:
            rows, written = other.sequence_length, other.funnel.kept.documents
            size = f"{counted(other.samples, 'row')}" if rows else f"{counted(written, 'document')}"
            facts.append(("and", f"{other.location}: {size}, in {other._shards()}"))
        return f"Dataset {self.location}", [
            *facts,
            ("time", self._time()),
            *self._costs(),
            ("report", f"{self.location}/{REPORT_NAME}"),
            *next_steps,
        ]

    def _costs(self) -> Facts:
        filters = [cost for cost in self.costs if cost.seconds and cost.seconds >= 1 and not cost.is_global]
        filters.sort(key=lambda cost: -(cost.seconds or 0.0))
        shown = [f"{cost.step} {cost.seconds:,.0f} s" for cost in filters[:_MOST_STEPS]]
        advice = better_place(self.costs)
        facts = [("filters", f"CPU of all workers: {', '.join(shown)}")] if shown else []
        facts += [(cost.step, cost.describe_spent()) for cost in self.costs if cost.spent]
        return [*facts, ("order", advice)] if advice else facts

    def _shards(self) -> str:
        return f"{counted(self.shards, 'shard')} ({self.format})"

    def _time(self) -> str:
        if self.up_to_date:
            return "up to date: nothing to do"
        reused = f", {self.tasks_reused:,} of {self.tasks:,} tasks reused" if self.tasks_reused else ""
        spans: dict[str, tuple[float, float]] = {}
        for stage in self.stages:
            if step := stage.step:
                start, end = spans.get(step, (stage.start, 0.0))
                spans[step] = min(start, stage.start), max(end, stage.start + stage.seconds)
        longest = sorted(((end - start, step) for step, (start, end) in spans.items()), reverse=True)
        named = ", ".join(f"{step} {seconds:.1f} s" for seconds, step in longest[:_MOST_STEPS])
        return f"{self.total_seconds:.1f} s{reused}; {named}"


def _lost(documents: int, text_bytes: int, read: int) -> str:
    """Format what a step removed: "-1,234 (5.6%)" for documents, or "-7.8 MB of text" if it removed none."""
    if not documents:
        sign = "+" if text_bytes < 0 else "-"
        return f"{sign}{format_bytes(abs(text_bytes))} of text"
    return f"-{documents:,} ({100 * documents / max(1, read):.1f}%)"
