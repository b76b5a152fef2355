"""Online loaders: shards to batches in an order that is arithmetic, resumable at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

if TYPE_CHECKING:
    from shardkit.loaders.balanced import balanced_streams as balanced_streams
    from shardkit.loaders.balanced import weighted_streams as weighted_streams
    from shardkit.loaders.config import Stream as Stream
    from shardkit.loaders.loader import StreamingLoader as StreamingLoader
    from shardkit.loaders.peers import watch as watch

__all__ = ["Stream", "StreamingLoader", "balanced_streams", "watch", "weighted_streams"]


def __getattr__(name: str) -> object:
    # Lazy, so that the planning modules can be used without importing torch.
    with naming_extras(f"{__name__}.{name}"):
        if name == "StreamingLoader":
            from shardkit.loaders.loader import StreamingLoader

            return StreamingLoader
        if name == "Stream":
            from shardkit.loaders.config import Stream

            return Stream
        if name == "watch":
            from shardkit.loaders.peers import watch

            return watch
        if name in ("balanced_streams", "weighted_streams"):
            from shardkit.loaders import balanced

            return getattr(balanced, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
