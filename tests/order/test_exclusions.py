"""Rows that are left out are left out, all others are kept, and their numbers go there and back."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.order.exclusions import Exclusions

Ranges = list[tuple[int, int]]

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=10
)


def rows_of(ranges: Ranges) -> set[int]:
    return {row for begin, end in ranges for row in range(begin, end)}


@given(ranges=RANGES)
@settings(max_examples=100, deadline=None)
def test_rank_and_select_agree_with_a_list_of_the_kept_rows(ranges: Ranges) -> None:
    excluded, out = Exclusions(ranges), rows_of(ranges)
    kept = [row for row in range(90) if row not in out]
    assert excluded.count == len(out)
    assert excluded.contains(np.arange(90)).tolist() == [row in out for row in range(90)]
    assert excluded.select(np.arange(len(kept))).tolist() == kept
    assert excluded.rank(kept).tolist() == list(range(len(kept)))
    for row in out:
        with pytest.raises(IndexError, match=f"row {row} is excluded"):
            excluded.rank([row])


@given(ranges=RANGES, sizes=st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=100, deadline=None)
def test_each_shard_keeps_its_other_rows(ranges: Ranges, sizes: list[int]) -> None:
    sizes = [*sizes, 72]  # so that the ranges lie in the dataset
    out, rows = rows_of(ranges), iter(range(sum(sizes)))
    expected = [sum(next(rows) not in out for _ in range(size)) for size in sizes]
    assert Exclusions(ranges).kept_of_shards(np.array(sizes)).tolist() == expected


@given(ranges=RANGES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_rows_are_equal_however_they_are_written(ranges: Ranges, data: st.DataObject) -> None:
    excluded, rows = Exclusions(ranges), data.draw(st.permutations(sorted(rows_of(ranges))))
    written: list[int | tuple[int, int]] = [*ranges, *rows]
    others = [
        Exclusions(np.array(ranges, dtype=np.int32).reshape(-1, 2)),
        Exclusions.of(rows),
        Exclusions.of(np.array(rows, dtype=np.int16)),
        Exclusions.of(data.draw(st.permutations(written))),
        Exclusions(excluded.to_list()),
    ]
    for other in others:
        assert other == excluded
        assert other.digest == excluded.digest
        assert hash(other) == hash(excluded)
    merged = excluded.to_list()
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(merged))
    more = Exclusions([*ranges, (100, 101)])
    assert more != excluded
    assert more.digest != excluded.digest


def test_the_digest_never_changes() -> None:
    assert Exclusions([]).digest == "2013867f14b595c41d29d5e54ea383de"
    assert Exclusions([(17, 21), (2**60 - 1, 2**60)]).digest == "9260c3f5dc3ebe20cf036a88df20912a"


def test_the_largest_dataset_has_rows_that_can_be_left_out() -> None:
    last = 2**60 - 1
    excluded = Exclusions([(0, 10), (2**59, 2**59 + 5), (last, last + 1)])
    assert excluded.select([0, 2**59 - 11, 2**59 - 10]).tolist() == [10, 2**59 - 1, 2**59 + 5]
    assert excluded.rank([last - 1]).tolist() == [last - 1 - 15]
    assert excluded.kept_of_shards([2**59, 2**59]).tolist() == [2**59 - 10, 2**59 - 6]


def test_arrays_keep_their_shapes() -> None:
    excluded = Exclusions.of([1, (3, 5)])
    assert excluded.select([[0, 1], [2, 3]]).tolist() == [[0, 2], [5, 6]]
    assert excluded.rank([[0, 2], [5, 6]]).tolist() == [[0, 1], [2, 3]]
    assert excluded.select(1).tolist() == 2
    assert excluded.select([]).shape == (0,)
    assert Exclusions.of(np.array([255], dtype=np.uint8)).to_list() == [(255, 256)]


def test_a_file_lists_rows_and_ranges(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_bytes(b"\xef\xbb\xbf# spikes of the loss\n\n  40\n17:21 # a bad page\r\n19 : 30\n")
    assert Exclusions.read(file).to_list() == [(17, 30), (40, 41)]
    assert Exclusions.read(str(file)) == Exclusions.of([40, (17, 30)])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"17-20", "neither a row"),
        (b"17:", "neither a row"),
        (b"-3", "neither a row"),
        (b"1_000", "neither a row"),
        (b"1 2", "neither a row"),
        (b"seven\xff", "neither a row"),
        (b"\xd9\xa3", "neither a row"),
        (b"21:17", "21:17 is not a range"),
        (b"17:17", "17:17 is not a range"),
        (b"1152921504606846976", "goes beyond"),
        (b"9" * 5000, "digits"),
    ],
)
def test_a_line_that_is_neither_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    file = tmp_path / "rows.txt"
    file.write_bytes(b"# rows\n12\n" + line + b"\n13\n")
    with pytest.raises(ValueError, match=rf"rows\.txt: line 3: .*{problem}"):
        Exclusions.read(file)


def test_a_file_may_state_the_dataset_of_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("17\n# fingerprint: 0123456789abcdef0123456789abcdef\n# a comment\n")
    assert Exclusions.read(file).fingerprint == "0123456789abcdef0123456789abcdef"
    file.write_text("17\n# fingerprint: unknown\n")
    assert Exclusions.read(file).fingerprint is None


@pytest.mark.parametrize("wrong", [(3, 3), (5, 2), (-1, 2), (0, 2**60 + 1)])
def test_a_wrong_range_is_found_behind_the_outermost_ranges_that_are_right(wrong: tuple[int, int]) -> None:
    right = [(0, 1), (2**60 - 1, 2**60)]
    assert Exclusions(np.array(right)).to_list() == right
    for ranges in (np.array([*right, wrong, (7, 7)]), [*right, wrong, (7, 7)]):
        with pytest.raises(ValueError, match=f"{wrong[0]}:{wrong[1]} (is not a range|goes beyond)"):
            Exclusions(ranges)


def test_rows_that_are_none_are_refused() -> None:
    for ranges in ([(3, 3)], [(5, 2)], [(-1, 2)], [(0, 2**60 + 1)], [(0, 2**70)]):
        with pytest.raises(ValueError, match=r"not a range of rows|goes beyond"):
            Exclusions(ranges)
    for array in (np.array([[1, 1]]), np.array([[-5, 1]])):
        with pytest.raises(ValueError, match="not a range of rows"):
            Exclusions(array)
    for wrong in (np.array([[1.0, 2.0]]), np.array([1, 2]), np.array([[1, 2, 3]])):
        with pytest.raises(ValueError, match="pairs of whole numbers"):
            Exclusions(wrong)
    with pytest.raises(ValueError, match="pairs of whole numbers"):
        Exclusions([(0.5, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="not a range of rows"):
        Exclusions.of([-1])


def test_rows_that_the_dataset_does_not_have_are_refused() -> None:
    excluded = Exclusions([(3, 8)])
    assert excluded.kept_of_shards([4, 4]).tolist() == [3, 0]
    for ranges in ([(3, 8)], [(1, 2), (7, 8)]):
        with pytest.raises(ValueError, match="rows up to 7 are excluded, but the dataset has 7 samples"):
            Exclusions(ranges).kept_of_shards([4, 3])
    for ask in (excluded.select, excluded.rank, excluded.contains):
        with pytest.raises(IndexError, match="are numbered from 0, not -1"):
            ask([5, -1])
        with pytest.raises(TypeError, match="whole numbers, not float64"):
            ask([0.5])
