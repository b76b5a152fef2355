"""How far a conversion is, in bytes of its source, told to the listeners that transfers have."""

from __future__ import annotations

import time

from shardkit.convert.source import Source
from shardkit.progress import Listener, TransferProgress

__all__ = ["Meter"]

_TELL_BYTES = 1 << 22  # of the source between two reports


class Meter:
    """Counts bytes of a source, called `where` in messages, and tells a listener now and then."""

    def __init__(self, listener: Listener, source: Source, where: str) -> None:
        self._listener, self._source, self.where = listener, source, where
        self._start = time.monotonic()
        self._done = self._told = 0

    def add(self, size: int) -> None:
        """So many more bytes of the source are converted."""
        self._done += size
        if self._done - self._told >= _TELL_BYTES:
            self._tell("convert")

    def step(self, name: str) -> None:
        """The next step begins."""
        self._done = self._source.bytes
        self._tell(name)

    def _tell(self, step: str) -> None:
        self._told, source = self._done, self._source
        seconds = time.monotonic() - self._start
        done = min(self._done, source.bytes)
        self._listener(
            TransferProgress(step, source.files_done, source.files, done, source.bytes, done, seconds)
        )
