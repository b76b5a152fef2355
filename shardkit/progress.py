"""Progress of long operations: bars on a terminal, a table in a notebook, occasional lines in a log file.

An operation reports plain data after each piece of work; a listener decides what to show. Nothing here can
change or stop the operation, and rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

from shardkit.units import format_bytes

LINE_SECONDS = 5.0  # shortest time between two lines in a log file; events are printed at once
TABLE_SECONDS = 0.3  # shortest time between updates of a notebook's table: each is a message to the browser
QUIET_SECONDS = 2.0  # `reading` shows its progress only if it takes longer than this


class Report(Protocol):
    """Progress of one operation at one moment, for a bar or a line."""

    @property
    def name(self) -> str:
        """The name of the operation or step. Each name gets its own bar."""

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int | None: ...
    @property
    def event(self) -> str:
        """A change to print at once when it is first reported by this operation; "" if there is none."""

    def text(self) -> str:
        """Return the whole report on one line."""


R = TypeVar("R", bound=Report)
R_contra = TypeVar("R_contra", bound=Report, contravariant=True)


class Listener(Protocol[R_contra]):
    """A consumer of reports; must be entered as a context before the first report."""

    def __call__(self, report: R_contra, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@overload
def make_listener(progress: bool) -> Listener[Report]: ...
@overload
def make_listener(progress: bool | Callable[[R], None]) -> Listener[R]: ...
def make_listener(progress: bool | Callable[[R], None]) -> Listener[R] | Listener[Report]:
    """Return a listener for the user's `progress` argument.

    False shows nothing. True shows a table in a notebook, bars if stderr is a terminal, and otherwise lines.
    A callable is called with each report. Within `command_output`, a log file gets lines in all cases.
    """
    if callable(progress):
        shown: Listener[Any] = _Calls(progress)
    elif not progress or _output.quiet:
        shown = _Calls[Report](lambda report: None)
    elif _in_notebook():
        shown = _Table()
    else:
        shown = _Bars() if sys.stderr.isatty() else _Calls(Lines())
    return shown if _output.log is None else _Logged(shown)


@dataclass(frozen=True, slots=True)
class _Output:
    """Says where a command's progress and messages go besides stderr, and whether stderr gets progress."""

    quiet: bool = False
    log: IO[str] | None = None


_output = _Output()


@contextmanager
def command_output(*, quiet: bool, log: IO[str] | None) -> Iterator[None]:
    """Show no progress anywhere in this process if `quiet`, and append all progress to `log` if it is given.

    Only the command line sets this, for the time of one verb; it applies to all threads.
    """
    global _output
    _output = _Output(quiet, log)
    try:
        yield
    finally:
        _output = _Output()


def write_log(text: str) -> None:
    """Append lines to the command's log file, if it has one, each after the time; errors are ignored."""
    if _output.log is not None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk for the log must not end a build
            _output.log.write("".join(f"{now} {line}\n" for line in text.splitlines()))
            _output.log.flush()


class _Logged:
    """Shows reports by another listener, and writes them to the log file as lines."""

    def __init__(self, shown: Listener[Any]) -> None:
        self._shown, self._lines = shown, Lines(write_log)

    def __call__(self, report: Any, /) -> None:
        self._shown(report)
        self._lines(report)

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)


class _Calls(Generic[R]):
    def __init__(self, hear: Callable[[R], None]) -> None:
        self._hear = hear

    def __call__(self, report: R, /) -> None:
        self._hear(report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


class Lines:
    """Writes a line (to stderr by default) at each event, and otherwise one line every five seconds."""

    def __init__(self, write: Callable[[str], None] = _to_stderr) -> None:
        self._write = write
        self._next = time.monotonic() + LINE_SECONDS
        self._said: set[tuple[str, str]] = set()

    def __call__(self, report: Report, /) -> None:
        now, key = time.monotonic(), (report.name, report.event)
        if key in self._said or (not report.event and now < self._next):
            return
        if report.event:
            self._said.add(key)
        self._next = now + LINE_SECONDS
        self._write(f"{report.name}: {report.text()}")


class _Bars:
    """Shows one bar on the terminal for each name of an operation."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}

    def __call__(self, report: Report, /) -> None:
        name = report.name
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=report.total, text="")
        self._bars.update(self._tasks[name], completed=report.done, text=report.text())

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def _in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, which can display tables."""
    module = sys.modules.get("IPython")
    return module is not None and hasattr(module.get_ipython(), "kernel")


class _Table:
    """Shows a table in the output of a notebook cell, with one row per operation, and updates it in place."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self._output = DisplayHandle()
        self._reports: dict[str, Report] = {}
        self._is_shown = False
        self._next = time.monotonic() + TABLE_SECONDS  # operations that end sooner show no table

    def __call__(self, report: Report, /) -> None:
        self._reports[report.name] = report
        if time.monotonic() < self._next:
            return
        if self._is_shown:
            self._output.update(self._bundle(), raw=True)
        else:
            self._output.display(self._bundle(), raw=True)
        self._is_shown, self._next = True, time.monotonic() + TABLE_SECONDS

    def _bundle(self) -> dict[str, str]:
        """Return the table as HTML and as plain text, by MIME type."""
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><td {left}>{html.escape(one.name)}</td>"
            f"<td><progress value='{one.done}' max='{one.total or max(1, one.done)}'></progress></td>"
            f"<td {left}>{html.escape(one.text())}</td></tr>"
            for one in self._reports.values()
        )
        lines = [f"{one.name}: {one.text()}" for one in self._reports.values()]
        return {"text/html": f"<table>{rows}</table>", "text/plain": "\n".join(lines)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._output.update(self._bundle(), raw=True)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Progress of a transfer. Skipped files count in `files_done` and `bytes_done`, not in `bytes_moved`."""

    step: str
    files_done: int
    files: int
    bytes_done: int
    bytes: int
    bytes_moved: int
    seconds: float
    event: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return self.step

    @property
    def done(self) -> int:
        return self.bytes_done

    @property
    def total(self) -> int:
        return self.bytes

    def text(self) -> str:
        """Return files, bytes, speed and remaining time on one line."""
        rate = self.bytes_moved / self.seconds if self.seconds > 0 else 0.0
        text = (
            f"{self.files_done:,} of {self.files:,} files, "
            f"{format_bytes(self.bytes_done)} of {format_bytes(self.bytes)}"
        )
        if not rate:
            return text
        return f"{text}, {format_bytes(rate)}/s, {(self.bytes - self.bytes_done) / rate:,.0f} s left"


TransferListener = Callable[[TransferProgress], None]


class FileCounter:
    """Counts the files that threads have finished in one step, and reports each to a listener."""

    def __init__(self, listener: TransferListener, step: str, files: int, size: int) -> None:
        self._listener, self._step, self._files, self._bytes = listener, step, files, size
        self._done = self._bytes_done = self._moved = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size: int, *, moved: bool) -> None:
        """Count one more finished file of `size` bytes; `moved`: whether its bytes were transferred."""
        with self._lock:
            self._done += 1
            self._bytes_done += size
            self._moved += size if moved else 0
            files, sizes = (self._done, self._files), (self._bytes_done, self._bytes, self._moved)
            self._listener(TransferProgress(self._step, *files, *sizes, time.monotonic() - self._start))


@contextmanager
def reading(step: str, sizes: Mapping[int, int]) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts a file as read, given its number; `sizes` is {file number: bytes}.

    Progress is shown after `QUIET_SECONDS`, and only by the first process of a machine (LOCAL_RANK 0).
    """
    began = time.monotonic()
    with ExitStack() as stack:
        opened: list[Listener[TransferProgress]] = []

        def hear(report: TransferProgress) -> None:
            if time.monotonic() - began < QUIET_SECONDS or os.environ.get("LOCAL_RANK", "0") != "0":
                return
            if not opened:
                opened.append(stack.enter_context(make_listener(True)))
            opened[0](report)

        counter = FileCounter(hear, step, len(sizes), sum(sizes.values()))
        yield lambda number: counter.add(sizes[number], moved=True)


@dataclass(frozen=True, slots=True)
class CountProgress:
    """The number of finished items of one operation; `total` is None if it is unknown."""

    name: str
    done: int
    total: int | None
    unit: str
    seconds: float
    event: ClassVar[str] = ""

    def text(self) -> str:
        """Return the count, the share of the total, and the rate on one line."""
        of = "" if self.total is None else f" of {self.total:,}"
        share = f" ({100 * self.done / self.total:.0f}%)" if self.total else ""
        rate = f", {self.done / self.seconds:,.0f}/s" if self.seconds > 0 else ""
        return f"{self.done:,}{of} {self.unit}{share}{rate}"


@contextmanager
def counting(
    name: str, total: int | None, unit: str, *, progress: bool = True
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the number of finished items; call it in one thread at a time."""
    start, done = time.monotonic(), 0
    with make_listener(progress) as listener:

        def add(number: int) -> None:
            nonlocal done
            done += number
            listener(CountProgress(name, done, total, unit, time.monotonic() - start))

        yield add
