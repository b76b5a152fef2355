"""The training loop, without a model: what it reads, and when it saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.loader import DataloaderConfig
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["TrainFinetuneRecipeForNextTokenPrediction"]


class RecipeConfig:
    """The typed view of the configuration: a recipe takes its loader from `dataloader`."""

    def __init__(self, raw: ConfigNode) -> None:
        self._raw = raw
        self.dataloader: DataloaderConfig | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class TrainFinetuneRecipeForNextTokenPrediction:
    """It keeps the batches of each step in `seen`."""

    def __init__(self, cfg: ConfigNode) -> None:
        self.cfg = RecipeConfig(cfg)
        self.seen: list[list[dict[str, Tensor]]] = []
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.tracked = {"rng", "dataloader", "step_scheduler"}

    def untrack_state(self, *keys: str) -> None:
        self.tracked -= set(keys)

    def setup(self) -> None:
        assert self.cfg.dataset is not None
        assert self.cfg.dataloader is not None
        self.dataloader = self.cfg.dataloader.build(
            dp_rank=self.rank, dp_world_size=self.ranks, pp_enabled=False, tokenizer=None
        )
        self.step = 0
        self.load_checkpoint()

    def run_train_validation_loop(self) -> None:
        scheduler = self.cfg.step_scheduler
        accumulated = scheduler.global_batch_size // (scheduler.local_batch_size * self.ranks)
        batches = iter(self.dataloader)
        while self.step < scheduler.max_steps:
            self.seen.append([next(batches) for _ in range(accumulated)])
            self.step += 1
            if self.step % scheduler.ckpt_every_steps == 0 or self.step == scheduler.max_steps:
                self.save_checkpoint()

    def save_checkpoint(self) -> None:
        folder = Path(self.cfg.checkpoint.checkpoint_dir) / f"epoch_0_step_{self.step:04d}"
        for key in sorted(self.tracked):
            file = self._file(folder, key)
            if self.rank == 0 or file.parent != folder:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(
                    {"dataloader": self.dataloader.state_dict(), "step_scheduler": self.step}.get(key), file
                )

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        """Load the newest checkpoint; a rank whose file is missing fails."""
        folders = sorted(Path(self.cfg.checkpoint.checkpoint_dir).glob("epoch_*"))
        if not folders:
            return
        states = {key: torch.load(self._file(folders[-1], key)) for key in sorted(self.tracked)}
        self.step = states["step_scheduler"]
        self.dataloader.load_state_dict(states["dataloader"])

    def _file(self, folder: Path, key: str) -> Path:
        """Return where a state is: in one file for all ranks, or in one for each."""
        if key == "rng":
            return folder / key / f"{key}_global_rank_{self.rank}.pt"
        if key == "dataloader" and isinstance(self.dataloader, StatefulDataLoader):
            return folder / key / f"{key}_dp_rank_{self.rank}.pt"
        return folder / f"{key}.pt"
