"""Single samples of any dataset, as samplers and collators want them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shardkit import open_dataset
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, Run
from shardkit.loaders.pytorch import MapDataset
from shardkit.storage.memory import MemoryStore
from support.loader_data import KINDS, columns_sample, make_dataset, token_rows, write_card
from support.remote_harness import fresh_url, make_remote_kind, put_folder

SAMPLES = 53


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("datasets")
    made = {kind: make_dataset(folder / kind, kind, samples=SAMPLES) for kind in KINDS}
    write_card(made["mds"])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_dataset_in_its_order(datasets: dict[str, Path], kind: str) -> None:
    dataset = MapDataset(datasets[kind])
    assert len(dataset) == SAMPLES
    rows = torch.from_numpy(token_rows(SAMPLES).astype("int64"))
    for index in (0, 10, 11, SAMPLES - 1, -1, -SAMPLES):
        assert dataset[index]["tokens"].dtype == torch.int64
        assert torch.equal(dataset[index]["tokens"], rows[index])
    some = [30, 2, 2, 51, -53]
    found = dataset.__getitems__(some)
    assert [sample["tokens"].tolist() for sample in found] == rows[some].tolist()
    assert dataset.__getitems__([]) == []
    for index in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError, match="sample"):
            dataset[index]


def test_slices_lists_and_arrays_give_lists_of_samples(datasets: dict[str, Path]) -> None:
    dataset = MapDataset(datasets["mds"])
    rows = token_rows(SAMPLES).astype("int64")
    slices: list[Any] = [slice(None), slice(3, 40, 7), slice(-2, None), slice(60, 70)]
    for index in (*slices, [5, -1, 5], np.array([51, 0, -53])):
        assert [sample["tokens"].tolist() for sample in dataset[index]] == rows[index].tolist()
    assert len(dataset[range(4)]) == 4
    assert dataset[[]] == []
    assert dataset[np.int64(7)]["tokens"].tolist() == rows[7].tolist()
    with pytest.raises(IndexError, match="sample 53 of 53"):
        dataset[[0, SAMPLES]]
    for wrong in ([1.5], np.array([True, False]), "3"):
        with pytest.raises(TypeError, match="integer"):
            dataset[wrong]  # type: ignore[index]


def test_a_sample_of_any_columns_is_that_of_a_batch_of_one(datasets: dict[str, Path]) -> None:
    with StreamingLoader(datasets["columns"], batch_size=1, shuffle="none", rank=0, world_size=1) as loader:
        batches = [{name: value[0] for name, value in batch.items()} for batch in loader]
    dataset = MapDataset(datasets["columns"])
    for index in (0, 17):
        sample, stored = dataset[index], columns_sample(index)
        assert sample.keys() == batches[index].keys() == stored.keys()
        assert sample["text"] == stored["text"]
        assert sample["varied"].tolist() == stored["varied"].tolist()
        for name in ("image", "label", "score", "tokens"):
            assert torch.equal(sample[name], batches[index][name]), name
    assert MapDataset(datasets["columns"], columns=["label"])[3].keys() == {"label"}


def test_a_trainer_gets_input_ids_and_labels(datasets: dict[str, Path]) -> None:
    dataset = MapDataset(
        datasets["mds"], labels=True, return_ids=True, layout=Layout(rename={"tokens": "input_ids"})
    )
    sample = dataset[4]
    assert sample.keys() == {"input_ids", "labels", "sample_id"}
    assert int(sample["sample_id"]) == 4
    padded = sample["labels"] == -100
    assert padded.any()
    assert torch.equal(sample["labels"][~padded], sample["input_ids"][~padded])
    with pytest.raises(ValueError, match="rename has 'token'"):
        MapDataset(datasets["mds"], layout=Layout(rename={"token": "input_ids"}))
    with pytest.raises(ValueError, match="the same name"):
        MapDataset(datasets["mds"], labels=True, layout=Layout(rename={"tokens": "labels"}))
    with pytest.raises(TypeError, match="endless"):
        MapDataset(datasets["mds"], endless=True)
    assert MapDataset(open_dataset(datasets["mds"]), dtype=None)[0]["tokens"].dtype == torch.uint16


def test_a_sample_holds_no_memory_but_its_own(datasets: dict[str, Path]) -> None:
    samples = MapDataset(datasets["mds"]).__getitems__(range(8))
    for sample in samples:
        assert sample["tokens"].untyped_storage().nbytes() == sample["tokens"].nbytes


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_of_all_ranks_deliver_every_sample(datasets: dict[str, Path], workers: int) -> None:
    dataset = MapDataset(datasets["tar"])
    context = "fork" if workers else None
    first: list[int] = []
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, rank, seed=3)
        loader = DataLoader(
            dataset, batch_size=4, sampler=sampler, num_workers=workers, multiprocessing_context=context
        )
        for batch in loader:
            assert batch["tokens"].shape == (len(batch["tokens"]), 8)
            first += batch["tokens"][:, 0].tolist()
    assert set(first) == set(range(1, SAMPLES + 1))


def test_it_pickles(datasets: dict[str, Path]) -> None:
    dataset = MapDataset(
        datasets["mds_zstd"], labels=True, eos_id=0, layout=Layout(rename={"labels": "target"})
    )
    copied = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copied[9]["target"], dataset[9]["target"])


def test_a_remote_dataset_is_read_by_number_in_forked_workers_too(tmp_path: Path) -> None:
    url = fresh_url()
    put_folder(make_remote_kind(tmp_path / "made", "mds_zstd"), MemoryStore(url))
    dataset = MapDataset(url, cache_dir=tmp_path / "cache", run=Run(connections=2))
    rows = torch.from_numpy(token_rows(SAMPLES).astype("int64"))
    assert torch.equal(dataset[40]["tokens"], rows[40])  # the parent's threads run now
    loader = DataLoader(
        dataset,
        batch_size=7,
        num_workers=2,
        multiprocessing_context="fork",
        sampler=list(range(SAMPLES))[::-1],
    )
    assert torch.equal(torch.cat([batch["tokens"] for batch in loader]), rows.flip(0))


def test_a_lock_that_is_held_while_a_worker_is_forked_does_not_stop_it(datasets: dict[str, Path]) -> None:
    dataset = MapDataset(datasets["mds"])
    with dataset._dataset._lock:
        loader = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork", timeout=60)
        first = [int(i) for batch in loader for i in batch["tokens"][:, 0]]
    assert first == list(range(1, SAMPLES + 1))
