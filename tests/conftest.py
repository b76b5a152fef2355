"""Lets tests share helper modules: `import peers`. (pytest's importlib mode adds no folder to the path.)"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.writers.kernels.numba_support import kernel_cache

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(kernel_cache())  # before Numba is imported: kernels are compiled once for tests and workers


@pytest.fixture
def heeded_ctrl_c() -> Iterator[None]:
    """What the test starts heeds SIGINT, even if this run does not: a script's `pytest &` ignores it, and so
    does every process that inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def inline_builds() -> Iterator[None]:
    """Builds run their tasks in this process, which saves the start of workers, a second of CPU each.

    For what does not depend on them: tests/builds/test_build_determinism.py holds any number to the same
    bytes.
    """
    from shardkit.writers import executors
    from shardkit.writers.execution.engine import InlineEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "LocalEngine", lambda workers: InlineEngine())
        yield
