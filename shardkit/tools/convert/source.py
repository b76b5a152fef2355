"""Defines the interface of readers, and the options of a conversion.

A source yields rows, tokens or samples, block by block. A reader validates its files before it uses their
content, reads them once from start to end, and holds a few blocks in memory. It hashes files that it reads
completely, and the card records these hashes. `CutOptions` define how tokens become rows, `OutputOptions` how
rows become files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.formats.compression import parse_compression
from shardkit.formats.mds.index import MAX_SHARD_BYTES
from shardkit.hashing import new_hash
from shardkit.manifest import FileInfo
from shardkit.units import parse_bytes

BLOCK_BYTES = 1 << 23  # size of a block: large enough to hide Python's overhead, small enough for CPU caches
SOURCE_HASH = "xxh3_128"
TOKEN_COLUMNS = ("input_ids", "tokens")  # usual names of token columns, preferred if there are several
NO_ENDS: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A run of consecutive tokens of a source.

    `ends` are the exclusive end indices in `tokens` of the documents that end in the block (int64, ascending,
    repeated for empty documents); the last document may continue in the next block. The first token of the
    block is token `token` of document `document`, both counted from 0; documents are numbered through the
    source. In streams without documents, `token` is the first token's index in the file.
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
    """One sample as {target column or extension: bytes}; `key` is None if the writer numbers samples."""

    payloads: Mapping[str, bytes | memoryview]
    key: str | None
    where: str
    source_bytes: int


class Source(Protocol):
    """The interface of every source.

    `digests` has size and hash of each file that was read completely. It is empty for datasets, because their
    index already has hashes.
    """

    kind: ClassVar[str]
    bytes: int
    files: int
    files_done: int
    digests: list[FileInfo]

    @property
    def facts(self) -> Mapping[str, object]:
        """Facts about the source, beyond the fields of this class, that the card records."""


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source of tokenized documents, or of a stream without document ends (`has_documents` is False)."""

    dtype: np.dtype[Any]
    max_token: int | None
    has_documents: bool
    left_out: Sequence[str]

    def blocks(self) -> Iterator[TokenBlock]: ...


@runtime_checkable
class SampleSource(Source, Protocol):
    """A source of samples with any columns, already encoded for the target."""

    columns: Mapping[str, str]
    """{target column: its MDS encoding}; for a tar target, {extension: MDS encoding in the source}."""
    names: Mapping[str, str]
    """{target column or extension: name of the source's column or extension}."""
    has_keys: bool

    def samples(self) -> Iterator[Sample]: ...


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a JSON file; raises ShardError if it is too large, not JSON or not an object."""
    try:
        if file.stat().st_size > max_bytes:
            raise ShardError(file, f"is larger than the limit of {max_bytes:,} bytes")
        content = load_json(file.read_bytes())
    except OSError as error:
        raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ShardError(file, "is not a JSON object")
    return content


DTYPES = ("uint16", "uint32")
SOURCE_DTYPES = (*DTYPES, "int32", "int64")
_MAX_ROW_TOKENS = 1 << 28  # maximum row length, 1 GiB of uint32: a longer row is a user's mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOptions:
    """Options that define how documents or streams become rows; raises ValueError if options conflict.

    Without `sequence_length` and `keep_lengths`, rows are copied and must all have the same length.
    """

    sequence_length: int | None = None
    """Concatenate all documents and cut rows of this many tokens; default: copy rows, all of one length."""
    keep_lengths: bool = False
    """Write each document as a row of its own length."""
    eos: int | None = None
    """Append this id to documents that do not end with it, and pad the last row with it; default: neither."""
    pad: int | None = None
    """Pad the last row with this id; default: the id of `eos`."""
    drop_tail: bool = False
    """Drop the last tokens if they do not fill a row; default: pad the row, which needs `eos` or `pad`."""
    drop_empty: bool = False
    """With `keep_lengths`, drop documents without tokens; default: fail."""
    per_file: bool = False
    """Start a new row at each file or chunk of the source, and pad or drop the last tokens of each; with
    `drop_tail`, this gives the rows of litdata's TokensLoader(L)."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the rows; every id is checked; default: uint16 if all ids are known to fit, else uint32."""
    source_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in a .bin file without a header (default: uint16) or in an MDS column of bytes."""

    def __post_init__(self) -> None:
        length = self.sequence_length
        if length is not None and not 1 <= length <= _MAX_ROW_TOKENS:
            raise ValueError(f"the sequence length must be from 1 to {_MAX_ROW_TOKENS:,}, not {length:,}")
        if length is not None and self.keep_lengths:
            raise ValueError("give either sequence_length or keep_lengths, not both")
        if length is None and (self.pad is not None or self.drop_tail or self.per_file):
            raise ValueError("pad, drop_tail and per_file need rows of one length: give sequence_length")
        if length is None and not self.keep_lengths and self.eos is not None:
            raise ValueError("eos would change rows that are copied: give sequence_length or keep_lengths")
        if self.drop_tail and self.pad is not None:
            raise ValueError("give either pad or drop_tail, not both")
        if length is not None and not self.drop_tail and self.fill is None:
            raise ValueError(
                "the last tokens may not fill a row: give eos or pad to fill it, or drop_tail to drop them"
            )
        if not self.keep_lengths and self.drop_empty:
            raise ValueError("drop_empty needs keep_lengths: otherwise empty documents add nothing to a row")
        for name, known in (("dtype", DTYPES), ("source_dtype", SOURCE_DTYPES)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("eos", "pad"):
            token = getattr(self, name)
            if token is not None and not 0 <= token <= np.iinfo(self.dtype or "uint32").max:
                raise ValueError(f"{name} {token:,} does not fit {self.dtype or 'uint32'}")

    @property
    def fill(self) -> int | None:
        """The token id that pads the last row: `pad`, else `eos`, else None."""
        return self.eos if self.pad is None else self.pad

    @property
    def changes_rows(self) -> bool:
        """Whether the target's rows differ from the source's rows."""
        return self.sequence_length is not None or self.keep_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Options of the files to write; raises ValueError for options that the format does not support."""

    format: Literal["mds", "wds"] = "mds"
    """Format of the shards."""
    shard_bytes: int | str = "64MiB"
    """Maximum size of a shard before compression."""
    compression: str | None = None
    """Compression of MDS shards, such as zstd:7."""
    hashes: tuple[str, ...] = ("xxh64",)
    shuffle: int | None = None
    """Write all rows in an order that is shuffled with this seed; default: in the order of the source."""

    def __post_init__(self) -> None:
        if self.shuffle is not None and not 0 <= self.shuffle < 1 << 64:
            raise ValueError(f"the seed of shuffle must be from 0 to 2**64 - 1, not {self.shuffle}")
        if self.format not in ("mds", "wds"):
            raise ValueError(f"the format must be mds or wds, not {self.format!r}")
        if not 0 < self.limit <= MAX_SHARD_BYTES:
            raise ValueError(f"shard_bytes must be above 0 and below 4 GiB, not {self.shard_bytes}")
        if self.compression is not None:
            parse_compression(self.compression)
            if self.format == "wds":
                raise ValueError("compression needs format mds: tars are written uncompressed")
        for name in self.hashes:
            new_hash(name)

    @property
    def limit(self) -> int:
        """The value of `shard_bytes` as a number of bytes."""
        return parse_bytes(self.shard_bytes)
