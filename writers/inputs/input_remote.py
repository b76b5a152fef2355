"""Input files in stores: globs over the keys of a bucket, and objects opened as files.

A file is one version of an object: the size and version (of S3 the ETag) that the listing stated when the
build began. Every read asks for that version, so an object that is replaced meanwhile ends the build and
never mixes into it. Nothing is read twice and nothing is stored on this machine.
"""

from __future__ import annotations

import re
from functools import lru_cache
from io import BufferedReader
from urllib.parse import urlsplit

from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, StoreError
from shardkit.writers.inputs.file_names import fixed_part, key_matches

__all__ = ["expand_url", "open_url"]

_STORES = 16
# s3://bucket, gs://bucket, https://host: what a connection is made to; hdfs:///folder has no host.
_ROOT = re.compile(r"([^:/]+://(?:[^/]+|/[^/]+))(?:/(.*))?", re.DOTALL)


def expand_url(url: str, storage: StorageOptions | None) -> dict[str, ObjectInfo]:
    """{URL: object} of what `url` names: an object, a glob over keys, or all below a folder.

    An object of this very name wins over a glob. http(s) has no listings: one file. StoreError.
    """
    root, pattern = _split(url)
    store = _connect(root, storage)
    is_web = urlsplit(url).scheme.lower() in ("http", "https")
    if pattern and not pattern.endswith("/"):
        try:
            return {url: store.head(pattern)}
        except ObjectNotFoundError:
            if is_web:
                raise
    elif is_web:
        raise StoreError(url, "is no file, and http has no listings")
    is_glob = fixed_part(pattern) != pattern
    pattern = pattern.rstrip("/")
    if not is_glob:
        pattern = f"{pattern}/**" if pattern else "**"
    found = store.list(fixed_part(pattern))
    return {f"{root}/{info.key}": info for info in found if key_matches(pattern, info.key)}


def open_url(url: str, size: int, version: str, storage: StorageOptions | None) -> BufferedReader:
    """The object at `url`, of `size` bytes, if it is still of this version."""
    root, key = _split(url)
    return open_object(_connect(root, storage), ObjectInfo(key, size, version))


def _split(url: str) -> tuple[str, str]:
    """(what a store is opened at, the key of the object or the pattern)."""
    found = _ROOT.fullmatch(url)
    if found is None:
        raise StoreError(url, "is no URL of a file, such as s3://bucket/folder/file.jsonl")
    return found[1], found[2] or ""


@lru_cache(maxsize=_STORES)
def _connect(root: str, storage: StorageOptions | None) -> ResilientStore:
    """One store for all files of a bucket: connections are kept, and a client takes long to make."""
    return connect(root, storage)
