"""Which logs belong to one run, and which of its steps count.

A run is what all ranks deliver between a start (or a state that is loaded) and the next one. Logs of one
run have the same position, world size and batch size, and began at about the same time: clocks of machines
must agree better than the time between a crash and the next start. A run that begins at position p
supersedes all that earlier ones delivered from p on: those steps were lost with the crash, and are
replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.audit.findings import Finding, Findings
from shardkit.audit.settings import RunSettings
from shardkit.audit.usage_file import SUFFIX, Section, scan
from shardkit.errors import ShardError

__all__ = ["Run", "find_runs"]


@dataclass(slots=True)
class Run:
    """One run of all ranks: their logs, and the position from which a later one supersedes it."""

    start: int
    world_size: int
    batch_size: int
    time_ns: int
    sections: dict[int, Section] = field(default_factory=dict)
    stop: int | None = None
    number: int = 0

    @property
    def settings(self) -> RunSettings:
        """Those of its lowest rank."""
        return self.sections[min(self.sections)].head.settings

    @property
    def missing(self) -> list[int]:
        """Ranks without a log."""
        return [rank for rank in range(self.world_size) if rank not in self.sections]

    @property
    def last(self) -> int:
        """The position of the last step that any rank has."""
        return max(section.last for section in self.sections.values())

    @property
    def fewest(self) -> int:
        """Steps that all ranks have, at most."""
        return min(section.count for section in self.sections.values())

    @property
    def most(self) -> int:
        """Steps of the rank that has most."""
        return max(section.count for section in self.sections.values())

    def __str__(self) -> str:
        return f"run {self.number} ({self.world_size} x {self.batch_size} from position {self.start:,})"


def find_runs(folder: Path, findings: Findings) -> list[Run]:
    """The runs of a folder's logs, in the order of time; ShardError if there are none."""
    if not folder.is_dir():
        raise ShardError(folder, "is no folder of usage logs")
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
        key = (head.position, head.world_size, head.batch_size)
        fitting = [
            run
            for run in runs
            if (run.start, run.world_size, run.batch_size) == key and head.rank not in run.sections
        ]
        # After a crash at once, two runs start alike, and one may lack a rank: the nearest in time is meant.
        run = min(fitting, key=lambda run: abs(run.time_ns - head.time_ns), default=None)
        if run is None:
            run = Run(*key, time_ns=head.time_ns)
            runs.append(run)
        run.sections[head.rank] = section
    for number, run in enumerate(runs, 1):
        run.number = number
    return runs
