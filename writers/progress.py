"""What a build says while it runs: bars on a terminal, a line now and then in a log file, both on stderr.

The build reports a `StageProgress` after every task; whoever listens decides what to show. Nothing here can
change or stop a build.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from shardkit.units import format_bytes

__all__ = ["Listener", "StageProgress", "make_listener"]

LINE_SECONDS = 5.0  # a log file gets a line this often at most


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is. Documents and bytes of text are those read in this run, not in reused tasks."""

    stage: str
    tasks_done: int
    tasks: int
    tasks_reused: int
    documents: int
    bytes: int
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return self.tasks_done == self.tasks

    def rates(self) -> str:
        """ "1,234 documents/s, 56.7 MB/s", or nothing for stages that count no documents."""
        if not self.documents or self.seconds <= 0:
            return ""
        return (
            f"{self.documents / self.seconds:,.0f} documents/s, {format_bytes(self.bytes / self.seconds)}/s"
        )


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
    """Plain lines: the end of each stage that took a while, and in between one every few seconds."""

    def __init__(self) -> None:
        super().__init__(self._print)
        self._next = time.monotonic() + LINE_SECONDS

    def _print(self, progress: StageProgress) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_SECONDS
            print(_line(progress), file=sys.stderr, flush=True)  # noqa: T201


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
        reused = f"{progress.tasks_reused:,} reused  " if progress.tasks_reused else ""
        self._bars.update(self._stages[stage], completed=progress.tasks_done, rates=reused + progress.rates())

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def _line(progress: StageProgress) -> str:
    rates = progress.rates()
    return f"{progress.stage}: {progress.tasks_done:,} of {progress.tasks:,} tasks" + (
        f", {rates}" if rates else ""
    )
