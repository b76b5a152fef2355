"""Rows of any dataset: chosen as a list is, and given as columns to NumPy, PyTorch, Arrow and pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkit as sk
from shardkit.datasets.rows import Rows
from shardkit.errors import MissingExtraError, ShardError
from shardkit.formats import mds
from support.loader_data import COLUMNS, KINDS, columns_sample, make_dataset, token_rows

SAMPLES = 23
TOKENS = token_rows(SAMPLES)
LAST = SAMPLES - 1
CHOICES: dict[str, Any] = {
    "slice": slice(3, 9),
    "stride": slice(None, None, -4),
    "none": slice(5, 5),
    "list": [1, 5, 1, -1],
    "array": np.array([LAST, 0], np.uint16),
    "no list": [],
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, sk.Dataset]:
    folder = tmp_path_factory.mktemp("rows")
    return {kind: sk.open(make_dataset(folder / kind, kind, samples=SAMPLES)) for kind in KINDS}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_chosen_as_numpy_chooses_them(
    datasets: dict[str, sk.Dataset], kind: str, choice: str
) -> None:
    dataset, wanted = datasets[kind], CHOICES[choice]
    rows, numbers = dataset[wanted], np.arange(SAMPLES)[wanted].tolist()
    assert isinstance(rows, Rows)
    assert (len(rows), list(rows.numbers)) == (len(numbers), numbers)
    np.testing.assert_array_equal(
        [token_of(row) for row in rows], [token_of(dataset[number]) for number in numbers]
    )
    if numbers:
        np.testing.assert_array_equal(token_of(rows[-1]), TOKENS[numbers[-1]])
    assert list(rows[::-1].numbers) == numbers[::-1]
    assert list(rows[: len(numbers)][[0]].numbers if numbers else []) == numbers[:1]


def token_of(sample: dict[str, object]) -> Any:
    return sample.get("tokens", sample.get("tokens.npy"))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_equal_arrays_become_one_array_for_every_library(
    datasets: dict[str, sk.Dataset], kind: str
) -> None:
    dataset = datasets[kind]
    rows, key = dataset[[2, 0]], dataset.token_column
    assert key is not None
    expected = TOKENS[[2, 0]]
    np.testing.assert_array_equal(rows.to_numpy()[key], expected)
    assert rows.to_numpy()[key].dtype == np.uint16
    tensor = rows.to_torch([key])[key]
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.int64
    np.testing.assert_array_equal(tensor.numpy(), expected)
    table = rows.to_arrow([key])
    assert table.column_names == ["row", key]
    assert table.column("row").to_pylist() == [2, 0]
    assert table.column(key).to_pylist() == expected.tolist()
    if "__key__" in dataset[0]:
        assert rows.to_numpy()["__key__"].tolist() == [dataset[2]["__key__"], dataset[0]["__key__"]]


def test_columns_of_text_and_of_arrays_of_any_length_keep_a_value_a_row(
    datasets: dict[str, sk.Dataset],
) -> None:
    rows, samples = datasets["columns"][4:8], [columns_sample(number) for number in range(4, 8)]
    by_library: list[dict[str, Any]] = [{**rows.to_numpy()}, {**rows.to_torch()}]
    for found in by_library:
        assert list(found) == list(COLUMNS)
        assert list(found["text"]) == [sample["text"] for sample in samples]
        assert [len(value) for value in found["varied"]] == [len(sample["varied"]) for sample in samples]
        assert tuple(found["image"].shape) == (4, 2, 3)
    lines = rows.to_arrow().to_pylist()
    for number, (line, sample) in enumerate(zip(lines, samples, strict=True), 4):
        assert line.pop("row") == number
        plain = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in sample.items()}
        assert line == plain
    one = datasets["columns"][[3]].to_numpy(["varied"])["varied"]
    assert one.dtype == object, "what a column becomes does not depend on the rows that were chosen"


def test_what_is_no_choice_of_rows_and_what_is_no_column_is_refused(datasets: dict[str, sk.Dataset]) -> None:
    dataset = datasets["columns"]
    wrong: Any
    for wrong in ([True, False], [0.5], [[1]], ["a"]):
        with pytest.raises(TypeError, match="by number, slice or list of numbers"):
            dataset[wrong]
    for outside in ([SAMPLES], [0, -SAMPLES - 1]):
        with pytest.raises(IndexError, match=f"no row -?{abs(outside[-1])}; there are {SAMPLES}"):
            dataset[outside]
    with pytest.raises(ShardError, match="has no column 'tokns'; it has image, label"):
        dataset[:2].to_numpy(["tokns"])


def test_columns_that_are_not_wanted_are_not_decoded(tmp_path: Path) -> None:
    with mds.MdsWriter(tmp_path / "data", columns={"image": "jpeg", "number": "int32"}) as writer:
        for number in range(3):
            writer.write_encoded({"image": b"no image", "number": np.int32(number).tobytes()})
    rows = sk.open(tmp_path / "data")[:]
    assert rows.to_numpy(["number"])["number"].tolist() == [0, 1, 2]
    with pytest.raises(ShardError, match="image"):
        rows.to_numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_arrays_without_rows(datasets: dict[str, sk.Dataset], kind: str) -> None:
    dataset = datasets[kind]
    assert dataset.token_column is not None
    found = dataset[5:5].to_numpy()[dataset.token_column]
    assert found.shape == (0, TOKENS.shape[1])
    assert found.dtype == np.uint16
    assert dataset[[]].to_arrow().num_rows == 0


def test_a_sample_is_the_same_for_a_seed_and_never_repeats_a_row(datasets: dict[str, sk.Dataset]) -> None:
    dataset = datasets["mds"]
    first = list(dataset.sample(9, seed=1).numbers)
    assert first == sorted(set(first)) == list(dataset.sample(9, seed=1).numbers)
    assert first != list(dataset.sample(9, seed=2).numbers)
    assert list(dataset.sample(1000).numbers) == list(range(SAMPLES))


def test_pandas_gets_a_frame_indexed_by_row_or_is_asked_for(datasets: dict[str, sk.Dataset]) -> None:
    rows = datasets["columns"][[7, 2]]
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(MissingExtraError, match=r"Rows\.to_pandas needs pandas: pip install pandas"):
            rows.to_pandas()
        return
    frame = rows.to_pandas()
    assert (frame.index.tolist(), frame["label"].tolist()) == ([7, 2], [0, 2])
    np.testing.assert_array_equal(frame["tokens"][7], TOKENS[7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_takes_an_open_dataset(datasets: dict[str, sk.Dataset], kind: str) -> None:
    dataset = datasets[kind]
    loader = sk.StreamingLoader(dataset, batch_size=2, shuffle="none", columns=["tokens"])
    np.testing.assert_array_equal(next(iter(loader))["tokens"], TOKENS[:2])
    loader.close()
