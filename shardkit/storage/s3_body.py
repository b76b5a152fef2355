"""The body of an S3 answer as a stream of exactly the bytes that were asked for.

Reads return what has arrived (one `recv`, one copy), so a trickling server cannot hold a reader for longer
than the read timeout. In long bodies the system is asked to wait for 128 KiB at a time (SO_RCVLOWAT): it
would wake the reader for every few packets otherwise, three times the work; less than that within the read
timeout counts as silence. A body that ends early is a TransientError. Where botocore checks a body against a
stored checksum (whole objects, with checksums "when_supported"), it must be read in filled pieces of 64 KiB.
`close` may come from another thread, and then ends a read that waits.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shardkit.closing import Closing
from shardkit.storage.errors import TransientError
from shardkit.storage.s3_errors import request_errors, translated
from shardkit.storage.store import ObjectInfo

__all__ = ["EmptyBody", "S3Body"]

_FILLED_BYTES = 1 << 16  # of a read that waits until its piece is full
_LOW_WATER_BYTES = 1 << 17
_TAIL_BYTES = 1 << 20  # far more than what may wait in the buffers between the socket and us


class S3Body(Closing):
    """`bytes_left` bytes from botocore's `stream`."""

    def __init__(self, where: str, info: ObjectInfo, stream: Any, bytes_left: int) -> None:
        self.info = info
        self._where = where
        self._stream = stream
        self._bytes = self._left = bytes_left
        self._closed = False
        self._is_checked = hasattr(stream, "checksum")
        self._next = self._reader()
        self._socket = None if self._is_checked else _socket_of(stream)
        self._wait_for(_LOW_WATER_BYTES)

    def readinto(self, buffer: memoryview, /) -> int:
        piece = self._piece(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        return len(piece)

    def read(self) -> bytes:
        """All that is left, in one piece."""
        pieces = []
        while piece := self._piece(self._left):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._closed = True
        if self._left:
            shutdown = getattr(getattr(self._stream, "_raw_stream", None), "shutdown", None)
            if shutdown is not None:  # closing alone would wait for a read in another thread
                with contextlib.suppress(Exception):
                    shutdown()
        with contextlib.suppress(*request_errors()):
            self._stream.close()

    def _piece(self, wanted: int) -> bytes:
        """What comes next, 1 to `wanted` bytes; nothing at the end."""
        if not wanted:
            return b""
        try:
            piece = self._next(wanted)
            self._left -= len(piece)
            if self._socket is not None and self._left < _TAIL_BYTES:
                self._wait_for(1)  # the end of the body may be less, and the connection is used again
                self._socket = None
            if not self._left and self._is_checked:
                self._stream.read(1)  # compares the checksum
        except request_errors() as error:
            raise self._broken(error) from error
        except (ValueError, AttributeError) as error:
            if not self._closed:
                raise
            raise self._broken(error) from error
        if self._closed or not piece or self._left < 0:
            raise self._broken(None)
        return piece

    def _wait_for(self, count: int) -> None:
        """Let the system wake a read of this connection when `count` bytes have come."""
        if self._socket is not None and self._bytes >= _TAIL_BYTES:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _reader(self) -> Callable[[int], bytes]:
        read1 = getattr(getattr(self._stream, "_raw_stream", None), "read1", None)
        if self._is_checked or read1 is None:
            read: Callable[[int], bytes] = self._stream.read
            return lambda wanted: read(min(wanted, _FILLED_BYTES))
        direct: Callable[[int], bytes] = read1
        return direct

    def _broken(self, error: Exception | None) -> Exception:
        got = self._bytes - max(self._left, 0)
        place = f"after {got:,} of {self._bytes:,} bytes"
        if self._closed:
            return TransientError(self._where, f"the body was closed {place}")
        if error is None:
            return TransientError(self._where, f"the body ended {place}")
        found = translated(self._where, error)
        return type(found)(self._where, f"{found.problem}, {place}", status=found.status)


def _socket_of(stream: Any) -> socket.socket | None:
    """The connection's socket, found through botocore, urllib3 and http.client; None if one has changed."""
    response = getattr(getattr(stream, "_raw_stream", None), "_fp", None)
    found = getattr(getattr(getattr(response, "fp", None), "raw", None), "_sock", None)
    return found if isinstance(found, socket.socket) else None


class EmptyBody:
    """No bytes of an object: S3 has no range that asks for none."""

    def __init__(self, info: ObjectInfo) -> None:
        self.info = info

    def readinto(self, buffer: memoryview, /) -> int:
        return 0

    def read(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
