"""One name for the columns of tokens and of loss masks, in tars as in MDS."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset

import shardkit as sk
from shardkit.formats import tar
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.tools.convert import OutputOptions

ROWS: npt.NDArray[Any] = np.arange(12 * 8, dtype=np.uint16).reshape(12, 8)
MASKS: npt.NDArray[Any] = (ROWS % 3 == 0).astype(np.uint8)


def packed(folder: Path) -> Path:
    """Rows and their masks in two listed tars."""
    infos = [
        tar.write_columns_shard(
            folder,
            f"{at}.tar",
            {"tokens": ROWS[at : at + 6], "loss_mask": MASKS[at : at + 6]},
            key_start=at,
        )
        for at in (0, 6)
    ]
    tar.write_shard_list(folder, infos)
    return folder


def others(folder: Path, samples: list[dict[str, Any]], *, per_tar: int = 100) -> Path:
    """Tars that webdataset writes, without a list."""
    for number, at in enumerate(range(0, len(samples), per_tar)):
        with webdataset.TarWriter(str(folder / f"{number}.tar")) as writer:
            for i, sample in enumerate(samples[at : at + per_tar], at):
                writer.write({"__key__": f"{i:04d}", **sample})
    return folder


def batch_of(dataset: sk.Dataset, **options: Any) -> dict[str, Any]:
    with StreamingLoader(dataset, batch_size=len(dataset), shuffle="none", **grouped(options)) as loader:
        [batch] = loader
    return dict(batch)


@pytest.mark.parametrize("form", ["listed", "without columns", "without a list", "by pattern"])
def test_rows_batches_and_features_call_tokens_and_masks_as_in_mds(tmp_path: Path, form: str) -> None:
    path: Path | str = packed(tmp_path)
    file = tmp_path / "shards.json"
    if form == "without columns":
        listing = json.loads(file.read_text())
        for entry in listing["shardlist"]:
            del entry["columns"]
        file.write_text(json.dumps(listing))
    elif form != "listed":
        file.unlink()
        path = f"{tmp_path}/{{0,6}}.tar" if form == "by pattern" else path
    dataset = sk.open_dataset(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(dataset[7]) == ["__key__", "loss_mask", "tokens"]
        np.testing.assert_array_equal(dataset[7]["tokens"], ROWS[7])
        assert sorted(column.name for column in dataset.columns) == ["loss_mask", "tokens"]
        assert (dataset.token_column, dataset.loss_mask_column) == ("tokens", "loss_mask")
        np.testing.assert_array_equal(dataset[2:9].to_numpy(["loss_mask"])["loss_mask"], MASKS[2:9])
        batch = batch_of(dataset)
        np.testing.assert_array_equal(batch["tokens"], ROWS)
        np.testing.assert_array_equal(batch["loss_mask"], MASKS)
        assert batch_of(dataset, columns=["tokens"]).keys() == batch.keys() - {"loss_mask"}
    assert "tokens.npy" not in repr(dataset) + str(dataset.describe())


def test_members_that_are_asked_for_by_extension_are_found_with_one_line(tmp_path: Path) -> None:
    dataset = sk.open_dataset(packed(tmp_path))
    line = r"members \.tokens\.npy is called 'tokens'"
    row = dataset[3]
    for same in (row, copy.copy(row), pickle.loads(pickle.dumps(row))):
        with pytest.warns(RuntimeWarning, match=line):
            np.testing.assert_array_equal(same["tokens.npy"], ROWS[3])
        assert dict(same).keys() == {"__key__", "tokens", "loss_mask"}
    with pytest.warns(RuntimeWarning, match=line):
        assert [*dataset[:4].to_numpy(["tokens.npy"])] == ["tokens"]
    with pytest.warns(RuntimeWarning, match=line):
        assert "tokens" in batch_of(dataset, columns=["tokens.npy"])
    with pytest.raises(KeyError, match="labels"):
        row["labels.npy"]
    with pytest.raises(ValueError, match=r"no column 'labels'; it has .*tokens"):
        StreamingLoader(dataset, batch_size=2, columns=["labels"])


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        ([{"tokens.npy": np.arange(n + 1)} for n in range(5)], {"tokens.npy"}),  # documents
        ([{"tokens.npy": np.zeros(4, np.float32)}] * 5, {"tokens.npy"}),
        ([{"tokens.npy": np.zeros((2, 2), np.int32)}] * 5, {"tokens.npy"}),
        ([{"tokens.npy": np.arange(4), "tokens": b"x"}] * 5, {"tokens", "tokens.npy"}),
        ([{"left.tokens.npy": np.arange(4)}] * 5, {"left.tokens.npy"}),
        (
            [{"ids.npy": np.arange(4), "loss_mask.npy": np.ones(4)}] * 5,
            {"ids.npy", "loss_mask.npy"},
        ),
        ([{"image.npy": np.zeros((2, 2))}] * 5, {"image.npy"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("per_tar", [100, 1])
def test_members_of_others_keep_their_names(
    tmp_path: Path, samples: list[dict[str, Any]], names: set[str], per_tar: int
) -> None:
    dataset = sk.open_dataset(others(tmp_path, samples, per_tar=per_tar))
    assert {name for row in dataset for name in row} == names | {"__key__"}
    assert {column.name for column in dataset.columns} == names


def test_bytes_of_members_are_called_by_their_extension(tmp_path: Path) -> None:
    dataset = sk.open_dataset(packed(tmp_path), decode=False)
    assert dataset[0].keys() == {"__key__", "tokens.npy", "loss_mask.npy"}


def test_a_tar_and_an_mds_dataset_of_one_build_are_streams_of_one_loader(tmp_path: Path) -> None:
    (tmp_path / "tar").mkdir()
    sk.convert(packed(tmp_path / "tar"), tmp_path / "mds")
    pair = [Stream(tmp_path / kind, name=kind) for kind in ("tar", "mds")]
    with StreamingLoader(pair, batch_size=24, shuffle="none", tail="drop") as loader:
        [batch] = loader
    assert np.asarray(batch["tokens"]).sum() == 2 * int(ROWS.sum(dtype=np.int64))


def test_conversion_keeps_members_on_disk_and_names_for_users(tmp_path: Path) -> None:
    (tmp_path / "tar").mkdir()
    packed(tmp_path / "tar")
    sk.convert(tmp_path / "tar", tmp_path / "mds")
    output = OutputOptions(format="wds")
    result = sk.convert(tmp_path / "mds", tmp_path / "again", output=output, columns=["tokens"])
    assert [*result.columns] == ["tokens"]
    [sample, *_] = webdataset.WebDataset(
        [str(file) for file in sorted((tmp_path / "again").glob("*.tar"))], shardshuffle=False
    ).decode()
    np.testing.assert_array_equal(sample["tokens.npy"], ROWS[0])
    np.testing.assert_array_equal(sk.open_dataset(tmp_path / "again")[0]["tokens"], ROWS[0])
