"""How the state of external data is saved and loaded: one file for each data-parallel rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["maybe_load_dataloader_state", "maybe_save_dataloader_state"]


def state_file(folder: str, iteration: int, dp_rank: int) -> Path:
    return Path(folder) / f"iter_{iteration:07d}" / f"train_dataloader_dprank{dp_rank:03d}.pt"


def maybe_save_dataloader_state(
    model: Any,
    train_iterator: Any,
    iteration: int,
    dataloader_save_path: str | None = None,
    *,
    pg_collection: SimpleNamespace,
) -> None:
    if train_iterator is None or not dataloader_save_path:
        return
    file = state_file(dataloader_save_path, iteration, dist.get_rank(pg_collection.dp))
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": train_iterator.iterable.save_state()}, file)


def maybe_load_dataloader_state(
    train_iterator: Any,
    iteration: int,
    dataloader_load_path: str | None = None,
    *,
    pg_collection: SimpleNamespace,
) -> None:
    if train_iterator is None or not dataloader_load_path:
        return
    file = state_file(dataloader_load_path, iteration, dist.get_rank(pg_collection.dp))
    if not file.parent.is_dir():
        return
    if not file.is_file():
        raise RuntimeError(f"{file} is missing. The data-parallel size likely changed")
    train_iterator.iterable.restore_state(torch.load(file, weights_only=True)["dataloader_state_dict"])
