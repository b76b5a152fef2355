"""Loss masks: the same rows in every format, from every place, and every masked token accounted for."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.cli.main import main
from shardkit.errors import BuildError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.batch import repetitive_rows
from shardkit.loaders.config import grouped
from shardkit.writers import build
from shardkit.writers.kernels.repetitions import mask_repetitions
from shardkit.writers.token_store import pack_store
from support.small_build import EOS, train_bpe, tree

SHARD = {"shard_bytes": "8KiB"}
LENGTH = 48
OUTPUTS: dict[str, dict[str, Any]] = {
    "mds": {"format": "mds", **SHARD},
    "wds": {"format": "wds", **SHARD},
    "cropped": {"pack": {"sequence_length": 32, "strategy": "best_fit_truncate"}, **SHARD},
    "store": {"format": "tokens", **SHARD},
}
ROWS = ("mds", "wds")
ANSWERS = ("it is two", "two and two", "no", "it is " * 30)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prompts and plain documents, of which some are longer than a row."""
    folder = tmp_path_factory.mktemp("masks")
    train_bpe(["what is two and two, it is no 0123456789"] * 5).save(str(folder / "tokenizer.json"))
    pairs = [{"p": f"what is {n}? ", "c": f"{ANSWERS[n % 4]} {n}"} for n in range(150)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    plain = [{"text": f"it is {n} " * (n % 9 + 1)} for n in range(80)]
    (folder / "plain.jsonl").write_text("".join(json.dumps(one) + "\n" for one in plain))
    return {
        "inputs": [
            {"path": str(folder / "pairs.jsonl"), "prompt": "p", "completion": "c", "base": str(folder)},
            {"path": str(folder / "plain.jsonl"), "base": str(folder)},
        ],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": EOS},
        "dedup": None,
        "pack": {"sequence_length": LENGTH},
        "memory": "256MiB",
    }


@pytest.fixture(scope="module")
def together(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    outputs = [{"path": str(folder / name)} | output for name, output in OUTPUTS.items()]
    build(recipe | {"outputs": outputs}, workers=1, progress=False)
    return folder


def rows_of(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(tokens, loss masks) of all rows."""
    data = shardkit.open_dataset(path)
    assert data.loss_mask_column is not None
    columns = data[:].to_numpy()
    return columns[data.token_column or ""], columns[data.loss_mask_column]


def test_tars_hold_the_rows_and_masks_of_mds(together: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tokens, masks), (same, also) = rows_of(together / "mds"), rows_of(together / "wds")
    np.testing.assert_array_equal(same, tokens)
    np.testing.assert_array_equal(also, masks)
    assert 0 < masks.sum() < masks.size
    shards = sorted(str(path) for path in (together / "wds").glob("*.tar"))
    assert len(shards) > 2
    found = list(webdataset.WebDataset(shards, shardshuffle=False).decode())
    np.testing.assert_array_equal([sample["tokens.npy"] for sample in found], tokens)
    np.testing.assert_array_equal([sample["loss_mask.npy"] for sample in found], masks)
    cards = [json.loads((together / name / "dataset.json").read_text()) for name in (*ROWS, "store")]
    assert {card["trained_tokens"] for card in cards} == {int(masks.sum())}
    for name in ROWS:
        assert shardkit.verify(together / name).ok
        assert main(["info", str(together / name)]) == 0
        assert f"{int(masks.sum()):,}" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [True, "shifted"])
def test_batches_of_tars_are_those_of_mds(together: Path, labels: Any) -> None:
    options: dict[str, Any] = {
        "batch_size": 4,
        "labels": labels,
        "return_ids": True,
        "tensors": "numpy",
        "shuffle": "none",
    }
    shift = int(labels == "shifted")
    tokens, masks = rows_of(together / "mds")
    with (
        StreamingLoader(together / "mds", **grouped(options)) as one,
        StreamingLoader(together / "wds", **grouped(options)) as two,
    ):
        for number, (expected, batch) in enumerate(zip(one, two, strict=True)):
            assert list(batch) == list(expected)
            for name, values in expected.items():
                np.testing.assert_array_equal(batch[name], values, err_msg=f"batch {number}, {name}")
            masked = masks[batch["sample_id"]][:, shift:] == 0
            assert (batch["labels"][masked] == -100).all()
            assert np.array_equal(batch["tokens"], tokens[batch["sample_id"]][:, : LENGTH - shift])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mds", [f"pack.sequence_length={LENGTH}"]),
        ("wds", [f"pack.sequence_length={LENGTH}", "output.format=wds"]),
        ("cropped", ["pack.sequence_length=32", "pack.strategy=best_fit_truncate"]),
    ],
)
def test_packing_a_store_with_masks_gives_the_bytes_of_a_build(
    together: Path, tmp_path: Path, name: str, settings: list[str], inline_builds: None
) -> None:
    overrides = [*settings, "output.shard_bytes=8KiB"]
    pack_store(together / "store", tmp_path / "out", overrides=overrides, workers=1, progress=False)
    assert tree(tmp_path / "out") == tree(together / name)


def test_a_store_keeps_the_mask_of_every_document(together: Path) -> None:
    store, made = shardkit.open_dataset(together / "store"), shardkit.open_dataset(together / "mds")
    pieces: dict[str, list[tuple[int, list[int], list[int]]]] = {}
    for row in range(len(made)):
        tokens, mask = (np.asarray(made[row][name]).tolist() for name in ("tokens", "loss_mask"))
        for one in made.documents(row):
            here = slice(one.start, one.end)
            pieces.setdefault(one.document_id, []).append((one.document_start, tokens[here], mask[here]))
    assert any(len(some) > 1 for some in pieces.values())
    for row in range(len(store)):
        [document] = store.documents(row)
        _, *joined = map(list, zip(*sorted(pieces.pop(document.document_id)), strict=True))
        expected = [[*chain(*values)] for values in joined]
        assert [np.asarray(store[row][name]).tolist() for name in ("tokens", "loss_mask")] == expected
    assert not pieces
    assert shardkit.verify(together / "store").ok


@pytest.mark.parametrize("name", ["mds", "wds", "store"])
def test_verify_compares_the_masks_with_the_card(together: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    shutil.copytree(together / name, copy)
    card = json.loads((copy / "dataset.json").read_text())
    trained = card["trained_tokens"]
    (copy / "dataset.json").write_text(json.dumps(card | {"trained_tokens": trained - 1}))
    [problem] = shardkit.verify(copy).problems
    assert problem.problem == f"trained_tokens is {trained - 1}, but the loss masks select {trained:,}"
    assert shardkit.verify(copy, quick=True).ok


def test_a_store_whose_masks_do_not_fit_its_card_is_refused(
    together: Path, tmp_path: Path, inline_builds: None
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(together / "store", copy)
    card = json.loads((copy / "dataset.json").read_text())
    card["trained_tokens"] += 1
    (copy / "dataset.json").write_text(json.dumps(card))
    with pytest.raises(BuildError, match=r"tokens to train on were packed, cropped or masked, but the store"):
        pack_store(copy, tmp_path / "out", workers=1, progress=False)


def repeated_tokens(tokens: list[int], most: int) -> set[int]:
    """The reference: every token of every stretch that repeats its first 1 to 13 tokens too often."""
    found: set[int] = set()
    for period in range(1, 14):
        for begin in range(len(tokens) - period * (most + 1) + 1):
            unit = tokens[begin : begin + period]
            if tokens[begin : begin + period * (most + 1)] == unit * (most + 1):
                found.update(range(begin, begin + period * (most + 1)))
    return found


SOME_TOKENS = st.lists(st.integers(0, 2), max_size=40)
REPEATED = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=15), st.integers(1, 9)).map(
    lambda pair: pair[0] * pair[1]
)
DOCUMENTS = st.lists(
    st.lists(SOME_TOKENS | REPEATED, max_size=4).map(lambda parts: [*chain(*parts)]), max_size=5
)


@settings(max_examples=300, deadline=None)
@given(
    documents=DOCUMENTS,
    most=st.integers(1, 6),
    wide=st.booleans(),
    seed=st.integers(0, 99),
    gaps=st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_the_tokens_of_repetitions_are_masked_and_no_others(
    documents: list[list[int]], most: int, wide: bool, seed: int, gaps: list[int]
) -> None:
    lengths = np.array([len(one) for one in documents], np.int64)
    starts, mask_starts = (
        np.array([sum(gap[: n + 1]) + lengths[:n].sum() for n in range(len(documents))], np.int64)
        for gap in (gaps[:5], gaps[5:])
    )
    size = int(sum(gaps) + lengths.sum())
    tokens = np.zeros(size, np.uint32) if wide else np.zeros(size, np.uint16)
    masks = np.random.default_rng(seed).integers(0, 2, len(tokens)).astype(np.uint8)
    expected, lost = masks.copy(), []
    for document, start, place in zip(documents, starts, mask_starts, strict=True):
        tokens[start : start + len(document)] = document
        hidden = [place + at for at in repeated_tokens(document, most)]
        lost.append(int(expected[hidden].sum()))
        expected[hidden] = 0
        row = np.array([document], tokens.dtype)
        assert bool(hidden) == (len(document) > 0 and bool(repetitive_rows(row, most)[0]))
    assert mask_repetitions(tokens, starts, lengths, masks, mask_starts, most).tolist() == lost
    np.testing.assert_array_equal(masks, expected)


def test_documents_outside_of_their_tokens_are_refused() -> None:
    tokens, masks, one = np.zeros(9, np.uint16), np.ones(5, np.uint8), np.array([6])
    with pytest.raises(IndexError, match="outside the tokens or the masks"):
        mask_repetitions(tokens, np.array([0]), one, masks, np.array([0]), 2)


REPETITIONS = {"sequence_length": LENGTH, "max_repetitions": 7}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "masked", "form"),
    [
        ("best_fit", True, "mds"),
        ("best_fit_crop", False, "mds"),
        pytest.param("best_fit", False, "wds", marks=pytest.mark.extended),
        pytest.param("concat", False, "mds", marks=pytest.mark.extended),
        pytest.param("best_fit_truncate", True, "wds", marks=pytest.mark.extended),
    ],
)
def test_repetitions_are_masked_counted_and_packed_alike_from_a_store(
    recipe: dict[str, Any], tmp_path: Path, strategy: str, masked: bool, form: str, inline_builds: None
) -> None:
    pack = REPETITIONS | {"strategy": strategy}
    recipe = recipe | ({} if masked else {"inputs": recipe["inputs"][1:]})
    outputs = [
        {"path": str(tmp_path / "rows"), "format": form, "pack": pack, **SHARD},
        {"path": str(tmp_path / "store"), "format": "tokens", **SHARD},
    ]
    build(recipe | {"outputs": outputs}, workers=1, progress=False)
    rows, store = (shardkit.open_dataset(tmp_path / name) for name in ("rows", "store"))
    card, whole = rows.card, store.card
    assert card is not None
    assert whole is not None
    hidden: dict[str, npt.NDArray[np.bool_]] = {}
    masks: dict[str, npt.NDArray[np.uint8]] = {}
    for row, sample in enumerate(store):
        [document] = store.documents(row)
        tokens = np.asarray(sample["tokens"])
        mask = np.asarray(sample["loss_mask"]) if masked else np.ones(len(tokens), np.uint8)
        repeated = [*repeated_tokens(tokens.tolist(), 7)]
        hidden[document.document_id] = np.isin(np.arange(len(tokens)), repeated) & (mask == 1)
        masks[document.document_id] = np.where(hidden[document.document_id], 0, mask)
    assert card.packing["repeated"] == sum(int(one.sum()) for one in hidden.values()) > 100
    assert card.packing["repeated_documents"] == sum(bool(one.any()) for one in hidden.values())
    _, stored = rows_of(tmp_path / "rows")
    assert card.data["trained_tokens"] == int(stored.sum())
    if not card.packing.get("cropped"):
        before = whole.data["trained_tokens"] if masked else whole.tokens
        assert card.data["trained_tokens"] + card.packing["repeated"] == before
    for row in range(len(rows)):
        expected = np.zeros(LENGTH, np.uint8)
        for one in rows.documents(row):
            here = slice(one.document_start, one.document_start + one.tokens)
            expected[one.start : one.end] = masks[one.document_id][here]
        np.testing.assert_array_equal(stored[row], expected)
    assert shardkit.verify(tmp_path / "rows").ok
    assert "follow each other more than 7 times" in (tmp_path / "rows" / "report.html").read_text()
    overrides = [f"pack.{key}={value}" for key, value in pack.items()]
    overrides += ["output.shard_bytes=8KiB", f"output.format={form}"]
    pack_store(tmp_path / "store", tmp_path / "again", overrides=overrides, workers=1, progress=False)
    assert tree(tmp_path / "again") == tree(tmp_path / "rows")
