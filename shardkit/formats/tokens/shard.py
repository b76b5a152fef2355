"""Read rows of constant length from flat files of token ids, in place.

A *piece* is a range of bytes of a file. A `TokenShard` holds the rows of one piece, or a single row made of
several: the end of a file and the beginnings of the next ones. A shard's name in a manifest is its location:
`tokens.npy@128-67108992`, or several such pieces joined by "&".
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.files import map_file, open_regular
from shardkit.manifest import Column, ShardInfo


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of a file from `start` to `stop` (exclusive)."""

    file: str
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def name_of(pieces: Sequence[Piece]) -> str:
    """Return the manifest's name for the shard that consists of `pieces`; `pieces_of` is the inverse."""
    return "&".join(f"{quote(piece.file)}@{piece.start}-{piece.stop}" for piece in pieces)


def pieces_of(name: str) -> list[Piece]:
    """Parse a shard's name into its pieces. Raises ValueError if it is malformed."""
    found = []
    for part in name.split("&"):
        file, at, edges = part.rpartition("@")
        start, dash, stop = edges.partition("-")
        if not (at and dash and start.isdecimal() and stop.isdecimal()):
            raise ValueError(f"{name!r:.200} is not a range of bytes, FILE@START-STOP")
        found.append(Piece(unquote(file), int(start), int(stop)))
    return found


class TokenShard:
    """An open shard of token rows: contiguous ids without headers; with loss masks, these follow each row."""

    def __init__(self, where: str | PathLike[str], info: ShardInfo, data: Bytes) -> None:
        """Check the size of the shard's bytes `data`; errors name `where`."""
        self.info = info
        self._where, self._data = where, data
        self._places: dict[str, tuple[int, np.dtype[Any], int]] = {}
        """By column: its first byte in a row, and the type and number of its values."""
        self._row_bytes = 0
        for column in info.columns:
            _, dtype, length = column.encoding.split(":")
            self._places[column.name] = self._row_bytes, np.dtype(dtype).newbyteorder("<"), int(length)
            self._row_bytes += int(length) * np.dtype(dtype).itemsize
        if len(data) != info.raw.bytes:
            raise ShardError(where, f"has {len(data):,} bytes, expected {info.raw.bytes:,}; fetch it again")

    def __len__(self) -> int:
        return self.info.samples

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.info.columns

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {"tokens": ids, …} of one row. Raises IndexError unless 0 <= row < len."""
        if not 0 <= row < len(self):
            raise IndexError(f"{os.fspath(self._where)}: no row {row}; the shard has {len(self)} rows")
        wanted = [name for name in self._places if columns is None or name in columns]
        rows = {name: self._rows(name)[row] for name in wanted}
        return {name: values.astype(values.dtype.newbyteorder("=")) for name, values in rows.items()}

    def fixed_rows(self, column: str) -> npt.NDArray[Any]:
        """Return a read-only view (samples, length) of all rows, without a copy; values may be unaligned."""
        if column not in self._places:
            only = ", ".join(self._places)
            raise KeyError(f"{os.fspath(self._where)}: no column {column!r}, only {only}")
        return self._rows(column)

    def close(self) -> None:
        """Drop the memory map; views returned earlier stay readable."""
        self._data = np.empty(0, dtype=np.uint8)

    def _rows(self, column: str) -> npt.NDArray[Any]:
        first, dtype, length = self._places[column]
        rows = self._data.reshape(-1, self._row_bytes)[:, first : first + length * dtype.itemsize]
        return rows.view(dtype)


def open_shard(folder: Path, info: ShardInfo, dates: Mapping[str, tuple[int, int]]) -> TokenShard:
    """Memory-map the rows of the shard `info`, whose name gives ranges of files below `folder`.

    `dates` maps each file to its expected (modification time in ns, size in bytes). Raises ShardError if a
    file was replaced.
    """
    parts = [map_piece(folder, piece, dates) for piece in pieces_of(info.raw.basename)]
    data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return TokenShard(folder / info.raw.basename, info, data)


def map_piece(folder: Path, piece: Piece, dates: Mapping[str, tuple[int, int]]) -> Bytes:
    """Map the bytes of a piece of a file below `folder`. Raises ShardError if the file was replaced."""
    file = folder / piece.file
    try:
        descriptor = open_regular(file)
    except FileNotFoundError as error:
        raise ShardNotFoundError(file, f"cannot be opened: {error.strerror}") from error
    except OSError as error:
        raise ShardError(file, f"cannot be opened: {error.strerror or error}") from error
    try:
        status = os.fstat(descriptor)
        if (status.st_mtime_ns, status.st_size) != dates[piece.file]:
            raise ShardError(
                file, "was replaced after its dataset was opened; open the dataset again, with a new loader"
            )
        return map_file(descriptor, piece.bytes, start=piece.start)
    except OSError as error:
        raise ShardError(file, f"cannot be mapped: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
