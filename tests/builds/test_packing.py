"""Packing keeps every token exactly once, cuts only what must be cut, and agrees with a plain reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.tokens.packing import (
    Placement,
    fill_rows,
    pack_best_fit,
    pack_best_fit_crop,
    pack_best_fit_truncate,
    pack_concat,
)

Piece = tuple[int, int, int, int, int]  # document, start, length, row, column
LENGTHS = st.lists(st.integers(2, 70), max_size=200)
EOS, BOS = 9, 8


def reference_best_fit(lengths: list[int], size: int, window: int) -> list[Piece]:
    """Best-fit-decreasing as a textbook has it: look at every open row for every piece."""
    pieces: list[Piece] = []
    for number, length in enumerate(lengths):
        pieces += [(number, k * size, size, len(pieces) + k, 0) for k in range(length // size)]
    rows = len(pieces)
    rests = [(i, length % size) for i, length in enumerate(lengths) if length % size]
    windows = max(1, len(rests) // window)
    for w in range(windows):
        part = rests[len(rests) * w // windows : len(rests) * (w + 1) // windows]
        stacks: dict[int, list[int]] = {}
        placed: list[list[int]] = []
        for document, rest in sorted(part, key=lambda item: -item[1]):
            free = min((f for f, stack in stacks.items() if stack and f >= rest), default=size)
            if stacks.get(free):
                row = stacks[free].pop()
            else:
                row, rows = rows, rows + 1
            lone = rest == 1
            if lone:
                for other in placed:
                    other[4] += other[3] == row
            elif free > rest:
                stacks.setdefault(free - rest, []).append(row)
            placed.append([document, lengths[document] - rest, rest, row, 0 if lone else size - free])
        pieces += [(p[0], p[1], p[2], p[3], p[4]) for p in placed]
    return pieces


def reference_concat(lengths: list[int], size: int) -> list[Piece]:
    """One token at a time."""
    pieces: list[Piece] = []
    place = 0
    for document, length in enumerate(lengths):
        for token in range(length):
            if token == 0 or place % size == 0:
                pieces.append((document, token, 0, place // size, place % size))
            pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + 1, *pieces[-1][3:])
            place += 1
    return pieces


def reference_crop(lengths: list[int], size: int) -> list[Piece]:
    """Look at all documents for every place: the longest that fits, else the shortest, cropped."""
    left = list(range(len(lengths)))
    pieces: list[Piece] = []
    row, free = -1, 0
    while left:
        if free == 0:
            row, free = row + 1, size
        fitting = [i for i in left if lengths[i] <= free]
        if fitting:
            chosen = max(fitting, key=lambda i: (lengths[i], -i))
        else:  # of those longer than a row the first: all of them are cropped to it
            chosen = min(left, key=lambda i: (min(lengths[i], size + 1), i))
        left.remove(chosen)
        taken = min(lengths[chosen], free)
        pieces.append((chosen, 0, taken, row, size - free))
        free -= taken
    return pieces


def pieces_of(placement: Placement) -> list[Piece]:
    columns = (placement.document, placement.start, placement.length, placement.row, placement.column)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def corpus(lengths: list[int]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens of documents of these lengths; the last is EOS, the others tell their document."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    tokens = (np.repeat(np.arange(len(sizes)), sizes) % 60_000 + 10).astype(np.uint16)
    tokens[ends - 1] = EOS
    return tokens, sizes, ends - sizes


def filled(
    placement: Placement, tokens: npt.NDArray[np.uint16], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    rows = np.zeros((placement.rows, placement.sequence_length), np.uint16)
    sources = starts[placement.document] + placement.start
    fill_rows(tokens, sources, placement.length, placement.row, placement.column, rows, EOS)
    return rows


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(2, 70), st.integers(1, 50))
def test_best_fit_equals_the_plain_reference(lengths: list[int], size: int, window: int) -> None:
    placement = pack_best_fit(np.array(lengths, np.int64), size, window)
    assert pieces_of(placement) == reference_best_fit(lengths, size, window)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_concat_equals_the_plain_reference(lengths: list[int], size: int) -> None:
    assert pieces_of(pack_concat(np.array(lengths, np.int64), size)) == reference_concat(lengths, size)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_cropping_equals_the_plain_reference(lengths: list[int], size: int) -> None:
    placement = pack_best_fit_crop(np.array(lengths, np.int64), size)
    assert pieces_of(placement) == reference_crop(lengths, size)
    assert placement.padding < size, "only the last row is padded"


def test_cropping_equals_the_reference_where_the_bit_sets_have_several_levels() -> None:
    lengths = np.random.default_rng(3).geometric(1 / 3000, 900) + 1
    assert pieces_of(pack_best_fit_crop(lengths, 9000)) == reference_crop(lengths.tolist(), 9000)


def test_cropping_with_all_documents_in_view_leaves_out_less_than_with_a_buffer_of_them() -> None:
    """nanochat's way: a buffer of 1,000 documents, from which it takes in the same order."""
    lengths = np.minimum(np.random.default_rng(4).lognormal(6, 1, 8000).astype(np.int64) + 2, 2048)
    rest, buffer, kept = lengths.tolist(), list[int](), 0
    while rest or buffer:
        free = 2048
        while free and (rest or buffer):
            buffer += [rest.pop() for _ in range(min(len(rest), 1000 - len(buffer)))]
            taken = max((n for n in buffer if n <= free), default=0) or min(buffer)
            buffer.remove(taken)
            free, kept = free - min(free, taken), kept + min(free, taken)
    placement = pack_best_fit_crop(lengths, 2048)
    assert lengths.sum() - placement.length.sum() < (lengths.sum() - kept) / 5


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_truncating_keeps_the_beginning_of_every_document_in_one_piece(lengths: list[int], size: int) -> None:
    placement = pack_best_fit_truncate(np.array(lengths, np.int64), size)
    pieces = sorted(pieces_of(placement))
    assert [piece[:3] for piece in pieces] == [(i, 0, min(n, size)) for i, n in enumerate(lengths)]
    assert (placement.column + placement.length <= size).all()


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(2, 70), st.sampled_from([pack_best_fit, pack_concat]))
def test_with_row_bos_every_row_begins_with_a_bos_and_no_token_is_lost(
    lengths: list[int], size: int, packer: Callable[..., Placement]
) -> None:
    tokens, sizes, starts = corpus(lengths)
    placement = packer(sizes, size, row_bos=True)
    tokens[starts] = BOS
    rows = filled(placement, tokens, starts)
    further = placement.start > 0
    places = placement.row[further], placement.column[further] - 1
    assert (placement.column[further] > 0).all()
    assert (rows[places] == EOS).all(), "nothing else stands there"
    rows[places] = BOS
    assert (rows[:, 0] == BOS).all()
    assert (rows == BOS).sum() == len(lengths) + placement.repeated_bos
    covered = [np.zeros(n, int) for n in lengths]
    for document, start, length, row, column in pieces_of(placement):
        covered[document][start : start + length] += 1
        whole = tokens[starts[document] + start :][:length]
        assert rows[row, column : column + length].tolist() == whole.tolist()
    assert all((c == 1).all() for c in covered)
    ends = np.zeros(placement.rows, np.int64)
    np.maximum.at(ends, placement.row, placement.column + placement.length)
    assert placement.padding == (size - ends).sum(), "padding is at the ends of rows only"


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_concat_with_row_bos_cuts_where_a_reference_does(lengths: list[int], size: int) -> None:
    """One token at a time."""
    pieces: list[Piece] = []
    place = 0
    for document, length in enumerate(lengths):
        for token in range(length):
            if token and place % size == 0:
                place += 1
            if token == 0 or pieces[-1][3] != place // size:
                pieces.append((document, token, 0, place // size, place % size))
            pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + 1, *pieces[-1][3:])
            place += 1
    assert pieces_of(pack_concat(np.array(lengths, np.int64), size, row_bos=True)) == pieces


@pytest.mark.parametrize("size", [64, 2048, 5000, 300_000])
def test_best_fit_equals_the_reference_where_the_bit_set_has_several_levels(size: int) -> None:
    lengths = np.random.default_rng(size).geometric(2.5 / size, 1500) + 1
    assert pieces_of(pack_best_fit(lengths, size, 400)) == reference_best_fit(lengths.tolist(), size, 400)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 70), st.sampled_from(["best_fit", "concat"]), st.integers(0, 2**32))
def test_every_token_lies_in_exactly_one_place(
    lengths: list[int], size: int, strategy: str, seed: int
) -> None:
    sizes = np.array(lengths, np.int64)
    placement = pack_best_fit(sizes, size, 20) if strategy == "best_fit" else pack_concat(sizes, size)
    placement = placement.moved(np.random.default_rng(seed).permutation(placement.rows))
    assert (placement.column + placement.length <= size).all()
    taken = np.zeros((placement.rows, size), int)
    covered = [np.zeros(n, int) for n in lengths]
    for document, start, length, row, column in pieces_of(placement):
        taken[row, column : column + length] += 1
        covered[document][start : start + length] += 1
    assert all((c == 1).all() for c in covered)
    assert taken.max(initial=0) <= 1
    # Padding only at a row's end, no row without a token, and counted right.
    assert (np.diff(taken, axis=1) <= 0).all()
    assert taken[:, 0].all()
    assert placement.padding == int((taken == 0).sum())
    order = list(zip(placement.row.tolist(), placement.column.tolist(), strict=True))
    assert order == sorted(order)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 70))
def test_best_fit_cuts_only_documents_longer_than_a_row(lengths: list[int], size: int) -> None:
    placement = pack_best_fit(np.array(lengths, np.int64), size)
    pieces = np.bincount(placement.document, minlength=len(lengths))
    assert pieces.tolist() == [-(-length // size) for length in lengths]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(2, 20), max_size=80), st.integers(2, 7), st.booleans())
def test_eos_after_eos_within_a_row_is_always_padding(lengths: list[int], size: int, best: bool) -> None:
    # Short rows make lone eos remainders common; this is what lets a reader tell padding from text.
    tokens, sizes, starts = corpus(lengths)
    placement = pack_best_fit(sizes, size, 10) if best else pack_concat(sizes, size)
    rows = filled(placement, tokens, starts)
    is_padding = np.zeros(rows.shape, bool)
    is_padding[:, 1:] = (rows[:, 1:] == EOS) & (rows[:, :-1] == EOS)
    assert int(is_padding.sum()) == placement.padding
    assert int((rows[~is_padding] == EOS).sum()) == len(lengths)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=30),
    st.integers(2, 40),
    st.sampled_from([pack_best_fit, pack_concat]),
)
def test_dividing_texts_into_their_parts_moves_no_token(
    texts: list[list[int]], size: int, packer: Callable[..., Placement]
) -> None:
    texts = [[*parts[:-1], parts[-1] + 1] for parts in texts]  # a text has at least two tokens
    whole = packer(np.array([sum(parts) for parts in texts]), size)
    firsts = np.cumsum([0, *(len(parts) for parts in texts)])
    divided = whole.divided(np.array([length for parts in texts for length in parts]), firsts)
    # Number all tokens: text by text, and within each part by part, which is the same.
    in_text = np.cumsum([0, *(sum(parts) for parts in texts)])
    in_part = np.cumsum([0, *(length for parts in texts for length in parts)])
    expected = np.full((whole.rows, size), -1)
    for text, start, length, row, column in pieces_of(whole):
        expected[row, column : column + length] = in_text[text] + start + np.arange(length)
    found = np.full((divided.rows, size), -1)
    for part, start, length, row, column in pieces_of(divided):
        assert length > 0
        assert start + length <= in_part[part + 1] - in_part[part]
        assert (found[row, column : column + length] == -1).all()
        found[row, column : column + length] = in_part[part] + start + np.arange(length)
    assert found.tolist() == expected.tolist()


def test_pieces_of_a_row_are_sorted_by_their_columns_wherever_they_stand() -> None:
    columns = np.array([6, 3, 0, 8])
    pieces = np.arange(4)
    placement = Placement(10, 1, pieces, 0 * pieces, np.array([2, 3, 3, 2]), 0 * pieces, columns)
    assert placement.moved(np.array([0])).document.tolist() == [2, 1, 0, 3]


def test_a_piece_without_tokens_writes_none() -> None:
    out, none = np.zeros((1, 3), np.uint16), np.array([0])
    fill_rows(np.array([7], np.uint16), none, none, none, none + 3, out, EOS)
    assert out.tolist() == [[EOS] * 3]


def test_rows_hold_the_documents_tokens() -> None:
    tokens, sizes, starts = corpus([3, 5, 12, 2, 3])
    rows = filled(pack_concat(sizes, 5), tokens, starts)
    assert rows.ravel().tolist() == tokens.tolist()
    rows = filled(pack_best_fit(sizes, 5), tokens, starts)
    assert sorted(rows.ravel().tolist()) == sorted([*tokens.tolist(), *[EOS] * (rows.size - len(tokens))])


def test_concat_pads_only_the_last_row() -> None:
    lengths = np.random.default_rng(1).integers(1, 5000, 1000)
    assert 0 <= pack_concat(lengths, 2048).padding < 2048


def test_best_fit_pads_less_than_a_thousandth_of_typical_text() -> None:
    lengths = np.random.default_rng(2).lognormal(6.3, 1.1, 60_000).astype(np.int64) + 1
    placement = pack_best_fit(lengths, 2048)
    assert placement.padding / lengths.sum() < 0.001


def test_the_last_window_is_never_a_small_rest() -> None:
    # 10,001 pieces in windows of 10,000 and 1 would leave a nearly empty row for each rest.
    lengths = np.full(30, 11)
    assert pack_best_fit(lengths, 100, window=20).rows == 4


@pytest.mark.parametrize("pack", [pack_best_fit, pack_concat])
def test_no_documents_make_no_rows(pack: object) -> None:
    assert callable(pack)
    placement = pack(np.zeros(0, np.int64), 8)
    assert (placement.rows, placement.padding, len(placement.row)) == (0, 0, 0)


@pytest.mark.parametrize(("lengths", "size"), [([1], 8), ([3, -1], 8), ([3], 1)])
def test_lengths_that_cannot_be_packed_are_refused(lengths: list[int], size: int) -> None:
    for pack in (pack_best_fit, pack_concat, pack_best_fit_crop, pack_best_fit_truncate):
        with pytest.raises(ValueError, match=r"cannot be packed|needs at least 2 tokens"):
            pack(np.array(lengths, np.int64), size)


def test_a_window_has_room_for_a_piece() -> None:
    with pytest.raises(ValueError, match="a window needs at least one piece, not 0"):
        pack_best_fit(np.array([3]), 8, window=0)


@pytest.mark.parametrize(
    ("source", "length", "row", "column"),
    [
        (-1, 2, 0, 0),
        (3, 2, 0, 0),
        (0, 2, -1, 0),
        (0, 2, 2, 0),
        (0, 2, 1, -1),
        (0, 2, 0, 7),
        (0, -1, 0, 0),
    ],
)
def test_a_piece_outside_the_arrays_is_refused(source: int, length: int, row: int, column: int) -> None:
    # Behind a piece that fills all there is.
    sources, lengths, rows, columns = np.array([[0, source], [4, length], [1, row], [4, column]], np.int64)
    with pytest.raises(IndexError, match="is outside"):
        fill_rows(np.zeros(4, np.uint16), sources, lengths, rows, columns, np.zeros((2, 8), np.uint16), EOS)
