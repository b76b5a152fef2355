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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Heads",
    "Table",
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


def benchmark_parser(doc: str | None, *, runs: int | None = None) -> argparse.ArgumentParser:
    """Options of all benchmarks; help is the docstring as it is written."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs find their modules compiled
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print rows with every run as JSON")
    help_text = "also write PREFIX.json, PREFIX.md and, of rows with several runs, the bars PREFIX.png"
    parser.add_argument("--save", type=Path, metavar="PREFIX", help=help_text)
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


def print_figures(arguments: argparse.Namespace, figures: Mapping[str, Any], *, title: str = "") -> None:
    """One figure a line, or all as JSON."""
    shown = {
        name: f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
        for name, value in figures.items()
    }
    table = Table(title, [["figure", "value"], *([name, str(text)] for name, text in shown.items())], [1])
    if arguments.save is not None:
        table.save(arguments.save, figures)
    if arguments.json:
        print(json.dumps(figures))
        return
    width = max(map(len, shown))
    for name, text in shown.items():
        print(f"{name:{width}}  {text}")


@dataclass(frozen=True)
class Table:
    """Cells of a table, its head first; columns numbered `right` are aligned right."""

    title: str
    lines: Sequence[Sequence[str]]
    right: Sequence[int]

    def markdown(self) -> str:
        edge = ["---:" if column in self.right else "---" for column in range(len(self.lines[0]))]
        lines = [self.lines[0], edge, *self.lines[1:]]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        sides = [">" if column in self.right else "<" for column in range(len(widths))]
        rows = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
            for line in self.lines
        ]
        return "\n".join(row.rstrip() for row in rows)

    def save(self, prefix: Path, rows: object) -> None:
        """PREFIX.md and PREFIX.json: the title, the table and what it was made of."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        prefix.with_name(f"{prefix.name}.md").write_text(self.markdown())
        content = {"title": self.title, "markdown": self.markdown(), "rows": rows}
        prefix.with_name(f"{prefix.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def give(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    heads: Heads,
    *,
    title: str = "",
    unit: str = "",
    runs: str = "runs",
) -> None:
    """Print rows as a table or JSON, and save them if asked; `runs` is the key of all runs' figures."""
    texts = [
        ["" if row[key] is None else format(row[key], form) for key, (_, form) in heads.items()]
        for row in rows
    ]
    right = [number for number, (_, form) in enumerate(heads.values()) if form]
    table = Table(title, [[head for head, _ in heads.values()], *texts], right)
    if arguments.save is not None:
        table.save(arguments.save, rows)
        if rows and all("side" in row and len(row.get(runs) or ()) > 1 for row in rows):
            _draw(arguments.save.with_name(f"{arguments.save.name}.png"), rows, runs, title, unit)
    print(json.dumps(rows) if arguments.json else table.text())


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
