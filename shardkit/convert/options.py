"""What a conversion is told: how tokens become rows, and what files the rows become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardkit.compression import parse_compression
from shardkit.hashing import new_hash
from shardkit.mds.index import MAX_SHARD_BYTES
from shardkit.units import parse_bytes

__all__ = ["DTYPES", "SOURCE_DTYPES", "CutOptions", "OutputOptions"]

DTYPES = ("uint16", "uint32")
SOURCE_DTYPES = (*DTYPES, "int32", "int64")
_MAX_ROW_TOKENS = 1 << 28  # a gigabyte of uint32; longer rows are a mistake, and would not fit into a shard


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOptions:
    """How documents or endless streams of tokens become rows; ValueError for what contradicts itself.

    Without `sequence_length` and `keep_lengths` the source's rows are copied, and all must be of one length.
    """

    sequence_length: int | None = None
    """Cut the stream of all documents into rows of so many tokens."""
    keep_lengths: bool = False
    """Write each document as a row of its own length."""
    eos: int | None = None
    """Append this id to each document that does not end in it; also what the last row is padded with."""
    pad: int | None = None
    """Fill the last row with this id."""
    drop_tail: bool = False
    """Leave out the last tokens if they fill no row."""
    drop_empty: bool = False
    """Leave out documents without tokens, which a row of their own cannot hold."""
    per_file: bool = False
    """Begin a row at each file of the source, and treat the end of each as the tail."""
    dtype: str | None = None
    """Of the rows; default: as the source needs."""
    source_dtype: str | None = None
    """Of a bare .bin (default uint16) and of columns of bytes, which do not say."""

    def __post_init__(self) -> None:
        length = self.sequence_length
        if length is not None and not 1 <= length <= _MAX_ROW_TOKENS:
            raise ValueError(f"the sequence length must be from 1 to {_MAX_ROW_TOKENS:,}, not {length:,}")
        if length is not None and self.keep_lengths:
            raise ValueError("either a sequence length or the documents' own lengths, not both")
        if length is None and (self.pad is not None or self.drop_tail or self.per_file):
            raise ValueError("pad, drop_tail and per_file are for rows cut by a sequence length: give one")
        if length is None and not self.keep_lengths and self.eos is not None:
            raise ValueError("eos changes rows that are copied: give a sequence length, or keep_lengths")
        if self.drop_tail and self.pad is not None:
            raise ValueError("either pad or drop_tail, not both")
        if length is not None and not self.drop_tail and self.fill is None:
            raise ValueError(
                "say what becomes of the last tokens if they fill no row: give eos or pad to fill it, or "
                "drop_tail"
            )
        if not self.keep_lengths and self.drop_empty:
            raise ValueError("drop_empty is for keep_lengths: elsewhere empty documents take no room")
        for name, known in (("dtype", DTYPES), ("source_dtype", SOURCE_DTYPES)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("eos", "pad"):
            token = getattr(self, name)
            if token is not None and not 0 <= token <= np.iinfo(self.dtype or "uint32").max:
                raise ValueError(f"{name} {token:,} does not fit {self.dtype or 'uint32'}")

    @property
    def fill(self) -> int | None:
        """The id that fills the last row."""
        return self.eos if self.pad is None else self.pad

    @property
    def changes_rows(self) -> bool:
        """Whether anything asks for other rows than the source's."""
        return self.sequence_length is not None or self.keep_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """The files that are written; ValueError for what the format does not have."""

    format: Literal["mds", "wds"] = "mds"
    shard_bytes: int | str = 1 << 26
    """Largest size of a raw shard."""
    compression: str | None = None
    hashes: tuple[str, ...] = ("xxh64",)

    def __post_init__(self) -> None:
        if self.format not in ("mds", "wds"):
            raise ValueError(f"the format is mds or wds, not {self.format!r}")
        if not 0 < self.limit <= MAX_SHARD_BYTES:
            raise ValueError(f"shards must be below 4 GiB and not empty, not {self.shard_bytes}")
        if self.compression is not None:
            parse_compression(self.compression)
            if self.format == "wds":
                raise ValueError("tars are written as they are: compression is for mds")
        for name in self.hashes:
            new_hash(name)

    @property
    def limit(self) -> int:
        """`shard_bytes` as a number."""
        return parse_bytes(self.shard_bytes)
