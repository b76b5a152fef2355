"""The whole crash matrix: faults at every stage, on every engine; then the same command, and the same bytes.

    python tests/benchmarks/crash_matrix.py [--engines inline,local,s3,s3-local,ray] [--no-stores]
                                            [--stride 1] [--only WORD] [--jobs N] [--log FILE] [--json]

Builds of a small corpus that gives every stage work are killed, starved of disk, cut off from power, or meet
damaged files and failing stores (see tests/crash). Each then runs once more: its output must have the names
and SHA-256 of an undisturbed build's files, and no others; the failed run must have said what happened, in
bounded time; and a reader that polled the output must never have seen an index without all of its files.
Prints a table as Markdown, and every cell that failed. Points are numbers of operations, drawn from fixed
seeds, never moments in time. Exit status 1 if any cell failed.

Cells are independent, and `--jobs` processes share them. With a log (JSON lines, one for each cell) an
interrupted matrix continues: cells in the log are not run again. Buckets are those of Ceph's gateway if it is
installed (tests/servers/install_rgw.sh), else of moto.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from crash import points as crash_points
from crash.builds import POINT_NAME, Crashes, Engine
from crash.grid import grid
from crash.stores import FAULTS, Place, StoreCell, StoreCrashes
from figures import benchmark_parser
from servers.bucket import s3_client
from servers.rgw import RgwServer, missing_programs
from shardkit.kernels.numba_support import kernel_cache
from support.ray_cluster import RayCluster
from support.s3_moto import s3_server
from support.s3_rgw import rgw_environment

ENGINES: tuple[Engine, ...] = ("inline", "local", "s3", "s3-local", "ray")
CELL_SECONDS = 1800.0  # above what any cell may take, with all its bounded waits

Kind = Literal["builds", "ray", "stores"]
Key = tuple[str, str, str, int]
"""Fault, engine, stage, and which of their cells, from 0."""


@dataclass(frozen=True)
class Plan:
    """What a job needs. `steps` and `all_steps` as in `grid`; cells that are `done` are not run."""

    kind: Kind
    folder: Path
    engines: tuple[Engine, ...]
    stride: int
    only: str
    bucket: str = ""
    steps: int = 0
    all_steps: int = 0
    operations: tuple[tuple[Place, int], ...] = ()
    done: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Result:
    """Result of a cell."""

    key: Key
    struck: bool
    looks: int
    problems: list[str]
    seconds: float


@dataclass
class Row:
    """Results of the cells of one fault and engine."""

    stages: set[str] = field(default_factory=set)
    cells: int = 0
    struck: int = 0
    good: int = 0
    seconds: float = 0.0


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: all")
    parser.add_argument("--stride", type=int, default=1, help="take each so-many-th step only (default: 1)")
    parser.add_argument("--only", default="", help="faults with this word in their name only")
    parser.add_argument("--no-stores", action="store_true", help="leave out failing stores")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time (default: cores)")
    parser.add_argument("--log", type=Path, help="write each cell here; those that are there are not run")
    arguments = parser.parse_args()
    engines: tuple[Engine, ...] = tuple(name for name in ENGINES if name in arguments.engines.split(","))
    os.environ.update(kernel_cache())
    start = time.monotonic()
    results = _logged(arguments.log)
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        plan = Plan("builds", folder, engines, arguments.stride, arguments.only)
        plan = replace(plan, done=frozenset(result.key for result in results))
        for kind in _kinds(engines, stores=not arguments.no_stores):
            jobs = 1 if kind == "ray" else arguments.jobs
            for result in _run(_prepared(replace(plan, kind=kind), stack), jobs):
                results.append(result)
                if arguments.log is not None:
                    with arguments.log.open("a") as log:
                        log.write(json.dumps(asdict(result)) + "\n")
    seconds = time.monotonic() - start
    if arguments.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"seconds": seconds, "cells": rows}, indent=1))
    else:
        show(results, seconds)
    return int(any(result.problems for result in results))


def _logged(log: Path | None) -> list[Result]:
    """The cells of an earlier run that passed; the others are run again."""
    if log is None or not log.exists():
        return []
    cells = [json.loads(line) for line in log.read_text().splitlines()]
    results = {tuple(cell["key"]): Result(**cell | {"key": tuple(cell["key"])}) for cell in cells}
    return [result for result in results.values() if not result.problems]


def _kinds(engines: Sequence[Engine], *, stores: bool) -> Iterator[Kind]:
    if set(engines) - {"ray"}:
        yield "builds"
    if "ray" in engines:
        yield "ray"
    if stores:
        yield "stores"


def _prepared(plan: Plan, stack: contextlib.ExitStack) -> Plan:
    """With a bucket, if its engines need one, and with the numbers of operations of an undisturbed build."""
    folder = plan.folder / plan.kind
    folder.mkdir()
    if plan.kind == "ray":
        return replace(plan, folder=folder, engines=("ray",))
    if plan.kind == "stores":
        operations = StoreCrashes(folder / "measured").operations
        return replace(plan, folder=folder, operations=tuple(operations.items()))
    engines = tuple(engine for engine in plan.engines if engine != "ray")
    bucket = stack.enter_context(_bucket()) if {"s3", "s3-local"} & set(engines) else ""
    with Crashes(folder / "measured") as crashes:
        steps, all_steps = crashes.steps("out"), crashes.steps(".")
    return replace(plan, folder=folder, engines=engines, bucket=bucket, steps=steps, all_steps=all_steps)


@contextlib.contextmanager
def _bucket() -> Iterator[str]:
    """A bucket, and the environment that leads to it."""
    if missing_programs():
        with s3_server() as moto:
            yield moto.new_bucket()
        return
    with (
        RgwServer() as server,
        rgw_environment(server),
        patch.dict(os.environ, AWS_ENDPOINT_URL=server.endpoint_url),
    ):
        s3_client(server.endpoint_url).create_bucket(Bucket="crash-matrix")
        yield "crash-matrix"


def _run(plan: Plan, jobs: int) -> Iterator[Result]:
    """All cells of a plan that are not done, in any order, by so many processes."""
    context = mp.get_context("spawn")
    numbers = context.Value("i", 0)
    with ProcessPoolExecutor(jobs, context, _begin_job, (plan, numbers)) as pool:
        keys = [key for key in pool.submit(_keys).result() if key not in plan.done]
        waiting = {pool.submit(_do, key) for key in keys}
        start = time.monotonic()
        while waiting:
            ended, waiting = wait(waiting, CELL_SECONDS, FIRST_COMPLETED)
            if not ended:
                for process in mp.active_children():
                    process.kill()
                raise SystemExit(f"no cell ended in {CELL_SECONDS:.0f} s")
            for future in ended:
                yield future.result()
                _say(len(keys) - len(waiting), len(keys), time.monotonic() - start, future.result())


def _say(count: int, total: int, seconds: float, result: Result) -> None:
    fault, engine, stage, which = result.key
    left = seconds / count * (total - count)
    what = "; ".join(result.problems) or ("identical" if result.struck else "identical, but no fault came")
    sys.stderr.write(
        f"{count}/{total} ({left / 60:.0f} min left) {fault}, {engine}, {stage}, {which}: {what}\n"
    )


_cells: dict[Key, Callable[[], Any]] = {}
"""Of the plan that this process works on."""


def _begin_job(plan: Plan, numbers: Any) -> None:
    with numbers.get_lock():
        job, numbers.value = numbers.value, numbers.value + 1
    stack = contextlib.ExitStack()
    Finalize(None, stack.close, exitpriority=0)  # a pool's process runs no atexit handlers
    _cells.update(stack.enter_context(_machinery(plan, plan.folder / f"job-{job}")))


def _keys() -> list[Key]:
    return list(_cells)


def _do(key: Key) -> Result:
    start = time.monotonic()
    outcome = _cells[key]()
    looks, seconds = getattr(outcome, "looks", 0), round(time.monotonic() - start, 3)
    return Result(key, outcome.struck, looks, outcome.problems, seconds)


Named = tuple[tuple[str, str, str], Callable[[], Any]]
Cells = list[tuple[Key, Callable[[], Any]]]


@contextlib.contextmanager
def _machinery(plan: Plan, folder: Path) -> Iterator[Cells]:
    """The cells of a plan, with the servers and folders that they need."""
    folder.mkdir()
    if plan.kind == "stores":
        yield _numbered(_store_cells(StoreCrashes(folder), plan), plan.only)
        return
    with contextlib.ExitStack() as stack:
        ray = None
        if plan.kind == "ray":
            stack.enter_context(patch.dict(os.environ, crash_points.environment(folder / POINT_NAME)))
            ray = stack.enter_context(RayCluster(nodes=2))
        bucket = f"{plan.bucket}/{folder.name}"  # jobs number their cells alike
        crashes = stack.enter_context(Crashes(folder, bucket=bucket, ray=ray))
        entries = grid(plan.engines, steps=plan.steps, all_steps=plan.all_steps, stride=plan.stride)
        found: list[Named] = [
            ((entry.fault, entry.engine, entry.stage), partial(entry.do, crashes)) for entry in entries
        ]
        yield _numbered(found, plan.only)


def _store_cells(crashes: StoreCrashes, plan: Plan) -> list[Named]:
    return [
        (
            (f"store: {fault}", "inline", f"{place}: every operation"),
            partial(crashes.run, StoreCell(fault=fault, place=place, number=number)),
        )
        for fault in FAULTS
        for place, count in plan.operations
        for number in range(1, count + 1, plan.stride)
    ]


def _numbered(cells: list[Named], only: str) -> Cells:
    seen: dict[tuple[str, str, str], int] = {}
    numbered: Cells = []
    for key, do in cells:
        if only in key[0]:
            numbered.append(((*key, seen.get(key, 0)), do))
            seen[key] = seen.get(key, 0) + 1
    return numbered


def show(results: Sequence[Result], seconds: float) -> None:
    """Print a row for each fault and engine, and every problem."""
    rows: dict[tuple[str, str], Row] = {}
    for result in results:
        row = rows.setdefault(result.key[:2], Row())
        row.stages.add(result.key[2])
        row.cells += 1
        row.struck += result.struck
        row.good += not result.problems
        row.seconds += result.seconds
    print("| fault | engine | stages | cells | struck | identical, nothing left, no false index | s a cell |")
    print("|---|---|---|---|---|---|---|")
    for (fault, engine), row in rows.items():
        stages = f"{len(row.stages)} stages" if len(row.stages) > 2 else ", ".join(sorted(row.stages))
        each = row.seconds / row.cells
        print(
            f"| {fault} | {engine} | {stages} | {row.cells:,} | {row.struck:,} | {row.good:,} | {each:.1f} |"
        )
    good = sum(row.good for row in rows.values())
    print(
        f"\n{good:,} of {len(results):,} cells kept every promise; this run took {seconds / 60:.0f} minutes;"
    )
    looks = sum(result.looks for result in results)
    print(f"readers looked {looks:,} times at datasets that were being built or replaced.")
    for result in results:
        for problem in result.problems:
            print(f"- {', '.join(map(str, result.key))}: {problem}")


if __name__ == "__main__":
    sys.exit(main())
