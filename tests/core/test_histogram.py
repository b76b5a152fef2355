"""Histograms hold every value, exactly, and those of parts add up to that of the whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.card import Histogram


@given(st.lists(st.integers(0, 2**40)), st.integers(0, 50))
def test_bins_hold_what_they_say_and_parts_add_up(values: list[int], cut: int) -> None:
    whole = Histogram.of(np.array(values, np.int64))
    assert (whole.count, whole.sum) == (len(values), sum(values))
    for one in whole.bins():
        inside = [value for value in values if one.low <= value <= one.high]
        assert (one.count, one.sum) == (len(inside), sum(inside))
    parts = [Histogram.of(np.array(part, np.int64)) for part in (values[:cut], values[cut:])]
    assert Histogram.total(json.loads(json.dumps(part.to_dict())) for part in parts) == whole


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (1, "1"), (2, "2-3"), (3, "2-3"), (1024, "1,024-2,047"), (1023, "512-1,023")],
)
def test_bins_are_between_powers_of_two(value: int, label: str) -> None:
    [one] = Histogram.of(np.array([value])).bins()
    assert one.label == label
