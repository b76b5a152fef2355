"""How far a transfer is, on stderr: a bar on a terminal, else a line every few seconds.

Nothing here can change or stop a transfer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardkit.units import format_bytes

__all__ = ["Listener", "Progress", "TransferProgress", "lines", "listen"]

LINE_SECONDS = 5.0  # a log file gets a line this often at most


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is. Skipped files count as done, not as moved."""

    step: str
    files_done: int
    files: int
    bytes_done: int
    bytes: int
    bytes_moved: int
    seconds: float


Listener = Callable[[TransferProgress], None]


class Progress:
    """Counts what threads have done in one step and tells a listener."""

    def __init__(self, listener: Listener, step: str, files: int, size: int) -> None:
        self._listener, self._step, self._files, self._bytes = listener, step, files, size
        self._done = self._bytes_done = self._moved = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size: int, *, moved: bool) -> None:
        """One more file of `size` bytes is done."""
        with self._lock:
            self._done += 1
            self._bytes_done += size
            self._moved += size if moved else 0
            self._listener(
                TransferProgress(
                    self._step,
                    self._done,
                    self._files,
                    self._bytes_done,
                    self._bytes,
                    self._moved,
                    time.monotonic() - self._start,
                )
            )


@contextmanager
def listen(progress: bool | Listener) -> Iterator[Listener]:
    """False: silence. True: a bar if stderr is a terminal, else lines. A callable hears each report."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda report: None
    elif sys.stderr.isatty():
        with _bars() as listener:
            yield listener
    else:
        yield lines()


def lines() -> Listener:
    """A line on stderr every few seconds."""
    following = time.monotonic() + LINE_SECONDS

    def hear(report: TransferProgress) -> None:
        nonlocal following
        now = time.monotonic()
        if now >= following:
            following = now + LINE_SECONDS
            print(_line(report), file=sys.stderr, flush=True)  # noqa: T201

    return hear


def _line(report: TransferProgress) -> str:
    rate = report.bytes_moved / report.seconds if report.seconds > 0 else 0.0
    text = (
        f"{report.step}: {report.files_done:,} of {report.files:,} files, "
        f"{format_bytes(report.bytes_done)} of {format_bytes(report.bytes)}"
    )
    if not rate:
        return text
    left = (report.bytes - report.bytes_done) / rate
    return f"{text}, {format_bytes(rate)}/s, {left:,.0f} s left"


@contextmanager
def _bars() -> Iterator[Listener]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bars = Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[files]}"),
        console=Console(stderr=True),
    )
    steps: dict[str, Any] = {}

    def hear(report: TransferProgress) -> None:
        if report.step not in steps:
            steps[report.step] = bars.add_task(report.step, total=report.bytes, files="")
        files = f"{report.files_done:,} of {report.files:,} files"
        bars.update(steps[report.step], completed=report.bytes_done, files=files)

    with bars:
        yield hear
