"""Processes for crash tests: real ones, ended by real signals, that start in milliseconds.

A server process imports everything, loads all compiled kernels by running most of a build, and then forks a
process for each command, so that a build costs a quarter of a second instead of three. (The build that warms
it stops before it encodes anything, because the threads of an encoder do not survive a fork.) Workers are
not forked of it: they come from a fresh interpreter, as in any build.

    with Victims(folder) as victims:
        ended = victims.run(["build", "recipe.yaml"], cwd=…, engine="inline", point=Point(…))
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from crash import points as crash_points
from crash.points import Point
from crash.power_cut import Disk

__all__ = ["Ended", "Process", "Victims", "expire_quickly"]

SECONDS = 150.0  # of a command: above that it hangs
_START_SECONDS = 120.0
_WARM_UNTIL = "parity"
_forever = contextlib.ExitStack()  # until a process ends
_ENGINE = "shardkit.writers.executors.LocalEngine"


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit status (negative: the signal; None: it hung), and its stderr."""

    status: int | None
    errors: str

    @property
    def hung(self) -> bool:
        return self.status is None


class Victims:
    """The server, as a context manager; a build of `recipe` warms it."""

    def __init__(self, folder: Path, recipe: Path) -> None:
        self._folder, self._recipe = folder, recipe
        self._count = 0

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self._recipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer(_START_SECONDS) == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()  # it kills what it started, and ends
        self._server.wait(_START_SECONDS)
        self._server.stdout.close()

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        engine: str = "inline",
        point: Point | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> Process:
        """Start `shardkit argv…`, armed with `point`. Engine "inline": tasks run in the process itself.

        `limits`: {"FSIZE": bytes}, as setrlimit has them. The environment is the server's, but for buckets
        (AWS_*): that is the caller's.
        """
        errors = self._folder / f"errors-{self._next()}.txt"
        request: dict[str, Any] = {"argv": list(argv), "cwd": str(cwd), "engine": engine}
        request |= {"errors": str(errors), "limits": dict(limits or {})}
        request["point"] = None if point is None else asdict(point)
        request["buckets"] = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return Process(self, self._ask(request), errors)

    def watch(self, output: Path | str) -> Watch:
        """Start a process that checks `output` as a reader, again and again, until it is stopped."""
        report = self._folder / f"watch-{self._next()}.json"
        return Watch(Process(self, self._ask({"watch": str(output), "report": str(report)}), report), report)

    def run(self, argv: Sequence[str], **settings: Any) -> Ended:
        """`start`, and wait for the end."""
        return self.start(argv, **settings).wait()

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _ask(self, request: Mapping[str, Any], seconds: float = 30.0) -> Any:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        assert self._server.stdout is not None
        ready = wait([self._server.stdout.fileno()], seconds)
        assert ready, "the server of victims does not answer"
        return json.loads(self._server.stdout.readline())


@dataclass
class Process:
    """A running command."""

    victims: Victims
    pid: int
    errors: Path

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Wait for its end; after `seconds` it is killed and counts as hung."""
        status = self.victims._ask({"wait": self.pid, "seconds": seconds}, seconds + 30.0)
        return Ended(status, self.errors.read_text() if self.errors.exists() else "")

    def await_stop(self, seconds: float = SECONDS) -> None:
        """Wait until a signal has stopped it (`go_on` ends that)."""
        deadline = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "it was not stopped"
            time.sleep(0.02)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass
class Watch:
    """A polling reader. `looks`: number of checks; `seen`: how many of them found an index."""

    process: Process
    report: Path
    looks: int = 0
    seen: int = 0
    problems: list[str] = field(default_factory=list)

    def stop(self) -> Watch:
        """Stop it and read its report."""
        os.kill(self.process.pid, signal.SIGTERM)
        ended = self.process.wait()
        assert ended.status == 0, (ended.status, self.report.read_text() if self.report.exists() else "")
        self.__dict__.update(json.loads(self.report.read_text()))
        return self


class _WarmError(BaseException):
    """Ends the build that warms the server."""


def _serve(recipe: Path) -> None:
    _warm(recipe)
    children: set[int] = set()
    print(json.dumps("ready"), flush=True)  # noqa: T201
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "wait" in request:
                answer: Any = _wait(request["wait"], request["seconds"])
                children.discard(request["wait"])
            else:
                answer = _fork(lambda request=request: _child(request))  # type: ignore[misc]
                children.add(answer)
            print(json.dumps(answer), flush=True)  # noqa: T201
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _warm(recipe: Path) -> None:
    import shardkit.cli.build
    import shardkit.cli.main  # noqa: F401
    from shardkit.writers import build
    from shardkit.writers.execution.engine import InlineEngine
    from shardkit.writers.execution.task_queue import TaskQueue
    from shardkit.writers.execution.work import Work, run_task

    class Warming(InlineEngine):
        def run(self, queue: TaskQueue, work: Work, on_news: Any = None) -> None:
            while (task := queue.take()) is not None:
                if task.stage == _WARM_UNTIL:
                    raise _WarmError
                queue.done(run_task(task, task.digest, work))

    with (
        patch(_ENGINE, lambda workers, **options: Warming()),
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(_WarmError),
    ):
        build(recipe, overrides=[f"work={folder}/work", f"output.path={folder}/out"], progress=False)


def _fork(action: Callable[[], int]) -> int:
    if pid := os.fork():
        return pid
    status = 70
    try:
        status = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, seconds: float) -> int | None:
    descriptor = os.pidfd_open(pid)
    try:
        ended = wait([descriptor], seconds)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) if ended else None
    finally:
        os.close(descriptor)


def _child(request: Mapping[str, Any]) -> int:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if "watch" in request:
        return _watch(request["watch"], Path(request["report"]))
    os.dup2(os.open(request["errors"], os.O_WRONLY | os.O_CREAT, 0o644), 2)
    os.environ.update(request["buckets"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_limits(request["limits"])
    _forever.enter_context(expire_quickly())
    if request["engine"] in ("inline", "s3"):
        _forever.enter_context(patch(_ENGINE, lambda workers, **options: _guarded_engine()))
    trigger = None
    if request["point"] is not None:
        point = Point(**request["point"])
        os.environ.update(crash_points.environment(point))
        if point.action.startswith("cut"):
            _have_disk(Path(request["cwd"]))
        trigger = crash_points.arm(point, builder=os.getpid())
    from shardkit.cli.main import main

    try:
        return main(request["argv"])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        if trigger is not None:
            Path(f"{trigger.point.struck}.steps").write_text(str(trigger.steps))


def _have_disk(base: Path) -> None:
    """Record every sync, and change files in one thread only."""
    disk = Disk([base / "out", base / "out.work"], base.with_suffix(".kept"))
    disk.install()
    crash_points.disks.append(disk)
    _forever.enter_context(patch("shardkit.writers.stages.publish._THREADS", 1))


def _guarded_engine() -> Any:
    """Runs tasks in this process, with the error handling of workers."""
    from shardkit.writers.execution.engine import InlineEngine
    from shardkit.writers.execution.processes import run_guarded

    return InlineEngine(run_guarded)


def _set_limits(limits: Mapping[str, int]) -> None:
    import resource

    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


@contextlib.contextmanager
def expire_quickly() -> Iterator[None]:
    """Leases of dead processes end after a second, not after a minute; only the duration depends on it."""
    from shardkit.writers.executors import Execution

    with patch.dict(Execution.__init__.__kwdefaults__ or {}, lease_seconds=1.0):
        yield


def _watch(output: str, report: Path) -> int:
    from crash.reader import look

    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    os.nice(5)
    looks = seen = 0
    problems: list[str] = []
    while not ending:
        looks += 1
        found, problem = look(Path(output))
        seen += found
        if problem and len(problems) < 10:
            problems.append(problem)
        if not found:
            time.sleep(0.0005)  # leave the core to the build
    report.write_text(json.dumps({"looks": looks, "seen": seen, "problems": problems}))
    return 0


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
