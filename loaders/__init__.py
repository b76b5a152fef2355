"""Online loaders: deliver batches of shards in a computed order that is resumable at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.lazy import imported

__all__ = [
    "Layout",
    "LengthLoader",
    "Order",
    "Run",
    "Stream",
    "StreamingLoader",
    "balanced_streams",
    "value_hash",
    "watch",
    "weighted_streams",
]

_PLACES = {
    "Layout": "shardkit.loaders.config",
    "LengthLoader": "shardkit.loaders.lengths",
    "Order": "shardkit.loaders.config",
    "Run": "shardkit.loaders.config",
    "Stream": "shardkit.loaders.config",
    "StreamingLoader": "shardkit.loaders.loader",
    "balanced_streams": "shardkit.loaders.balanced",
    "value_hash": "shardkit.hashing",
    "watch": "shardkit.loaders.peers",
    "weighted_streams": "shardkit.loaders.balanced",
}

if TYPE_CHECKING:
    from shardkit.hashing import value_hash
    from shardkit.loaders.balanced import balanced_streams, weighted_streams
    from shardkit.loaders.config import Layout, Order, Run, Stream
    from shardkit.loaders.lengths import LengthLoader
    from shardkit.loaders.loader import StreamingLoader
    from shardkit.loaders.peers import watch
else:

    def __getattr__(name: str) -> object:
        return imported(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return __all__
