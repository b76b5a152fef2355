"""How the training script makes its data iterators."""

from __future__ import annotations

from typing import Any

from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import get_args
from megatron.training.datasets.data_samplers import build_pretraining_data_loader

__all__ = ["build_train_valid_test_data_iterators"]


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Any,
) -> tuple[Any, Any, Any]:
    args = get_args()
    is_distributed = getattr(build_train_valid_test_datasets_provider, "is_distributed", False)
    if not is_distributed and mpu.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    numbers = (args.train_iters * args.global_batch_size, args.global_batch_size, args.global_batch_size)
    datasets = build_train_valid_test_datasets_provider(numbers)
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    loaders = [build_pretraining_data_loader(*pair) for pair in zip(datasets, consumed, strict=True)]
    train, valid, test = (
        None
        if each is None
        else RerunDataIterator(each if args.dataloader_type == "external" else iter(each))
        for each in loaders
    )
    return train, valid, test
