"""The arguments of a run."""

from __future__ import annotations

from typing import Any

__all__ = ["get_args", "set_args"]

_args: Any = None


def get_args() -> Any:
    assert _args is not None, "args is not initialized."
    return _args


def set_args(args: Any) -> None:
    global _args
    _args = args
