"""Online loaders: shards to batches in an order that is arithmetic, resumable at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkit.loaders.config import Stream as Stream
    from shardkit.loaders.loader import StreamingLoader as StreamingLoader

__all__ = ["Stream", "StreamingLoader"]


def __getattr__(name: str) -> object:
    # Lazy, so that the planning modules can be used without importing torch.
    if name == "StreamingLoader":
        from shardkit.loaders.loader import StreamingLoader

        return StreamingLoader
    if name == "Stream":
        from shardkit.loaders.config import Stream

        return Stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
