"""HTTP/1.1 messages moved from socket to socket as they are, without a copy beyond the sockets' own.

Bytes move in pieces of at most 256 KiB; the head of a message, or the line before a chunk, is at most 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Awaitable, Callable

__all__ = ["BrokenOffError", "EndedError", "Headers", "Pacer", "Wire", "parse_head", "relay_body"]

Headers = dict[str, str]
Sink = Callable[[memoryview, bool], Awaitable[None]]  # (bytes, whether they are of the body)

_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_PACE_SECONDS = 0.25  # a paced stream that fell behind makes up for this much
_STEP_SECONDS = 0.01  # a paced stream moves at most this much of its rate at once
_DRAIN_SECONDS = 1.0  # for the bytes before a reset to reach the other side


class BrokenOffError(Exception):
    """The client's connection is to end here: with RST, or with FIN."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class EndedError(Exception):
    """A connection ended, or what came from it was no HTTP."""


class Wire:
    """A non-blocking socket with what was read from it beyond a message's head."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._rest = bytearray()
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes | memoryview) -> None:
        try:
            await self._loop.sock_sendall(self.sock, data)
        except OSError as error:
            raise EndedError from error

    async def read_piece(self, limit: int) -> memoryview:
        """1 to `limit` bytes, valid until the next read; EndedError at the end."""
        if self._rest:
            count = min(limit, len(self._rest), _PIECE_BYTES)
            self._piece[:count] = self._rest[:count]
            del self._rest[:count]
            return self._piece[:count]
        try:
            count = await self._loop.sock_recv_into(self.sock, self._piece[:limit])
        except OSError as error:
            raise EndedError from error
        if not count:
            raise EndedError
        return self._piece[:count]

    async def read_until(self, mark: bytes) -> bytes:
        """Up to and including `mark`; empty if the connection ended before the first byte."""
        while (end := self._rest.find(mark)) < 0:
            if len(self._rest) > _HEAD_BYTES:
                raise EndedError
            try:
                more = await self._loop.sock_recv(self.sock, _HEAD_BYTES)
            except OSError as error:
                raise EndedError from error
            if not more:
                if self._rest:
                    raise EndedError
                return b""
            self._rest += more
        data = bytes(self._rest[: end + len(mark)])
        del self._rest[: end + len(mark)]
        return data

    def is_stale(self) -> bool:
        """Whether the other side has closed (or said something unasked)."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def wait_closed(self, seconds: float | None) -> None:
        """Until the other side closes, or sends, or `seconds` have passed."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(seconds):
                self._rest += await self._loop.sock_recv(self.sock, _HEAD_BYTES)

    async def close(self, *, reset: bool = False) -> None:
        if reset:
            await self._wait_drained()
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    async def _wait_drained(self) -> None:
        """Until all that was sent has been acknowledged: a reset throws the rest away."""
        deadline = self._loop.time() + _DRAIN_SECONDS
        queued = bytearray(4)
        while self._loop.time() < deadline:
            fcntl.ioctl(self.sock, termios.TIOCOUTQ, queued)
            if not any(queued):
                return
            await asyncio.sleep(0.001)


class Pacer:
    """Holds a stream to a rate by an absolute schedule, so that late wake-ups do not add up."""

    def __init__(self, bytes_per_second: float) -> None:
        self.step_bytes = max(1, min(_PIECE_BYTES, int(bytes_per_second * _STEP_SECONDS)))
        self._seconds_per_byte = 1 / bytes_per_second
        self._due = 0.0

    async def wait(self, count: int) -> None:
        now = time.monotonic()
        self._due = max(self._due or now, now - _PACE_SECONDS) + count * self._seconds_per_byte
        if self._due > now:
            await asyncio.sleep(self._due - now)


def parse_head(head: bytes) -> tuple[list[str], Headers]:
    """(words of the first line, headers by lower-case name)."""
    first, *lines = head.decode("latin1").rstrip("\r\n").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2:
        raise EndedError
    return words, {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


async def relay_body(source: Wire, headers: Headers, sink: Sink, *, until_end: bool) -> None:
    """One body from `source` to `sink`, framing included; `until_end` if it has no framing."""
    try:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            await _relay_chunks(source, sink)
        elif "content-length" in headers:
            await _relay_bytes(source, int(headers["content-length"]), sink)
        elif until_end:
            with contextlib.suppress(EndedError):
                await _relay_bytes(source, sys.maxsize, sink)
    except ValueError as error:
        raise EndedError from error


async def _relay_bytes(source: Wire, count: int, sink: Sink) -> None:
    while count:
        piece = await source.read_piece(count)
        count -= len(piece)
        await sink(piece, True)


async def _relay_chunks(source: Wire, sink: Sink) -> None:
    while True:
        line = await source.read_until(b"\r\n")
        await sink(memoryview(line), False)
        size = int(line.split(b";")[0], 16)
        await _relay_bytes(source, size, sink)
        line = await source.read_until(b"\r\n")  # behind the chunk, or the first trailer
        await sink(memoryview(line), False)
        if not size:
            while line != b"\r\n":
                line = await source.read_until(b"\r\n")
                await sink(memoryview(line), False)
            return
