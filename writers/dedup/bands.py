"""Locality-sensitive hashing: the table of band keys, and the choice of bands and rows.

Two documents are candidates if they share the key of a band (a 64-bit hash of some rows of the signature).
Each part writes a BANDS run with one entry for each band of each document that can be in a pair; partitions
are ranges of the keys, so all entries of a key meet in one task. An entry takes 16 bytes.

Two documents of Jaccard similarity s agree in one MinHash value with probability s, in all `rows` values of
a band with s^rows, and in at least one of `bands` bands with 1 - (1 - s^rows)^bands: the S-curve (Leskovec,
Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). `optimal_parameters` chooses as datasketch's
MinHashLSH does: the least weighted area of false positives (below the threshold) and false negatives (above
it). The areas are of polynomials, so Gauss-Legendre quadrature has them to rounding error without SciPy.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from shardkit.errors import RecipeError
from shardkit.units import format_bytes
from shardkit.writers.exchange.exchange import Table

BANDS = Table("bands.run", np.dtype([("key", "<u8"), ("number", "<u8")]))  # of a document

MAX_PARTITIONS = 1 << 16

PEAK_BYTES_PER_ENTRY = 48  # of a partition in `shardkit.writers.dedup.candidates`, measured


def partitions_for(entries: int, memory_bytes: int) -> int:
    """Partitions of this many entries of all parts that keep one within half of a memory budget.

    RecipeError if there would be too many; the budget is a fifth of the recipe's memory.
    """
    needed = entries * PEAK_BYTES_PER_ENTRY * 2
    partitions = max(1, -(-needed // memory_bytes))
    if partitions > MAX_PARTITIONS:
        enough = -(-5 * needed // MAX_PARTITIONS // 10**8) * 10**8
        raise RecipeError(
            f"memory: near-duplicates of {entries:,} band keys, with {format_bytes(5 * memory_bytes)} for a "
            f"task, take {partitions:,} tasks of stage candidates; at most {MAX_PARTITIONS:,} are possible: "
            f"set `memory` to {format_bytes(enough)} or more (finished tasks stay), or build in parts and "
            f"remove the duplicates of earlier ones with `dedup.near.against`"
        )
    return partitions


Floats = npt.NDArray[np.float64]

CURVE_START = 0.5

CURVE_STEP = 0.025  # 21 lines: with the heading, one screen of 24

BAR_WIDTH = 40

SAME = 1 + 1e-12  # a ratio of areas that is due to rounding: there are ties, such as 1 x 1 and 1 x 2 at 0.5


def probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that a pair of this Jaccard similarity shares at least one band."""
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def curve(bands: int, rows: int) -> list[tuple[float, float]]:
    """(similarity, probability) from 0.5 to 1.0."""
    steps = round((1.0 - CURVE_START) / CURVE_STEP)
    similarities = [round(CURVE_START + CURVE_STEP * step, 6) for step in range(steps + 1)]
    return [(similarity, probability(similarity, bands, rows)) for similarity in similarities]


def render_curve(bands: int, rows: int, *, threshold: float | None = None) -> str:
    """The S-curve as a table with bars, for a terminal; the line of the threshold is marked."""
    points = curve(bands, rows)
    if threshold is not None and threshold not in dict(points):
        points = sorted([*points, (threshold, probability(threshold, bands, rows))])
    lines = [
        f"{bands} bands x {rows} rows: pairs that become candidates, by Jaccard similarity",
        "similarity  candidates",
    ]
    for similarity, found in points:
        bar = "#" * round(found * BAR_WIDTH)
        mark = "  < threshold" if similarity == threshold else ""
        lines.append(f"{similarity:10.3f}  {100 * found:8.2f}%  {bar}{mark}")
    return "\n".join(lines)


def optimal_parameters(
    threshold: float,
    permutations: int,
    false_positive_weight: float = 0.5,
    false_negative_weight: float = 0.5,
) -> tuple[int, int]:
    """(bands, rows) with bands x rows <= permutations, as datasketch's MinHashLSH would choose.

    The first of equals counts, in ascending order of bands, then rows. ValueError: a threshold outside
    0..1, no permutation, or a negative weight.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold {threshold} is not between 0 and 1")
    if permutations < 1:
        raise ValueError(f"{permutations} permutations: at least one is needed")
    if min(false_positive_weight, false_negative_weight) < 0:
        raise ValueError(f"weights {false_positive_weight} and {false_negative_weight}: one is below 0")
    best, least = (0, 0), float("inf")
    for bands in range(1, permutations + 1):
        positive, negative = _areas(threshold, bands, permutations)
        errors = positive * false_positive_weight + negative * false_negative_weight
        rows = int(np.argmax(errors <= errors.min() * SAME))
        if errors[rows] * SAME < least:
            best, least = (bands, rows + 1), float(errors[rows])
    return best


def _areas(threshold: float, bands: int, permutations: int) -> tuple[Floats, Floats]:
    """The areas of false positives and of false negatives for each number of rows, 1 first."""
    nodes, weights = _quadrature(permutations)
    rows = np.arange(1, permutations // bands + 1)[:, None]

    def missed(start: float, stop: float) -> Floats:
        points = start + (stop - start) * nodes
        values: Floats = (1.0 - points[None, :] ** rows) ** bands
        return (stop - start) * (values @ weights)

    return threshold - missed(0.0, threshold), missed(threshold, 1.0)


@cache
def _quadrature(permutations: int) -> tuple[Floats, Floats]:
    """Gauss-Legendre on 0..1: n points are exact up to degree 2n - 1, and bands x rows is the degree."""
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0
