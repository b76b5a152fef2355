"""Where objects lie: one narrow contract over folders, S3, memory and fsspec, and wrappers around it."""

from __future__ import annotations

from shardkit.storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
)
from shardkit.storage.options import StorageOptions
from shardkit.storage.store import Body, ObjectInfo, Store
from shardkit.storage.url import is_remote, open_store

__all__ = [
    "Body",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "StorageOptions",
    "Store",
    "StoreError",
    "ThrottledError",
    "TransientError",
    "is_remote",
    "open_store",
]
