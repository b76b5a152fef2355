"""Bands and rows are those that datasketch chooses, and the S-curve is the one of the books."""

from __future__ import annotations

import math

import pytest
from datasketch.lsh import _optimal_param

from shardkit.writers.dedup.bands import curve, optimal_parameters, probability, render_curve


@pytest.mark.parametrize("permutations", [1, 2, 3, 16, 31, 100, 112, 128])
def test_parameters_equal_those_of_datasketch(permutations: int) -> None:
    for threshold in (0.0, 0.05, 0.3, 0.5, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0):
        ours = optimal_parameters(threshold, permutations)
        assert ours == _optimal_param(threshold, permutations, 0.5, 0.5), threshold


@pytest.mark.parametrize(("false_positives", "false_negatives"), [(0.2, 0.8), (0.9, 0.1), (0.01, 0.99)])
def test_weights_mean_what_they_mean_to_datasketch(false_positives: float, false_negatives: float) -> None:
    for threshold in (0.4, 0.6, 0.8, 0.93):
        ours = optimal_parameters(threshold, 64, false_positives, false_negatives)
        assert ours == _optimal_param(threshold, 64, false_positives, false_negatives), threshold


def test_parameters_for_a_thousand_permutations_use_no_more_than_there_are() -> None:
    bands, rows = optimal_parameters(0.8, 1024)
    assert bands * rows <= 1024
    assert probability(0.75, bands, rows) < 0.2 < 0.8 < probability(0.85, bands, rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1.1, 128), "threshold"), ((0.8, 0), "permutations"), ((0.8, 128, -0.1, 1.1), "weights")],
)
def test_impossible_arguments_are_refused(arguments: tuple[float, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimal_parameters(*arguments)


@pytest.mark.parametrize(("similarity", "found"), [(0.7, 0.56), (0.75, 0.77), (0.8, 0.92), (0.85, 0.988)])
def test_the_probability_is_the_published_one_for_14_bands_of_8_rows(similarity: float, found: float) -> None:
    """The FineWeb paper states these for 112 hashes."""
    assert probability(similarity, 14, 8) == pytest.approx(found, abs=0.005)


def test_the_curve_rises_from_half_to_one() -> None:
    points = curve(14, 8)
    assert [similarity for similarity, _ in points] == pytest.approx([0.5 + i / 40 for i in range(21)])
    assert points == sorted(points, key=lambda point: point[1])
    assert points[-1] == (1.0, 1.0)
    assert math.isclose(points[0][1], 1 - (1 - 0.5**8) ** 14)


def test_the_rendered_curve_fits_one_screen_and_marks_the_threshold() -> None:
    lines = render_curve(14, 8, threshold=0.8).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.endswith("< threshold")] == ["0.800"]
    between = [line.split() for line in render_curve(9, 13, threshold=0.81).splitlines() if "<" in line]
    assert [words[:2] for words in between] == [["0.810", "45.18%"]]
