"""Where MaxText (e591f30c) looks up its pipelines, by the names in this module, when training begins."""

from __future__ import annotations

from typing import Any

__all__ = ["create_data_iterator", "make_grain_eval_iterator", "make_grain_train_iterator"]


def make_grain_train_iterator(config: Any, global_mesh: Any, process_indices: list[int]) -> Any:
    raise NotImplementedError


def make_grain_eval_iterator(config: Any, global_mesh: Any, process_indices: list[int]) -> Any:
    raise NotImplementedError


def create_data_iterator(config: Any, mesh: Any) -> tuple[Any, Any]:
    evaluation = make_grain_eval_iterator(config, mesh, [0]) if config.eval_interval > 0 else None
    return make_grain_train_iterator(config, mesh, [0]), evaluation
