"""Which pieces of documents a search wants: by document id or URL, of some sources and files only.

A piece is wanted if it has one of the ids or one of the URLs (any piece, where neither is given), and is of
one of the sources, and of one of the files, where those are given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from shardkit.errors import ShardkitError
from shardkit.trace.urls import UrlPatterns

__all__ = ["Selection", "parse_document_id"]

_Mask = npt.NDArray[np.bool_]
_SEED, _FIRST_HASH, _LAST_HASH = b"shardkit.seed", b"shardkit.first_hash", b"shardkit.last_hash"


class Selection:
    """What to look for. `sources`: numbers of recipe inputs; `files`: names, their ends, or with * and ?."""

    def __init__(
        self,
        *,
        documents: Collection[bytes] = (),
        urls: UrlPatterns | None = None,
        sources: Collection[int] = (),
        files: Collection[str] = (),
    ) -> None:
        self.documents, self.urls = frozenset(documents), urls
        self.sources, self.files = tuple(sources), tuple(files)
        self._ids = pa.array(sorted(self.documents), pa.binary(16))
        self._sources = pa.array(sorted(sources), pa.int32())
        self._files: dict[str, bool] = {}

    @property
    def columns(self) -> list[str]:
        """The columns that `match` needs."""
        wanted = {
            "document_id": bool(self.documents),
            "url": self.urls is not None,
            "source": bool(self.sources),
            "file": bool(self.files),
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def match(self, table: pa.Table) -> _Mask:
        """bool[n]: which lines of a provenance table (with at least `columns`) are wanted."""
        which: list[_Mask] = []
        if self.documents:
            which.append(_flags(pc.is_in(_column(table, "document_id"), value_set=self._ids)))
        if self.urls is not None:
            which.append(self.urls.match(_column(table, "url")))
        limits = [reduce(or_, which)] if which else []
        if self.sources:
            limits.append(_flags(pc.is_in(_column(table, "source"), value_set=self._sources)))
        if self.files:
            limits.append(self._of_files(_column(table, "file")))
        return reduce(and_, limits) if limits else np.ones(table.num_rows, np.bool_)

    def may_be_in(self, metadata: Mapping[bytes, bytes]) -> bool:
        """Whether a file with this schema metadata may hold what is wanted: it states its range of hashes."""
        if self.urls is not None or not self.documents or _SEED not in metadata:
            return True
        first, last = int(metadata[_FIRST_HASH]), int(metadata[_LAST_HASH])
        return any(first <= shuffle_hash(one, int(metadata[_SEED])) <= last for one in self.documents)

    def may_be_within(self, limits: Mapping[str, tuple[Any, Any]]) -> bool:
        """Whether lines whose columns have these (least, greatest) values may be wanted."""
        if self.sources and "source" in limits:
            low, high = limits["source"]
            if not any(low <= one <= high for one in self.sources):
                return False
        if self.files and "file" in limits:
            low, high = limits["file"]
            if low == high and not self._is_wanted(low):
                return False
        return True

    def _of_files(self, column: pa.Array) -> _Mask:
        names = column.dictionary_encode()
        wanted = np.array([self._is_wanted(name) for name in names.dictionary.to_pylist()], np.bool_)
        mask: _Mask = wanted[names.indices.to_numpy(zero_copy_only=False)] if len(wanted) else wanted
        return mask

    def _is_wanted(self, name: str) -> bool:
        if name not in self._files:
            self._files[name] = any(
                name == one or name.endswith("/" + one) or fnmatchcase(name, one) for one in self.files
            )
        return self._files[name]


def parse_document_id(text: str) -> bytes:
    """The 16 bytes of a document id in hex; ShardkitError."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise ShardkitError(f"{text!r:.80} is no document id: those have 32 hexadecimal digits")
    return found


def shuffle_hash(document_id: bytes, seed: int) -> int:
    """By which a build has shuffled a document (`shardkit.writers.documents.keyed_hashes`)."""
    key = hashlib.blake2b(f"{seed}\0shuffle".encode(), digest_size=8).digest()
    return xxhash.xxh3_64_intdigest(document_id, int.from_bytes(key, "little"))


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _flags(mask: pa.Array) -> _Mask:
    flags: _Mask = mask.to_numpy(zero_copy_only=False)
    return flags
