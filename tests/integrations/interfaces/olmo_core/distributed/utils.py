"""Rank and size of this process in a group."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["get_rank", "get_world_size"]


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
