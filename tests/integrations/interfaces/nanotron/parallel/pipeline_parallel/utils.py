"""Where a model's first and last block are."""

from __future__ import annotations

from typing import Any

__all__ = ["get_input_output_pp_ranks"]


def get_input_output_pp_ranks(model: Any) -> tuple[int, int]:
    return model.input_pp_rank, model.output_pp_rank
