"""How benchmarks that set tools side by side give figures: as text, --json, --markdown and --png FILE."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Heads", "add_output_arguments", "give"]

Row = Mapping[str, Any]
Heads = Mapping[str, tuple[str, str]]
"""{key of a row: (head of its column, format of its values)}; a value of None is left empty."""

OURS, THEIRS = "#1f6f8b", "#c3c9d0"
LOG_FROM = 20  # a slowest bar this many times shorter than the longest cannot be seen on a linear axis


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="also draw bars (pip install shardkit[plot])"
    )


def give(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    heads: Heads,
    show: Callable[[], object],
    *,
    title: str,
    unit: str,
    runs: str,
) -> None:
    """What was asked for of `rows`; `show` prints the plain table, `runs` is the key of all runs' figures."""
    if arguments.png and rows:
        _draw(arguments.png, rows, runs, title, unit)
    if arguments.json:
        print(json.dumps(rows))
    elif arguments.markdown:
        print(_markdown(rows, heads))
    else:
        show()


def _markdown(rows: Sequence[Row], heads: Heads) -> str:
    lines = [[head for head, _ in heads.values()], ["---:" if form else "---" for _, form in heads.values()]]
    for row in rows:
        lines.append(["" if row[key] is None else format(row[key], form) for key, (_, form) in heads.items()])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _draw(file: Path, rows: Sequence[Row], runs: str, title: str, unit: str) -> None:
    """A bar a row: its median, the range of its runs, the figure beside it."""
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
