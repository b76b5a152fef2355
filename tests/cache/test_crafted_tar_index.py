"""Indexes of tars that a cache keeps: crafted ones, checksums and all, are made anew or give samples."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardkit.cache.indexes import TarIndexes
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.formats.tar.members import Scanned
from shardkit.formats.tar.shard_list import describe_tar
from support.foreign_tars import tar_bytes
from support.json_trees import variants

RAW = np.frombuffer(tar_bytes(0, 7), dtype=np.uint8)
PREFIX = struct.Struct("<8sI")
DIGEST_BYTES = 16


def kept(folder: Path) -> tuple[TarIndexes, Path, bytes]:
    shard = tar.shard_from_raw("a.tar", describe_tar("a.tar"), RAW)
    indexes = TarIndexes.in_cache(folder, [("s3://bucket/a.tar", "v1")])
    indexes.keep(0, Scanned(len(shard), len(RAW), shard.columns), shard.index)
    file = indexes._file(0)
    assert file is not None
    return indexes, file, file.read_bytes()


def parts_of(data: bytes) -> tuple[dict[str, object], bytes]:
    """The head and the body."""
    size = PREFIX.unpack_from(data)[1]
    start = PREFIX.size + size
    return json.loads(data[PREFIX.size : start]), data[start + DIGEST_BYTES : -DIGEST_BYTES]


def joined(head: object, body: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    front = PREFIX.pack(b"shardtx2", len(text)) + text
    return front + xxhash.xxh3_128_digest(front) + body + xxhash.xxh3_128_digest(body)


def check(indexes: TarIndexes) -> bool:
    """Whether an index was believed; if so, its samples are values or ShardErrors."""
    scanned, index = indexes.scanned(0), indexes.index(0)
    if scanned is not None:
        assert scanned.samples >= 0
        assert {len(f"{one.name}{one.encoding}") > 0 for one in scanned.columns} <= {True}
    if index is None:
        return False
    with contextlib.suppress(ShardError):
        shard = tar.shard_from_raw("a.tar", describe_tar("a.tar"), RAW, index=index)
        for row in range(min(len(shard), 20)):
            with contextlib.suppress(ShardError):
                assert shard.sample(row)
        assert all(isinstance(shard.key(row), str) for row in range(min(len(shard), 20)))
        assert isinstance(shard.columns, tuple)
        for column in shard.columns:
            shard.fixed_rows(column.name)
            shard.offset_rows(column.name)
    return True


def test_crafted_heads_are_no_indexes_or_usable_ones(tmp_path: Path) -> None:
    indexes, file, good = kept(tmp_path)
    head, body = parts_of(good)
    assert joined(head, body) == good
    assert check(indexes)
    believed = refused = 0
    for crafted in variants(head):
        try:
            file.write_bytes(joined(crafted, body))
        except (ValueError, TypeError):
            continue
        found = check(indexes)
        believed, refused = believed + found, refused + (not found)
    assert refused > 500
    assert believed < refused


def _bodies(body: bytes) -> Iterator[bytes]:
    rng = np.random.default_rng(5)
    limits = [0, 1, -1, 511, 1 << 31, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 62]
    for width in (8, 4):
        for at in range(0, len(body) - width, width):
            value = limits[int(rng.integers(len(limits)))]
            number = (value % (1 << 8 * width)).to_bytes(width, "little")
            yield body[:at] + number + body[at + width :]


def test_crafted_bodies_are_no_indexes_or_usable_ones(tmp_path: Path) -> None:
    indexes, file, good = kept(tmp_path)
    head, body = parts_of(good)
    found = []
    for crafted in _bodies(body):
        file.write_bytes(joined(head, crafted))
        found.append(check(indexes))
    assert sum(found) < len(found)
    assert len(found) > 100


@pytest.mark.parametrize("count", [1 << 33, 1 << 52, 1 << 62, 1 << 80])
def test_a_head_of_many_keys_allocates_nothing(tmp_path: Path, count: int) -> None:
    indexes, file, good = kept(tmp_path)
    head, body = parts_of(good)
    file.write_bytes(joined(head | {"key_bytes": count}, body))
    assert indexes.index(0) is None
