"""The runner reports how far each stage is: kept documents, time left by weight, kernels being compiled."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardkit.progress import make_listener
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.engine_local import LocalEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.task import Task
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.progress import StageProgress

TASKS = """
import numba

@numba.njit
def inner(x):
    return x + 1

@numba.njit
def outer(x):
    return inner(x) * 2

def compile(folder):
    assert outer(3) == 8
    return {}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "kernel_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("kernel_tasks")
    del sys.modules["kernel_tasks"]


def test_compiling_kernels_is_heard_while_it_happens(tmp_path: Path, kernels: ModuleType) -> None:
    heard: list[StageProgress] = []
    with (
        make_listener(heard.append) as listener,
        Journal(tmp_path / "work") as journal,
        LocalEngine(1) as engine,
    ):
        runner = Runner(journal, engine, listener)
        runner.run([Task("stage", "one", {}, kernels.compile)])
        runner.run([Task("again", "one", {}, kernels.compile)])
    told = [(report.stage, report.tasks_done, report.compiling) for report in heard]
    # Once, though one kernel is compiled for the other; the second task finds them in the worker's memory.
    assert told == [
        ("stage", 0, 0),
        ("stage", 0, 1),
        ("stage", 0, 0),
        ("stage", 1, 0),
        ("again", 0, 0),
        ("again", 1, 0),
    ]
    assert 0 < heard[3].compile_seconds <= heard[3].seconds
    assert heard[-1].compile_seconds == 0


def keep_a_third(folder: Path, documents: int) -> dict[str, Any]:
    third = documents // 3
    ledger = Ledger(Count(documents, documents * 10), Count(third, third * 10))
    ledger.drop("x/y", documents - third, (documents - third) * 10)
    return {"ledger": ledger.to_dict()}


def test_time_left_follows_the_weights_of_tasks_and_reused_ones_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    def plan(count: int) -> list[Task]:
        return [
            Task("stage", str(n), {}, keep_a_third, (300 * n,), weight=100 * n - 1)
            for n in range(1, count + 1)
        ]

    heard: list[StageProgress] = []
    with make_listener(heard.append) as listener, Journal(tmp_path / "work") as journal:
        Runner(journal, InlineEngine(), listener).run(plan(1))
        heard.clear()
        monkeypatch.setattr(time, "perf_counter", clock)
        Runner(journal, InlineEngine(), listener).run(plan(3))
    assert [(report.tasks_done, report.tasks_reused) for report in heard] == [(1, 1), (2, 1), (3, 1)]
    seconds = heard[1].seconds
    assert [report.seconds_left for report in heard] == [None, pytest.approx(seconds * 200 / 300), None]
    assert [(report.documents, report.documents_kept) for report in heard] == [
        (0, None),
        (900, 300),
        (1500, 500),
    ]
