"""WebDataset tars: shardkit's own and any made by others, read in place.

`open_shard` maps a tar (or decompresses a compressed one into memory) and indexes its members. Where the
samples repeat with a constant stride, an extension of equal .npy members is a strided matrix over the map:
`fixed_rows` gathers a batch with no Python per sample, exactly as for MDS. Everything else is decoded
sample by sample (see `shardkit.formats.tar.values`). Opening costs milliseconds for a constant stride, about
10 microseconds a member otherwise. Every view handed out keeps its map alive, so closing never breaks a
reader.
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

_CHUNK = 1 << 14  # members compared at a time


class TarShard:
    """One open tar: samples by row, and strided matrices of its fixed-size array columns."""

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
        """Names of columns that are not the extension of their members, by extension (`column_names`)."""

    def __len__(self) -> int:
        return len(self.index)

    def key(self, row: int) -> str:
        """The key of sample `row`: its member names without extensions."""
        return self.index.keys[self._checked(row)]

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {"__key__": key, column: value}; ShardError if a member is not what its extension says.

        Only members of `columns` are decoded, if they are given: names of columns, or extensions.
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
        """One column per extension, by first appearance, under the names of `names`."""
        return renamed(self.member_columns, self.names)

    @cached_property
    def member_columns(self) -> tuple[Column, ...]:
        """One column per extension, by first appearance, as a list of shards states them.

        Numbers of one shape a constant stride apart are `ndarray:dtype:shape`, and only they have a `size`.
        """
        return tuple(self._column(extension) for extension in self.index.extensions)

    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None:
        """Read-only view (samples, *shape) of an extension of equal .npy members, or None.

        None unless every sample has the member, all have one header, and they lie a constant stride apart.
        `column` is its name or its extension; `tokens` is short for `tokens.npy`.
        """
        found = self._arrays.get(self._extension(column))
        if found is None:
            return None
        header, members = found
        stride = self._stride(members)
        return None if stride is None else self._matrix(header, int(self.index.offsets[members[0]]), stride)

    def offset_rows(self, column: str) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]] | None:
        """(view, index) such that `view[index[rows]]` gathers equal .npy members at any offsets, or None.

        Payloads start at whole blocks, so the view has a row for every block, most of them meaningless:
        use it through `index` only.
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
        """Forget the map; views already handed out stay readable."""
        self._data = np.empty(0, dtype=np.uint8)
        self._view = memoryview(b"")
        self.__dict__.pop("_arrays", None)

    def _checked(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._file}: row {row} of {len(self)}")
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
        """{extension: (header, member of each sample)} of the columns whose .npy headers are all the same."""
        arrays = {}
        for extension in self.index.extensions:
            members = self.index.members_of(extension) if extension.rpartition(".")[2] == "npy" else None
            if members is None or not len(members):
                continue
            size, offset = int(self.index.sizes[members[0]]), int(self.index.offsets[members[0]])
            try:
                header = parse_npy_header(self._view[offset : offset + size])
            except ValueError:
                continue  # the sample path words the error for the row that is asked for
            plain = not header.fortran_order or len(header.shape) <= 1
            exact = header.payload_bytes == size - header.bytes > 0
            if plain and exact and self._same_headers(header, members):
                arrays[extension] = (header, members)
        return arrays

    def _same_headers(self, header: NpyHeader, members: npt.NDArray[np.int64]) -> bool:
        """All members have the first one's size and, byte for byte, its .npy header."""
        sizes, offsets = self.index.sizes[members], self.index.offsets[members]
        if (sizes != sizes[0]).any():
            return False
        blocks = offsets // BLOCK
        heads = _rows(self._data, np.dtype(np.uint8), (header.bytes,), 0, BLOCK, int(blocks.max()) + 1)
        first = heads[blocks[0]]
        return all((heads[blocks[i : i + _CHUNK]] == first).all() for i in range(0, len(blocks), _CHUNK))

    def _stride(self, members: npt.NDArray[np.int64]) -> int | None:
        """Bytes from each of these members to the next, if that is one number."""
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
    """A sample some of whose columns are not named by their extension, which finds them, too."""

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
    """Return {extension: name} of the columns that are not called by their extension in rows and batches.

    These are the members that hold rows of tokens of one length, `tokens.npy`, and the loss masks beside
    them: `tokens` and `loss_mask`, as in MDS. All others keep their extension, as does every member of tars
    whose `tokens.npy` are of different lengths or that have a member `tokens` as well.
    """
    by_extension = {column.name: column for column in columns}
    tokens = by_extension.get(f"{TOKENS}.npy")
    if tokens is None or token_layout(tokens) is None or by_extension.keys() & {TOKENS, LOSS_MASK}:
        return {}
    return {f"{name}.npy": name for name in (TOKENS, LOSS_MASK) if f"{name}.npy" in by_extension}


def renamed(columns: Sequence[Column], names: Mapping[str, str]) -> tuple[Column, ...]:
    """Return `columns` under their names; `names` by extension."""
    return tuple(replace(column, name=names.get(column.name, column.name)) for column in columns)


def tell_name(extension: str, name: str) -> None:
    """Warn that a column was asked for by its member's extension."""
    warn_user(f"the column in members .{extension} is called {name!r}, in tars as in MDS: ask for {name!r}")


def _rows(
    data: npt.NDArray[np.uint8],
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    offset: int,
    stride: int,
    count: int,
) -> npt.NDArray[np.generic]:
    """Read-only (count, *shape) over `data`; NumPy refuses bounds that leave the buffer."""
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
    """The shard that `info` describes; ShardError if the file is missing or not what `info` says.

    `verify` also checks every stated hash. `decode` says what becomes of members (see
    `shardkit.formats.tar.values`). The size, the sample count and the columns that `info` states are always
    checked.
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
    """The tar whose uncompressed bytes are `raw`, wherever they came from; `where` is named in errors.

    `index` is what an earlier scan of the same tar found.
    """
    if index is None or not index.fits(len(raw)):
        index = index_constant_stride(raw, where) or group_members(walk_members(raw.data, where), where)
    if info.samples not in (UNKNOWN, len(index)):
        problem = f"has {len(index):,} samples, the index states {info.samples:,}; fetch it again"
        raise ShardError(where, problem)
    info = replace(info, raw=replace(info.raw, bytes=len(raw)), samples=len(index))
    shard = TarShard(info, raw, index, file=where, allow_pickle=allow_pickle, decode=decode)
    if len(shard) and info.columns and set(info.columns) != set(shard.member_columns):
        problem = f"has the columns {_words(shard.member_columns)}; the index states {_words(info.columns)}"
        raise ShardError(where, problem)
    return shard


def scan_folder(folder: Path, basenames: list[str] | None = None) -> list[ShardInfo]:
    """Open and index tars that have no index, in the order of their names.

    `basenames` are relative to `folder`; default: all tars directly in it. To scan only once, publish the
    result with `write_shard_list`.
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
