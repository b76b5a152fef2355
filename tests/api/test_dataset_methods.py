"""What users of pandas and Hugging Face datasets try first on an open dataset."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit.datasets.rows import Rows
from shardkit.errors import MissingExtraError, ShardkitError
from shardkit.formats import mds
from support.loader_data import COLUMNS, columns_sample, make_dataset, token_rows
from support.small_build import make_corpus

SAMPLES = 23
TOKENS = token_rows(SAMPLES)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> sk.Dataset:
    return sk.open(make_dataset(tmp_path_factory.mktemp("methods") / "columns", "columns", samples=SAMPLES))


@given(st.integers(-2 * SAMPLES, 2 * SAMPLES))
def test_head_is_what_pandas_calls_so(dataset: sk.Dataset, count: int) -> None:
    assert list(dataset.head(count).numbers) == list(range(SAMPLES))[:count]
    assert len(dataset.head()) == 5


@pytest.mark.parametrize("of", [list, tuple, iter, np.array, lambda rows: (row for row in rows)])
def test_select_takes_rows_as_any_iterable_in_the_given_order(
    dataset: sk.Dataset, of: Callable[..., Any]
) -> None:
    chosen = dataset.select(of([4, 0, -1, 4]))
    assert isinstance(chosen, Rows)
    assert list(chosen.numbers) == [4, 0, SAMPLES - 1, 4]
    assert list(dataset.select(range(2, 9, 3)).numbers) == [2, 5, 8]
    assert list(dataset.select([]).numbers) == []


@pytest.mark.parametrize("pick", ["dataset[wrong]", "dataset.select(wrong)", "dataset[:5][wrong]"])
@pytest.mark.parametrize("wrong", ["tokens", ["tokens"], ["tokens", "text"]])
def test_a_name_of_a_column_is_answered_with_the_ways_to_its_values(
    dataset: sk.Dataset, wrong: Any, pick: str
) -> None:
    with pytest.raises(TypeError) as refused:
        eval(pick, {"dataset": dataset, "wrong": wrong})
    names = [wrong] if isinstance(wrong, str) else wrong
    assert f"dataset[:100].to_numpy({names!r})" in str(refused.value)
    assert "dataset[0]['tokens']" in str(refused.value)
    assert dataset[:100].to_numpy(names)["tokens"].shape == TOKENS.shape


def test_a_mask_and_a_name_instead_of_names_are_answered_too(dataset: sk.Dataset) -> None:
    with pytest.raises(TypeError, match=r"for a mask, give numpy.flatnonzero\(mask\)"):
        dataset[np.ones(SAMPLES, bool)]
    with pytest.raises(TypeError, match=r"columns must be a list of names: columns=\['tokens'\]"):
        dataset.to_arrow("tokens")


def test_a_whole_dataset_becomes_a_table_and_a_frame(dataset: sk.Dataset) -> None:
    table = dataset.to_arrow()
    assert table.column_names == ["row", *COLUMNS]
    assert table.column("tokens").to_pylist() == TOKENS.tolist()
    assert dataset.to_arrow(["text"]).column_names == ["row", "text"]
    try:
        frame = dataset.to_pandas(["text"])
    except MissingExtraError:
        return
    assert frame["text"].tolist() == [columns_sample(number)["text"] for number in range(SAMPLES)]


CONVERSIONS: dict[str, Callable[[sk.Dataset, str | None], object]] = {
    "arrow": lambda dataset, most: dataset.to_arrow(max_bytes=most),
    "pandas": lambda dataset, most: dataset.to_pandas(max_bytes=most),
    "rows to arrow": lambda dataset, most: dataset[:].to_arrow(max_bytes=most),
    "rows to numpy": lambda dataset, most: dataset[:].to_numpy(max_bytes=most),
    "rows to torch": lambda dataset, most: dataset[:].to_torch(max_bytes=most),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_conversion_that_would_take_too_much_memory_ends_and_says_what_to_do(
    tmp_path: Path, kind: str
) -> None:
    written = np.arange(1000 * 500, dtype=np.int64).reshape(1000, 500)  # 4 KB a row
    with mds.MdsWriter(tmp_path / "data", columns={"x": "ndarray:int64:500"}) as writer:
        writer.write_rows(written)
    dataset, read = sk.open(tmp_path / "data"), []
    row = dataset.row

    def counted(number: int, columns: Any = None) -> dict[str, object]:
        read.append(number)
        return row(number, columns)

    dataset.row = counted  # type: ignore[method-assign]
    with pytest.raises(ShardkitError) as refused:
        CONVERSIONS[kind](dataset, "1MB")
    assert len(read) == 100, "the size of all rows is estimated from the first"
    assert "1,000 rows would take about 4 MB, more than 1 MB (max_bytes)" in str(refused.value)
    assert 'dataset[:1000], or fewer columns (columns=["…"]), or give max_bytes' in str(refused.value)
    read.clear()
    with pytest.raises(ShardkitError, match=r"would take about 4\.\d+ MB, more than 3 MB"):
        CONVERSIONS[kind](dataset, "3MB")
    assert 750 <= len(read) < 766, "rows are counted to the limit if the estimate is near it"
    CONVERSIONS[kind](dataset, "4MB")
    CONVERSIONS[kind](dataset, None)


def test_the_memory_of_a_conversion_is_a_part_of_what_is_free(
    dataset: sk.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.datasets.rows.available_bytes", lambda: 4000)
    with pytest.raises(ShardkitError, match=r"more than 1 KB \(a quarter of the free memory\)"):
        dataset.to_arrow()


def test_images_count_with_their_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    with mds.MdsWriter(tmp_path / "data", columns={"image": "png"}) as writer:
        for _ in range(3):
            writer.write({"image": image.new("RGB", (1000, 1000))})
    dataset = sk.open(tmp_path / "data")
    with pytest.raises(ShardkitError, match="3 rows would take about 9 MB"):
        dataset.head().to_numpy(max_bytes="2MB")
    assert len(dataset.head().to_numpy(max_bytes="10MB")["image"]) == 3


def test_features_are_the_columns_that_rows_have(dataset: sk.Dataset) -> None:
    assert list(dataset.features) == list(dataset[0]) == list(COLUMNS)
    assert dataset.features["text"] == "str"
    assert dataset.features["tokens"].startswith("ndarray:uint16:")
    assert sk.open(dataset.path, columns=["text"]).features == {"text": "str"}


def test_the_tokenizer_of_the_card_decodes_rows_or_the_error_says_what_to_do(
    tmp_path: Path, inline_builds: None, dataset: sk.Dataset
) -> None:
    recipe = make_corpus(tmp_path / "corpus", 40)
    built = sk.open(sk.build(recipe, workers=1, progress=False).location)
    tokens: Any = built[0][built.token_column or ""]
    assert built.tokenizer.decode(tokens, skip_special_tokens=False).startswith(built.text(0)[:20])
    assert built.tokenizer.encode(built.text(0)[:20]).ids
    for file in tmp_path.rglob("*tokenizer*.json"):
        file.rename(file.with_suffix(".gone"))
    with pytest.raises(ShardkitError, match="is not at the path in the recipe: copy it there, or load it"):
        _ = sk.open(built.path).tokenizer
    with pytest.raises(ShardkitError, match="has no record of its tokenizer"):
        _ = dataset.tokenizer


@pytest.mark.parametrize(
    ("name", "instead"),
    [("map", "transform="), ("filter", "exclude="), ("to_torch", r"dataset\[:\].to_torch")],
)
def test_methods_of_other_libraries_are_answered_with_what_to_use(
    dataset: sk.Dataset, name: str, instead: str
) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; in shardkit: .*{instead}"):
        getattr(dataset, name)
    assert not hasattr(dataset, name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        _ = dataset.no_such_name  # type: ignore[attr-defined]


def test_a_dataset_is_still_copied_and_pickled(dataset: sk.Dataset) -> None:
    for twin in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert twin.to_arrow().equals(dataset.to_arrow())
