"""Datasets of any columns through the same loader: gathered where they can be, decoded where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.gather import FixedRows
from shardkit.loaders.sources import DecodedSamples
from support.loader_data import columns_sample, make_dataset, token_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "columns", "columns", samples=40)


def loader_of(data: Path, **arguments: Any) -> StreamingLoader:
    return StreamingLoader(
        data, **grouped({"batch_size": 3, "rank": 0, "world_size": 1, "return_ids": True} | arguments)
    )


def test_constant_shapes_are_stacked_and_everything_else_is_a_list(data: Path) -> None:
    for batch in loader_of(data):
        expected = [columns_sample(number) for number in batch["sample_id"].tolist()]
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].shape == (3, 2, 3)
        assert batch["label"].dtype == torch.int64
        assert batch["score"].dtype == torch.float32
        assert batch["tokens"].dtype == torch.int64
        assert batch["text"] == [sample["text"] for sample in expected]
        for name in ("image", "label", "score", "tokens"):
            assert np.array_equal(batch[name].numpy(), np.stack([s[name] for s in expected]))
        assert [v.tolist() for v in batch["varied"]] == [s["varied"].tolist() for s in expected]


def test_a_column_is_stacked_or_listed_whatever_the_batch(data: Path) -> None:
    for batch in loader_of(data, batch_size=1):
        assert isinstance(batch["varied"], list)
        assert isinstance(batch["label"], torch.Tensor)


def test_padding_samples_are_none_in_lists(data: Path) -> None:
    *_, last = loader_of(data, tail="pad", columns=["text", "label"])
    assert last.keys() == {"text", "label", "sample_id", "is_padding"}
    assert last["text"][1:] == [None, None]
    assert last["is_padding"].tolist() == [False, True, True]


def test_wanted_columns_beside_ones_of_varying_size_are_decoded(data: Path) -> None:
    loader = loader_of(data, columns=["tokens", "score"])
    assert isinstance(loader._source.source, DecodedSamples), "MDS samples of varying size have no stride"
    for batch in loader:
        assert batch.keys() == {"tokens", "score", "sample_id"}


def test_several_columns_of_constant_size_are_gathered(tmp_path: Path) -> None:
    columns = {"image": "ndarray:uint8:2,3", "label": "int", "tokens": "ndarray:uint16:8"}
    with mds.MdsWriter(tmp_path, columns=columns, shard_bytes=700) as writer:
        for number in range(30):
            sample = columns_sample(number)
            writer.write({name: sample[name] for name in columns})
    loader = loader_of(tmp_path)
    assert isinstance(loader._source.source, FixedRows)
    assert len(loader.dataset.manifest.shards) > 2
    for batch in loader:
        expected = [columns_sample(number) for number in batch["sample_id"].tolist()]
        for name in columns:
            assert np.array_equal(batch[name].numpy(), np.stack([s[name] for s in expected]))


def test_foreign_tars_give_keys_and_decoded_members(tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(9):
            writer.write({"__key__": f"k{number}", "txt": f"text {number}", "cls": number % 3})
    for batch in loader_of(tmp_path):
        assert batch["__key__"] == [f"k{i}" for i in batch["sample_id"].tolist()]
        assert batch["txt"] == [f"text {i}" for i in batch["sample_id"].tolist()]
        assert list(batch["cls"]) == [i % 3 for i in batch["sample_id"].tolist()]


def test_foreign_packed_tars_call_their_tokens_tokens(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "foreign_tar", samples=20)
    rows = token_rows(20)
    for batch in loader_of(folder):
        assert np.array_equal(batch["tokens"].numpy(), rows[batch["sample_id"].numpy()])
    (batch, *_) = loader_of(folder, columns=["tokens", "__key__"])
    assert batch["__key__"] == [f"{i:06d}" for i in batch["sample_id"].tolist()]


def test_a_sample_without_a_wanted_column_is_named(tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(9):
            writer.write({"__key__": f"k{number}", "txt": "text"} | ({"cls": 1} if number != 5 else {}))
    with pytest.raises(ShardError, match=r"a\.tar: sample 5 has no column 'cls'.*columns="):
        list(loader_of(tmp_path))
    assert len(list(loader_of(tmp_path, columns=["txt"]))) == 3
