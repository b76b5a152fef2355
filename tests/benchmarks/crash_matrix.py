"""The whole crash matrix: faults at every stage, on every engine; then the same command, and the same bytes.

    python tests/benchmarks/crash_matrix.py [--engines inline,local,slices,s3,s3-local,ray] [--no-stores]
                                            [--stride 1] [--only WORD] [--json]

Builds of a small corpus that has work for all stages are killed, starved of disk, cut off from power, or meet
damaged files and failing stores (tests/crashes.py and its neighbours say how). Each then runs once more: its
output must have the names and SHA-256 of an undisturbed build's, with nothing beside it; the failed run must
have said what happened, in bounded time; and a reader who looked at the output all the while must never have
seen an index without all of its files. Prints a table as Markdown, and every cell that broke a promise.
Points are numbers of operations, drawn from fixed seeds, never moments in time. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import crash_points
from crash_grid import grid
from crash_stores import FAULTS, StoreCell, StoreCrashes
from crashes import POINT_NAME, Crashes, Engine
from ray_cluster import RayCluster
from s3_moto import s3_server

from shardkit.writers.kernel_cache import kernel_cache

ENGINES: tuple[Engine, ...] = ("inline", "local", "slices", "s3", "s3-local", "ray")


@dataclass
class Row:
    """What came of the cells of one fault, engine and stage."""

    cells: int = 0
    struck: int = 0
    good: int = 0
    looks: int = 0
    problems: list[str] = field(default_factory=list)


Table = dict[tuple[str, str, str], Row]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: all")
    parser.add_argument("--stride", type=int, default=1, help="take each so-many-th step only (default: 1)")
    parser.add_argument("--only", default="", help="faults with this word in their name only")
    parser.add_argument("--no-stores", action="store_true", help="leave out failing stores")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    engines: list[Engine] = [name for name in ENGINES if name in arguments.engines.split(",")]
    os.environ.update(kernel_cache())
    start = time.monotonic()
    table: Table = {}
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as name:
        folder = Path(name)
        if here := [engine for engine in engines if engine != "ray"]:
            builds(table, folder / "builds", here, arguments.stride, arguments.only)
        if "ray" in engines:
            builds(table, folder / "ray", ["ray"], arguments.stride, arguments.only)
        if not arguments.no_stores:
            stores(table, folder / "stores", arguments.stride, arguments.only)
    seconds = time.monotonic() - start
    failed = sum(row.cells - row.good for row in table.values())
    if arguments.json:
        rows = [
            dict(zip(("fault", "engine", "stage"), key, strict=True)) | row.__dict__
            for key, row in table.items()
        ]
        print(json.dumps({"seconds": seconds, "rows": rows}, indent=1))
    else:
        show(table, seconds)
    return int(failed > 0)


def builds(table: Table, folder: Path, engines: Sequence[Engine], stride: int, only: str) -> None:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        bucket = ""
        if {"s3", "s3-local"} & set(engines):
            bucket = stack.enter_context(s3_server()).new_bucket()
        ray = None
        if "ray" in engines:
            stack.enter_context(patch.dict(os.environ, crash_points.environment(folder / POINT_NAME)))
            ray = stack.enter_context(RayCluster(nodes=2))
        crashes = stack.enter_context(Crashes(folder, bucket=bucket, ray=ray))
        entries = list(grid(engines, steps=crashes.steps("out"), all_steps=crashes.steps("."), stride=stride))
        entries = [entry for entry in entries if only in entry.fault]
        for number, entry in enumerate(entries, 1):
            outcome = entry.do(crashes)
            note(
                table,
                (entry.fault, entry.engine, entry.stage),
                outcome.struck,
                outcome.problems,
                outcome.looks,
            )
            say(number, len(entries), f"{entry.fault}, {entry.engine}, {entry.stage}", outcome.problems)


def stores(table: Table, folder: Path, stride: int, only: str) -> None:
    folder.mkdir()
    crashes = StoreCrashes(folder)
    cells = [
        StoreCell(fault=fault, place=place, number=number)
        for fault in FAULTS
        for place, count in crashes.operations.items()
        for number in range(1, count + 1, stride)
        if only in f"store: {fault}"
    ]
    for number, cell in enumerate(cells, 1):
        outcome = crashes.run(cell)
        key = (f"store: {cell.fault}", "inline", f"{cell.place}: every operation")
        note(table, key, outcome.struck, outcome.problems, 0)
        say(number, len(cells), str(cell), outcome.problems)


def note(table: Table, key: tuple[str, str, str], struck: bool, problems: list[str], looks: int) -> None:
    row = table.setdefault(key, Row())
    row.cells += 1
    row.struck += struck
    row.good += not problems
    row.looks += looks
    row.problems += problems


def say(number: int, count: int, what: str, problems: list[str]) -> None:
    sys.stderr.write(f"{number}/{count} {what}: {'; '.join(problems) or 'identical'}\n")


def show(table: Table, seconds: float) -> None:
    print("| fault | engine | stage | cells | struck | identical, nothing left, no false index |")
    print("|---|---|---|---|---|---|")
    for fault, engine, stages, row in merged(table):
        print(f"| {fault} | {engine} | {stages} | {row.cells:,} | {row.struck:,} | {row.good:,} |")
    total = list(table.values())
    cells, good = sum(row.cells for row in total), sum(row.good for row in total)
    looks = sum(row.looks for row in total)
    print(f"\n{good:,} of {cells:,} cells kept every promise in {seconds / 60:.0f} minutes;")
    print(f"readers looked {looks:,} times at datasets that were being built or replaced.")
    for key, row in table.items():
        for problem in row.problems:
            print(f"- {', '.join(key)}: {problem}")


def merged(table: Table) -> Iterator[tuple[str, str, str, Row]]:
    """One row for all stages of a fault and engine."""
    keys = dict.fromkeys((fault, engine) for fault, engine, _ in table)
    for fault, engine in keys:
        rows = {stage: row for (f, e, stage), row in table.items() if (f, e) == (fault, engine)}
        total = Row(
            cells=sum(row.cells for row in rows.values()),
            struck=sum(row.struck for row in rows.values()),
            good=sum(row.good for row in rows.values()),
        )
        yield fault, engine, f"{len(rows)} stages" if len(rows) > 2 else ", ".join(rows), total


if __name__ == "__main__":
    sys.exit(main())
