"""The training loop, without a model: what it asks a data loader for, and when it saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from olmo_core.data import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.train.train_module import TrainModule

__all__ = ["Duration", "Trainer", "TrainerConfig"]


@dataclass(frozen=True)
class Duration:
    value: int
    unit: str

    @classmethod
    def steps(cls, steps: int) -> Duration:
        return cls(steps, "steps")

    @classmethod
    def epochs(cls, epochs: int) -> Duration:
        return cls(epochs, "epochs")


@dataclass
class TrainerConfig:
    save_folder: str
    max_duration: Duration

    def build(self, train_module: TrainModule, data_loader: DataLoaderBase) -> Trainer:
        return Trainer(train_module, data_loader, self)


class Trainer:
    """It keeps (epoch, batch) of each step in `seen`; `batch_sizes` says by step what a scheduler does."""

    def __init__(self, train_module: TrainModule, data_loader: DataLoaderBase, config: TrainerConfig) -> None:
        if dist.is_initialized():
            assert data_loader.dp_world_size == get_world_size(train_module.dp_process_group)
            assert data_loader.dp_rank == get_rank(train_module.dp_process_group)
        self.data_loader, self.max_duration = data_loader, config.max_duration
        self.global_step, self.epoch = 0, 1
        self.batch_sizes: Mapping[int, int] = {}
        self.seen: list[tuple[int, dict[str, Any]]] = []
        self.states: dict[int, dict[str, Any]] = {}

    @property
    def max_steps(self) -> int | None:
        if self.max_duration.unit == "steps":
            return self.max_duration.value
        total = self.data_loader.total_batches
        assert total is not None
        remaining = (
            0 if self.epoch > self.max_duration.value else max(total - self.data_loader.batches_processed, 0)
        )
        for epoch in range(self.epoch + 1, self.max_duration.value + 1):
            batches = self.data_loader.batches_in_epoch(epoch)
            assert batches is not None
            remaining += batches
        return self.global_step + remaining

    @property
    def training_complete(self) -> bool:
        if self.max_duration.unit == "epochs":
            return self.epoch > self.max_duration.value
        return self.global_step >= self.max_duration.value

    def state_dict(self) -> dict[str, Any]:
        state = {"data_loader": self.data_loader.state_dict()}
        return {**state, "global_step": self.global_step, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data_loader.load_state_dict(state_dict["data_loader"])
        self.global_step, self.epoch = state_dict["global_step"], state_dict["epoch"]

    def fit(self) -> None:
        self.data_loader.get_mock_batch()
        while not self.training_complete:
            self._fit_epoch()

    def _fit_epoch(self) -> None:
        self.data_loader.reshuffle(self.epoch)
        batches = iter(self.data_loader)
        while True:
            if (size := self.batch_sizes.get(self.global_step)) is not None:
                self.data_loader.global_batch_size = size
            if (batch := next(batches, None)) is None:
                break
            self.global_step += 1
            self.seen.append((self.epoch, batch))
            self.states[self.global_step] = self.state_dict()
            if self.training_complete:
                return
        self.epoch += 1
        self.data_loader.reset()
