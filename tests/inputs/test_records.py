from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.writers.inputs.lines import Lines

PIECES = st.lists(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xe2\x80\xa8"])).map(b"".join))


@given(pieces=PIECES, offset=st.integers(0, 9))
def test_lines_are_those_between_newlines_whatever_the_pieces(pieces: list[bytes], offset: int) -> None:
    data = b"".join(pieces)
    lines = Lines(pieces, offset=offset, max_line_bytes=1 << 20)
    found = list(lines)
    assert [line for _, _, line, _ in found] == data.removesuffix(b"\n").split(b"\n") if data else not found
    assert all(whole and length == len(line) for _, length, line, whole in found)
    for start, length, line, _ in found:
        assert data[start - offset :][:length] == line


@given(pieces=PIECES, limit=st.integers(0, 5))
def test_a_line_beyond_the_limit_comes_as_its_head_and_length(pieces: list[bytes], limit: int) -> None:
    expected = [
        (start, length, line if whole or not length else line[:256], length <= limit)
        for start, length, line, whole in Lines(pieces, max_line_bytes=1 << 20)
    ]
    assert [
        (start, length, line, whole) for start, length, line, whole in Lines(pieces, max_line_bytes=limit)
    ] == expected


def test_a_line_beyond_the_limit_is_not_held() -> None:
    def pieces() -> object:
        for _ in range(1000):
            yield b"x" * 10_000
        yield b"\nnext"

    lines = Lines(pieces(), max_line_bytes=50_000)  # type: ignore[arg-type]
    found = list(lines)
    held = sum(len(line) for _, _, line, _ in found)
    assert [(length, whole) for _, length, _, whole in found] == [(10_000_000, False), (4, True)]
    assert held <= 256 + 4


def test_after_an_error_the_offset_is_where_the_unfinished_line_begins() -> None:
    def pieces() -> object:
        yield b"one\ntw"
        raise OSError("gone")

    lines = Lines(pieces(), max_line_bytes=100)  # type: ignore[arg-type]
    iterator = iter(lines)
    assert next(iterator)[2] == b"one"
    with pytest.raises(OSError, match="gone"):
        next(iterator)
    assert lines.offset == 4
