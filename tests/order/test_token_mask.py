"""Masked spans of tokens: read, written, looked up, and kept out of the labels of a loader only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Order, grouped
from shardkit.order.token_mask import TokenMask
from shardkit.writers import build
from support.small_build import make_corpus

SPANS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(1, 8)).filter(lambda span: span[1] < span[2])
)


@given(SPANS, st.lists(st.integers(-1, 12)))
def test_places_are_those_of_a_plain_reading(spans: list[tuple[int, int, int]], rows: list[int]) -> None:
    places = TokenMask(spans).places(np.array(rows, np.int64), 8)
    expected = [
        (at * 8 + token)
        for at, row in enumerate(rows)
        for number, first, end in sorted(spans)
        if number == row
        for token in range(first, end)
    ]
    assert places.tolist() == expected


@given(st.lists(SPANS, max_size=3))
def test_masks_of_several_datasets_are_numbered_through(parts: list[list[tuple[int, int, int]]]) -> None:
    starts = [number * 10 for number in range(len(parts))]
    joined = TokenMask.joined([TokenMask(part) if part else None for part in parts], starts)
    expected = [(row + start, a, b) for part, start in zip(parts, starts, strict=True) for row, a, b in part]
    assert ([] if joined is None else joined.to_list()) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("17", r"line 1: '17' is not a row with a half-open range of tokens \(17 120:340\)"),
        ("# comment\n17 5", "line 2"),
        ("17 9:5", "row 17, tokens 9:5: not a span"),
    ],
)
def test_what_is_no_span_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mask.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        TokenMask.read(tmp_path / "mask.txt")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return Path(build(make_corpus(tmp_path_factory.mktemp("mask") / "corpus", 60), progress=False).output)


def labels_by_row(dataset: Any, **options: Any) -> dict[int, list[int]]:
    with StreamingLoader(dataset, batch_size=3, return_ids=True, tail="pad", **grouped(options)) as loader:
        found: dict[int, list[int]] = {}
        for batch in loader:
            for row, labels in zip(batch["sample_id"].tolist(), batch["labels"].tolist(), strict=True):
                found[row] = labels
    return found


def test_a_traced_documents_labels_are_ignored_and_all_others_are_as_without_the_mask(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_dataset(out) as dataset:
        document = dataset.documents(2)[0].document_id
    mask = tmp_path / "mask.txt"
    assert main(["trace", str(out), "--document", document, "--mask", str(mask), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    spans = {(piece["row"], *piece["tokens"]) for piece in found["shown"]}
    assert set(TokenMask.read(mask).to_list()) == spans
    assert found["mask"] == {
        "file": str(mask),
        "rows": len({row for row, _, _ in spans}),
        "tokens": found["tokens"],
    }
    for shift, option in ((0, True), (1, "shifted")):
        plain = labels_by_row(out, labels=option)
        masked = labels_by_row([Stream(out, mask=mask)], labels=option)
        assert plain.keys() == masked.keys()
        for row, labels in plain.items():
            hidden = {token - shift for at, a, b in spans if at == row for token in range(a, b)}
            expected = [-100 if place in hidden else label for place, label in enumerate(labels)]
            assert masked[row] == expected
        assert plain != masked


def test_a_mixture_masks_the_rows_of_each_stream(out: Path) -> None:
    streams = [Stream(out, name="a", mask=[(1, 0, 64)]), Stream(out, name="b", mask=[(5, 10, 20)])]
    with StreamingLoader(
        streams, batch_size=4, labels=True, return_ids=True, order=Order(epoch_samples=400)
    ) as loader:
        checked = set()
        for batch in loader:
            for stream, row, tokens, labels in zip(
                batch["stream_id"].tolist(),
                batch["sample_id"].tolist(),
                batch["tokens"],
                batch["labels"],
                strict=True,
            ):
                spans = {(0, 1): slice(0, 64), (1, 5): slice(10, 20)}
                if (stream, row) in spans:
                    assert (labels[spans[stream, row]] == -100).all()
                    checked.add((stream, row))
                elif stream == 0 and row == 5:
                    assert torch.equal(labels[10:20], tokens[10:20])
    assert checked == {(0, 1), (1, 5)}


def test_the_state_and_the_order_are_those_without_a_mask(out: Path) -> None:
    with (
        StreamingLoader(out, batch_size=4, labels=True, return_ids=True) as plain,
        StreamingLoader(
            [Stream(out, mask=[(1, 0, 64)])], batch_size=4, labels=True, return_ids=True
        ) as masked,
    ):
        for _, a, b in zip(range(3), plain, masked, strict=False):
            assert torch.equal(a["sample_id"], b["sample_id"])
        state = plain.state_dict()
        assert {**masked.state_dict(), "streams": None} == {**state, "streams": None}
        masked.load_state_dict(state)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        ([(0, 0, 5)], {}, "give labels=True"),
        ([(10_000, 0, 5)], {"labels": True}, "the dataset has"),
        ([(0, 0, 65)], {"labels": True}, "a row has only 64 tokens"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(
    out: Path, mask: list[tuple[int, int, int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingLoader([Stream(out, mask=mask)], batch_size=2, **grouped(options))


def test_a_mask_of_another_dataset_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "mask.txt").write_text(f"# fingerprint: {'0' * 32}\n0 0:5\n")
    with pytest.raises(ValueError, match="the mask was made for the dataset with fingerprint 0000"):
        StreamingLoader([Stream(out, mask=tmp_path / "mask.txt")], batch_size=2, labels=True)
