"""Lines of a byte stream with their offsets: split at b"\\n" only, no line held beyond a limit.

JSON text may hold U+2028, U+0085 and other characters that Python's str.splitlines takes for line ends, so
lines are cut on bytes before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["Line", "Lines"]

_HEAD_BYTES = 256

Line = tuple[
    int, int, bytes, bool
]  # offset, length without the newline, the bytes, whole (False: only the head)


class Lines:
    """Iterate over the lines in pieces of bytes.

    `unfinished_bytes` is the length of a line that had begun when the pieces raised an error.
    """

    def __init__(self, pieces: Iterable[bytes], *, offset: int = 0, max_line_bytes: int) -> None:
        self._pieces = pieces
        self._offset = offset
        self._max_line_bytes = max_line_bytes
        self.unfinished_bytes = 0

    @property
    def offset(self) -> int:
        """Where the line after the last one handed out begins."""
        return self._offset

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
                offset = self._offset
                self._offset += len(line) + 1
                if len(line) > self._max_line_bytes:
                    yield offset, len(line), line[:_HEAD_BYTES], False
                else:
                    yield offset, len(line), line, True
            held = []
            self._hold(held, last)
        if self.unfinished_bytes:
            yield self._finish(held)

    def _hold(self, held: list[bytes], part: bytes) -> None:
        self.unfinished_bytes += len(part)
        if self.unfinished_bytes > self._max_line_bytes:
            head = b"".join(held)[:_HEAD_BYTES] + part[:_HEAD_BYTES]
            held[:] = [head[:_HEAD_BYTES]]
        elif part:
            held.append(part)

    def _finish(self, held: list[bytes]) -> Line:
        offset, length = self._offset, self.unfinished_bytes
        self._offset += length + 1
        self.unfinished_bytes = 0
        whole = length <= self._max_line_bytes
        return offset, length, b"".join(held), whole
