"""A body that goes on where its connection broke: all bytes of one version of the object, or an error.

A broken, short or too slow connection is closed and the range opened again from the next byte, pinned to the
version that was seen first, so that a replaced object ends in ObjectChangedError and never in a mixture.
Tries count from the last byte that arrived; the time of all reads is bounded by the size of the range.
Between failures a read costs two looks at the clock and a few additions (a microsecond).

One silence on a connection lasts as long as the store's read timeout, which this layer cannot shorten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from shardkit.closing import Closing
from shardkit.storage.calls import Calls, Operation
from shardkit.storage.errors import ObjectChangedError, StoreError, TransientError
from shardkit.storage.gate import Ticket
from shardkit.storage.store import Body

__all__ = ["ResilientBody"]

_REPORT_BYTES = 1 << 20  # how much may be read before the metrics know of it


class ResilientBody(Closing):
    """Bytes `start` to `stop` of what `raw` is a body of; `reopen` opens them from another start on."""

    def __init__(
        self,
        calls: Calls,
        raw: Body,
        ticket: Ticket,
        where: str,
        span: tuple[int, int | None],
        reopen: Callable[[int, str], Body],
        operation: Operation,
    ) -> None:
        self.info = raw.info
        self._calls = calls
        self._raw: Body | None = raw
        self._readinto = raw.readinto
        self._ticket = ticket
        self._where = where
        self._reopen = reopen
        self._operation = operation
        self._clock = calls.policy.clock
        self._closed = threading.Event()
        start, stop = span
        self._start = self._position = self._reported = start
        self._stop = self.info.bytes if stop is None else min(stop, self.info.bytes)
        self._look_at = min(
            start + _REPORT_BYTES, self._stop
        )  # the position at which to look up from reading
        self._window_seconds = calls.policy.window_seconds
        self._window_start = start
        self._window_used = 0.0  # time spent reading since then: pauses of the reader are its own
        self._left_seconds = calls.policy.transfer_seconds(self._stop - start)
        if self._position >= self._stop:
            self._finish()

    def readinto(self, buffer: memoryview, /) -> int:
        began = self._clock()
        try:
            count = self._readinto(buffer)
        except TransientError as error:
            self._calls.failed(error)
            return self._read_on(buffer, error, began)
        self._window_used += self._clock() - began
        self._position = position = self._position + count
        if position >= self._look_at or self._window_used >= self._window_seconds or not count:
            if not count and position < self._stop:
                return self._read_on(buffer, self._short(), began)
            self._look_up()
        return count

    def read(self) -> bytes:
        """All that is left, in one piece."""
        data = bytearray(max(0, self._stop - self._position))
        view, filled = memoryview(data), 0
        while filled < len(data):
            filled += self.readinto(view[filled:])
        return bytes(data)

    def close(self) -> None:
        """From another thread too: a read there then fails as soon as its connection does."""
        self._closed.set()
        self._let_go()
        self._report()
        self._readinto = _refuse

    def _look_up(self) -> None:
        """After some bytes or some time: are we done, and if not, are we fast enough?"""
        self._report()
        if self._position >= self._stop:
            self._finish()
            return
        self._look_at = min(self._position + _REPORT_BYTES, self._stop)
        if self._window_used < self._window_seconds:
            return
        policy = self._calls.policy
        rate = (self._position - self._window_start) / self._window_used
        self._begin_window()
        if rate < policy.floor_bytes_per_second:
            self._window_seconds = min(
                2 * self._window_seconds, max(policy.window_seconds, self._left_seconds)
            )
            self._calls.metrics.count("slow_bodies")
            slow = TransientError(self._where, f"only {rate:,.0f} bytes per second arrive")
            self._let_go()

            def fail(buffer: memoryview, /) -> int:
                raise slow

            self._readinto = fail  # the next read opens it again

    def _read_on(self, buffer: memoryview, error: TransientError, began: float) -> int:
        """Open the rest again, until some bytes are in `buffer`."""
        policy, metrics = self._calls.policy, self._calls.metrics
        self._left_seconds -= self._window_used
        seconds = min(policy.deadline_seconds, self._left_seconds)
        tries = self._calls.retries("read", self._where, seconds=seconds, began=began)
        while True:
            self._let_go()
            if self._closed.is_set() or not self.info.version:
                raise error  # without a version, what would be opened again might be another object
            tries.wait(error, self._arrived())
            raw = self._calls.open(
                self._operation,
                lambda: self._reopen(self._position, self.info.version),
                tries,
                self._ticket,
                self._arrived(),
            )
            self._raw, self._readinto = raw, raw.readinto
            if self._closed.is_set():
                self.close()
                raise error
            if raw.info.version != self.info.version or raw.info.bytes != self.info.bytes:
                self._let_go()
                raise ObjectChangedError(self._where, f"was replaced while it was read ({self._arrived()})")
            metrics.count("resumed_bodies")
            try:
                count = raw.readinto(buffer)
            except TransientError as raised:
                self._calls.failed(raised)
                error = raised
                continue
            if count:
                break
            error = self._short()
        self._left_seconds -= self._clock() - began
        self._position += count
        self._window_start, self._window_used = self._position, 0.0
        self._look_up()
        return count

    def _begin_window(self) -> None:
        self._left_seconds -= self._window_used
        self._window_start, self._window_used = self._position, 0.0

    def _finish(self) -> None:
        """All is read: make room for others, though the reader may not close us soon."""
        if self._position > self._stop:
            raise StoreError(self._where, f"{self._position - self._stop:,} bytes too many came")
        self._ticket.leave()
        self._readinto = _nothing

    def _let_go(self) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            with suppress(StoreError):
                raw.close()
        self._ticket.leave()

    def _report(self) -> None:
        if self._position > self._reported:
            self._calls.metrics.count("bytes_read", self._position - self._reported)
            self._reported = self._position

    def _short(self) -> TransientError:
        error = TransientError(self._where, "the connection ended early")
        self._calls.failed(error)
        return error

    def _arrived(self) -> str:
        return f"{self._position - self._start:,} of {self._stop - self._start:,} bytes had arrived"


def _nothing(buffer: memoryview, /) -> int:
    return 0


def _refuse(buffer: memoryview, /) -> int:
    raise ValueError("read of a closed body")
