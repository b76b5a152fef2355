"""Choosing and opening a store by its URL."""

from __future__ import annotations

import os

from shardkit.files import is_remote, local_path
from shardkit.storage.store import StorageOptions, Store, StoreError

__all__ = ["is_remote", "local_path", "open_store", "split_url"]


def split_url(url: str) -> tuple[str, str]:
    """Return (URL of the folder, name) for the URL of a remote file; name is "" if the URL has no folder."""
    head, _, name = url.rstrip("/").rpartition("/")
    return (head, name) if "://" in head and not head.endswith(":/") else (url.rstrip("/"), "")


def open_store(url: str | os.PathLike[str], options: StorageOptions | None = None) -> Store:
    """Open the store at `url`: a path or file://, s3://bucket/prefix, hf://datasets/org/name, https://host,
    memory://name, or any URL of fsspec.

    Contacts no server yet. Raises StoreError if the URL is invalid, MissingExtraError if a package is
    missing.
    """
    options = options or StorageOptions()
    text = os.fspath(url)
    if not is_remote(text):
        from shardkit.storage.local import LocalStore

        return LocalStore(local_path(text))
    scheme = text.partition("://")[0].lower()
    if scheme == "s3":
        from shardkit.storage.s3 import S3Store

        return S3Store(text, options)
    if scheme == "hf":
        from shardkit.storage.hub import HubStore

        return HubStore(text, options)
    if scheme == "memory":
        from shardkit.storage.memory import MemoryStore

        return MemoryStore(text)
    if scheme in ("http", "https"):
        from shardkit.storage.http_store import HttpStore

        return HttpStore(text, options)
    if not scheme.isalnum():
        raise StoreError(
            text, "not a valid URL: expected s3://bucket/prefix, file:///path or a URL of fsspec"
        )
    from shardkit.storage.fsspec_store import FsspecStore

    return FsspecStore(text)
