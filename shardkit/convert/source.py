"""What readers of other formats have in common: a source gives rows, tokens or samples, block by block.

A reader checks what its files claim before anything relies on it, reads forward once, and holds a few blocks.
Files that are read whole are hashed on the way, so that the card can say what a dataset was made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.hashing import Hasher, new_hash
from shardkit.index import FileInfo

__all__ = [
    "BLOCK_BYTES",
    "NO_ENDS",
    "SOURCE_HASH",
    "TOKEN_COLUMNS",
    "HashedPieces",
    "RowSource",
    "Sample",
    "SampleSource",
    "Source",
    "TokenBlock",
    "TokenSource",
]

BLOCK_BYTES = 1 << 23  # of a source at a time: large enough that Python does not count, small for the caches
SOURCE_HASH = "xxh3_128"
TOKEN_COLUMNS = ("input_ids", "tokens")  # what the tokens are called, here and elsewhere
NO_ENDS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A run of tokens; documents end before the tokens `ends` (int64, in order, repeated for empty ones).

    A document may go on into the next block. `document` and `token` number the first token's document in the
    source and the token in it; of streams without documents, `token` is the place in the file.
    """

    tokens: Array
    ends: npt.NDArray[np.int64]
    file: str
    document: int
    token: int
    source_bytes: int
    ends_file: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as bytes: {target column or extension: payload}; `key` is None where keys are counted."""

    payloads: Mapping[str, bytes | memoryview]
    key: str | None
    where: str
    source_bytes: int


class Source(Protocol):
    """What any source says of itself. `digests` are of files that were read whole; datasets have hashes."""

    kind: ClassVar[str]
    bytes: int
    files: int
    files_done: int
    digests: list[FileInfo]

    @property
    def facts(self) -> Mapping[str, object]:
        """For the card: what else tells this source from others."""


@runtime_checkable
class TokenSource(Source, Protocol):
    """Documents of tokens, or a stream without any ends (`has_documents` is False)."""

    dtype: np.dtype[Any]
    max_token: int | None
    has_documents: bool
    left_out: Sequence[str]

    def blocks(self) -> Iterator[TokenBlock]: ...


@runtime_checkable
class RowSource(Source, Protocol):
    """Rows of one fixed column."""

    column: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def rows(self) -> Iterator[tuple[str, Array, int]]:
        """(file, rows (n, *shape), bytes of the source) in order."""


@runtime_checkable
class SampleSource(Source, Protocol):
    """Samples of any columns, as they go into the target."""

    columns: Mapping[str, str]
    """{target column: MDS encoding}, or {extension: what it was}."""
    names: Mapping[str, str]
    """{target column or extension: column of the source}."""
    has_keys: bool

    def samples(self) -> Iterator[Sample]: ...


@dataclass(slots=True)
class HashedPieces:
    """A file's bytes from `start` on, in arrays of whole items; its digest is in `info` at the end."""

    path: Path
    start: int
    itemsize: int
    info: FileInfo | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        hasher = new_hash(SOURCE_HASH)
        try:
            with self.path.open("rb", buffering=0) as file:
                size = self._hash_head(file.read(self.start), hasher)
                piece = BLOCK_BYTES // self.itemsize * self.itemsize
                while True:
                    data = np.empty(piece, np.uint8)  # a new one each time: views of it may be kept
                    filled = _fill(file, data.data)
                    if not filled:
                        break
                    hasher.update(data[:filled].data)
                    size += filled
                    yield data[:filled]
        except OSError as error:
            raise ShardError(self.path, f"cannot be read: {error.strerror or error}") from error
        self.info = FileInfo(self.path.name, size, {SOURCE_HASH: hasher.hexdigest()})

    def _hash_head(self, head: bytes, hasher: Hasher) -> int:
        if len(head) != self.start:
            raise ShardError(self.path, f"ends after {len(head):,} bytes, inside of its header")
        hasher.update(head)
        return len(head)


def _fill(file: Any, view: memoryview) -> int:
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled
