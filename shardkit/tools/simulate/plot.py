"""Pictures of simulated runs: waits and traffic over time, or how a sweep's settings compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import naming_extras
from shardkit.tools.simulate.run import SLOW_STEP_SECONDS, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_run", "plot_sweep"]

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#c05621", "#718096"

_BINS = 200


def plot_run(outcome: Outcome, file: Path) -> None:
    """Write a picture of the waits of steps and the traffic of nodes; its format is that of the ending."""
    scenario = outcome.scenario
    figure = _figure(3)
    waits, traffic, nodes = figure.subplots(3, 1)
    waits.plot(outcome.begins, np.maximum(outcome.waits, 1e-6) * 1000, ".", color=_BLUE, markersize=3)
    waits.axhline(SLOW_STEP_SECONDS * 1000, color=_GREY, linewidth=0.8, linestyle="--")
    waits.set_yscale("log")
    waits.set_ylabel("wait of a step (ms)")
    waits.set_title("How long the run waited for each step; dashed: 1 ms; at the bottom: none", fontsize=10)

    edges = np.linspace(0, max(outcome.seconds, 1e-9), _BINS + 1)
    # What had arrived at each node by each edge.
    came = np.stack([np.interp(edges, *node.moved.T) for node in outcome.nodes])
    rates = np.diff(came, axis=1) / (edges[1] - edges[0])
    middles = (edges[1:] + edges[:-1]) / 2
    traffic.fill_between(middles, rates.min(axis=0) / 1e6, rates.max(axis=0) / 1e6, color=_BLUE, alpha=0.25)
    traffic.plot(middles, rates.mean(axis=0) / 1e6, color=_BLUE, label="mean of the nodes, least to most")
    limit = scenario.network.node_bytes_per_second / 1e6
    traffic.axhline(limit, color=_ORANGE, linewidth=0.8, label="bandwidth of a node")
    traffic.set_ylabel("shards fetched (MB/s)")
    traffic.set_ylim(bottom=0)
    traffic.legend(frameon=False, fontsize=8)
    traffic.set_title("Traffic of a node, without rows that are read singly", fontsize=10)

    used = np.cumsum(np.full(scenario.steps, scenario.batch_size * scenario.gpus_per_node))
    nodes.plot(edges, came.mean(axis=0) / 1e9, color=_BLUE, label="fetched, whole shards")
    nodes.plot(
        outcome.begins, used * scenario.shards.sample_bytes / 1e9, color=_ORANGE, label="used by its batches"
    )
    nodes.set_ylabel("bytes of a node (GB)")
    nodes.set_xlabel("virtual time (s)")
    nodes.legend(frameon=False, fontsize=8)
    nodes.set_title("What a node has fetched and used so far", fontsize=10)
    _save(figure, file)


def plot_sweep(names: Sequence[str], rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Bars for each run of a sweep: time lost to waits, and bytes fetched per byte used.

    `rows`: figures of the runs, and the values of the varied settings under `names`.
    """
    figure = _figure(2)
    stalls, reads = figure.subplots(2, 1, sharex=True)
    places = np.arange(len(rows))
    labels = ["\n".join(f"{name}={row[name]}" for name in names) for row in rows]
    stalls.bar(places, [100 * row["stall_share"] for row in rows], color=_BLUE)
    stalls.set_ylabel("time lost to waits (%)")
    reads.bar(places, [row["read_amplification"] for row in rows], color=_ORANGE)
    reads.axhline(1, color=_GREY, linewidth=0.8, linestyle="--")
    reads.set_ylabel("bytes read / bytes used")
    reads.set_xticks(places, labels, fontsize=8)
    _save(figure, file)


def _figure(panels: int) -> Figure:
    with naming_extras("pictures of simulations"):
        from matplotlib.figure import Figure
    # Not pyplot: it would choose a window system and keep the figure.
    return Figure(figsize=(8, 2.6 * panels), layout="constrained", dpi=120)


def _save(figure: Figure, file: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="#e2e8f0", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(file)
