"""The node cache: shards of remote datasets on a local disk or in memory, fetched before they are needed."""

from __future__ import annotations

from shardkit.cache.protocol import CacheOptions

__all__ = ["CacheOptions"]
