"""Checks the usage logs of a real run: all ranks present, every step once, every sample once per epoch.

A run here is the steps of all ranks between a start (or a loaded state) and the next one. Logs of one run
have the same position, world size and batch size and began at about the same time: the clocks of machines
must differ by less than the time between a crash and the next start. A run that begins at position p
supersedes all steps of earlier runs from p on: those steps were lost in the crash and are replayed.

The steps that count, over all runs and restarts, go to one `Checker` in the order of their positions, so that
a run on 8 ranks that was killed and resumed on 3 is checked as one. Ranges that are known to be missing are
reported and skipped, and the epochs that contain them are not proved.

Replicas of a rank (such as tensor parallel peers) all log the same steps if they could not agree on a single
one that logs. The heads of such logs contain the same rank, but different global ranks (`replica`). The logs
are compared, and count as one.
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

MAX_APART = 16  # maximum difference in logged steps of a killed run's ranks: more than a prefetcher is ahead


@dataclass(slots=True)
class Run:
    """One run: the logs of its ranks, and `stop`, the position from which a later run supersedes it."""

    start: int
    world_size: int
    batch_size: int
    time_ns: int
    sections: dict[int, Section] = field(default_factory=dict)
    twins: list[Section] = field(default_factory=list)
    """Further logs of the same ranks, written by their replicas."""
    stop: int | None = None
    number: int = 0

    @property
    def settings(self) -> RunSettings:
        """The settings in the log of the lowest rank."""
        return self.sections[min(self.sections)].head.settings

    @property
    def missing(self) -> list[int]:
        """The ranks without a log."""
        return [rank for rank in range(self.world_size) if rank not in self.sections]

    @property
    def last(self) -> int:
        """The position of the last step in any rank's log."""
        return max(section.last for section in self.sections.values())

    def accepts(self, head: RunHead) -> bool:
        """Return whether the log of `head` fits this run, which has no log of its rank or replica yet."""
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


def find_runs(folder: Path, findings: Findings) -> list[Run]:
    """Return the runs in a folder's logs, in order of time; raises ShardError if no log has a step."""
    if not folder.is_dir():
        raise ShardError(folder, "is not a folder of usage logs")
    files = [scan(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    for file in files:
        if file.damage is not None:
            findings.add(Finding(kind="log", problem=f"{file.path.name}: {file.damage}"))
        if file.cut:
            findings.notices.append(
                f"{file.path.name}: its last record is truncated (the process was killed); {file.cut:,} "
                "bytes are ignored"
            )
    runs = _grouped(section for file in files for section in file.sections if section.count)
    if not runs:
        raise ShardError(folder, f"has no usage logs (rank-*{SUFFIX}) that contain a step")
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
        # If a run crashes before its first checkpoint, the next one starts at the same position, and a rank's
        # log fits both: choose the run that is nearest in time.
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

    `key` is the key of the sums (default: random). Raises StateError if the logs belong to other datasets or
    exclusions, and ShardError if there are no logs.
    """
    began = time.perf_counter()
    findings = Findings()
    runs = find_runs(folder, findings)
    settings = runs[-1].settings
    expected = Expectation(settings, datasets, exclusions)
    report = AuditReport("logs", str(folder), settings.to_dict(), findings)
    first = min(run.start for run in runs)
    if first:
        findings.notices.append(f"the logs begin at position {first:,}: earlier steps are not checked")
    checker = Checker(expected, report, SampleHash(key), "logs", runs=len(runs), position=first)
    superseded = 0
    with counting("audit", None, "samples", progress=progress) as advance:
        for run in runs:
            _unite_twins(run, findings)
            before = checker.walk.steps
            if run.stop is not None and run.stop <= run.start:
                findings.notices.append(
                    f"{run} was replaced by a later run from position {run.stop:,}: none of its steps count"
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
    """Compare the logs of replicas of the same rank, and keep the longest log of each rank."""
    for twin in run.twins:
        rank = twin.head.rank
        section = run.sections[rank]
        if (step := _first_difference(section, twin)) is not None:
            problem = (
                f"{run}: {section.path.name} and {twin.path.name} are logs of replicas of one rank, but "
                f"differ from their step {step + 1:,} on"
            )
            findings.add(Finding(kind="replica", problem=problem, rank=rank))
        run.sections[rank] = max(section, twin, key=lambda each: each.count)


def _first_difference(one: Section, other: Section) -> int | None:
    """Return the first step (counted from 0 in the logs) that differs between two logs; None if equal."""
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
        findings.add(Finding(kind="settings", problem=f"{run}, compared with the last run: {line}"))
    for rank, section in sorted(run.sections.items()):
        for line in _differences(run.settings, section.head.settings, run.start + 1):
            problem = f"{run}, compared with rank {min(run.sections)}: {line}"
            findings.add(Finding(kind="settings", problem=problem, rank=rank))


def _differences(settings: RunSettings, later: RunSettings, position: int) -> list[str]:
    return [f"{each.what} {each.before} became {each.now}" for each in settings.differences(later, position)]


def _count_from(section: Section, position: int) -> int:
    """Return how many steps of a log begin at `position` or later."""
    steps = range(section.count)
    return section.count - bisect_left(steps, position, key=lambda step: int(section.read(step, 1)[0][0]))


class _LogRun:
    """Checks one run's steps, up to the position from which a later run supersedes them."""

    def __init__(self, run: Run, checker: Checker, advance: Callable[[int], None]) -> None:
        self._run, self._checker, self._advance = run, checker, advance
        self._batch = run.world_size * run.batch_size

    def check(self) -> None:
        """Pass the steps that no later run supersedes to the checker; add findings for incomplete logs."""
        run, checker = self._run, self._checker
        end = run.last if run.stop is None else run.stop
        if run.missing:
            names = ", ".join(map(str, run.missing[:8])) + ("…" if len(run.missing) > 8 else "")
            problem = f"{run}: no log of rank {names}; steps up to position {end:,} are not checked"
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
            problem = f"{run}: the next run begins at position {run.stop:,}, inside a step of this run"
            checker.found("resume", problem)

    def _is_begun(self) -> bool:
        """Return whether the run has steps that are not superseded.

        Adds findings for a wrong first step, and for positions before it that no run delivered.
        """
        run, checker = self._run, self._checker
        due = checker.expected.tiling.settle(run.start, self._batch)
        for rank, section in sorted(run.sections.items()):
            if section.first != due:
                problem = (
                    f"{run}: its state is at position {run.start:,}, but its first step at {section.first:,} "
                    f"({'skipping' if section.first > due else 'repeating'} "
                    f"{abs(section.first - due):,} samples)"
                )
                checker.found("resume", problem, rank=rank, position=run.start)
        start = max(section.first for section in run.sections.values())
        if checker.expected.tiling.settle(checker.position, self._batch) < start:
            problem = (
                f"{run}: positions {checker.position:,} to {start - 1:,} "
                f"({start - checker.position:,} samples) were not delivered by any run"
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
                    problem = (
                        f"{run}: a step is at position {positions[good]:,}, but should be at {due[good]:,}"
                    )
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
        """Add findings for ranks whose logs end before the next run begins."""
        run, checker = self._run, self._checker
        for rank, section in sorted(run.sections.items()):
            if section.last < checker.position:
                problem = (
                    f"{run}: its log ends with the step at position {section.last:,}, but the next run "
                    f"begins at {run.stop:,}: samples delivered in between are unknown"
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
            problem = f"{run}: its log ends {apart:,} steps before the logs of other ranks"
            checker.found("rank", problem, rank=short[0], position=checker.position)
            return
        checker.findings.notices.append(
            f"{run}: only some ranks have the last {apart:,} step{'s' if apart > 1 else ''} (the run was "
            "stopped), which are not checked"
        )
