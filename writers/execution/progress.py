"""Progress of a build: a `StageProgress` after every task, and twice a second while a task reads documents.

A caller's progress function receives only these. A terminal, a log and a notebook also show the whole build
(`WholeBuild`): how much is done, when it will end, and what it uses of the machine. They show a stage by its
title (execution/stage.py), which is the name of the step that it belongs to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from shardkit.progress import Listener, Report
from shardkit.units import format_bytes
from shardkit.writers.rows.ledger import Count, Ledger

COMPILING = "compiling kernels …"

_PULSE_SECONDS = 0.5
_USAGE_SECONDS = 2.0
_SHORT_SECONDS = 1.0  # the end of a stage that took less time gets no line in a log
_TELLING_SHARE = 0.05  # share of the build that this run must have done before it estimates the time left
_MAIN_SHARE = 0.8  # a stage with more than this share of its step's cost is the main stage of the step
_BAR = 1000  # value of `total` for a progress bar that shows a share from 0 to 1


@dataclass(frozen=True, slots=True)
class Pulse:
    """Counts of the documents that a running task has read and kept so far."""

    read: Count
    kept: Count


News = Pulse | float | None
"""A report of a running task: a `Pulse`, None when Numba begins to compile kernels, or a float, the seconds
that the compilation took, when it ends."""


class _PulseOfProcess:
    """Calls `send`, if it is set, with a `Pulse` of the task in this process, at most twice a second."""

    def __init__(self) -> None:
        self.send: Callable[[Pulse], None] | None = None
        self._next = 0.0

    def tell(self, ledger: Ledger) -> None:
        """Report the counts of a task's ledger. It is cheap, so a task may call it for every document."""
        if self.send is not None and (now := time.monotonic()) >= self._next:
            self._next = now + _PULSE_SECONDS
            self.send(Pulse(ledger.read, ledger.kept))


PULSE = _PulseOfProcess()


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Progress of one stage. `documents` and `bytes` of text do not include those of reused tasks.

    `seconds_left` is None while it cannot be estimated. `compiling` is the number of tasks whose kernels are
    being compiled, `compile_seconds` the longest time that one task waited for that. `tasks_running` is the
    sum of the finished shares of all running tasks, or 0 while they are not known. `step` is the title of the
    build's step that the stage belongs to. `cpu_seconds` are those of the tasks that ended in this build.
    """

    stage: str
    tasks_done: int
    tasks: int
    tasks_reused: int
    documents: int
    bytes: int
    seconds: float
    documents_kept: int | None = None
    seconds_left: float | None = None
    compiling: int = 0
    compile_seconds: float = 0.0
    tasks_running: float = 0.0
    step: str = ""
    cpu_seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.stage

    @property
    def done(self) -> int:
        return self.tasks_done

    @property
    def total(self) -> int:
        return self.tasks

    @property
    def event(self) -> str:
        """The event to log: "end", "compiling" while the stage waits for kernels, or ""."""
        return "end" if self.finished else "compiling" if self.compiling else ""

    @property
    def share_done(self) -> float:
        """The finished share of the stage, from 0 to 1, including finished parts of running tasks."""
        return min(1.0, (self.tasks_done + self.tasks_running) / self.tasks) if self.tasks else 1.0

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return self.tasks_done == self.tasks

    def rates(self) -> str:
        """Return "1,234 documents/s, 56.7 MB/s, 81.2% kept", or "" for stages that count no documents."""
        if not self.documents or self.seconds <= 0:
            return ""
        speed = format_bytes(self.bytes / self.seconds)
        rates = f"{self.documents / self.seconds:,.0f} documents/s, {speed}/s"
        if self.documents_kept is not None:
            rates += f", {100 * self.documents_kept / self.documents:.1f}% kept"
        return rates

    def text(self) -> str:
        """Return one line with finished tasks, rates, and the time left or taken."""
        parts = [f"{self.tasks_done:,} of {self.tasks:,} tasks"]
        if self.tasks_reused:
            parts[0] += f" ({self.tasks_reused:,} reused)"
        parts += [self.rates()] if self.rates() else []
        if self.compiling:
            parts.append(COMPILING)
        elif self.finished:
            parts.append(f"{_clock(self.seconds)} in all")
        elif self.seconds_left is not None:
            parts.append(f"{_clock(self.seconds_left)} left")
        if self.finished and self.compile_seconds:
            parts.append(f"{self.compile_seconds:.1f} s of it compiling kernels, which are cached")
        return ", ".join(parts)


class Costed(Protocol):
    """The attributes of a stage that progress uses: its name, its step's title, its relative cost."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def cost(self) -> float: ...


class WholeBuild:
    """Converts each report of a stage to one of the whole build and one of its step, and sends them on.

    `stages` are the stages of the build in order, without merges. The time left is estimated from the usual
    costs of stages, once this run has done a twentieth of the build. Kernels are compiled once for a machine,
    by the first task of a stage: that time is left out of the rate, and what later stages still compile is
    not known, so the estimate says that it is without it. `folder` is on the disk whose free space is shown.
    """

    def __init__(self, listener: Listener[Report], stages: Sequence[Costed], folder: Path | None) -> None:
        self._listener = listener
        self._costs: dict[str, dict[str, float]] = {}
        for stage in stages:
            self._costs.setdefault(stage.title, {})[stage.name] = stage.cost
        self._steps = list(self._costs)
        self._weight = sum(sum(costs.values()) for costs in self._costs.values())
        self._done: dict[str, float] = {}  # finished share of each stage, from 0 to 1
        self._reused: dict[str, float] = {}
        self._compiled: dict[str, float] = {}  # seconds, by stage
        self._start = time.monotonic()
        self._machine = _Machine(folder)

    def __enter__(self) -> Self:
        self._listener.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.__exit__(kind, error, trace)

    def __call__(self, progress: StageProgress, /) -> None:
        step = progress.step
        if step not in self._costs:
            return
        costs = self._costs[step]
        if progress.stage in costs:
            self._done[progress.stage] = progress.share_done
            self._reused[progress.stage] = progress.tasks_reused / progress.tasks
        self._compiled[progress.stage] = progress.compile_seconds
        self._listener(self._whole(step, progress))
        of_step = self._weighted(self._done, [step]) / (sum(costs.values()) or 1.0)
        is_main = costs.get(progress.stage, 0.0) > _MAIN_SHARE * sum(costs.values())
        self._listener(StepProgress(step, of_step, progress, is_main))

    def _whole(self, step: str, progress: StageProgress) -> BuildProgress:
        begun = self._steps.index(step)
        done = sum(sum(self._costs[each].values()) for each in self._steps[:begun])
        done += self._weighted(self._done, self._steps[begun:])
        made = done - self._weighted(self._reused, self._steps)
        compiled, left = sum(self._compiled.values()), None
        if made >= _TELLING_SHARE * self._weight and not progress.compiling:
            worked = max(0.0, time.monotonic() - self._start - compiled)
            left = worked * (self._weight - done) / made
        is_cold = compiled > _SHORT_SECONDS
        return BuildProgress(done / self._weight, left, self._machine.usage(), step, progress, is_cold)

    def _weighted(self, shares: Mapping[str, float], steps: Sequence[str]) -> float:
        return sum(
            weight * shares.get(name, 0.0) for step in steps for name, weight in self._costs[step].items()
        )


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress of a step, with the report of one stage. `is_main`: that stage is most of the step's cost."""

    name: str
    share: float
    stage: StageProgress
    is_main: bool = False

    @property
    def done(self) -> int:
        return round(_BAR * self.share)

    @property
    def total(self) -> int:
        return _BAR

    @property
    def event(self) -> str:
        """The event to log: the end of a stage, unless it was short, or a stage waiting for kernels."""
        is_short = self.stage.finished and self.stage.seconds < _SHORT_SECONDS
        return f"{self.stage.event} {self.stage.stage}" if self.stage.event and not is_short else ""

    def text(self) -> str:
        """Return the stage's report as text. Begins with its name unless it is the step's main stage."""
        stage = "" if self.is_main else f"{self.stage.stage} "
        return f"{stage}{self.stage.text()}"


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Progress of a build: the finished share from 0 to 1, the seconds left, and the use of the machine.

    `seconds_left` is None while it cannot be estimated, as while kernels are compiled. `is_cold`: this run
    has compiled kernels, so later stages may have to, in time that `seconds_left` leaves out.
    """

    share: float
    seconds_left: float | None
    usage: str
    step: str
    stage: StageProgress
    is_cold: bool = False

    @property
    def name(self) -> str:
        return "build"

    @property
    def done(self) -> int:
        return round(_BAR * self.share)

    @property
    def total(self) -> int:
        return _BAR

    @property
    def event(self) -> str:
        return ""

    def text(self) -> str:
        """Return "38%, about 0:02:10 left; near-duplicates, verify 3 of 24 tasks; 1.9 cores"."""
        left = f", {COMPILING}" if self.stage.compiling else ""
        if self.seconds_left is not None:
            without = " without compiling kernels" if self.is_cold else ""
            left = f", about {_clock(self.seconds_left)} left{without}"
        now = f"{self.step}, {self.stage.stage} {self.stage.tasks_done:,} of {self.stage.tasks:,} tasks"
        rates = f", {self.stage.rates()}" if self.stage.rates() else ""
        return "; ".join(filter(None, (f"{100 * self.share:.0f}%{left}", f"{now}{rates}", self.usage)))


class _Machine:
    """Measures CPU and memory of this process and its descendants, and the free disk space at `folder`."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._time, self._cpu = 0.0, 0.0
        self._usage = ""

    def usage(self) -> str:
        """Return "1.9 cores, 1.2 GB of memory, 40 GB of disk free"; unknown values are left out."""
        now = time.monotonic()
        if now - self._time < _USAGE_SECONDS:
            return self._usage
        found = []
        with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or a process has just ended
            cpu, memory = map(sum, zip(*map(_cpu_and_memory, _tree(os.getpid())), strict=True))
            if self._time:
                found.append(f"{max(0.0, cpu - self._cpu) / (now - self._time):.1f} cores")
            found.append(f"{format_bytes(int(memory))} of memory")
            self._cpu = cpu
        with contextlib.suppress(OSError):
            if self._folder is not None:
                found.append(f"{format_bytes(shutil.disk_usage(_existing(self._folder)).free)} of disk free")
        self._time, self._usage = now, ", ".join(found)
        return self._usage


def _tree(process: int) -> list[int]:
    found = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += _tree(int(child))
    return found


def _cpu_and_memory(process: int) -> tuple[float, float]:
    """Return (CPU seconds, resident bytes) of a process. Pages shared by processes count in each of them."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # CPU time of the process and of its children that have ended
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _existing(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
