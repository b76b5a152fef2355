"""A memory store that notes what it is asked for, and hands bodies out when and as a test says."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.store import ObjectInfo
from support.remote_harness import SOON_SECONDS, fresh_url, put_folder

__all__ = ["NotedStore", "Read", "SlowBody"]


class Read(NamedTuple):
    """What was asked for in one read."""

    key: str
    start: int
    stop: int | None
    version: str | None

    @property
    def shard(self) -> int | None:
        """The shard's number, None for an index."""
        found = re.search(r"\d{5}", self.key)
        return int(found[0]) if found else None


class NotedStore(MemoryStore):
    """`reads` and `heads` are what it was asked for, in order.

    Reads for which `holds` is true wait, once `after_bytes` of them have been handed out, until
    `let_through`; `reached` is set when one waits. `hand_out` may replace the body of the n-th read.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        holds: Callable[[Read], bool] = lambda read: False,
        after_bytes: int = 0,
        hand_out: Callable[[int, MemoryBody], MemoryBody] = lambda number, body: body,
    ) -> None:
        super().__init__(fresh_url())
        self.reads: list[Read] = []
        self.heads: list[str] = []
        self.holds, self.hand_out = holds, hand_out
        self.reached, self._go_on = threading.Event(), threading.Event()
        self._after_bytes, self._numbers = after_bytes, itertools.count()
        if folder is not None:
            put_folder(folder, self)

    @property
    def shards(self) -> list[int | None]:
        """The shards in the order of their reads."""
        return [read.shard for read in self.reads]

    def head(self, key: str) -> ObjectInfo:
        self.heads.append(key)
        return super().head(key)

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        read = Read(key, start, stop, version)
        number = next(self._numbers)
        self.reads.append(read)
        body = self.hand_out(number, super().open(key, start, stop, version=version))
        if self.holds(read) and self._after_bytes:
            return SlowBody(body, self._after_bytes, self._wait)
        if self.holds(read):
            self._wait()
        return body

    def let_through(self) -> None:
        """Go on with all reads."""
        self._go_on.set()

    def quiet(self, key: str) -> bytes:
        """An object's bytes, without a read that is noted."""
        return MemoryStore(self.url).get(key)

    def _wait(self) -> None:
        self.reached.set()
        assert self._go_on.wait(SOON_SECONDS)


class SlowBody(MemoryBody):
    """Hands out `left` bytes, `step` at a time, then calls `then` before each piece, which may raise."""

    def __init__(self, body: MemoryBody, left: int, then: Callable[[], None], step: int = 1 << 30) -> None:
        super().__init__(body.info, memoryview(body.read()))
        self._left, self._then, self._step = left, then, step

    def readinto(self, buffer: memoryview, /) -> int:
        if self._left <= 0:
            self._then()
            return super().readinto(buffer)
        count = super().readinto(buffer[: min(self._step, self._left)])
        self._left -= count
        return count
