"""Documents, padding and positions inside packed rows, against a reference in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.datasets.segments import find_segments
from shardkit.loaders.batch import BatchMaker, TokenColumn
from shardkit.loaders.config import LoaderConfig

EOS = 0


def reference(row: list[int], is_padding_row: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """(labels, position ids, document ids, lengths of the segments) of one row, token by token."""
    labels, positions, documents, lengths = [], [], [], [0]
    was_padding = False
    for i, token in enumerate(row):
        is_padding = is_padding_row or (i > 0 and token == EOS and row[i - 1] == EOS)
        begins = i > 0 and ((is_padding and not was_padding) or (not is_padding and row[i - 1] == EOS))
        if begins:
            lengths.append(0)
        labels.append(-100 if is_padding else token)
        positions.append(lengths[-1])
        documents.append(len(lengths) - 1)
        lengths[-1] += 1
        was_padding = is_padding
    return labels, positions, documents, lengths


rows = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2]), min_size=length, max_size=length), min_size=1, max_size=6
    )
)


@given(rows, st.randoms(use_true_random=False))
def test_documents_are_found_as_a_plain_reading_finds_them(table: list[list[int]], random: Any) -> None:
    tokens = np.array(table, dtype=np.uint16)
    padding = np.array([random.random() < 0.2 for _ in table])
    segments = find_segments(tokens, EOS, padding)
    expected = [reference(row, bool(pad)) for row, pad in zip(table, padding, strict=True)]
    for mask_starts in (False, True):
        labels = tokens.astype(np.int64)
        segments.mask(labels, shift=0, mask_starts=mask_starts)
        assert labels.tolist() == [
            [
                -100 if mask_starts and position == 0 else label
                for label, position in zip(row[0], row[1], strict=True)
            ]
            for row in expected
        ]
    positions = np.empty_like(labels)
    segments.position_ids(positions)
    assert positions.tolist() == [row[1] for row in expected]
    assert segments.document_ids().tolist() == [row[2] for row in expected]
    for batch_size in {1, len(table)}:
        for number, (bounds, longest) in enumerate(segments.cu_seqlens(batch_size)):
            lengths = [n for row in expected[number * batch_size : (number + 1) * batch_size] for n in row[3]]
            assert bounds.tolist() == [0, *np.cumsum(lengths).tolist()]
            assert longest == max(lengths)


def test_the_example_of_the_module_is_right() -> None:
    def batch_of(**options: Any) -> dict[str, Any]:
        maker = BatchMaker(1, LoaderConfig(**options), ["tokens"], TokenColumn("tokens", EOS))
        ((batch,), _) = maker.make({"tokens": np.array([[5, 6, 0, 7, 0, 0, 0]])}, np.arange(1))
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}

    assert batch_of(labels=True)["labels"] == [[5, 6, 0, 7, 0, -100, -100]]
    documents = batch_of(labels=True, position_ids=True, document_ids=True, cu_seqlens=True, doc_lens=True)
    assert documents["labels"] == [[-100, 6, 0, -100, 0, -100, -100]]
    assert documents["position_ids"] == [[0, 1, 2, 0, 1, 0, 1]]
    assert documents["document_ids"] == [[0, 0, 0, 1, 1, 2, 2]]
    assert (documents["cu_seqlens"], documents["max_seqlen"]) == ([0, 3, 5, 7], 3)
    assert (documents["doc_lens"], documents["max_doc_lens"]) == ([[3, 2, 2]], [3])
    shifted = batch_of(labels="shifted", doc_lens=True, mask_document_starts=False, cu_seqlens=True)
    assert shifted["tokens"] == [[5, 6, 0, 7, 0, 0]]
    assert shifted["labels"] == [[6, 0, 7, 0, -100, -100]]
    assert (shifted["doc_lens"], shifted["cu_seqlens"]) == ([[3, 2, 1]], [0, 3, 5, 6])


def make(config: LoaderConfig, ids: list[int], *, mark_padding: bool = False) -> list[dict[str, Any]]:
    tokens = np.array([[i, EOS, EOS, 3] for i in ids if i >= 0], dtype=np.int64).reshape(-1, 4)
    words: list[object] = [f"word {i}" for i in ids if i >= 0]
    maker = BatchMaker(
        2, config, ["tokens", "words"], TokenColumn("tokens", EOS), return_ids=True, mark_padding=mark_padding
    )
    return maker.make({"tokens": tokens, "words": words}, np.array(ids, dtype=np.int64))[0]


def test_extras_have_the_types_that_models_expect() -> None:
    config = LoaderConfig(labels=True, position_ids=True, document_ids=True, cu_seqlens=True)
    batches = make(config, [1, 2, 3, 4])
    assert len(batches) == 2
    assert {key: getattr(value, "dtype", type(value)) for key, value in batches[1].items()} == {
        "tokens": torch.int64,
        "words": list,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "document_ids": torch.int32,
        "sample_id": torch.int64,
        "cu_seqlens": torch.int32,
        "max_seqlen": int,
    }
    assert batches[1]["words"] == ["word 3", "word 4"]
    assert batches[1]["sample_id"].tolist() == [3, 4]


def test_padding_rows_are_flagged_ignored_and_hold_no_sample() -> None:
    first, last = make(LoaderConfig(labels=True), [1, 2, 3, -1], mark_padding=True)
    assert first["is_padding"].tolist() == [False, False]
    assert last["is_padding"].tolist() == [False, True]
    assert last["labels"][1].tolist() == [-100] * 4
    assert last["tokens"][1].tolist() == [EOS] * 4
    assert last["words"] == ["word 3", None]
    assert last["labels"][0].tolist() == [3, 0, -100, 3]


def predicted(row: list[int]) -> list[tuple[int, int]]:
    """(token, token to predict from it), of a row of documents, as a model scores each document alone."""
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == EOS:
            documents.append([])
    return [pair for document in documents for pair in itertools.pairwise(document)]


packed_rows = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5).map(
    lambda documents: [token for document in documents for token in (*document, EOS)]
)


@given(packed_rows, packed_rows, st.sampled_from(["position_ids", "document_ids", "cu_seqlens"]))
def test_a_model_that_sees_document_bounds_is_scored_inside_of_documents_only(
    first: list[int], second: list[int], bounds: str
) -> None:
    length = max(len(first), len(second))
    rows = np.array([row + [EOS] * (length - len(row)) for row in (first, second)])
    config = LoaderConfig(labels=True, **{bounds: True})  # type: ignore[arg-type]
    maker = BatchMaker(2, config, ["tokens"], TokenColumn("tokens", EOS))
    ((batch,), _) = maker.make({"tokens": rows}, np.arange(2))
    tokens, labels = batch["tokens"].flatten().tolist(), batch["labels"].flatten().tolist()
    # The rows of a flattened batch follow one another, as with cu_seqlens: no row predicts the next one.
    scored = [(token, label) for token, label in zip(tokens, labels[1:], strict=False) if label != -100]
    assert scored == predicted(first) + predicted(second)


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({}, False),
        ({"mask_document_starts": True}, True),
        ({"document_ids": True}, True),
        ({"position_ids": True}, True),
        ({"cu_seqlens": True}, True),
        ({"document_ids": True, "mask_document_starts": False}, False),
    ],
)
def test_document_starts_are_masked_by_default_when_the_model_is_told_of_documents(
    options: dict[str, bool], masked: bool
) -> None:
    (batch,) = make(LoaderConfig(labels=True, **options), [1, 2])  # type: ignore[arg-type]
    first = -100 if masked else 1
    assert batch["labels"][0].tolist() == [first, 0, -100, -100 if masked else 3]


def test_masking_document_starts_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_document_starts masks labels: give labels=True"):
        LoaderConfig(mask_document_starts=True)


@pytest.mark.parametrize("ids", [[-1, -1]])
def test_a_batch_of_nothing_but_padding_has_the_same_keys(ids: list[int]) -> None:
    (batch,) = make(LoaderConfig(labels=True, cu_seqlens=True), ids, mark_padding=True)
    assert (batch["labels"] == -100).all()
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("labels", LoaderConfig(labels=True)),
        ("cu_seqlens", LoaderConfig(cu_seqlens=True)),
        ("sample_id", LoaderConfig()),
    ],
)
def test_an_option_never_replaces_a_column_of_the_same_name(name: str, config: LoaderConfig) -> None:
    with pytest.raises(ValueError, match=f"a column '{name}', which an option of the loader would replace"):
        BatchMaker(2, config, ["tokens", name], TokenColumn("tokens", EOS), return_ids=True)
