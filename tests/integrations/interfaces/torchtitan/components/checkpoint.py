"""Checkpoints by torch.distributed.checkpoint, as folders named step-N."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from torchtitan.config import Configurable

__all__ = ["CheckpointManager"]


class CheckpointManager(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500

    def __init__(self, config: Config, *, states: dict[str, Any], base_folder: str) -> None:
        self.config, self.states, self.folder = config, states, Path(base_folder) / config.folder

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if self.config.enable and (last_step or curr_step % self.config.interval == 0):
            checkpoint = self.folder / f"step-{curr_step}"
            dcp.save(self.states, checkpoint_id=checkpoint)  # type: ignore[attr-defined]

    def load(self, step: int = -1) -> bool:
        steps = [int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")]
        if not self.config.enable or not steps:
            return False
        checkpoint = self.folder / f"step-{max(steps) if step < 0 else step}"
        dcp.load(self.states, checkpoint_id=checkpoint)  # type: ignore[attr-defined]
        return True
