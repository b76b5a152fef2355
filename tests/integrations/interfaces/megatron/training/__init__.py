"""The arguments of a run."""

from __future__ import annotations

from megatron.training.global_vars import get_args

__all__ = ["get_args"]
