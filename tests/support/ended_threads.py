"""Threads of the package that a test started must not be there in the next one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from unittest.mock import patch

from shardkit.storage import threads as workers

__all__ = ["ended_threads"]

SECONDS = 30.0


@contextlib.contextmanager
def ended_threads() -> Iterator[None]:
    """At the end of the block, wait for the threads that were started in it; idle ones end at once."""
    before = set(threading.enumerate())
    with patch.object(workers, "_IDLE_SECONDS", 0.01):
        yield
        for thread in threading.enumerate():
            if thread not in before and thread.name.startswith("shardkit"):
                while thread.ident is None:  # its start has not got so far: it cannot be joined yet
                    time.sleep(0.001)
                thread.join(SECONDS)
