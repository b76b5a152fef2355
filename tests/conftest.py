"""Fixtures of all tests. Helper modules become importable: importlib mode adds no folder to the path."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardkit.kernels.numba_support import kernel_cache

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(kernel_cache())  # before Numba is imported: kernels are compiled once for tests and workers
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks for the names of local addresses
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of tiny models and of other tests wait for each other
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the tests' processes would compile all modules
MEMORY = Path("/dev/shm")
gc.disable()  # while tests are collected: no collection can free what is imported


def pytest_configure() -> None:
    """Make temporary folders in memory where there is enough: thousands of fsyncs cost nothing there."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of large grids and of random examples in the default run; CI's run has all."""
    from support.default_run import draw_fewer_examples, leave_cases

    leave_cases(items)
    if config.option.markexpr == "not extended":
        draw_fewer_examples(items)


def pytest_collection_finish() -> None:
    """Leave the millions of objects that were imported out of all collections, also in forks."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _facts_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A tokenizer is examined once for all builds of a run, as workers do it for all builds of a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDKIT_FACTS_DIR", str(tmp_path_factory.mktemp("facts")))
        yield


@pytest.fixture
def process_groups() -> Iterator[Callable[[int, int], None]]:
    """Makes this process a rank of a world whose other ranks do nothing; all that it makes share a store."""
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def start(rank: int, size: int) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=size)

    yield start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Child processes react to SIGINT even if this run ignores it, as `pytest &` in a script does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def inline_builds() -> Iterator[None]:
    """Builds run their tasks in this process, which saves a second of CPU for each worker.

    For tests that do not depend on workers: tests/builds/test_build_determinism.py shows that any number of
    them makes the same bytes.
    """
    from shardkit.tokens.parity import sample_texts
    from shardkit.writers import executors
    from shardkit.writers.execution.engine import InlineEngine
    from shardkit.writers.execution.progress import PULSE
    from shardkit.writers.stages import tokenize

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "LocalEngine", lambda workers, **options: InlineEngine())
        # 4 KiB of 128 KiB, which is most of what a small build takes.
        patch.setattr(tokenize, "sample_texts", lambda files, size: sample_texts(files, min(size, 1 << 12)))
        patch.setattr(
            PULSE, "send", None
        )  # each task sets it; restored for tests that call stages themselves
        yield
