"""WebDataset tars: shardkit's own and any made by others, read in place.

`open_shard` maps a tar (or decompresses a compressed one into memory) and indexes its members. If .npy
members of one extension have equal headers and are a constant stride apart, `fixed_rows` returns them as a
strided matrix over the map: indexing it gathers a batch without a Python step per sample, exactly as for MDS.
All other members are decoded sample by sample (see `shardkit.formats.tar.values`). Opening takes milliseconds
for a constant stride, and about 10 microseconds per member otherwise. Every returned view keeps its map
alive, so closing a shard never breaks code that uses its views.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError, warn_user
from shardkit.formats.budget import SampleBudget
from shardkit.formats.stored import load_raw
from shardkit.formats.tar.members import BLOCK, TarIndex, group_members, walk_members
from shardkit.formats.tar.shard_list import describe_tar, tar_files
from shardkit.formats.tar.stride import index_constant_stride
from shardkit.formats.tar.values import NpyHeader, decode_member, encoding_of, parse_npy_header
from shardkit.manifest import LOSS_MASK, TOKENS, UNKNOWN, Column, ShardInfo, token_layout

_CHUNK = 1 << 14  # number of members whose headers are compared at a time


class TarShard:
    """An open tar. Returns samples by row number, and columns of fixed-size arrays as strided matrices."""

    def __init__(
        self,
        info: ShardInfo,
        data: npt.NDArray[np.uint8],
        index: TarIndex,
        *,
        file: str | PathLike[str],
        allow_pickle: bool = False,
        decode: bool | str = True,
    ) -> None:
        self.info = info
        self._data = data
        self._view = data.data
        self.index = index
        self._file = file
        self._allow_pickle = allow_pickle
        self._decode = decode
        self.names: Mapping[str, str] = {}
        """Maps an extension to its column name where the two differ; see `column_names`."""

    def __len__(self) -> int:
        return len(self.index)

    def key(self, row: int) -> str:
        """Return the key of sample `row`, which all its member names share: the name without extension."""
        return self.index.keys[self._checked(row)]

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return a sample as {"__key__": key, column: value}, decoding only `columns` if they are given.

        `columns` holds column names or extensions. Raises ShardError if a member cannot be decoded.
        """
        row, index = self._checked(row), self.index
        sample: dict[str, object] = _Renamed(self.names) if self.names else {}
        sample["__key__"] = index.keys[row]
        budget = SampleBudget(self.info.stored.bytes)
        for member in range(int(index.starts[row]), int(index.starts[row + 1])):
            extension, offset = index.extensions[index.kinds[member]], int(index.offsets[member])
            name = self.names.get(extension, extension)
            if columns is not None and name not in columns and extension not in columns:
                continue
            payload = self._view[offset : offset + int(index.sizes[member])]
            try:
                sample[name] = decode_member(
                    extension, payload, decode=self._decode, allow_pickle=self._allow_pickle, budget=budget
                )
            except ValueError as error:
                problem = f"sample {row} ({index.keys[row][:200]!r}), .{extension}: {error}"
                raise ShardError(self._file, problem, offset=offset) from error
        return sample

    @property
    def columns(self) -> tuple[Column, ...]:
        """One column per extension, in order of first appearance, renamed as in `names`."""
        return renamed(self.member_columns, self.names)

    @cached_property
    def member_columns(self) -> tuple[Column, ...]:
        """One column per extension, in order of first appearance, named by extension as in shards.json.

        A column of equally shaped arrays a constant stride apart has encoding `ndarray:dtype:shape` and a
        `size`. All other columns have no `size`.
        """
        return tuple(self._column(extension) for extension in self.index.extensions)

    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None:
        """Return a read-only view of shape (samples, *shape) over the .npy members of one column.

        Returns None unless every sample has such a member, all have the same header, and consecutive ones
        are a constant distance apart. `column` is a name or an extension; `tokens` also means `tokens.npy`.
        """
        found = self._arrays.get(self._extension(column))
        if found is None:
            return None
        header, members = found
        stride = self._stride(members)
        return None if stride is None else self._matrix(header, int(self.index.offsets[members[0]]), stride)

    def offset_rows(self, column: str) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]] | None:
        """Return (view, index) such that `view[index[rows]]` gathers a column's .npy members of these rows.

        The members may have any offsets. Returns None unless every sample has one and all have the same
        header. Payloads start at 512-byte blocks, so the view has a row for every block. Most of its rows
        are meaningless: access it only through `index`.
        """
        found = self._arrays.get(self._extension(column))
        if found is None:
            return None
        header, members = found
        blocks = self.index.offsets[members] // BLOCK
        first = int(blocks.min())
        count = int(blocks.max()) - first + 1
        return self._matrix(header, first * BLOCK, BLOCK, count), blocks - first

    def close(self) -> None:
        """Drop the memory map; views returned earlier stay readable."""
        self._data = np.empty(0, dtype=np.uint8)
        self._view = memoryview(b"")
        self.__dict__.pop("_arrays", None)

    def _checked(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._file}: no row {row}; the tar has {len(self)} samples")
        return row

    def _extension(self, column: str) -> str:
        return column if column in self.index.extensions else f"{column}.npy"

    def _column(self, extension: str) -> Column:
        found = self._arrays.get(extension)
        if found is None:
            return Column(extension, encoding_of(extension))
        header, members = found
        if header.dtype.kind not in "biufc":
            return Column(extension, "ndarray")
        if self._stride(members) is None:
            return Column(extension, f"ndarray:{header.dtype.name}")
        shape = ",".join(map(str, header.shape))
        return Column(extension, f"ndarray:{header.dtype.name}:{shape}", header.payload_bytes)

    @cached_property
    def _arrays(self) -> dict[str, tuple[NpyHeader, npt.NDArray[np.int64]]]:
        """Maps an extension to (.npy header, indices of its members) if every sample has it, all equal."""
        arrays = {}
        for extension in self.index.extensions:
            members = self.index.members_of(extension) if extension.rpartition(".")[2] == "npy" else None
            if members is None or not len(members):
                continue
            size, offset = int(self.index.sizes[members[0]]), int(self.index.offsets[members[0]])
            try:
                header = parse_npy_header(self._view[offset : offset + size])
            except ValueError:
                continue  # `sample` reports this error for the row that has it
            plain = not header.fortran_order or len(header.shape) <= 1
            exact = header.payload_bytes == size - header.bytes > 0
            if plain and exact and self._same_headers(header, members):
                arrays[extension] = (header, members)
        return arrays

    def _same_headers(self, header: NpyHeader, members: npt.NDArray[np.int64]) -> bool:
        """Return whether all members have the first one's size and, byte for byte, its .npy header."""
        sizes, offsets = self.index.sizes[members], self.index.offsets[members]
        if (sizes != sizes[0]).any():
            return False
        blocks = offsets // BLOCK
        heads = _rows(self._data, np.dtype(np.uint8), (header.bytes,), 0, BLOCK, int(blocks.max()) + 1)
        first = heads[blocks[0]]
        return all((heads[blocks[i : i + _CHUNK]] == first).all() for i in range(0, len(blocks), _CHUNK))

    def _stride(self, members: npt.NDArray[np.int64]) -> int | None:
        """Return the constant distance between the offsets of these members in bytes; None if it varies."""
        steps = np.diff(self.index.offsets[members])
        if not len(steps):
            return BLOCK
        return int(steps[0]) if (steps == steps[0]).all() else None

    def _matrix(
        self, header: NpyHeader, offset: int, stride: int, count: int | None = None
    ) -> npt.NDArray[np.generic]:
        count = len(self) if count is None else count
        return _rows(self._data, header.dtype, header.shape, offset + header.bytes, stride, count)


class _Renamed(dict[str, object]):
    """A sample with renamed columns. Their extensions still work as keys, with a warning."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __missing__(self, key: str) -> object:
        name = self._names.get(key)
        if name is None or name not in self:
            raise KeyError(key)
        tell_name(key, name)
        return self[name]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (dict(self._names),), None, None, iter(self.items())


def column_names(columns: Sequence[Column]) -> dict[str, str]:
    """Return {extension: name} for the columns whose name in samples and batches is not their extension.

    They are `tokens.npy`, if it holds token rows of one length, and its loss mask. As in MDS, their names are
    `tokens` and `loss_mask`. All other columns are named by their extension. So is every column of a tar
    whose `tokens.npy` members vary in length, or that also has a member `tokens` or `loss_mask`.
    """
    by_extension = {column.name: column for column in columns}
    tokens = by_extension.get(f"{TOKENS}.npy")
    if tokens is None or token_layout(tokens) is None or by_extension.keys() & {TOKENS, LOSS_MASK}:
        return {}
    return {f"{name}.npy": name for name in (TOKENS, LOSS_MASK) if f"{name}.npy" in by_extension}


def renamed(columns: Sequence[Column], names: Mapping[str, str]) -> tuple[Column, ...]:
    """Return `columns` renamed by `names`, a mapping {extension: name}."""
    return tuple(replace(column, name=names.get(column.name, column.name)) for column in columns)


def tell_name(extension: str, name: str) -> None:
    """Warn that a column was accessed by its member's extension instead of its name."""
    warn_user(f"the column in members .{extension} is called {name!r}, in tars as in MDS: use {name!r}")


def _rows(
    data: npt.NDArray[np.uint8],
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    offset: int,
    stride: int,
    count: int,
) -> npt.NDArray[np.generic]:
    """Return a read-only view of shape (count, *shape) over `data`; row i starts at byte offset + i * stride.

    NumPy raises an error if the view would extend outside of `data`.
    """
    inner = [dtype.itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
    rows: npt.NDArray[np.generic] = np.ndarray(
        (count, *shape), dtype=dtype, buffer=data, offset=offset, strides=(stride, *inner)
    )
    rows.flags.writeable = False
    return rows


def open_shard(
    folder: Path,
    info: ShardInfo,
    *,
    verify: bool = False,
    allow_pickle: bool = False,
    decode: bool | str = True,
) -> TarShard:
    """Open the shard that `info` describes. Raises ShardError if the file is missing or contradicts `info`.

    The size, sample count and columns that `info` records are always checked; `verify` also checks every
    recorded hash. `decode` selects how members are decoded (see `shardkit.formats.tar.values`).
    """
    raw = load_raw("tar", folder, info, verify=verify)
    file = folder / info.stored.basename
    return shard_from_raw(file, info, raw, allow_pickle=allow_pickle, decode=decode)


def shard_from_raw(
    where: str | PathLike[str],
    info: ShardInfo,
    raw: npt.NDArray[np.uint8],
    *,
    allow_pickle: bool = False,
    decode: bool | str = True,
    index: TarIndex | None = None,
) -> TarShard:
    """Open the tar whose uncompressed bytes are `raw`; `where` is its name in errors.

    `index` is the result of an earlier scan of the same tar; without one, the tar is scanned.
    """
    if index is None or not index.fits(len(raw)):
        index = index_constant_stride(raw, where) or group_members(walk_members(raw.data, where), where)
    if info.samples not in (UNKNOWN, len(index)):
        problem = f"has {len(index):,} samples, but the index states {info.samples:,}; fetch it again"
        raise ShardError(where, problem)
    info = replace(info, raw=replace(info.raw, bytes=len(raw)), samples=len(index))
    shard = TarShard(info, raw, index, file=where, allow_pickle=allow_pickle, decode=decode)
    if len(shard) and info.columns and set(info.columns) != set(shard.member_columns):
        problem = f"has the columns {_words(shard.member_columns)}; the index states {_words(info.columns)}"
        raise ShardError(where, problem)
    return shard


def scan_folder(folder: Path, basenames: list[str] | None = None) -> list[ShardInfo]:
    """Open and scan tars that have no index, and return their entries for shards.json.

    `basenames` are relative to `folder`; the default is all tars directly in it, sorted. To scan only once,
    publish the result with `write_shard_list`.
    """
    infos = []
    for basename in tar_files(folder) if basenames is None else basenames:
        shard = open_shard(folder, describe_tar(basename))
        size = (folder / basename).stat().st_size
        stored = shard.info.zip and replace(shard.info.zip, bytes=size)
        infos.append(replace(shard.info, zip=stored, columns=shard.member_columns))
    return infos


def _words(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{c.name} ({c.encoding})" for c in columns)
