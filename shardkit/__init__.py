"""shardkit: raw text to deterministic pretraining shards, and those shards to GPUs, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["__version__", "open_dataset"]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardkit.datasets.dataset import open_dataset
else:

    def __getattr__(name: str) -> object:
        # Late, so that `import shardkit` costs nothing: not even NumPy is loaded.
        if name == "open_dataset":
            from shardkit.datasets.dataset import open_dataset

            return open_dataset
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
