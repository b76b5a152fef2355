"""Write the files of other trainers (`shardkit.formats.trainers`), and read the ids in them.

A `TokenStream` reads the ids of one file as a single sample.
"""

from __future__ import annotations

import os
from collections.abc import Container
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.errors import ShardError
from shardkit.formats.compression import new_compressor
from shardkit.formats.tokens.headers import DTYPES, HEAD_BYTES, LLMC_HEADERS, MAGIC, read_header
from shardkit.formats.trainers import (
    LLMC_HEADER_BYTES,
    MAX_FILE_TOKENS,
    TRAINER_FORMATS,
    count_tokens,
    dtype_of_stream,
    start_of,
)
from shardkit.manifest import TOKENS, Column, ShardInfo

_Ints = npt.NDArray[np.int64]


def write_token_files(
    folder: Path,
    stem: str,
    kind: str,
    ids: npt.NDArray[Any],
    ends: _Ints,
    mask: npt.NDArray[np.uint8] | None,
    tokenizer: str,
) -> Path:
    """Write the files of one number as `stem` with the endings of format `kind`; return that with the ids.

    `ids` has the dtype of the files. `ends`, int64[documents], are the documents' ends in tokens. `tokenizer`
    is the name that datatrove's metadata have. Raises ValueError for too many tokens.
    """
    if len(ids) > MAX_FILE_TOKENS:
        raise ValueError(f"{len(ids):,} tokens in one file; at most {MAX_FILE_TOKENS:,} are possible")
    paths = {ending: folder / f"{stem}.{ending}" for ending in TRAINER_FORMATS[kind].names}
    first, *beside = paths.values()
    with first.open("wb") as file:
        if kind == "llmc":
            file.write(_llmc_header(ids))
        ids.tofile(file)
    if kind == "megatron":
        beside[0].write_bytes(_megatron_index(ids.dtype, ends))
    elif kind == "olmo":
        lines = "".join(f"{start},{end}\n" for start, end in pairwise((0, *ends.tolist()))).encode()
        packer = new_compressor("gz", len(lines))
        beside[0].write_bytes(packer.compress(lines) + packer.flush())
    elif kind == "datatrove":
        beside[0].write_bytes(ends.astype("<u8").tobytes())
        size = ids.dtype.itemsize
        beside[1].write_bytes(f"{tokenizer}|{size}\n{len(ids)}\n{_for_people(len(ids))}".encode())
    if mask is not None:
        ending = TRAINER_FORMATS[kind].mask
        assert ending is not None
        mask.tofile(paths[ending])
    return first


def _llmc_header(ids: npt.NDArray[Any]) -> bytes:
    header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
    by_dtype = {name: (magic, version) for magic, (version, name) in LLMC_HEADERS.items()}
    header[:3] = *by_dtype[ids.dtype.name], len(ids)
    return header.tobytes()


def _megatron_index(dtype: np.dtype[Any], ends: _Ints) -> bytes:
    [code] = [code for code, name in DTYPES.items() if name == dtype.name]
    lengths = np.diff(ends, prepend=0)
    pointers = (ends - lengths) * dtype.itemsize
    numbers = np.array([len(ends), len(ends) + 1], "<u8")
    head = MAGIC + (1).to_bytes(8, "little") + bytes([code]) + numbers.tobytes()
    marks = np.arange(len(ends) + 1, dtype="<i8")
    return head + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + marks.tobytes()


def _for_people(tokens: int) -> str:
    """Format a number of tokens with three digits and an SI prefix, such as "1.23 MT".

    Rounds as datatrove does, by humanize.metric: first to the digits, then up to the next power of ten.
    """
    exponent = max(0, len(str(tokens)) - 1)
    digits = f"{tokens / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f}"
    if float(digits) >= 10 ** (exponent % 3 + 1):  # such as 999,999, which is 1.00 MT
        exponent += 1
        digits = f"{tokens / 10 ** (exponent // 3 * 3):.{2 - exponent % 3}f}"
    return f"{digits} {' kMGT'[exponent // 3].strip()}T"


class TokenStream:
    """An open file of a dataset in one of `TRAINER_FORMATS`: one sample with all its ids."""

    def __init__(self, where: str | PathLike[str], info: ShardInfo, data: Bytes, kind: str) -> None:
        """Check header and size of the bytes `data` of a file of format `kind`; errors name `where`."""
        self.info, self._where = info, where
        dtype = dtype_of_stream(info)
        count_tokens(kind, dtype, where, len(data))
        if kind == "llmc":
            header = read_header(where, data[:HEAD_BYTES].tobytes(), len(data))
            if header.dtype != dtype:
                raise ShardError(where, f"has no header of llm.c for {dtype.name} ids", offset=0)
        self._ids = data[start_of(kind) :].view(dtype)

    def __len__(self) -> int:
        return 1

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.info.columns

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {"tokens": all ids of the file}, without a copy. Raises IndexError unless `row` is 0."""
        if row != 0:
            raise IndexError(f"{os.fspath(self._where)}: no row {row}; a file of token ids is one row")
        return {TOKENS: self._ids} if columns is None or TOKENS in columns else {}

    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None:
        """Return None: files have any number of ids."""
        return None

    def close(self) -> None:
        """Drop the memory map; views returned earlier stay readable."""
        self._ids = self._ids[:0]
