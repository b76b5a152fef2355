"""One shard being fetched, from the demand or the plan to its last byte in the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.cache.contract import Contents, Lease, Slot
from shardkit.cache.download import Download, Target
from shardkit.index import FileInfo, Format, ShardInfo
from shardkit.storage.store import Store

__all__ = ["Job", "Shards"]

Bytes = npt.NDArray[np.uint8]


class Shards(Protocol):
    """What a fetcher must know of a dataset."""

    @property
    def kind(self) -> Format: ...
    @property
    def store(self) -> Store: ...
    def info(self, number: int) -> ShardInfo: ...
    def stored_file(self, number: int) -> FileInfo: ...
    def entry(self, number: int) -> str: ...
    def version(self, number: int) -> str | None: ...
    def trust(self, number: int, version: str | None) -> None: ...
    def last_status(self) -> int | None: ...


class Job:
    """One shard being fetched. It belongs to the threads that hold its parts; `stop` may come from any."""

    def __init__(self, number: int, *, urgent: bool, victims: Callable[[Contents], list[str]]) -> None:
        self.number = number
        self.urgent = urgent
        self.victims = victims
        self.attempts = 0
        self.download: Download | None = None
        self.slot: Slot | None = None
        self.lease: Lease | None = None
        self.target: Target | None = None
        self.data: Bytes | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.stopped = threading.Event()
        self._lock = threading.Lock()  # a job that is stopped may be let go by two threads

    def stop(self, error: BaseException) -> bool:
        """Tell whoever waits, and let the download end at its next piece; True if nobody is at a piece."""
        self.stopped.set()
        self.error = self.error or error
        is_idle = self.download is not None and self.download.stop(error)
        self.done.set()
        return is_idle

    def deliver(self, data: Bytes) -> None:
        """Hand the shard to whoever waits for it."""
        self.data = data[:]
        self.data.flags.writeable = False
        self.done.set()

    def drop_slot(self, *, damaged: bool) -> None:
        """Give back the room in the cache."""
        with self._lock:
            slot, self.slot = self.slot, None
        if slot is not None:
            slot.discard(damaged=damaged)

    def let_go(self) -> None:
        """Give back what is still held: room, lease, memory."""
        self.drop_slot(damaged=False)
        with self._lock:
            lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        self.target = None
