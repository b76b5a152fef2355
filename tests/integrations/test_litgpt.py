"""litgpt's data module: what `litgpt pretrain` calls, in its order, with the real Fabric."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from shardkit.loaders.integrations.litgpt_data import ShardkitData


class Pretraining:
    """The part of litgpt's `pretrain.main` and `fit` that handles data."""

    def __init__(
        self, data: ShardkitData, micro_batch_size: int = 6, max_seq_length: int | None = 64
    ) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1)
        data.connect(tokenizer=None, batch_size=micro_batch_size, max_seq_length=max_seq_length)
        with self.fabric.rank_zero_first():
            data.prepare_data()
        data.setup()
        self.own: Any = data.train_dataloader()
        self.train: Any
        self.val: Any
        self.train, self.val = self.fabric.setup_dataloaders(self.own, data.val_dataloader())
        self.state: dict[str, Any] = {"train_dataloader": self.train, "iter_num": 0}

    def fit(self, batches: int, *, validate_every: int = 0) -> list[Tensor]:
        seen = []
        for batch in self.train:
            self.state["iter_num"] += 1
            seen.append(batch)
            if validate_every and len(seen) % validate_every == 0:
                self.validate()
            if len(seen) == batches:
                break
        return seen

    def validate(self, max_iters: int = 2) -> list[Tensor]:
        seen = []
        for number, batch in enumerate(self.val):
            if number >= max_iters:
                break
            seen.append(batch)
        return seen


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_fabrics_checkpoint_continues_with_the_next_batch(data: Path, tmp_path: Path) -> None:
    settings = ShardkitData(data_path=data, val_data_path=data)
    whole = Pretraining(settings).fit(30)  # 150 rows: across an epoch's end
    assert whole[0].shape == (6, 65)
    assert whole[0].dtype == torch.int64
    run = Pretraining(settings)
    run.fit(7, validate_every=3)
    run.fabric.save(tmp_path / "checkpoint.pth", run.state)
    for size, rest in ((6, whole[7:]), (12, None)):
        resumed = Pretraining(settings, micro_batch_size=size)
        resumed.fabric.load(tmp_path / "checkpoint.pth", resumed.state)
        assert resumed.state["iter_num"] == 7
        found = resumed.fit(9)
        if rest is not None:
            assert equal(found, rest[:9])
        else:  # as many rows, in batches of twice as many
            first = torch.cat(whole[7:9]).tolist()
            assert sorted(found[0].tolist()) == sorted(first)


def test_every_validation_sees_the_same_batches(data: Path) -> None:
    run = Pretraining(ShardkitData(data_path=data, val_data_path=data))
    first = run.validate()
    run.fit(3)
    assert equal(run.validate(), first)
    assert len(first) == 2


def test_several_datasets_are_mixed_by_weight(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    copy.symlink_to(data)
    run = Pretraining(ShardkitData(data_path={str(data): 2, str(copy): 1}, val_data_path=data))
    run.fit(2)
    assert run.own.dataset.loader.stream_samples() == {"data": 8, "other": 4}


def test_rows_of_another_length_than_the_model_takes_are_refused(data: Path) -> None:
    run = Pretraining(ShardkitData(data_path=data, val_data_path=data), max_seq_length=128)
    with pytest.raises(
        ValueError, match=r"129 tokens, the dataset has rows of 65: pass --train.max_seq_length 64"
    ):
        run.validate()


def test_the_usage_log_and_settings_reach_the_loader(data: Path, tmp_path: Path) -> None:
    settings = ShardkitData(data_path=data, val_data_path=data, seed=5, usage_log=tmp_path / "usage")
    run = Pretraining(pickle.loads(pickle.dumps(settings)))
    list(islice(run.train, 2))
    assert run.own.state_dict()["seed"] == 5
    assert len(list((tmp_path / "usage").iterdir())) == 1, "validation is not logged"
    json.dumps(run.own.state_dict())
