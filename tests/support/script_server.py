"""Scripts run as programs by forks of one process that has imported what they import: a start takes no time.

    with ScriptServer(["torch"]) as server:
        process = server.start([script, *arguments], cwd=folder, output=file)
        assert process.wait(60) == 0

A script sees itself as `__main__`, with its own folder first on the path, as a program does; it ends without
what Python does at its own end, so that each script should also be run once as the program that it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["ForkedScript", "ScriptServer"]

_POLL_SECONDS = 0.005


class ScriptServer:
    """The process that is forked, as a context manager. Requests are made by one thread."""

    def __init__(self, modules: Sequence[str], *, path: Path, environment: Mapping[str, str]) -> None:
        """Imports `modules`, found in `path` too; `environment` is added to ours before that."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | dict(environment),
        )  # fmt: skip

    def start(
        self, command: Sequence[str], *, cwd: Path, output: Path, environment: Mapping[str, str] | None = None
    ) -> ForkedScript:
        """Run a script and its arguments; what it prints is added to the file `output`."""
        request = {"command": list(command), "cwd": str(cwd), "output": str(output)}
        return ForkedScript(self, int(self._ask(request | {"environment": dict(environment or {})})))

    def poll(self, pid: int) -> int | None:
        """The exit code, negative for a signal; None while it runs. Of an end only the first asker hears."""
        answer = self._ask({"poll": pid})
        return None if answer is None else int(answer)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)


class ForkedScript:
    """A running script, with what tests need of `subprocess.Popen`."""

    def __init__(self, server: ScriptServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.poll(self.pid)
        return self._code

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve() -> None:
    """Answer one line of JSON with another until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(run(request))
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def run(request: Mapping[str, Any]) -> int:
    """In the child: the script's exit code."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    script, *arguments = request["command"]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path.insert(1, sys.argv[1])
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    serve()
    os._exit(0)  # taking torch apart takes seconds
