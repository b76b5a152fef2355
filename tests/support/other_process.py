"""Another Python process that a test starts, talks with line by line, stops and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

SECONDS = 60.0  # for a line to come or a process to end, on a busy machine


class OtherProcess:
    """Runs `code`; its `arguments` are in sys.argv[1:]. Killed at the end of the `with` block.

    The code prints a line, flushed, when there is something to tell, and reads one when it has to wait.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line it prints; "" if it has ended."""
        assert self._process.stdout is not None
        assert wait([self._process.stdout.fileno()], SECONDS), "the other process says nothing"
        return self._process.stdout.readline().decode().strip()

    def tell(self, text: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())

    def stop(self) -> None:
        """Freeze it; returns when it is frozen."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS)

    def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        return self._process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
