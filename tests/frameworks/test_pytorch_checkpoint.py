"""Loaders in torch.distributed.checkpoint, as `{"loader": loader}` beside a model."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from shardkit.errors import StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Order, grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, checkpoint_state
from shardkit.order.state import LoaderState
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


def test_what_a_loader_was_given_since_the_checkpoint_wins_behind_the_position(
    data: list[Path], tmp_path: Path
) -> None:
    """A stream that was added, and weights and steps that change there."""
    with StreamingLoader(streams(data), batch_size=4, rank=0, world_size=1) as loader:
        next(iter(loader))
        save_checkpoint({"loader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
    added = [*streams(data), Stream(data[0], weight=0, name="more")]
    with StreamingLoader(added, batch_size=4, rank=0, world_size=1) as loader:
        load_checkpoint({"loader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
        assert loader.position == 4
        assert loader.state_dict()["schedule"] == [[0, [2, 1, 0]]]
    schedule = [(0, [2, 1, 0]), (8, [1, 1, 1])]
    with StreamingLoader(
        added, batch_size=4, rank=0, world_size=1, order=Order(schedule=schedule, global_batch=8)
    ) as loader:
        load_checkpoint({"loader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
        assert loader.position == 4
        state = loader.state_dict()
        assert (state["schedule"], state["global_batch"]) == ([[0, [2, 1, 0]], [8, [1, 1, 1]]], [[0, 8]])


def test_checkpoints_of_earlier_versions_and_of_other_data_are_read_by_themselves(
    data: list[Path], tmp_path: Path
) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "loader_states.json").read_text())
    for number, saved in enumerate(golden):
        folder = tmp_path / str(number)
        trainer = {"data": saved, "model": {"weight": torch.zeros(3)}}
        save_checkpoint({"trainer": trainer}, checkpoint_id=folder, no_dist=True)
        state = checkpoint_state(folder, "trainer.data")
        assert LoaderState.from_dict(state) == LoaderState.from_dict(saved)
        with StreamingLoader(streams(data), batch_size=4, rank=0, world_size=1) as loader:
            with pytest.raises(CheckpointException, match="Missing key"):
                load_checkpoint({"trainer": {"data": loader}}, checkpoint_id=folder, no_dist=True)
            with pytest.raises(StateError, match="does not belong to this loader"):
                loader.load_state_dict(state)
            loader.load_state_dict(state, on_mismatch="fork")
            assert loader.position == 120
    with pytest.raises(StateError, match="this checkpoint has no entry 'loader'"):
        checkpoint_state(folder)


def rank_run(rank: int, world: int, data: list[Path], folder: Path, load: bool, results: Any) -> None:
    """Two steps of one rank, in a process of its own, from the checkpoint or up to it."""
    place = folder / f"meet-{world}-{load}"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    mixed = streams(data)
    if load:
        mixed.append(Stream(data[0], weight=0, name="added"))
    with StreamingLoader(mixed, batch_size=GLOBAL_BATCH // world, return_ids=True) as loader:
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
            context.Process(target=rank_run, args=(rank, world, data, tmp_path, load, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        parts = [results.get(timeout=120) for _ in ranks]
        for process in ranks:
            process.join(120)
            assert process.exitcode == 0
        found += [sorted(i for ids, _ in parts for i in ids[step]) for step in range(2)]
    one: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "rank": 0, "world_size": 1, "return_ids": True}
    with StreamingLoader(streams(data), **grouped(one)) as loader:
        assert found == [sorted(batch["sample_id"].tolist()) for batch in islice(loader, 4)]
        assert all(state["position"] == loader.position == 4 * GLOBAL_BATCH for _, state in parts)
