"""Other people's tars through the loader: the same order, exact resume and cache as for our own data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from shardkit.cache import CacheOptions
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage import open_store
from support.foreign_tars import sample, tars
from support.remote_harness import QUICK, fresh_url
from support.resume import assert_equal, assert_exact_resume, run

COLUMNS = ["__key__", "png", "seg.png", "json", "cls"]
"""What all samples have; every fourth has a text as well."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {"local": str(tmp_path_factory.mktemp("tars")), "remote": fresh_url()}
    for url in found.values():
        for name, data in tars().items():
            open_store(url).put(name, data)
    return found


def loader_of(path: Any, **arguments: Any) -> StreamingLoader:
    return StreamingLoader(path, **grouped(dict(QUICK) | {"batch_size": 3, "columns": COLUMNS} | arguments))


@pytest.mark.parametrize("name", ["{}", "{}/part-{{000..004}}.tar"])
@pytest.mark.parametrize("place", ["local", "remote"])
def test_batches_are_the_samples_that_were_written(places: dict[str, str], place: str, name: str) -> None:
    seen = []
    with loader_of(name.format(places[place]), tail="drop", batch_size=4) as loader:
        for batch in loader:
            numbers = [value["number"] for value in batch["json"]]
            assert batch["sample_id"].tolist() == numbers
            assert batch["__key__"] == [sample(number)["__key__"] for number in numbers]
            assert batch["cls"].tolist() == [sample(number)["cls"] for number in numbers]
            for image, number in zip(batch["seg.png"], numbers, strict=True):
                np.testing.assert_array_equal(image, sample(number)["seg.png"])
            seen += numbers
    assert len(set(seen)) == len(seen) == 20


def test_without_decoding_batches_have_the_bytes_that_webdataset_gives(places: dict[str, str]) -> None:
    tars_of = sorted(map(str, Path(places["local"]).glob("*.tar")))
    theirs = {
        row["__key__"]: row for row in webdataset.WebDataset(tars_of, shardshuffle=False, empty_check=False)
    }
    dataset = open_dataset(places["local"], decode=False)
    assert {row["__key__"]: row["cls"] for row in dataset} == {key: row["cls"] for key, row in theirs.items()}
    with loader_of(dataset) as loader:
        for batch in loader:
            for name in COLUMNS:
                assert batch[name] == [theirs[key][name] for key in batch["__key__"]]


def test_without_decoding_packed_tokens_are_files_of_arrays(tmp_path: Path) -> None:
    rows = np.arange(32, dtype=np.uint16).reshape(4, 8)
    tar.write_rows_shard(tmp_path, "a.tar", rows, key_start=0)
    dataset = open_dataset(tmp_path, decode=False)
    with StreamingLoader(dataset, batch_size=4, shuffle="none") as loader:
        [batch] = loader
    assert batch["tokens.npy"] == [row["tokens.npy"] for row in dataset]
    np.testing.assert_array_equal([np.load(io.BytesIO(data)) for data in batch["tokens.npy"]], rows)


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_run_resumes_exactly_at_every_step(places: dict[str, str], place: str, tmp_path: Path) -> None:
    """Over the edge of an epoch; a remote run's cache is there from the run before."""

    def make() -> StreamingLoader:
        return loader_of(places[place], shuffle="window", lanes=2, cache_dir=tmp_path)

    assert_exact_resume(make, steps=9, tail_steps=3)


def test_a_run_goes_on_elsewhere_with_another_world(places: dict[str, str], tmp_path: Path) -> None:
    """From a folder on one rank to a bucket on two: the same data in the same order."""
    with loader_of(places["local"], batch_size=4, lanes=2) as loader:
        whole = run(loader, 6)
    for rank in range(2):
        two = {"batch_size": 2, "rank": rank, "world_size": 2, "cache_dir": tmp_path, "lanes": 2}
        with loader_of(places["remote"], **two) as loader:
            loader.load_state_dict(whole[2][1])
            for (got, _), (expected, _) in zip(run(loader, 3), whole[3:], strict=True):
                half = {key: value[2 * rank : 2 * rank + 2] for key, value in expected.items()}
                assert_equal(got, half, f"rank {rank}")


@pytest.mark.filterwarnings("ignore:cache_bytes")
def test_a_cache_smaller_than_the_tars_gives_the_same_batches(places: dict[str, str]) -> None:
    largest = max(len(data) for data in tars().values())
    with loader_of(places["local"], lanes=1) as loader:
        expected = run(loader, 9)
    for capacity in (3 * largest, largest // 2):
        with loader_of(places["remote"], lanes=1, cache_bytes=capacity) as loader:
            for (got, _), (wanted, _) in zip(run(loader, 9), expected, strict=True):
                assert_equal(got, wanted, f"capacity {capacity}")


def test_images_come_as_the_dataset_was_opened(places: dict[str, str]) -> None:
    for place, cache in (("local", None), ("remote", CacheOptions(connections=2))):
        dataset = open_dataset(places[place], decode="rgb8", cache=cache)
        with loader_of(dataset) as loader:
            for batch in loader:
                for image, key in zip(batch["png"], batch["__key__"], strict=True):
                    np.testing.assert_array_equal(image, np.asarray(sample(int(key[-5:]))["png"]))
        with loader_of(open_dataset(places[place], decode="basic", cache=cache)) as loader:
            assert next(iter(loader))["png"][0].startswith(b"\x89PNG")


def test_members_that_only_some_samples_have_are_named(places: dict[str, str]) -> None:
    for place in places.values():
        with (
            loader_of(place, columns=None) as loader,
            pytest.raises(ShardError, match=r"tar: sample \d+ has no column 'txt'; select .*columns="),
        ):
            list(loader)
