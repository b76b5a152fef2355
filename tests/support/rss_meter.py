"""Memory of a process tree while a block runs, sampled from /proc: of all, and of each process by stage.

    with RssMeter() as meter:
        build(recipe, progress=meter.progress)
    meter.stages["clean"].rss       # peak of any one worker while stage `clean` had tasks to do

RSS counts shared pages (libraries, mapped files) in every process that has touched them, PSS divides them
among those; it is dearer to read, so it is sampled once in ten times.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from shardkit.writers.execution.progress import StageProgress

__all__ = ["Peak", "RssMeter", "process_tree", "pss_bytes", "rss_bytes"]

PAGE_BYTES = resource.getpagesize()


def process_tree(pid: int) -> list[int]:
    """A process and all below it, without a look at every process there is, 20 times a second."""
    tree = [pid]
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                tree += process_tree(int(child))
    return tree


def workers_of(pid: int) -> list[int]:
    """The processes below one, without its copies: a process that was forked and has not run exec yet."""
    own, *below = process_tree(pid)
    return [one for one in below if _command(one) != _command(own)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


@dataclass
class Peak:
    """Bytes at most: of any one process below this one (`rss`, `pss`), and of all with this one (`tree`)."""

    rss: int = 0
    pss: int = 0
    tree: int = 0
    samples: int = 0


@dataclass
class RssMeter:
    """Samples every `seconds` between `with` and its end."""

    seconds: float = 0.02
    stages: dict[str, Peak] = field(default_factory=dict)
    _running: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def progress(self, stage: StageProgress) -> None:
        """A build's listener: from a stage's first report to its last one, samples are its."""
        if stage.finished:
            self._running.discard(stage.stage)
        else:
            self._running.add(stage.stage)

    @property
    def peak(self) -> Peak:
        """Over all stages."""
        peaks = self.stages.values()
        return Peak(
            max((peak.rss for peak in peaks), default=0),
            max((peak.pss for peak in peaks), default=0),
            max((peak.tree for peak in peaks), default=0),
            sum(peak.samples for peak in peaks),
        )

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def _sample(self) -> None:
        for number in self._ticks():
            running = list(self._running)
            if not running:
                continue
            workers = workers_of(os.getpid())
            sizes = [rss_bytes(pid) for pid in workers]
            shared = max(map(pss_bytes, workers), default=0) if number % 10 == 0 else 0
            for stage in running:
                peak = self.stages.setdefault(stage, Peak())
                peak.rss = max(peak.rss, *sizes, 0)
                peak.pss = max(peak.pss, shared)
                peak.tree = max(peak.tree, sum(sizes) + rss_bytes(os.getpid()))
                peak.samples += 1

    def _ticks(self) -> Iterator[int]:
        number = 0
        while not self._ended.wait(self.seconds):
            yield number
            number += 1
