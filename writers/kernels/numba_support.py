"""Where workers keep compiled kernels: one folder for each version of all kernels.

Numba's own cache looks at the file of a function only, so a kernel that calls one of another file would be
taken from the cache although the other was changed. Here the folder's name is a digest of every source file
with kernels. It lies below $XDG_CACHE_HOME (~/.cache), holds some megabytes and may be deleted at any time;
versions that nobody used for a month are.

Tells when Numba compiles: the first use of a kernel on a machine takes seconds in which nothing moves.

Compiled kernels are kept (kernel_cache.py), so later workers load them and nothing is told. Numba itself
reports compilations; kernels that are compiled for one another count once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CompilationWatch", "kernel_cache"]

_VARIABLE = "NUMBA_CACHE_DIR"

_UNUSED_SECONDS = 30 * 24 * 3600


def kernel_cache() -> dict[str, str]:
    """Environment for workers: {} if there is no place for the cache, or if the environment names one."""
    if _VARIABLE in os.environ:
        return {}
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "shardkit" / f"kernels-{_kernel_version()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.glob("kernels-*"):
            if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return {}
    return {_VARIABLE: str(folder)} if os.access(folder, os.W_OK) else {}


def _kernel_version() -> str:
    state = hashlib.blake2b(importlib.metadata.version("numba").encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        data = source.read_bytes()
        if b"numba" in data:
            state.update(data)
    return state.hexdigest()


class CompilationWatch:
    """Calls `tell(None)` when a compilation starts and `tell(seconds)` when it ends, in the same thread."""

    def __init__(self, tell: Callable[[float | None], None]) -> None:
        self._tell = tell
        self._installed = False
        self._depth = 0
        self._start = 0.0

    def install(self) -> None:
        """Listen from now on, if Numba is imported; else there is nothing to hear yet, and this is free."""
        if self._installed or "numba" not in sys.modules:
            return
        from numba.core import event

        watch = self

        class Listener(event.Listener):
            def on_start(self, _: Any) -> None:
                watch._begin()

            def on_end(self, _: Any) -> None:
                watch._end()

        event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]
        self._installed = True

    def _begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._start = time.perf_counter()
            self._tell(None)

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._tell(time.perf_counter() - self._start)
