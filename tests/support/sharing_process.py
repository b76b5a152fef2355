"""One of several processes that share a build, which stops or kills itself where a test wants it to.

    python tests/support/sharing_process.py RECIPE SLICE|- WHERE|- SIGNAL|- OVERRIDE...

WHERE is a stage, whose first task here is at its end when the signal comes, or "index": just before the index
is written. Leases are short, and tasks run in this very process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.publish.publication import Publication
from shardkit.writers import build, executors
from shardkit.writers.execution import engine as engine_inline
from shardkit.writers.execution.scheduler import Claims, TaskSlice
from shardkit.writers.execution.task import Commit, Counts, Task
from shardkit.writers.execution.work import Work, run_task

LEASE_SECONDS = 2.0


def strike(number: signal.Signals) -> None:
    """Once: whoever goes on after SIGSTOP is left alone."""
    if not strike.__dict__.setdefault("struck", False):
        strike.__dict__["struck"] = True
        os.kill(os.getpid(), number)


def run_and_strike(
    function: Callable[..., Counts | Mapping[str, Any]], number: signal.Signals, folder: Path, *args: Any
) -> Counts | Mapping[str, Any]:
    counts = function(folder, *args)
    strike(number)
    return counts


def arm(where: str, number: signal.Signals) -> None:
    def run(task: Task, digest: str, work: Work) -> Commit:
        if task.stage == where:
            task = replace(task, function=partial(run_and_strike, task.function, number))
        return run_task(task, digest, work)

    def before(function: Callable[..., Any], *args: Any) -> Any:
        strike(number)
        return function(*args)

    engine_inline.run_task = run  # type: ignore[attr-defined]
    if where == "index":
        put_index = Publication._put_index
        Publication._put_index = lambda self: before(put_index, self)  # type: ignore[method-assign]


def main(recipe: str, slice: str, where: str, name: str, *overrides: str) -> None:
    assert Claims.__init__.__kwdefaults__ is not None
    Claims.__init__.__kwdefaults__.update(lease_seconds=LEASE_SECONDS, beat_seconds=LEASE_SECONDS / 8)
    executors.LocalEngine = lambda workers: engine_inline.InlineEngine()  # type: ignore
    if where != "-":
        arm(where, signal.Signals[name])
    part = None if slice == "-" else TaskSlice(*map(int, slice.split("/")))
    result = build(recipe, workers=1, overrides=overrides, task_slice=part, progress=False)
    sys.stdout.write(json.dumps({"fingerprint": result.fingerprint, "tasks": result.tasks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
