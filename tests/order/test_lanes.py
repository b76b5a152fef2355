"""Lanes and windows cut an epoch without gap or overlap; defaults follow their rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.order.order import Lanes, default_lanes, default_window, rank_slice


@given(samples=st.integers(0, 300), lanes=st.integers(1, 40), window=st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_windows_tile_each_lane(samples: int, lanes: int, window: int) -> None:
    geometry = Lanes(samples, lanes, window)
    assert geometry.lengths.sum() == samples
    assert geometry.lengths.max() - geometry.lengths.min() <= 1
    for lane in range(lanes):
        rows = np.arange(geometry.lengths[lane])
        numbers = geometry.windows(np.full_like(rows, lane), rows)
        firsts, sizes = geometry.bounds(np.full_like(rows, lane), numbers)
        for number in np.unique(numbers):
            inside = rows[numbers == number]
            assert set(firsts[numbers == number]) == {inside[0]}
            assert set(sizes[numbers == number]) == {len(inside)}
        if window and len(rows) > window:
            assert np.bincount(numbers)[0] == window - window * lane // lanes
            assert set(np.bincount(numbers)[1:-1]) <= {window}


@given(samples=st.integers(1, 300), lanes=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_place_is_found_in_its_lane(samples: int, lanes: int) -> None:
    geometry = Lanes(samples, lanes, 5)
    expected = [(lane, row) for lane in range(lanes) for row in range(geometry.lengths[lane])]
    found, rows = geometry.find(np.arange(samples))
    assert list(zip(found.tolist(), rows.tolist(), strict=True)) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_rank_slices_are_equal_parts_in_order(world_size: int) -> None:
    taken = [i for rank in range(world_size) for i in range(12)[rank_slice(12, rank, world_size)]]
    assert taken == list(range(12))


@pytest.mark.parametrize(("size", "rank", "world_size"), [(12, 0, 5), (12, 4, 4), (12, -1, 4), (12, 0, 0)])
def test_unequal_parts_and_unknown_ranks_are_refused(size: int, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError):
        rank_slice(size, rank, world_size)


@pytest.mark.parametrize(
    ("global_batch", "nodes", "lanes"),
    [
        (512, 1, 64),
        (512, 8, 64),
        (480, 1, 60),
        (480, 16, 48),
        (48, 1, 48),
        (127, 1, 1),
        (8, 3, 8),
        (960, 96, 64),
    ],
)
def test_default_lanes_divide_the_batch_and_prefer_the_nodes(
    global_batch: int, nodes: int, lanes: int
) -> None:
    assert default_lanes(global_batch, nodes) == lanes


def test_two_default_windows_of_all_lanes_fit_the_budget() -> None:
    assert default_window(64, 4096) == 8192
    assert 2 * 64 * 4096 * default_window(64, 4096, 10**9) <= 10**9
    assert default_window(64, 10**9, 10) == 1


def test_defaults_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        default_lanes(0)
    with pytest.raises(ValueError, match="at least 1"):
        default_lanes(8, nodes=0)
    with pytest.raises(ValueError, match="at least 1"):
        default_window(0, 1)
