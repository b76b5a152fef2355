"""From a URL to the store behind it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shardkit.storage.errors import StoreError
from shardkit.storage.options import StorageOptions
from shardkit.storage.store import Store

__all__ = ["is_remote", "open_store", "split_url"]


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether `url` names something other than a path of this machine (file:// is a path)."""
    text = os.fspath(url)
    return "://" in text and not text.lower().startswith("file://")


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path that a local `url` means: a path as it is, or that of a file:// URL."""
    text = os.fspath(url)
    return Path(unquote(urlsplit(text).path)) if text.lower().startswith("file://") else Path(text)


def split_url(url: str) -> tuple[str, str]:
    """(url of the folder, last part of the path) of a remote URL: where a file lies and its name."""
    head, _, name = url.rstrip("/").rpartition("/")
    return (head, name) if "://" in head and not head.endswith(":/") else (url.rstrip("/"), "")


def open_store(url: str | os.PathLike[str], options: StorageOptions | None = None) -> Store:
    """The store at `url`: a path or file://, s3://bucket/prefix, memory://name, or any URL that fsspec knows.

    Nothing is contacted yet. StoreError if the URL cannot be one; MissingExtraError if a package is missing.
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
    if scheme == "memory":
        from shardkit.storage.memory import MemoryStore

        return MemoryStore(text)
    if not scheme.isalnum():
        raise StoreError(text, "is no URL: s3://bucket/prefix, file:///path or one that fsspec knows")
    from shardkit.storage.fsspec_store import FsspecStore

    return FsspecStore(text)
