"""The contract of readers, and the options of a conversion.

A source yields rows, tokens or samples, block by block. A reader validates its files before anything relies
on them, reads forward once, and holds a few blocks. Files that are read completely are hashed meanwhile, so
that the card can name what a dataset was made from. `CutOptions` say how tokens become rows, `OutputOptions`
how rows become files.
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

BLOCK_BYTES = 1 << 23  # of a source at a time: large enough to hide Python's overhead, small for the caches
SOURCE_HASH = "xxh3_128"
TOKEN_COLUMNS = ("input_ids", "tokens")  # names of token columns
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
    """Any source. `digests` are of files that were read completely; datasets have hashes of their own."""

    kind: ClassVar[str]
    bytes: int
    files: int
    files_done: int
    digests: list[FileInfo]

    @property
    def facts(self) -> Mapping[str, object]:
        """Further facts for the card."""


@runtime_checkable
class TokenSource(Source, Protocol):
    """Documents of tokens, or a stream without any ends (`has_documents` is False)."""

    dtype: np.dtype[Any]
    max_token: int | None
    has_documents: bool
    left_out: Sequence[str]

    def blocks(self) -> Iterator[TokenBlock]: ...


@runtime_checkable
class SampleSource(Source, Protocol):
    """Samples of any columns, as they go into the target."""

    columns: Mapping[str, str]
    """{target column: MDS encoding}, or {extension: what it was}."""
    names: Mapping[str, str]
    """{target column or extension: column of the source}."""
    has_keys: bool

    def samples(self) -> Iterator[Sample]: ...


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file; ShardError if there is none."""
    try:
        if file.stat().st_size > max_bytes:
            raise ShardError(file, f"is larger than {max_bytes:,} bytes")
        content = load_json(file.read_bytes())
    except OSError as error:
        raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ShardError(file, "is no JSON object")
    return content


DTYPES = ("uint16", "uint32")
SOURCE_DTYPES = (*DTYPES, "int32", "int64")
_MAX_ROW_TOKENS = 1 << 28  # a gigabyte of uint32; longer rows are a mistake and do not fit in a shard


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOptions:
    """How documents or streams of tokens become rows; ValueError if options contradict each other.

    Without `sequence_length` and `keep_lengths` rows are copied, and must have the same length.
    """

    sequence_length: int | None = None
    """Concatenate all documents and cut rows of this many tokens; default: copy rows, all of one length."""
    keep_lengths: bool = False
    """Write each document as a row of its own length."""
    eos: int | None = None
    """Append this id to documents that do not end with it, and pad the last row; default: neither."""
    pad: int | None = None
    """Pad the last row with this id; default: that of `eos`."""
    drop_tail: bool = False
    """Drop the last tokens if they do not fill a row; default: pad, which needs `eos` or `pad`."""
    drop_empty: bool = False
    """Drop documents without tokens, with `keep_lengths`; default: fail."""
    per_file: bool = False
    """Start a new row at each file or chunk of the source, and treat the end of each as the tail; with
    `drop_tail` these are the rows of litdata's TokensLoader(L)."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the rows; each id is checked; default: uint16 if all are known to fit, else uint32."""
    source_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in a bare .bin, where the default is uint16, or in an MDS column of bytes."""

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
        """Whether rows differ from those of the source."""
        return self.sequence_length is not None or self.keep_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """The files to write; ValueError for options that the format does not support."""

    format: Literal["mds", "wds"] = "mds"
    """Format of the shards."""
    shard_bytes: int | str = "64MiB"
    """Maximum size of a raw shard."""
    compression: str | None = None
    """Compression of MDS shards, such as zstd:7."""
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
