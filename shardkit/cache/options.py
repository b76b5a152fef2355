"""Where a remote dataset's shards are kept, and how much of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.units import parse_bytes

if TYPE_CHECKING:
    from shardkit.cache.contract import Cache

__all__ = ["CacheOptions", "open_cache"]

_MAX_MEMORY_BYTES = 8 << 30  # of a default cache in memory
_MEMORY_SHARE = 4  # a quarter of what is free, for all processes of the machine together
_MEMORY_FILE = Path("/proc/meminfo")
_LIMIT_FILES = (  # what a container may use, of control groups of version 2 and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """Plain data: may be pickled and compared."""

    folder: str | os.PathLike[str] | None = None
    """On a local disk, shared by all processes of the machine; None: each process keeps shards in memory."""
    capacity: int | str | None = None
    """In bytes or as "500GB"; default: the folder's free disk but a reserve, or a share of free memory."""
    connections: int = 16
    """Ranges and shards that a process fetches at a time."""
    processes: int = 1
    """Processes of this machine that divide the default memory among them."""

    def __post_init__(self) -> None:
        if self.capacity is not None:
            parse_bytes(self.capacity)
        if self.connections < 1 or self.processes < 1:
            raise ValueError("connections and processes must be at least 1")


def open_cache(options: CacheOptions) -> Cache:
    """The cache that `options` describe; CacheFolderError if the folder cannot be used."""
    capacity = None if options.capacity is None else parse_bytes(options.capacity)
    if options.folder is not None:
        from shardkit.cache.folder import CacheFolder

        return CacheFolder(options.folder, capacity)
    from shardkit.cache.memory import CacheMemory

    if capacity is None:
        capacity = min(_MAX_MEMORY_BYTES, _free_memory() // _MEMORY_SHARE) // options.processes
    return CacheMemory(capacity)


def _free_memory() -> int:
    """Bytes that are free or hold what the system would give up, such as cached files; at most the limit."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(_MEMORY_FILE), re.MULTILINE)
    free = int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for file in _LIMIT_FILES if (text := _text(file).strip()).isdecimal()]
    return min([free, *limits])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
