"""A server that kills its client with SIGKILL when a write arrives, or when its answer is about to leave."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from support.s3_moto import S3Server

__all__ = ["run_and_kill"]

WAIT_SECONDS = 60.0  # far above what any test takes


class _Killer:
    """Comes before the server; `fatal` counts PUT requests from 1."""

    def __init__(self, fatal: int, *, late: bool) -> None:
        self._fatal, self._late = fatal, late
        self._lock = threading.Lock()
        self._seen = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._started.set()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any], app: Callable[..., Iterable[bytes]]
    ) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return app(environ, start_response)
        assert self._started.wait(WAIT_SECONDS)
        with self._lock:
            self._seen += 1
            if self._seen > self._fatal or (self._seen == self._fatal and not self._late):
                self._kill()
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return []
            answer = list(app(environ, start_response))
            if self._seen == self._fatal:
                self._kill()
            return answer

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(WAIT_SECONDS)


def run_and_kill(server: S3Server, command: Sequence[str], fatal: int, *, late: bool) -> None:
    """Run `command` until its write number `fatal` arrives at the server, with `late` until it is done."""
    killer = _Killer(fatal, late=late)
    server.intercept = killer
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        killer.watch(process)
        try:
            _, errors = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == -signal.SIGKILL, errors.decode()
    finally:
        server.intercept = None
