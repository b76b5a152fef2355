"""From what describes a dataset to what can be read: shards by a cache, tars without a list by a scan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.cache.options import CacheOptions, open_cache
from shardkit.errors import warn_user
from shardkit.index import Manifest
from shardkit.locate import Found
from shardkit.storage.resilient import ResilientStore
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.cache.shards import CachedShards
    from shardkit.cache.tar_indexes import TarIndexes
    from shardkit.tar.index import TarIndex
    from shardkit.tar.index_file import Scanned

__all__ = ["Opened", "open_found"]

_MAX_THREADS = 16
_UNREMEMBERED_BYTES = 1 << 30  # of tars that may be scanned at every opening without a word


@dataclass(frozen=True, slots=True)
class Opened:
    """A complete manifest; the shards of a remote dataset; what scans of its tars found."""

    manifest: Manifest
    shards: CachedShards | None = None
    tar_indexes: TarIndexes | None = None


def open_found(found: Found, options: CacheOptions) -> Opened:
    """Ready to be read. ShardError names a tar that had to be scanned and is damaged; StoreError."""
    if found.store is not None:
        return _open_remote(found.store, found.manifest, found.versions, options)
    assert found.folder is not None
    if found.versions is None:
        return Opened(found.manifest)
    return _scan_local(found.folder, found.manifest, found.versions, options)


def _open_remote(
    store: ResilientStore, manifest: Manifest, versions: Sequence[str] | None, options: CacheOptions
) -> Opened:
    from shardkit.cache.shards import CachedShards

    cache, connections = open_cache(options), options.connections
    if versions is None:
        return Opened(manifest, CachedShards(store, manifest, cache, connections=connections))
    from shardkit.tar.scan import scan_tars
    from shardkit.tar.skim import skim_tar

    sizes = [info.stored.bytes for info in manifest.shards]
    objects = dict(enumerate(zip(sizes, versions, strict=True)))
    shards = CachedShards(store, manifest, cache, connections=connections, objects=objects)
    indexes = _indexes(store.url, manifest, versions, options)
    held = min(
        connections, max(1, cache.capacity // max([1, *sizes]))
    )  # together, what the cache has room for
    infos, before = manifest.shards, list(accumulate(sizes, initial=0))

    def skim(number: int) -> tuple[Scanned, TarIndex] | None:
        """Of tars that the cache has room for, whole ones are wanted: they are read again soon."""
        if before[number + 1] <= cache.capacity:
            return None
        return skim_tar(store, infos[number], versions[number])

    try:
        manifest = scan_tars(
            manifest, shards.load, shards.where, indexes, threads=connections, held=held, skim=skim
        )
    finally:
        shards.close()
    shards = CachedShards(store, manifest, cache, connections=connections, objects=objects)
    return Opened(manifest, shards, indexes)


def _scan_local(folder: Path, manifest: Manifest, versions: Sequence[str], options: CacheOptions) -> Opened:
    from shardkit.tar.scan import scan_tars
    from shardkit.tar.shard import load_raw

    indexes = _indexes(str(folder.absolute()), manifest, versions, options)
    infos = manifest.shards
    scanned = scan_tars(
        manifest,
        lambda number: load_raw(folder, infos[number]),
        lambda number: str(folder / infos[number].stored.basename),
        indexes,
        threads=min(_MAX_THREADS, os.cpu_count() or 1),
    )
    return Opened(scanned, tar_indexes=indexes)


def _indexes(url: str, manifest: Manifest, versions: Sequence[str], options: CacheOptions) -> TarIndexes:
    from shardkit.cache.tar_indexes import TarIndexes

    size = sum(info.stored.bytes for info in manifest.shards)
    if options.folder is None and size > _UNREMEMBERED_BYTES:
        warn_user(
            f"{url}: {format_bytes(size)} of tars without a list are scanned by each process at every start: "
            "give cache_dir, where what is found is kept, or publish a list (loaders/MIGRATING.md)"
        )
    names = [f"{url}/{info.stored.basename}" for info in manifest.shards]
    return TarIndexes.beside(options.folder, list(zip(names, versions, strict=True)))
