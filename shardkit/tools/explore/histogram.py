"""Draws the values of a rule around its bound: documents that the rule dropped, and documents that are kept.

The bound is an edge of a bar, so no bar holds documents of both sides. The picture shows nearly all dropped
documents, and kept ones up to three times as far from the bound, or as far as their median if that is at most
twelve times as far; the page says how many lie outside. One or two bars that are far higher than all others
are cut, or nothing near the bound would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.tools.explore.summary import RuleValues, Values

_BARS = 56
_TAIL = 0.005  # share of the values farthest from the bound that a picture may leave out
_KEPT_WIDTH, _MOST_WIDTH = 3, 12  # how far from the bound kept documents are shown, in widths of the dropped
_CUT = 3  # bars are cut at so many times the height of the highest bar but the `_HIGHEST` ones
_HIGHEST = 2
_LEAST_HEIGHT = 0.7  # percent of the picture, for a bar of one document
_TICKS = 5
_STEPS = (1, 2, 2.5, 5, 10)  # of numbers at the axis, times a power of ten

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from `low` to `high`: place and width in percent, and documents of both kinds with heights."""

    x: float
    width: float
    low: float
    high: float
    dropped: int
    kept: int
    dropped_height: float
    kept_height: float
    is_cut: bool

    @property
    def documents(self) -> int:
        """The number of documents, of both kinds."""
        return self.dropped + self.kept


@dataclass(frozen=True, slots=True)
class Chart:
    """A histogram. `bounds` and `ticks` are (place in percent, value); counts `outside` are in no bar.

    Bars with more than `most` documents are cut.
    """

    bars: Sequence[Bar]
    bounds: Sequence[tuple[float, float]]
    ticks: Sequence[tuple[float, float]]
    dropped_outside: int
    kept_outside: int
    most: int


def draw_chart(dropped: RuleValues, kept: Values | None = None, *, one_in: float = 1.0) -> Chart | None:
    """Return the histogram of a rule; None if it has no numbers. A kept value stands for `one_in` of them."""
    values, counts = dropped.values()
    if not len(values):
        return None
    kept_values, kept_counts = Values().values() if kept is None else kept.values()
    bound = dropped.bounds[0] if len(dropped.bounds) == 1 else None
    is_above = bound is not None and dropped.high > bound
    low, high = _range_of(dropped, values, counts, kept_values, kept_counts)
    numbers = np.concatenate([values, kept_values, dropped.bounds])
    is_whole = bool((numbers == np.round(numbers)).all()) and high - low < 4 * _BARS
    unit = 1.0 if is_whole else 0.0
    if bound is not None:
        # Stored values are rounded, but each kind of documents is on its side of the bound.
        edge = bound + unit * is_above
        below = math.nextafter(edge, -math.inf)
        values = np.maximum(values, edge) if is_above else np.minimum(values, below)
        kept_values = np.minimum(kept_values, below) if is_above else np.maximum(kept_values, edge)
        edges = _edges(low, high, edge, unit)
    else:
        edges = _edges(low, high, low, unit)[1:]
    found = [_heights(edges, values, counts), _heights(edges, kept_values, kept_counts)]
    heights = found[0], found[1] * one_in
    most = _most(heights[0] + heights[1])
    first, width = float(edges[0]), float(edges[-1] - edges[0])
    bars = [
        Bar(
            100 * float(edges[n] - first) / width,
            100 * float(edges[n + 1] - edges[n]) / width,
            float(edges[n]),
            float(edges[n + 1]) - unit,
            int(a),
            round(float(b)),
            *_percent(float(a), float(b), most),
            bool(a + b > most),
        )
        for n, (a, b) in enumerate(zip(*heights, strict=True))
        if a or b
    ]
    places = [(100 * (one + unit * is_above - first) / width, one) for one in dropped.bounds]
    outside = counts.sum() - found[0].sum(), one_in * (kept_counts.sum() - found[1].sum())
    ticks = [(100 * (at + unit / 2 - first) / width, at) for at in _ticks(first, first + width - unit)]
    return Chart(bars, places, ticks, round(outside[0]), round(outside[1]), round(most))


def _range_of(
    dropped: RuleValues, values: _Floats, counts: _Ints, kept: _Floats, kept_counts: _Ints
) -> tuple[float, float]:
    """Return the least and the greatest value to show."""
    low, high = float(values[0]), float(values[-1])
    if not dropped.bounds or not math.isfinite(dropped.bounds[0]):
        return low, high
    bounds = dropped.bounds
    shares = np.cumsum(counts) / counts.sum()
    if values[-1] > bounds[0]:
        high = float(values[np.searchsorted(shares, 1 - _TAIL)])
    elif values[0] < bounds[0]:
        low = float(values[np.searchsorted(shares, _TAIL)])
    low, high = min(low, *bounds), max(high, *bounds)
    if not len(kept):
        return low, high
    shares = np.cumsum(kept_counts) / kept_counts.sum()
    places = np.searchsorted(shares, [_TAIL, 0.5, 1 - _TAIL]).clip(max=len(kept) - 1)
    least, median, most = kept[places].tolist()
    middle = abs(median - bounds[0])
    width = high - low or math.inf
    room = max(_KEPT_WIDTH * width, middle if middle <= _MOST_WIDTH * width else 0.0)
    return min(low, max(least, bounds[0] - room)), max(high, min(most, bounds[0] + room))


def _edges(low: float, high: float, middle: float, unit: float) -> _Floats:
    """Return the edges of bars, with one at least on each side of `middle`, which is an edge.

    With a `unit` of 1, all are whole numbers.
    """
    step = float(math.ceil((high - low + 1) / _BARS)) if unit else (high - low) / _BARS or 1.0
    before = max(1, math.ceil((middle - low) / step - 1e-9))
    after = max(1, math.ceil((high + unit - middle) / step - 1e-9))
    return np.asarray(middle + step * np.arange(-before, after + 1), np.float64)


def _most(heights: _Floats) -> float:
    """Return the number of documents at which bars are cut; that of the highest bar if none is."""
    ranked = np.sort(heights)[::-1]
    others = ranked[_HIGHEST:][ranked[_HIGHEST:] > 0]
    return max(1.0, min(float(ranked[0]), _CUT * float(others[0]) if len(others) else math.inf))


def _percent(dropped: float, kept: float, most: float) -> tuple[float, float]:
    """Return the heights of both parts of a bar in percent of the picture."""
    parts = [max(_LEAST_HEIGHT, 100 * part / most) if part else 0.0 for part in (dropped, kept)]
    scale = min(1.0, 100 / (sum(parts) or 1))
    return parts[0] * scale, parts[1] * scale


def _heights(edges: _Floats, values: _Floats, counts: _Ints) -> _Floats:
    return np.histogram(values, edges, weights=counts)[0].astype(np.float64)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high` for an axis."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(one * power for one in _STEPS if (high - low) / (one * power) <= _TICKS + 1)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
