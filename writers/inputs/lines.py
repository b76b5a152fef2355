"""Turns the pieces of a file's content into lines, or into a stream with `read` and `skip`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

HEAD_BYTES_OF_LINE = 256  # number of first bytes that are kept of a line longer than the limit
Line = tuple[int, int, bytes, bool]
"""(offset, length without the newline, bytes, is_whole: the bytes are the whole line, not only its head)"""


class Lines:
    """Iterates over the lines of content that comes in pieces; splits at b"\\n" only, truncates long lines.

    JSON text may contain U+2028, U+0085 and other characters that str.splitlines treats as line ends, so
    lines are split as bytes, before they are decoded.
    """

    def __init__(self, pieces: Iterable[bytes], *, offset: int = 0, max_line_bytes: int) -> None:
        self._pieces = pieces
        self._max_line_bytes = max_line_bytes
        self._held_bytes = 0  # length of the current line so far, also of bytes that were not kept
        self.offset = offset  # offset of the line after the last one that was yielded

    def __iter__(self) -> Iterator[Line]:
        held: list[bytes] = []
        for piece in self._pieces:
            first, *rest = piece.split(b"\n")
            self._hold(held, first)
            if not rest:
                continue
            yield self._finish(held)
            last = rest.pop()
            for line in rest:
                offset = self.offset
                self.offset += len(line) + 1
                if len(line) > self._max_line_bytes:
                    yield offset, len(line), line[:HEAD_BYTES_OF_LINE], False
                else:
                    yield offset, len(line), line, True
            held = []
            self._hold(held, last)
        if self._held_bytes:
            yield self._finish(held)

    def _hold(self, held: list[bytes], part: bytes) -> None:
        self._held_bytes += len(part)
        if self._held_bytes > self._max_line_bytes:
            head = b"".join(held)[:HEAD_BYTES_OF_LINE] + part[:HEAD_BYTES_OF_LINE]
            held[:] = [head[:HEAD_BYTES_OF_LINE]]
        elif part:
            held.append(part)

    def _finish(self, held: list[bytes]) -> Line:
        offset, length = self.offset, self._held_bytes
        self.offset += length + 1
        self._held_bytes = 0
        whole = length <= self._max_line_bytes
        return offset, length, b"".join(held), whole


class PieceReader:
    """Reads pieces of bytes like a file, forward only."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0  # index of the next byte in `_held`
        self._before = 0  # total length of the pieces before `_held`

    def tell(self) -> int:
        """Return how many bytes have been read."""
        return self._before + self._at

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""
        parts, left = [], size
        while left and self._fill():
            part = self._held[self._at : self._at + left]
            self._at += len(part)
            left -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip(self, size: int) -> int:
        """Skip up to `size` bytes; return how many were skipped, fewer only at the end."""
        left = size
        while left and self._fill():
            step = min(left, len(self._held) - self._at)
            self._at += step
            left -= step
        return size - left

    def _fill(self) -> bool:
        while self._at == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._before += len(self._held)
            self._held, self._at = piece, 0
        return True
