"""Tells when Numba compiles: the first use of a kernel on a machine takes seconds in which nothing moves.

Compiled kernels are kept (kernel_cache.py), so later workers load them and nothing is told. Numba itself
reports compilations; kernels that are compiled for one another count once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CompilationWatch"]


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
