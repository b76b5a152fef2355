"""Progress of a build: a `StageProgress` after every task, and twice a second while a task reads documents.

A caller's function hears just that. A terminal, a log and a notebook show the build as a whole, too
(`WholeBuild`): how much is done, when it will end, what it takes of the machine. People read the titles of
stages (execution/stage.py), which are those of the steps that they are parts of.
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
_SHORT_SECONDS = 1.0  # a log has no line of stages that took less
_TELLING_SHARE = 0.05
_MAIN_SHARE = 0.8
_BAR = 1000  # steps of a bar


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a running task has read and kept so far."""

    read: Count
    kept: Count


News = Pulse | float | None
"""What a running task tells: a `Pulse`; None as Numba begins to compile kernels for it, then the seconds."""


class _PulseOfProcess:
    """The task of this process tells what it has read to `send`, if anyone listens."""

    def __init__(self) -> None:
        self.send: Callable[[Pulse], None] | None = None
        self._next = 0.0

    def tell(self, ledger: Ledger) -> None:
        """Call this as often as convenient."""
        if self.send is not None and (now := time.monotonic()) >= self._next:
            self._next = now + _PULSE_SECONDS
            self.send(Pulse(ledger.read, ledger.kept))


PULSE = _PulseOfProcess()


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is. Documents and bytes of text are those read in this run, not in reused tasks.

    `seconds_left` is None while nothing tells; `compiling` are tasks for which kernels are being compiled,
    `compile_seconds` the longest that any one waited for that. `tasks_running` is how much of
    the tasks that run is done, as a number of tasks; 0 while nothing tells. `step` is the step of the build
    that the stage is a part of.
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
        """How the stage ended, or that it waits for kernels to compile."""
        return "end" if self.finished else "compiling" if self.compiling else ""

    @property
    def share_done(self) -> float:
        """From 0 to 1, with what running tasks have done."""
        return min(1.0, (self.tasks_done + self.tasks_running) / self.tasks) if self.tasks else 1.0

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return self.tasks_done == self.tasks

    def rates(self) -> str:
        """ "1,234 documents/s, 56.7 MB/s, 81.2% kept", or nothing for stages that count no documents."""
        if not self.documents or self.seconds <= 0:
            return ""
        speed = format_bytes(self.bytes / self.seconds)
        rates = f"{self.documents / self.seconds:,.0f} documents/s, {speed}/s"
        if self.documents_kept is not None:
            rates += f", {100 * self.documents_kept / self.documents:.1f}% kept"
        return rates

    def text(self) -> str:
        """Everything on one line."""
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
            parts.append(f"{self.compile_seconds:.1f} s of it compiling kernels, which are kept")
        return ", ".join(parts)


class Costed(Protocol):
    """A stage, as far as progress knows it: its name, the title of its step, its share of a build."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def cost(self) -> float: ...


class WholeBuild:
    """Shows `listener` the build as a whole with each report of a stage, and the report by its step.

    `stages` are those of the build in order, without merges. What is left is estimated from the shares that
    they usually have, once this run has done a twentieth of the build. `folder` is on the disk whose room is
    shown.
    """

    def __init__(self, listener: Listener[Report], stages: Sequence[Costed], folder: Path | None) -> None:
        self._listener = listener
        self._costs: dict[str, dict[str, float]] = {}
        for stage in stages:
            self._costs.setdefault(stage.title, {})[stage.name] = stage.cost
        self._steps = list(self._costs)
        self._weight = sum(sum(costs.values()) for costs in self._costs.values())
        self._done: dict[str, float] = {}  # share of each stage
        self._reused: dict[str, float] = {}
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
        self._listener(self._whole(step, progress))
        of_step = self._weighted(self._done, [step]) / (sum(costs.values()) or 1.0)
        is_main = costs.get(progress.stage, 0.0) > _MAIN_SHARE * sum(costs.values())
        self._listener(StepProgress(step, of_step, progress, is_main))

    def _whole(self, step: str, progress: StageProgress) -> BuildProgress:
        begun = self._steps.index(step)
        done = sum(sum(self._costs[each].values()) for each in self._steps[:begun])
        done += self._weighted(self._done, self._steps[begun:])
        made = done - self._weighted(self._reused, self._steps)
        left = None
        if made >= _TELLING_SHARE * self._weight:
            left = (time.monotonic() - self._start) * (self._weight - done) / made
        return BuildProgress(done / self._weight, left, self._machine.usage(), step, progress)

    def _weighted(self, shares: Mapping[str, float], steps: Sequence[str]) -> float:
        return sum(
            weight * shares.get(name, 0.0) for step in steps for name, weight in self._costs[step].items()
        )


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How far a step is, with the report of one of its stages; `is_main`: that is most of the step."""

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
        """The end of a stage that took a while, or that a stage waits for kernels to compile."""
        is_short = self.stage.finished and self.stage.seconds < _SHORT_SECONDS
        return f"{self.stage.event} {self.stage.stage}" if self.stage.event and not is_short else ""

    def text(self) -> str:
        """The report of the stage, which is named where the step has several."""
        stage = "" if self.is_main else f"{self.stage.stage} "
        return f"{stage}{self.stage.text()}"


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How much of a build is done, from 0 to 1, how long it will take, and what it takes of the machine."""

    share: float
    seconds_left: float | None
    usage: str
    step: str
    stage: StageProgress

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
        """ "38%, about 0:02:10 left; near-duplicates, verify 3 of 24 tasks; 1.9 cores, 1.2 GB of memory"."""
        left = "" if self.seconds_left is None else f", about {_clock(self.seconds_left)} left"
        now = f"{self.step}, {self.stage.stage} {self.stage.tasks_done:,} of {self.stage.tasks:,} tasks"
        rates = f", {self.stage.rates()}" if self.stage.rates() else ""
        return "; ".join(filter(None, (f"{100 * self.share:.0f}%{left}", f"{now}{rates}", self.usage)))


class _Machine:
    """What this process and those below it take of the machine, looked at every two seconds."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._time, self._cpu = 0.0, 0.0
        self._usage = ""

    def usage(self) -> str:
        """ "1.9 cores, 1.2 GB of memory, 40 GB of disk free"; what cannot be found out is left out."""
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
    """CPU seconds, and bytes that are in memory: pages that processes share count in each."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # its own, and those of its children that have ended
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
