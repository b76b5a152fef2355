from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("64MiB", 64 << 20), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("12b", 12), ("3TB", 3 * 10**12)],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 mega", "1e3", "0x10", "1 2", None, True, 1.5])
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_bytes(-1)


@given(st.integers(0, 9 * 10**17))
def test_formatted_sizes_are_within_a_percent_of_the_truth(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.01)


def test_large_integers_are_exact() -> None:
    assert parse_bytes(f"{2**62 + 1}") == 2**62 + 1
