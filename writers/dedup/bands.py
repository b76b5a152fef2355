"""Locality-sensitive hashing: the table of band keys, and the choice of bands and rows.

Two documents are candidates if they share the key of a band (a 64-bit hash of some rows of the signature).
Each part writes a BANDS run with one entry for each band of each document that can be in a pair; partitions
are ranges of the keys, so all entries of a key meet in one task. An entry takes 16 bytes.

Two documents of Jaccard similarity s agree in one MinHash value with probability s, in all `rows` values of
a band with s^rows, and in at least one of `bands` bands with 1 - (1 - s^rows)^bands: the S-curve (Leskovec,
Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). `optimal_parameters` chooses as datasketch's
MinHashLSH does: the least weighted area of false positives (below the threshold) and false negatives (above
it). Both are integrals of polynomials, so Gauss-Legendre quadrature is exact to rounding error.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from shardkit.errors import RecipeError
from shardkit.units import format_bytes
from shardkit.writers.exchange.exchange import Table

BANDS = Table("bands.run", np.dtype([("key", "<u8"), ("number", "<u8")]))  # band key, document number

MAX_PARTITIONS = 1 << 20

PEAK_BYTES_PER_ENTRY = 48  # measured peak memory of stage `candidates`, per entry of a partition


def partitions_for(entries: int, memory_bytes: int) -> int:
    """Return the least number of partitions such that a task with one of them needs half of `memory_bytes`.

    `entries` is the total number of rows of BANDS. `memory_bytes` is a task's budget, a fifth of the recipe's
    `memory`. Raises RecipeError if more than MAX_PARTITIONS are needed.
    """
    needed = entries * PEAK_BYTES_PER_ENTRY * 2
    partitions = max(1, -(-needed // memory_bytes))
    if partitions > MAX_PARTITIONS:
        enough = -(-5 * needed // MAX_PARTITIONS // 10**8) * 10**8
        raise RecipeError(
            f"memory: near-duplicates of {entries:,} band keys, with {format_bytes(5 * memory_bytes)} per "
            f"task, take {partitions:,} tasks of stage candidates; at most {MAX_PARTITIONS:,} are possible: "
            f"set `memory` to {format_bytes(enough)} or more (finished tasks are kept), or build in parts "
            f"and remove the duplicates of earlier parts with `dedup.near.against`"
        )
    return partitions


Floats = npt.NDArray[np.float64]

CURVE_START = 0.5

CURVE_STEP = 0.025  # gives 21 points, so that the table with its heading fits 24 terminal lines

BAR_WIDTH = 40

SAME = 1 + 1e-12  # errors with a smaller ratio differ only by rounding, such as for 1 x 1 and 1 x 2 at 0.5


def probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that a pair of this Jaccard similarity shares at least one band."""
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def curve(bands: int, rows: int) -> list[tuple[float, float]]:
    """Return the points (similarity, probability) of the S-curve from 0.5 to 1.0."""
    steps = round((1.0 - CURVE_START) / CURVE_STEP)
    similarities = [round(CURVE_START + CURVE_STEP * step, 6) for step in range(steps + 1)]
    return [(similarity, probability(similarity, bands, rows)) for similarity in similarities]


def render_curve(bands: int, rows: int, *, threshold: float | None = None) -> str:
    """Format the S-curve as a table with bars for a terminal, with a mark at the threshold."""
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
    """Return (bands, rows) with bands x rows <= permutations, as datasketch's MinHashLSH chooses them.

    Of equally good choices the one with the fewest bands, then rows, is taken. Raises ValueError for a
    threshold outside 0..1, no permutation, or a negative weight.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; it must be between 0 and 1")
    if permutations < 1:
        raise ValueError(f"permutations is {permutations}; it must be at least 1")
    if min(false_positive_weight, false_negative_weight) < 0:
        raise ValueError(f"weights are {false_positive_weight} and {false_negative_weight}; use 0 or more")
    best, least = (0, 0), float("inf")
    for bands in range(1, permutations + 1):
        positive, negative = _areas(threshold, bands, permutations)
        errors = positive * false_positive_weight + negative * false_negative_weight
        rows = int(np.argmax(errors <= errors.min() * SAME))
        if errors[rows] * SAME < least:
            best, least = (bands, rows + 1), float(errors[rows])
    return best


def _areas(threshold: float, bands: int, permutations: int) -> tuple[Floats, Floats]:
    """Return two arrays, the areas of false positives and of false negatives, for bands of 1, 2, … rows."""
    nodes, weights = _quadrature(permutations)
    rows = np.arange(1, permutations // bands + 1)[:, None]

    def missed(start: float, stop: float) -> Floats:
        points = start + (stop - start) * nodes
        values: Floats = (1.0 - points[None, :] ** rows) ** bands
        return (stop - start) * (values @ weights)

    return threshold - missed(0.0, threshold), missed(threshold, 1.0)


@cache
def _quadrature(permutations: int) -> tuple[Floats, Floats]:
    """Return Gauss-Legendre nodes and weights on 0..1, exact up to degree `permutations`.

    n points are exact up to degree 2n - 1; the degree is bands x rows, at most `permutations`.
    """
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0
