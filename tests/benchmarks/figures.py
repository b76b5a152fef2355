"""What benchmarks share: command line, random rows, clocks, and figures as text, JSON or a picture.

Sides of a comparison take turns inside of one run, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Heads",
    "benchmark_parser",
    "give",
    "in_turns",
    "peak_rss_bytes",
    "print_figures",
    "read_once",
    "timed",
    "write_tokens",
]

Row = Mapping[str, Any]
Heads = Mapping[str, tuple[str, str]]
"""{key of a row: (head of its column, format of its values)}; a value of None is left empty."""

OURS, THEIRS = "#1f6f8b", "#c3c9d0"
LOG_FROM = 20  # a slowest bar this many times shorter than the longest cannot be seen on a linear axis


def benchmark_parser(
    doc: str | None, *, runs: int | None = None, compares: bool = False
) -> argparse.ArgumentParser:
    """Help is the docstring as it is written; with `compares` the options of `give`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if compares:
        parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
        parser.add_argument(
            "--png", type=Path, metavar="FILE", help="also draw bars (pip install shardkit[plot])"
        )
    return parser


def write_tokens(folder: Path, *, shards: int, rows: int, length: int, hashes: Sequence[str] = ()) -> int:
    """MDS shards of `rows` random uint16 rows each, no two alike; returns the bytes of all."""
    from shardkit.formats import mds

    tokens = np.random.default_rng(0).integers(0, 50_000, (rows, length), dtype=np.uint16)
    infos = []
    for number in range(shards):
        tokens[:, 0] = number
        infos.append(mds.write_rows_shard(folder, f"shard.{number:05d}.mds", tokens, hashes=hashes))
    mds.write_index(folder, infos)
    return sum(info.raw.bytes for info in infos)


def read_once(*files: Path) -> None:
    """Evict files from the page cache, then read each once in order: how pages came in shows for long."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass


def in_turns(names: Sequence[str], run: int) -> list[str]:
    """The names in the order of a run: the first one moves on each time."""
    start = run % len(names)
    return [*names[start:], *names[:start]]


def timed(cases: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Wall seconds of each case in each run; every run takes all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, work in cases.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_rss_bytes() -> int:
    """Of this program. What getrusage has begins with the peak of the parent."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def print_figures(arguments: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """One figure a line, or all as JSON."""
    if arguments.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
        print(f"{name:{width}}  {shown}")


def give(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    heads: Heads,
    *,
    title: str = "",
    unit: str = "",
    runs: str = "runs",
) -> None:
    """Print rows as a table or JSON, and draw them if asked; `runs` is the key of all runs' figures."""
    if getattr(arguments, "png", None) and rows:
        _draw(arguments.png, rows, runs, title, unit)
    if arguments.json:
        print(json.dumps(rows))
        return
    texts = [
        ["" if row[key] is None else format(row[key], form) for key, (_, form) in heads.items()]
        for row in rows
    ]
    lines = [[head for head, _ in heads.values()], *texts]
    if getattr(arguments, "markdown", False):
        lines.insert(1, ["---:" if form else "---" for _, form in heads.values()])
        print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if form else "<" for _, form in heads.values()]
    for line in lines:
        print("  ".join(f"{c:{side}{n}}" for c, side, n in zip(line, sides, widths, strict=True)).rstrip())


def _draw(file: Path, rows: Sequence[Row], runs: str, title: str, unit: str) -> None:
    """One bar for each row: median, range of the runs, and the figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    medians = [statistics.median(row[runs]) for row in rows]
    spreads = [
        [median - min(row[runs]) for row, median in zip(rows, medians, strict=True)],
        [max(row[runs]) - median for row, median in zip(rows, medians, strict=True)],
    ]
    names = [f"{row['task']}: {row['side']}" if row.get("task") else str(row["side"]) for row in rows]
    colors = [OURS if str(row["side"]).startswith("shardkit") else THEIRS for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.34 * len(rows)), layout="constrained")
    axes.barh(names, medians, xerr=spreads, color=colors, ecolor="#555555", capsize=2, height=0.66)
    logarithmic = min(medians) * LOG_FROM < max(medians)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(medians) / 2, max(medians) * 3)
    else:
        axes.set_xlim(0, max(medians) * 1.18)
    for place, (median, above) in enumerate(zip(medians, spreads[1], strict=True)):
        text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        axes.annotate(text, (median + above, place), (5, 0), textcoords="offset points", va="center", size=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(title, size=10, loc="left")
    count = len(rows[0][runs])
    axes.set_xlabel(
        f"{unit}{', logarithmic' if logarithmic else ''}; median and range of {count} run{'s'[: count > 1]}",
        size=8,
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
