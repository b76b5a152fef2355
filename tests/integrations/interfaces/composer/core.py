"""`composer.core` of mosaicml 0.32.1: how it wraps a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["DataSpec", "Evaluator"]


class DataSpec:
    """What the Trainer knows of a DataLoader."""

    def __init__(
        self,
        dataloader: Iterable[Any] | DataLoader[Any],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int | float], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int | float] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int | dict[str, int]] | None = None,
    ) -> None:
        self.dataloader: Any = dataloader
        self.num_samples = num_samples
        self.split_batch = split_batch or _split_rows
        self.get_num_samples_in_batch: Callable[[Any], Any] = get_num_samples_in_batch or _rows
        if isinstance(dataloader, DataLoader) and dataloader._iterator is not None:
            raise ValueError("The dataloader has an active iterator.")


class Evaluator:
    """A DataLoader for evaluation, with its label."""

    def __init__(self, *, label: str, dataloader: DataSpec | DataLoader[Any]) -> None:
        self.label = label
        self.dataloader = dataloader if isinstance(dataloader, DataSpec) else DataSpec(dataloader)


def _rows(batch: dict[str, torch.Tensor]) -> int:
    [size] = {len(value) for value in batch.values()}
    return size


def _split_rows(batch: dict[str, Any], microbatch_size: int | float) -> list[dict[str, Any]]:
    parts = {name: value.split(int(microbatch_size)) for name, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
