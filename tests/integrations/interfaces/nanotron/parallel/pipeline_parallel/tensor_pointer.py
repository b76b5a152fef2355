"""What stands for a tensor that another pipeline stage has."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TensorPointer"]


@dataclass
class TensorPointer:
    group_rank: int
