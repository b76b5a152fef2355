"""What a build says while it runs: bars on a terminal, a line now and then in a log file, both on stderr.

The build reports a `StageProgress` after every task; whoever listens decides what to show. Nothing here can
change or stop a build.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from shardkit.units import format_bytes

__all__ = ["Listener", "StageProgress", "make_listener", "names_of", "say"]

LINE_SECONDS = 5.0  # a log file gets a line this often at most, but for the ends of stages
_MOST_NAMES = 3
COMPILING = "compiling kernels …"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is. Documents and bytes of text are those read in this run, not in reused tasks.

    `seconds_left` is None while nothing tells; `compiling` are tasks for which kernels are being compiled,
    `compile_seconds` the longest that any one waited for that. Of `tasks_done`, other processes that share
    the work did `tasks_elsewhere` in this run; `waiting` says for whom this one waits.
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
    tasks_elsewhere: int = 0
    waiting: str = ""

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return self.tasks_done == self.tasks

    def rates(self) -> str:
        """ "1,234 documents/s, 56.7 MB/s, 81.2 % kept", or nothing for stages that count no documents."""
        if not self.documents or self.seconds <= 0:
            return ""
        speed = format_bytes(self.bytes / self.seconds)
        rates = f"{self.documents / self.seconds:,.0f} documents/s, {speed}/s"
        if self.documents_kept is not None:
            rates += f", {100 * self.documents_kept / self.documents:.1f} % kept"
        return rates

    def notes(self) -> list[str]:
        """What of the tasks this process did not do now."""
        notes = [f"{self.tasks_reused:,} reused"] if self.tasks_reused else []
        return notes + ([f"{self.tasks_elsewhere:,} by others"] if self.tasks_elsewhere else [])

    def waits(self) -> list[str]:
        """For whom this process waits."""
        return [f"waiting for {self.waiting}"] if self.waiting and not self.finished else []

    def line(self) -> str:
        """All of it on one line without a break."""
        parts = [f"{self.stage}: {self.tasks_done:,} of {self.tasks:,} tasks"]
        if notes := self.notes():
            parts[0] += f" ({', '.join(notes)})"
        parts += self.waits()
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


def say(text: str) -> None:
    """Tell people something beside the progress."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def names_of(holders: Mapping[str, int]) -> str:
    """Sessions that are waited for, and for how many tasks: "node7-4711-9f… (2 tasks)"."""
    most = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{name or 'nobody yet'} ({n:,} task{'s' * (n > 1)})" for name, n in most[:_MOST_NAMES]]
    return ", ".join(texts) + (f" and {len(most) - _MOST_NAMES:,} more" if len(most) > _MOST_NAMES else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Listener(Protocol):
    """Something that hears of progress."""

    def __call__(self, progress: StageProgress, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_listener(progress: bool | Callable[[StageProgress], None]) -> Listener:
    """False: silence. True: bars if stderr is a terminal, else lines. A callable hears each report."""
    if callable(progress):
        return _Quiet(progress)
    if not progress:
        return _Quiet(lambda report: None)
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Quiet:
    def __init__(self, hear: Callable[[StageProgress], None]) -> None:
        self._hear = hear

    def __call__(self, progress: StageProgress, /) -> None:
        self._hear(progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class _Lines(_Quiet):
    """Plain lines: one as each stage ends or begins to compile, and in between one every few seconds."""

    def __init__(self) -> None:
        super().__init__(self._print)
        self._next = time.monotonic() + LINE_SECONDS
        self._said: set[tuple[str, str]] = set()

    def _print(self, progress: StageProgress) -> None:
        now = time.monotonic()
        event = "end" if progress.finished else "compiling" if progress.compiling else ""
        if (progress.stage, event) in self._said or (not event and now < self._next):
            return
        if event:
            self._said.add((progress.stage, event))
        self._next = now + LINE_SECONDS
        print(progress.line(), file=sys.stderr, flush=True)  # noqa: T201


class _Bars(_Quiet):
    """One bar a stage."""

    def __init__(self) -> None:
        super().__init__(self._draw)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars: Any = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"),
            console=Console(stderr=True),
        )
        self._stages: dict[str, Any] = {}

    def _draw(self, progress: StageProgress) -> None:
        stage = progress.stage
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=progress.tasks, rates="")
        self._bars.update(self._stages[stage], completed=progress.tasks_done, rates=_beside_bar(progress))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def _beside_bar(progress: StageProgress) -> str:
    """What the bar, its numbers and its clock do not show."""
    parts = [*progress.notes(), *progress.waits()]
    parts += [progress.rates()] if progress.rates() else []
    if progress.compiling:
        parts.append(COMPILING)
    elif progress.seconds_left is not None:
        parts.append(f"{_clock(progress.seconds_left)} left")
    elif progress.compile_seconds:
        parts.append(f"kernels compiled in {progress.compile_seconds:.1f} s")
    return "  ".join(parts)
