"""Online loaders: deliver batches of shards in a computed order that is resumable at every step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

__all__ = [
    "Layout",
    "LengthLoader",
    "Order",
    "Run",
    "Stream",
    "StreamingLoader",
    "balanced_streams",
    "watch",
    "weighted_streams",
]

_MODULES = {
    "Layout": "config",
    "LengthLoader": "lengths",
    "Order": "config",
    "Run": "config",
    "Stream": "config",
    "StreamingLoader": "loader",
    "balanced_streams": "balanced",
    "watch": "peers",
    "weighted_streams": "balanced",
}

if TYPE_CHECKING:
    from shardkit.loaders.balanced import balanced_streams, weighted_streams
    from shardkit.loaders.config import Layout, Order, Run, Stream
    from shardkit.loaders.lengths import LengthLoader
    from shardkit.loaders.loader import StreamingLoader
    from shardkit.loaders.peers import watch
else:

    def __getattr__(name: str) -> object:
        # Imports are lazy, so that the planning modules can be used without torch.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with naming_extras(f"{__name__}.{name}"):
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
