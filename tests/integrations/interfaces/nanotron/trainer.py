"""The training loop, without a model: what it reads, and what it counts as consumed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

__all__ = ["DistributedTrainer"]


class Group:
    """A process group of which only this process is there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class DistributedTrainer:
    """It keeps the micro-batches of all steps in `seen`. Ranks and sizes: variables DP, PP and CP."""

    def __init__(self, config_or_config_file: Any) -> None:
        groups = {}
        for name in ("dp", "pp", "cp"):
            rank, size = map(int, os.environ.get(name.upper(), "0/1").split("/"))
            groups[f"{name}_pg"] = Group(rank, size)
        self.parallel_context = SimpleNamespace(**groups)
        self.model = SimpleNamespace(input_pp_rank=0, output_pp_rank=groups["pp_pg"].size() - 1)
        self.model_config = config_or_config_file["model"]
        self.micro_batch_size = config_or_config_file["micro_batch_size"]
        self.sequence_length = config_or_config_file["sequence_length"]
        self.global_batch_size = config_or_config_file["global_batch_size"]
        self.consumed_train_samples = config_or_config_file.get("consumed_train_samples", 0)
        self.seen: list[dict[str, Any]] = []

    def train(self, dataloader_or_dls: dict[str, Iterator[dict[str, Any]]], steps: int = 1) -> None:
        [batches] = map(iter, dataloader_or_dls.values())
        accumulated = self.global_batch_size // (self.micro_batch_size * self.parallel_context.dp_pg.size())
        for _ in range(steps):
            self.seen += [next(batches) for _ in range(accumulated)]
            self.consumed_train_samples += self.global_batch_size
