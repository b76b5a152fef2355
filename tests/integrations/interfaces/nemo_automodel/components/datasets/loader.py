"""What makes the data loader of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DataloaderConfig"]


@dataclass
class DataloaderConfig:
    dataset_config: Any
    batch_size: int | None = 1
    seed: int = 42

    def build(
        self, *, dp_rank: int, dp_world_size: int, pp_enabled: bool = False, tokenizer: Any = None
    ) -> Any:
        raise NotImplementedError
