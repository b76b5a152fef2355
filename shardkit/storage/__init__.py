"""Object storage: one interface to folders, S3, the Hugging Face Hub, memory and fsspec, and retries."""

from __future__ import annotations

from shardkit.storage.metrics import MetricsSnapshot, StoreMetrics
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import (
    Body,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    ThrottledError,
    TransientError,
)
from shardkit.storage.url import is_remote, open_store

__all__ = [
    "Body",
    "MetricsSnapshot",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "ResilientStore",
    "RetryPolicy",
    "StorageOptions",
    "Store",
    "StoreError",
    "StoreMetrics",
    "ThrottledError",
    "TransientError",
    "connect",
    "is_remote",
    "open_store",
]
