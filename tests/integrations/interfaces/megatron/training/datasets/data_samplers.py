"""Which samples of a map dataset a data-parallel rank takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args

__all__ = ["MegatronPretrainingSampler", "build_pretraining_data_loader"]


class MegatronPretrainingSampler:
    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        assert consumed_samples < total_samples
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.data_parallel_rank = micro_batch_size, data_parallel_rank
        self.data_parallel_size = data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        together = self.micro_batch_size * self.data_parallel_size
        first = self.data_parallel_rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples - together + 1, together):
            yield list(range(start + first, start + first + self.micro_batch_size))


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    args = get_args()
    if dataset is None or args.dataloader_type == "external":
        return dataset
    sampler = MegatronPretrainingSampler(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
    )
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=args.num_workers)
