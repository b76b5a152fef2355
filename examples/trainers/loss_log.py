"""Writes down the loss of each optimizer step, for training loops that have no callbacks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = ["LossLog"]


class LossLog:
    """Appends {"step", "loss"} to a file after each step: the mean over its ranks and micro-batches."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._losses: list[Tensor] = []
        file.parent.mkdir(parents=True, exist_ok=True)
        register_optimizer_step_post_hook(self._write)

    def add(self, loss: Tensor) -> None:
        """The loss of a micro-batch, before it is divided."""
        if loss.requires_grad and not loss.is_meta:  # neither of an evaluation nor of a count of operations
            self._losses.append(loss.detach())

    def _write(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        step = max(counts)  # AdamW's, which a checkpoint restores
        if not dist.is_initialized() or dist.get_rank() == 0:
            with self._file.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
