"""MDS datasets that MosaicML made, in a store: merged indexes, hashes of one kind only, pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.folder import SUBFOLDER
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.errors import ShardError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage import open_store
from support import peers
from support.remote_harness import QUICK, fresh_url, put_folder

COLUMNS = {
    "label": "int",
    "text": "str",
    "picture": "png",
    "scores": "ndarray:float32",
    "when": "str_decimal",
}


def samples(first: int, last: int) -> Iterator[dict[str, Any]]:
    from decimal import Decimal

    from PIL import Image

    for number in range(first, last):
        yield {
            "label": number,
            "text": "ü" * number,
            "picture": Image.new("L", (2, 1 + number), number),
            "scores": np.arange(1 + number % 4, dtype=np.float32),
            "when": Decimal(number) / 8,
        }


def write(folder: Path, first: int, last: int, **settings: Any) -> Path:
    return peers.write_with_streaming(folder, COLUMNS, samples(first, last), size_limit=700, **settings)


def uploaded(folder: Path) -> str:
    url = fresh_url()
    put_folder(folder, open_store(url))
    return url


def same(found: Any, expected: Any) -> bool:
    return bool(peers.comparable(list(found)) == peers.comparable(list(expected)))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts in sub-folders under the index that MosaicML merges."""
    folder = tmp_path_factory.mktemp("mds") / "merged"
    for name, first, last in (("0", 0, 9), ("1", 9, 14), ("2", 14, 30)):
        write(folder / name, first, last, compression="zstd" if name == "2" else None, hashes=["sha1"])
    peers.import_streaming().base.util.merge_index(str(folder), keep_local=True)
    return folder


def test_a_merged_index_reads_its_sub_folders(merged: Path) -> None:
    with open_dataset(uploaded(merged)) as dataset:
        assert len(dataset) == 30
        assert {info.stored.basename.rpartition("/")[0] for info in dataset.manifest.shards} == {
            "0", "1", "2"
        }  # fmt: skip
        assert same(dataset, samples(0, 30))
        assert same([dataset[17], dataset[-1]], [*samples(17, 18), *samples(29, 30)])


def test_the_loader_gives_the_same_batches_from_a_folder_and_from_a_store(
    merged: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        with (
            StreamingLoader(merged, batch_size=4, **grouped(QUICK)) as local,
            StreamingLoader(uploaded(merged), batch_size=4, cache_dir=tmp_path, **grouped(QUICK)) as remote,
        ):
            for expected, found in zip(local, remote, strict=True):
                assert found.keys() == expected.keys()
                assert found["label"].tolist() == found["sample_id"].tolist() == expected["label"].tolist()
                for name in ("text", "picture", "scores", "when"):
                    assert same(found[name], expected[name])
    entries = [*(tmp_path / SUBFOLDER / "shards").iterdir()]
    assert len(entries) == len(open_dataset(merged).manifest.shards), "named by content: fetched once"


@pytest.mark.parametrize("stated", ["zip_data", "raw_data", "neither"])
def test_compressed_shards_need_hashes_of_one_kind_or_none(tmp_path: Path, stated: str) -> None:
    write(tmp_path / "d", 0, 12, compression="zstd", hashes=["sha1", "xxh128"])
    index = json.loads((tmp_path / "d" / "index.json").read_text())
    for shard in index["shards"]:
        for key in {"zip_data", "raw_data"} - {stated}:
            shard[key]["hashes"] = {}
    (tmp_path / "d" / "index.json").write_text(json.dumps(index))
    url = uploaded(tmp_path / "d")
    for _ in range(2):
        with open_dataset(url, cache=CacheOptions(folder=tmp_path / "cache")) as dataset:
            assert same(dataset, samples(0, 12))
    store = open_store(url)
    key = dataset.manifest.shards[1].stored.basename
    store.put(key, store.get(key)[:-9] + b"\0" * 9)
    with open_dataset(url) as dataset, pytest.raises(ShardError, match=key):
        samples_of_shard(dataset, 1)


def samples_of_shard(dataset: Dataset, number: int) -> list[dict[str, object]]:
    shard = dataset.shard(number)
    return [shard.sample(row) for row in range(len(shard))]


@pytest.mark.parametrize("remote", [False, True])
def test_pickles_run_only_if_allowed(tmp_path: Path, remote: bool) -> None:
    values = [{"x": {number}} for number in range(5)]
    peers.write_with_streaming(tmp_path / "d", {"x": "pkl"}, values)
    path = uploaded(tmp_path / "d") if remote else tmp_path / "d"
    with (
        open_dataset(path) as dataset,
        pytest.raises(ShardError, match=r"'x' holds pickles.*allow_pickle=True"),
    ):
        dataset[0]
    with (
        StreamingLoader(path, batch_size=1, **grouped(QUICK)) as loader,
        pytest.raises(ShardError, match="holds pickles"),
    ):
        list(loader)
    with open_dataset(path, allow_pickle=True) as dataset:
        assert list(dataset) == values
        with StreamingLoader(dataset, batch_size=5, **grouped(QUICK)) as loader:
            assert sorted(map(list, next(iter(loader))["x"])) == [[number] for number in range(5)]
