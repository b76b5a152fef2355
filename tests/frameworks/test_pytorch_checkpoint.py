"""Loaders in torch.distributed.checkpoint, as `{"loader": loader}` beside a model."""

from __future__ import annotations

import multiprocessing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.loader_data import make_dataset

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GLOBAL_BATCH = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("data")
    return [make_dataset(folder / name, "mds", samples=n) for name, n in (("a", 200), ("b", 90))]


def streams(data: list[Path]) -> list[Stream]:
    return [Stream(data[0], weight=2), Stream(data[1])]


def test_a_state_survives_with_all_its_values(data: list[Path], tmp_path: Path) -> None:
    """Even a schedule that the loader which loads it has not been told of."""
    with StreamingLoader(streams(data), batch_size=4, rank=0, world_size=1) as loader:
        next(iter(loader))
        loader.set_weights([1, 3], at_position=40)
        state = loader.state_dict()
        model = {"weight": torch.arange(3.0)}
        save_checkpoint({"loader": loader, "model": model}, checkpoint_id=tmp_path / "saved", no_dist=True)
    dataset = StreamingDataset(streams(data), batch_size=4, rank=0, world_size=1)
    other = StreamingDataLoader(dataset)
    found = {"weight": torch.zeros(3)}
    load_checkpoint({"loader": other, "model": found}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert other.state_dict() == state
    assert torch.equal(found["weight"], model["weight"])


def rank_run(rank: int, world: int, data: Path, folder: Path, load: bool, results: Any) -> None:
    """Two steps of one rank, in a process of its own, from the checkpoint or up to it."""
    place = folder / f"meet-{world}-{load}"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    with StreamingLoader(data, batch_size=GLOBAL_BATCH // world, return_ids=True) as loader:
        if load:
            load_checkpoint({"loader": loader}, checkpoint_id=folder / "saved")
        ids = [batch["sample_id"].tolist() for batch in islice(loader, 2)]
        if not load:
            save_checkpoint({"loader": loader}, checkpoint_id=folder / "saved")
        results.put((ids, loader.state_dict()))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_world_size_goes_on_from_a_checkpoint(
    data: list[Path], tmp_path: Path, before: int, after: int
) -> None:
    context = multiprocessing.get_context("fork")
    found = []
    for world, load in ((before, False), (after, True)):
        results = context.Queue()
        ranks = [
            context.Process(target=rank_run, args=(rank, world, data[0], tmp_path, load, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        parts = [results.get(timeout=120) for _ in ranks]
        for process in ranks:
            process.join(120)
            assert process.exitcode == 0
        found += [sorted(i for ids, _ in parts for i in ids[step]) for step in range(2)]
    with StreamingLoader(data[0], batch_size=GLOBAL_BATCH, rank=0, world_size=1, return_ids=True) as loader:
        assert found == [sorted(batch["sample_id"].tolist()) for batch in islice(loader, 4)]
        assert all(state == loader.state_dict() for _, state in parts)
