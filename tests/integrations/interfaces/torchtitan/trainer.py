"""The training loop, without a model: what it reads, and when it saves and loads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.config import Configurable, TrainingConfig

__all__ = ["Trainer"]


class Trainer(Configurable):
    """It keeps (inputs, labels) of microbatches in `seen`, and labels of each validation in `validated`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dump_folder: str = "./outputs"
        dataloader: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        validator: Validator.Config = field(default_factory=Validator.Config)

    def __init__(self, config: Config) -> None:
        self.config, self.step = config, 0
        self.seen: list[tuple[dict[str, Tensor], Tensor]] = []
        self.validated: list[list[Tensor]] = []
        rank, degree = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        training = config.training
        local, global_batch = training.local_batch_size, training.global_batch_size
        self.gradient_accumulation_steps = 1 if global_batch < 0 else global_batch // (local * degree)
        runtime = {
            "dp_world_size": degree,
            "dp_rank": rank,
            "tokenizer": None,
            "seq_len": training.seq_len,
            "local_batch_size": local,
        }
        self.dataloader = config.dataloader.build(
            **runtime, snapshot_every_n_steps=config.checkpoint.interval * self.gradient_accumulation_steps
        )
        states = {"train_state": self, "dataloader": self.dataloader}
        self.checkpointer = config.checkpoint.build(states=states, base_folder=config.dump_folder)
        if config.validator.enable:
            self.validator = config.validator.build(**runtime)

    def train(self) -> None:
        self.checkpointer.load()
        batches = iter(self.dataloader)
        while self.step < self.config.training.steps:
            self.step += 1
            self.seen += [next(batches) for _ in range(self.gradient_accumulation_steps)]
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
            if self.config.validator.enable and self.validator.should_validate(self.step):
                self.validated.append([])
                self.validator.validate(lambda _, labels: self.validated[-1].append(labels))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def close(self) -> None:
        pass
