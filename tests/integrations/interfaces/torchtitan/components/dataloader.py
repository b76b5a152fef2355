"""The base class of data loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.config import Configurable

__all__ = ["BaseDataLoader"]


class BaseDataLoader(Stateful, ABC, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset: str = ""
        dataset_path: str | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]: ...
