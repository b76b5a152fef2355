"""Configurations of data, in Megatron-Bridge (067f987d)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

__all__ = ["DataloaderConfig", "DatasetBuildContext", "DatasetProvider"]


@dataclass(kw_only=True)
class DataloaderConfig:
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = None
    num_workers: int = 2
    data_sharding: bool = True
    pin_memory: bool = True
    drop_last: bool = True
    persistent_workers: bool = True
    trust_remote_code: bool | None = None
    dataloader_save: str | None = None
    dataloader_load: str | None = None


@dataclass(frozen=True)
class DatasetBuildContext:
    train_samples: int
    valid_samples: int
    test_samples: int
    tokenizer: Any = None
    pg_collection: SimpleNamespace | None = None


@dataclass
class DatasetProvider(DataloaderConfig, ABC):
    @abstractmethod
    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]: ...
