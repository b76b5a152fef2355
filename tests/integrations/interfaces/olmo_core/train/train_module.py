"""The model's side of a training."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["TrainModule"]


class TrainModule:
    """What a Trainer asks of a model: its data-parallel group."""

    dp_process_group: dist.ProcessGroup | None = None
