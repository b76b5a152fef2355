"""Progress of a build: a `StageProgress` after every task, shown by `shardkit.progress`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shardkit.units import format_bytes

__all__ = ["StageProgress", "say"]

COMPILING = "compiling kernels …"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is. Documents and bytes of text are those read in this run, not in reused tasks.

    `seconds_left` is None while nothing tells; `compiling` are tasks for which kernels are being compiled,
    `compile_seconds` the longest that any one waited for that. Of `tasks_done`, other processes that share
    the work did `tasks_elsewhere` in this run; `waiting` says what this one waits for.
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
        """How many tasks were reused or done elsewhere."""
        notes = [f"{self.tasks_reused:,} reused"] if self.tasks_reused else []
        return notes + ([f"{self.tasks_elsewhere:,} by others"] if self.tasks_elsewhere else [])

    def waits(self) -> list[str]:
        """What this process waits for."""
        return [f"waiting for {self.waiting}"] if self.waiting and not self.finished else []

    def text(self) -> str:
        """Everything on one line."""
        parts = [f"{self.tasks_done:,} of {self.tasks:,} tasks"]
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
    """Print a message along with the progress."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
