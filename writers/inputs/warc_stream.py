"""The bytes of an archive of web records, for warcio to parse headers from: buffered, counted, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import BinaryIO

__all__ = ["HeaderTooLongError", "WarcStream"]

_LINE_BYTES = 1 << 16
_HEADER_BYTES = 1 << 20  # real headers have a few KB


class HeaderTooLongError(Exception):
    """No end of a record's header in sight."""


class WarcStream:
    """Reads pieces of bytes as a file; `header_begins` starts a count that `readline` holds to a limit."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0  # of the next byte in what is held
        self._before = 0  # bytes of pieces that are gone
        self._header_start = 0
        self.last_line = b""

    def tell(self) -> int:
        """How many bytes have been read."""
        return self._before + self._at

    def header_begins(self) -> None:
        """From here on lines are a header's."""
        self._header_start = self.tell()

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        parts, left = [], size
        while left and self._fill():
            part = self._held[self._at : self._at + left]
            self._at += len(part)
            left -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, size: int) -> int:
        """Leave out `size` bytes; how many there were."""
        left = size
        while left and self._fill():
            step = min(left, len(self._held) - self._at)
            self._at += step
            left -= step
        return size - left

    def readline(self, size: int = _LINE_BYTES) -> bytes:
        """Up to the next newline, at most `size` bytes; HeaderTooLongError behind a megabyte of header."""
        parts: list[bytes] = []
        left = min(size, _LINE_BYTES)
        while left and self._fill():
            end = self._held.find(b"\n", self._at, self._at + left) + 1
            end = end or min(self._at + left, len(self._held))
            part = self._held[self._at : end]
            self._at = end
            left -= len(part)
            parts.append(part)
            if part.endswith(b"\n"):
                break
        if self.tell() - self._header_start > _HEADER_BYTES:
            raise HeaderTooLongError
        self.last_line = b"".join(parts)
        return self.last_line

    def header_lines(self) -> BinaryIO | None:
        """What is held up to an empty line, as a file that is quick to read; None if it ends before.

        `take_lines` then takes what was read of it.
        """
        end = self._held.find(b"\r\n\r\n", self._at, self._at + _LINE_BYTES)
        return BytesIO(self._held[self._at : end + 4]) if end >= 0 else None

    def take_lines(self, lines: BinaryIO) -> None:
        """Take from the stream what was read of `header_lines`: up to an empty line."""
        self._at += lines.tell()
        self.last_line = b"\r\n"

    def peek(self) -> bytes:
        """The next byte; b"" at the end."""
        return self._held[self._at : self._at + 1] if self._fill() else b""

    def _fill(self) -> bool:
        while self._at == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._before += len(self._held)
            self._held, self._at = piece, 0
        return True
