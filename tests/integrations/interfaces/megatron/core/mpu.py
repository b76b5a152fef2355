"""Ranks, tensor parallel ones innermost."""

from __future__ import annotations

import os

__all__ = [
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "initialize_model_parallel",
]

_tensor_parallel_size = 1


def initialize_model_parallel(tensor_model_parallel_size: int = 1) -> None:
    global _tensor_parallel_size
    _tensor_parallel_size = tensor_model_parallel_size


def get_tensor_model_parallel_rank() -> int:
    return int(os.environ.get("RANK", "0")) % _tensor_parallel_size


def get_data_parallel_rank() -> int:
    return int(os.environ.get("RANK", "0")) // _tensor_parallel_size


def get_data_parallel_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) // _tensor_parallel_size
