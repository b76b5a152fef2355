"""Checks the usage logs of a real run: all ranks present, every step once, every sample once an epoch.

A run here is what all ranks deliver between a start (or a loaded state) and the next one. Logs of one run
have the same position, world size and batch size and began at about the same time: the clocks of machines
must agree better than the time between a crash and the next start. A run that begins at position p supersedes
everything that earlier runs delivered from p on: those steps were lost in the crash and are replayed.

The steps that count, over all runs and restarts, go to one `Checker` in the order of their positions, so that
a run on 8 ranks that was killed and resumed on 3 is checked as one. What is known to be missing is named and
skipped; epochs that it touches are not proved.

Replicas of a rank (tensor parallel peers, say) log the same steps if they could not agree on one of them to
log. Their heads say so, by different ranks in the world. Their logs are compared, and count as one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardkit.datasets.dataset import Dataset
from shardkit.errors import ShardError
from shardkit.formats.usage_log import SUFFIX, RunHead, Section, scan
from shardkit.order.exclusions import Exclusions
from shardkit.order.run_settings import RunSettings
from shardkit.progress import counting
from shardkit.tools.audit.checker import BLOCK_POSITIONS, Checker
from shardkit.tools.audit.expectation import Expectation
from shardkit.tools.audit.findings import AuditReport, Finding, Findings
from shardkit.tools.audit.sums import SampleHash

MAX_APART = 16  # steps that a killed run's ranks may be apart: more than any loop or prefetcher runs ahead


@dataclass(slots=True)
class Run:
    """One run of all ranks: their logs, and the position from which a later run supersedes it."""

    start: int
    world_size: int
    batch_size: int
    time_ns: int
    sections: dict[int, Section] = field(default_factory=dict)
    twins: list[Section] = field(default_factory=list)
    """What replicas of these ranks logged besides."""
    stop: int | None = None
    number: int = 0

    @property
    def settings(self) -> RunSettings:
        """The settings of its lowest rank."""
        return self.sections[min(self.sections)].head.settings

    @property
    def missing(self) -> list[int]:
        """Ranks without a log."""
        return [rank for rank in range(self.world_size) if rank not in self.sections]

    @property
    def last(self) -> int:
        """The position of the last step that any rank has."""
        return max(section.last for section in self.sections.values())

    def accepts(self, head: RunHead) -> bool:
        """Whether a log is of this run: of a rank that has none yet, or of a replica that has none yet."""
        if (self.start, self.world_size, self.batch_size) != (
            head.position,
            head.world_size,
            head.batch_size,
        ):
            return False
        if (section := self.sections.get(head.rank)) is None:
            return True
        if head.replica is None or section.head.replica is None:
            return False
        logged = [each.head.replica for each in self.twins if each.head.rank == head.rank]
        return head.replica not in [section.head.replica, *logged]

    def __str__(self) -> str:
        return f"run {self.number} ({self.world_size} x {self.batch_size} from position {self.start:,})"


def _find_runs(folder: Path, findings: Findings) -> list[Run]:
    """The runs in a folder's logs, by time; ShardError if there are none."""
    if not folder.is_dir():
        raise ShardError(folder, "is not a folder of usage logs")
    files = [scan(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    for file in files:
        if file.damage is not None:
            findings.add(Finding(kind="log", problem=f"{file.path.name}: {file.damage}"))
        if file.cut:
            findings.notices.append(
                f"{file.path.name}: its last record was cut short (a killed process): {file.cut:,} bytes are "
                "left out"
            )
    runs = _grouped(section for file in files for section in file.sections if section.count)
    if not runs:
        raise ShardError(folder, f"holds no usage logs (rank-*{SUFFIX}) with a step in them")
    stop: int | None = None
    for run in reversed(runs):
        run.stop = stop
        stop = run.start if stop is None else min(stop, run.start)
    return runs


def _grouped(sections: Iterable[Section]) -> list[Run]:
    runs: list[Run] = []
    for section in sorted(sections, key=lambda section: section.head.time_ns):
        head = section.head
        fitting = [run for run in runs if run.accepts(head)]
        # If a run crashed at once, two runs start alike and one may lack a rank: take the nearest in time.
        run = min(fitting, key=lambda run: abs(run.time_ns - head.time_ns), default=None)
        if run is None:
            run = Run(head.position, head.world_size, head.batch_size, time_ns=head.time_ns)
            runs.append(run)
        if head.rank in run.sections:
            run.twins.append(section)
        else:
            run.sections[head.rank] = section
    for number, run in enumerate(runs, 1):
        run.number = number
    return runs


def audit_logs(
    folder: Path,
    datasets: Sequence[Dataset],
    exclusions: Sequence[Exclusions | None],
    *,
    key: bytes | None = None,
    progress: bool = True,
) -> AuditReport:
    """Check the logs in `folder` of a run over `datasets`, the loader's streams in their order.

    `key`: of the sums, random by default. StateError if the logs are of other datasets; ShardError if there
    are none.
    """
    began = time.perf_counter()
    findings = Findings()
    runs = _find_runs(folder, findings)
    settings = runs[-1].settings
    expected = Expectation(settings, datasets, exclusions)
    report = AuditReport("logs", str(folder), settings.to_dict(), findings)
    first = min(run.start for run in runs)
    if first:
        findings.notices.append(f"the logs begin at position {first:,}: what came before is not checked")
    checker = Checker(expected, report, SampleHash(key), "logs", runs=len(runs), position=first)
    superseded = 0
    with counting("audit", None, "samples", progress=progress) as advance:
        for run in runs:
            _unite_twins(run, findings)
            before = checker.walk.steps
            if run.stop is not None and run.stop <= run.start:
                findings.notices.append(
                    f"{run} was begun anew at position {run.stop:,}: nothing of it counts"
                )
            else:
                _check_settings(run, expected, findings)
                _LogRun(run, checker, advance).check()
            stop = run.stop
            replayed = 0 if stop is None else max(_count_from(each, stop) for each in run.sections.values())
            superseded += replayed
            facts: dict[str, object] = {"run": run.number, "start": run.start, "stop": stop}
            facts |= {"world_size": run.world_size, "batch_size": run.batch_size, "ranks": len(run.sections)}
            facts |= {"steps": checker.walk.steps - before, "superseded": replayed}
            report.runs.append(facts)
    checker.finish(seconds=time.perf_counter() - began, superseded=superseded)
    return report


def _unite_twins(run: Run, findings: Findings) -> None:
    """Compare logs of replicas with each other, and keep the longest of each rank."""
    for twin in run.twins:
        rank = twin.head.rank
        section = run.sections[rank]
        if (step := _first_difference(section, twin)) is not None:
            problem = (
                f"{run}: {section.path.name} and {twin.path.name}, logs of replicas of one rank, differ from "
                f"their step {step + 1:,} on"
            )
            findings.add(Finding(kind="replica", problem=problem, rank=rank))
        run.sections[rank] = max(section, twin, key=lambda each: each.count)


def _first_difference(one: Section, other: Section) -> int | None:
    """The first step, numbered in the logs, that two logs have differently; None if there is none."""
    if one.head.settings != other.head.settings:
        return 0
    block = max(1, BLOCK_POSITIONS // one.head.batch_size)
    both = min(one.count, other.count)
    for first in range(0, both, block):
        steps = min(block, both - first)
        here, there = one.read(first, steps), other.read(first, steps)
        differs = (here[0] != there[0]) | (here[1] != there[1]).any(axis=1)
        if differs.any():
            return first + int(differs.argmax())
    return None


def _check_settings(run: Run, expected: Expectation, findings: Findings) -> None:
    position = run.last if run.stop is None else min(run.last, run.stop)
    for line in _differences(run.settings, expected.settings, position):
        findings.add(Finding(kind="settings", problem=f"{run}, against the last run: {line}"))
    for rank, section in sorted(run.sections.items()):
        for line in _differences(run.settings, section.head.settings, run.start + 1):
            problem = f"{run}: against rank {min(run.sections)}: {line}"
            findings.add(Finding(kind="settings", problem=problem, rank=rank))


def _differences(settings: RunSettings, later: RunSettings, position: int) -> list[str]:
    return [f"{each.what} {each.before} became {each.now}" for each in settings.differences(later, position)]


def _count_from(section: Section, position: int) -> int:
    """How many of its steps begin at `position` or later."""
    steps = range(section.count)
    return section.count - bisect_left(steps, position, key=lambda step: int(section.read(step, 1)[0][0]))


class _LogRun:
    """One run's steps, up to where a later run supersedes them."""

    def __init__(self, run: Run, checker: Checker, advance: Callable[[int], None]) -> None:
        self._run, self._checker, self._advance = run, checker, advance
        self._batch = run.world_size * run.batch_size

    def check(self) -> None:
        """Pass all steps that count to the checker."""
        run, checker = self._run, self._checker
        end = run.last if run.stop is None else run.stop
        if run.missing:
            names = ", ".join(map(str, run.missing[:8])) + ("…" if len(run.missing) > 8 else "")
            problem = f"{run}: no log of rank {names}: its steps up to position {end:,} are not checked"
            checker.found("rank", problem, rank=run.missing[0])
            checker.skip(max(checker.position, end))
            return
        if not self._is_begun():
            return
        firsts = {rank: s.count - _count_from(s, checker.position) for rank, s in run.sections.items()}
        self._follow(firsts)
        if run.stop is None:
            self._check_ends()
        elif checker.position < run.stop:
            checker.skip(run.stop)
        elif checker.position > run.stop:
            problem = f"{run}: the next run begins at position {run.stop:,}, inside of a step of this one"
            checker.found("resume", problem)

    def _is_begun(self) -> bool:
        """Whether a step counts; finds first steps elsewhere than the state said, and gaps before them."""
        run, checker = self._run, self._checker
        due = checker.expected.tiling.settle(run.start, self._batch)
        for rank, section in sorted(run.sections.items()):
            if section.first != due:
                problem = (
                    f"{run}: its state said position {run.start:,}, its first step is at {section.first:,} "
                    f"({'skipping' if section.first > due else 'repeating'} "
                    f"{abs(section.first - due):,} samples)"
                )
                checker.found("resume", problem, rank=rank, position=run.start)
        start = max(section.first for section in run.sections.values())
        if checker.expected.tiling.settle(checker.position, self._batch) < start:
            problem = (
                f"{run}: positions {checker.position:,} to {start - 1:,} "
                f"({start - checker.position:,} samples) were delivered by no run"
            )
            lost = checker.expected.order.locate((checker.position, 1)).sample_id
            checker.found("gap", problem, position=checker.position, sample=int(lost[0]))
            checker.skip(start)
        return run.stop is None or checker.position < run.stop

    def _follow(self, firsts: dict[int, int]) -> None:
        run, checker, tiling = self._run, self._checker, self._checker.expected.tiling
        numbers = dict(firsts)
        block = max(1, BLOCK_POSITIONS // self._batch)
        left = min(section.count - numbers[rank] for rank, section in run.sections.items())
        while left and (run.stop is None or checker.position < run.stop):
            most = min(block, left)
            if run.stop is not None:
                most = min(most, -(-(run.stop - checker.position) // self._batch))
            steps = tiling.steps(checker.position, self._batch, most)
            due = steps.start + np.arange(steps.count, dtype=np.int64) * steps.size
            ids = np.empty((steps.count, run.world_size, run.batch_size), dtype=np.int64)
            good = steps.count
            for rank, section in run.sections.items():
                positions, ids[:, rank] = section.read(numbers[rank], steps.count)
                wrong = np.flatnonzero(positions != due)
                if len(wrong) and wrong[0] < good:
                    good = int(wrong[0])
                    problem = f"{run}: a step at position {positions[good]:,} where {due[good]:,} is due"
                    checker.found("steps", problem, rank=rank, position=int(due[good]))
            if run.stop is not None:
                good = min(good, int((due < run.stop).sum()))
            if good:
                checker.deliver(ids[:good])
                self._advance(good * self._batch)
            if good < steps.count:
                return
            left -= steps.count
            for rank in numbers:
                numbers[rank] += steps.count
        if run.stop is not None and checker.position < run.stop:
            self._name_short_logs()

    def _name_short_logs(self) -> None:
        """The ranks whose logs end before a later run takes over."""
        run, checker = self._run, self._checker
        for rank, section in sorted(run.sections.items()):
            if section.last < checker.position:
                problem = (
                    f"{run}: its log ends with the step at position {section.last:,}, but the next run "
                    f"begins at {run.stop:,}: what was delivered between is not known"
                )
                checker.found("rank", problem, rank=rank, position=checker.position)

    def _check_ends(self) -> None:
        run, checker = self._run, self._checker
        counts = {rank: section.count for rank, section in sorted(run.sections.items())}
        most = max(counts.values())
        apart = most - min(counts.values())
        if not apart:
            return
        short = [rank for rank, count in counts.items() if count < most]
        if apart > MAX_APART or all(section.ended for section in run.sections.values()):
            problem = f"{run}: its log ends {apart:,} steps before that of other ranks"
            checker.found("rank", problem, rank=short[0], position=checker.position)
            return
        checker.findings.notices.append(
            f"{run}: the last {apart:,} step{'s' if apart > 1 else ''} came to some ranks only (they were "
            "stopped): left out"
        )
