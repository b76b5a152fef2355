"""`index.bin` beside a large index.json: the same, in arrays that load in a fraction of a second.

An uncompressed .npz: `header` (JSON: version, size and xxh3_128 of the index.json it belongs to, the
dataset's fingerprint, one index entry for each kind of shard), `kind`, `samples`, and of the raw and the
stored files names, sizes and digests. It only saves time: if it is missing, damaged, or belongs to another
index.json, that is read instead.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import xxhash

from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.hashing import HASH_NAMES
from shardkit.index import ShardInfo
from shardkit.shard_table import Files, ShardTable

__all__ = ["TABLE_NAME", "TABLE_SHARDS", "read_table", "table_bytes"]

TABLE_NAME = "index.bin"
TABLE_SHARDS = 10_000  # from so many on; fewer are read from JSON in a tenth of a second
_VERSION = 1
_READ_BYTES = 1 << 20

Entry = dict[str, Any]


def table_bytes(table: ShardTable, index: bytes, entry_of: Callable[[ShardInfo], Entry]) -> bytes:
    """index.bin for the shards that `index`, the bytes of index.json, lists."""
    files = {"raw": table.raw} | ({"zip": table.packed} if table.packed is not None else {})
    header = {
        "version": _VERSION,
        "index_bytes": len(index),
        "index_xxh3_128": xxhash.xxh3_128_hexdigest(index),
        "fingerprint": table.fingerprint,
        "kinds": [entry_of(kind) for kind in table.kinds],
        "hashes": {key: list(each.hash_names) for key, each in files.items()},
    }
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header, sort_keys=True).encode(), dtype=np.uint8),
        "kind": table.kind,
        "samples": table.samples,
    }
    for key, each in files.items():
        arrays |= {f"{key}_names": each.names, f"{key}_sizes": each.sizes}
        arrays |= {
            f"{key}_{name}": digests for name, digests in zip(each.hash_names, each.digests, strict=True)
        }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def read_table(index_file: Path, parse: Callable[[int, Entry], ShardInfo]) -> ShardTable | None:
    """What lies beside `index_file` and belongs to it; None if there is nothing sound.

    `parse` checks an entry of an index and makes a shard of it.
    """
    file = index_file.with_name(TABLE_NAME)
    try:
        if not file.is_file():
            return None
        with np.load(file, allow_pickle=False) as arrays:
            header = load_json(arrays["header"].tobytes())
            if header["version"] != _VERSION or not _belongs(header, index_file):
                return None
            return _table(header, arrays, parse)
    except (ShardError, OSError, ValueError, LookupError, TypeError, EOFError, MemoryError):
        return None
    except (BadZipFile, NotImplementedError, RuntimeError):  # what zipfile says of features it has not
        return None


def _table(
    header: Mapping[str, Any], arrays: Mapping[str, Any], parse: Callable[[int, Entry], ShardInfo]
) -> ShardTable | None:
    kinds = [parse(number, entry) for number, entry in enumerate(header["kinds"])]
    kind, samples = arrays["kind"], arrays["samples"]
    raw = _files(header, arrays, "raw")
    packed = _files(header, arrays, "zip") if "zip" in header["hashes"] else None
    count = len(samples)
    sound = (
        _is_ints(kind, np.int32)
        and _is_ints(samples, np.int64)
        and len(kind) == count == len(raw)
        and raw.are_sound()
        and 0 <= int(kind.min()) <= int(kind.max()) < len(kinds)
        and bool((samples >= 0).all())
        and bool((samples <= raw.sizes // 4).all())
        and int(raw.sizes.max()) < 1 << 32
        and all((each.zip is not None) == (packed is not None) for each in kinds)
        and (packed is None or (len(packed) == count and packed.are_sound()))
        and isinstance(header["fingerprint"], str)
    )
    return ShardTable(kinds, kind, samples, raw, packed, header["fingerprint"]) if sound else None


def _files(header: Mapping[str, Any], arrays: Mapping[str, Any], key: str) -> Files:
    names: Sequence[str] = header["hashes"][key]
    if not set(names) <= set(HASH_NAMES):
        raise ValueError("unknown hashes")
    digests = tuple(arrays[f"{key}_{name}"] for name in names)
    files = Files(arrays[f"{key}_names"], arrays[f"{key}_sizes"], tuple(names), digests)
    plain = [files.names, *digests]
    if any(array.dtype != np.uint8 for array in plain) or files.names.ndim != 1:
        raise ValueError("not bytes")
    if not _is_ints(files.sizes, np.int64) or any(array.ndim != 2 for array in digests):
        raise ValueError("wrong shapes")
    return files


def _is_ints(array: Any, dtype: type[np.signedinteger[Any]]) -> bool:
    return bool(array.ndim == 1 and array.dtype == dtype)


def _belongs(header: Mapping[str, Any], index_file: Path) -> bool:
    """Whether the index.json that lies there is the one that the table was made of."""
    if index_file.stat().st_size != header["index_bytes"]:
        return False
    found, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    with index_file.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return bool(found.hexdigest() == header["index_xxh3_128"])
