"""Strike a process at an exact point of a build, so that crash tests do not depend on timing.

Every process of such a build has this module's audit hook (PEP 578): Python calls it before each file is
opened, renamed, linked or removed, and before each HTTP request. So points are reached without waiting and
without changes to the package:

    before       a task of a stage is about to make its folder
    uncommitted  its outputs are written, and the commit is about to be made (a rename, or a PUT)
    committed    the commit is made, and nobody knows of it yet
    index        the index of a dataset is about to get its name, by a hard link or a PUT
    step         operation number `step` (from 1) on files below a folder

A process gets the hook by calling `arm`, or from a `Point` in its environment when it starts
(`sitecustomize`), which covers processes that others start, such as workers. A point strikes once, in the
process that reaches it first, which makes the file `struck`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from crash.power_cut import Disk, Way

__all__ = ["VARIABLE", "Point", "arm", "disks", "environment", "install"]

VARIABLE = "SHARDKIT_TEST_CRASH_POINT"
Moment = Literal["before", "uncommitted", "committed", "index", "step"]
Action = Literal[
    "kill",
    "stop",
    "kill_builder",
    "terminate_builder",
    "interrupt_builder",
    "kill_node",
    "fill",
    "cut_all",
    "cut_some",
    "cut_data",
]
_FILE_EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_SECONDS = 120.0  # far above what any signal takes to arrive
_PAGE = 4096
_ANY = -1

disks: list[Disk] = []
"""The disk of this process, if its syncs are recorded."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where and how to strike.

    `folder` is the work folder or its scratch folder (the output for an index, any for a step); `skip` leaves
    out so many first times. The builder is the process that was asked to build: what started a worker or the
    process that forks workers, or the process itself.
    `fill` fills the file system of `filled`, all but `spare` pages of it; a cut is one of `disks`.
    """

    moment: Moment
    folder: str
    struck: str
    stage: str = ""
    action: Action = "kill"
    step: int = 0
    skip: int = 0
    filled: str = ""
    spare: int = 0


def environment(point: Point | Path) -> dict[str, str]:
    """Variables that arm a process as it starts: with a point, or with the point in a file."""
    text = f"@{point}" if isinstance(point, Path) else json.dumps(asdict(point))
    path = [str(Path(__file__).parent / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: text, "PYTHONPATH": os.pathsep.join(path)}


def install() -> None:
    """Arm this process if its environment has a point, or the name of a file with one, and all its forks.

    Its builder is its parent.
    """
    text = os.environ.get(VARIABLE, "")
    if text.startswith("@"):
        sys.addaudithook(_FromFile(text[1:], os.getppid()))
    elif text:
        arm(Point(**json.loads(text)), builder=os.getppid())


def arm(point: Point, *, builder: int) -> Trigger:
    """Arm this process and its forks; `builder` is the process id of the builder."""
    trigger = Trigger(point, builder)
    sys.addaudithook(trigger)
    return trigger


class Trigger:
    """An audit hook. `steps` are the operations below the point's folder so far."""

    def __init__(self, point: Point, builder: int) -> None:
        self.point, self._builder = point, builder
        self._below = point.folder.rstrip("/") + "/"
        self._unfinished = re.compile(rf"/unfinished/([^/]+/)?{re.escape(point.stage)}\.[^/]+$")
        record = rf"/{re.escape(point.stage)}/[^/]+/commit\.json"
        self._request = re.compile(rb"/index\.json" if point.moment == "index" else record.encode())
        self._busy = threading.local()
        self._lock = threading.Lock()
        self._committing: int | None = None  # the thread that has begun to commit
        self._seen = 0
        self._done = False
        self.steps = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._done or getattr(self._busy, "is_set", False):
            return
        self._busy.is_set = True
        try:
            with self._lock:
                if not self._done and self._is_here(event, arguments):
                    self._seen += 1
                    self._done = self._seen > self.point.skip
                    strikes = self._done
                else:
                    strikes = False
            if strikes and _first(self.point.struck):
                _ACTIONS[self.point.action](self.point, self._builder)
        finally:
            self._busy.is_set = False

    def _is_here(self, event: str, arguments: tuple[Any, ...]) -> bool:
        moment = self.point.moment
        if event == "http.client.send":
            return self._is_awaited_request(arguments[1])
        if event not in _FILE_EVENTS:
            return False
        paths = _paths(event, arguments)
        if not any(f"{path}/".startswith(self._below) for path in paths):
            return False
        if moment == "step":
            self.steps += 1
            return self.steps == self.point.step
        if moment == "index":
            return event == "os.link" and paths[1] == f"{self._below}index.json"
        if moment == "before":
            return event == "os.mkdir" and self._unfinished.search(paths[0]) is not None
        if self._committing in (_ANY, threading.get_ident()):
            self._committing = None
            return True
        if event == "os.rename" and self._unfinished.search(paths[0]) and "/unfinished/" not in paths[1]:
            return self._commits(threading.get_ident())
        return False

    def _is_awaited_request(self, data: object) -> bool:
        if not isinstance(data, bytes | bytearray) or not data.startswith(b"PUT "):
            return False
        if self._request.search(bytes(data[:2000]).split(b"\r\n", 1)[0]) is None:
            return False
        return self.point.moment == "index" or self._commits(_ANY)  # requests have threads of their own

    def _commits(self, thread: int) -> bool:
        """A commit is about to be made: the moment itself, or the thread's next operation comes after it."""
        if self.point.moment == "committed":
            self._committing = thread
        return self.point.moment == "uncommitted"


class _FromFile:
    """Follows the point in a file, which changes: processes that serve many builds outlive a point."""

    def __init__(self, name: str, builder: int) -> None:
        self._name, self._builder, self._text = name, builder, ""
        self._trigger: Trigger | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir":  # as every task makes its folder
            try:
                text = Path(self._name).read_text()
            except OSError:
                text = ""
            if text != self._text:
                self._text = text
                self._trigger = Trigger(Point(**json.loads(text)), self._builder) if text else None
        if self._trigger is not None:
            self._trigger(event, arguments)


def _paths(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """The absolute paths that an event is about, where it is about any."""
    two = event in ("os.rename", "os.link")
    folders = arguments[2:4] if two else (arguments[-1],) if event in ("os.remove", "os.rmdir") else ()
    found = []
    for number, path in enumerate(arguments[: 1 + two]):
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike):
            continue  # a descriptor: it was opened by a path
        descriptor = folders[number] if number < len(folders) else -1
        base = f"/proc/self/fd/{descriptor}" if descriptor not in (-1, None) else "/proc/self/cwd"
        found.append(os.path.join(os.readlink(base), os.fspath(path)))  # noqa: PTH115, PTH118
    return found


def _first(struck: str) -> bool:
    """Whether this process is the first to reach the point."""
    try:
        os.close(os.open(struck, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _send_itself(number: signal.Signals) -> Any:
    def act(point: Point, builder: int) -> None:
        os.kill(os.getpid(), number)

    return act


def _kill_node(point: Point, builder: int) -> None:
    """Of a Ray cluster: what started this process, and this process."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _signal_builder(number: signal.Signals) -> Any:
    def act(point: Point, builder: int) -> None:
        os.kill(builder, number)
        if builder == os.getpid():
            return  # Python's handler comes next
        time.sleep(_SECONDS)  # the end of the builder is the end of this process

    return act


def _fill(point: Point, builder: int) -> None:
    """Fill the file system except for `spare` pages, by one large file."""
    filler = Path(point.filled) / ".filler"
    zeros = bytes(_PAGE)
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while os.write(descriptor, zeros) == _PAGE:
            pass
    except OSError:
        pass
    os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size // _PAGE - point.spare) * _PAGE)
    os.close(descriptor)


def _cut(way: Way) -> Any:
    def act(point: Point, builder: int) -> None:
        assert disks, "this process has no disk that can be cut off"
        disks[0].cut(way, point.step)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


_ACTIONS = {
    "kill": _send_itself(signal.SIGKILL),
    "stop": _send_itself(signal.SIGSTOP),
    "kill_node": _kill_node,
    "kill_builder": _signal_builder(signal.SIGKILL),
    "terminate_builder": _signal_builder(signal.SIGTERM),
    "interrupt_builder": _signal_builder(signal.SIGINT),
    "fill": _fill,
    "cut_all": _cut("all"),
    "cut_some": _cut("some"),
    "cut_data": _cut("data"),
}
