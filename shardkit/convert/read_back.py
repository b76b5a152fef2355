"""A converted dataset read back: the digest of all its values must be that of what was read from the source.

Whole arrays are hashed as they lie in the shards, samples value by value, by the readers that training uses.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardkit.convert.columns import KEY
from shardkit.convert.source import BLOCK_BYTES
from shardkit.convert.write_rows import content_hasher
from shardkit.convert.write_samples import SampleDigest
from shardkit.dataset import Dataset, open_dataset
from shardkit.errors import ShardError
from shardkit.mds.shard import MdsShard
from shardkit.tar.shard import TarShard

__all__ = ["check_rows", "check_samples"]


def check_rows(folder: Path, column: str, expected: str) -> None:
    """ShardError unless the rows of `column` have the digest `expected`."""
    digest = content_hasher()
    with open_dataset(folder) as dataset:
        for number in range(len(dataset.manifest.shards)):
            rows = dataset.shard(number).fixed_rows(column)
            if rows is None:
                raise ShardError(dataset.where(number), "holds other rows than were written")
            step = max(1, BLOCK_BYTES // max(1, rows[:1].nbytes))
            for start in range(0, len(rows), step):
                digest.update(np.ascontiguousarray(rows[start : start + step]).view(np.uint8).data)
            dataset.keep_only(())
        _compare(dataset, digest.hexdigest(), expected)


def check_samples(folder: Path, expected: str, *, has_keys: bool) -> None:
    """ShardError unless all values of all samples have the digest `expected`."""
    digest = SampleDigest()
    with open_dataset(folder, decode=False) as dataset:
        for number in range(len(dataset.manifest.shards)):
            shard = dataset.shard(number)
            for row in range(len(shard)):
                digest.add(_payloads(shard, row, has_keys=has_keys))
            dataset.keep_only(())
        _compare(dataset, digest.hexdigest(), expected)


def _payloads(shard: object, row: int, *, has_keys: bool) -> dict[str, bytes | memoryview]:
    if isinstance(shard, MdsShard):
        return dict(shard.payloads(row))
    assert isinstance(shard, TarShard)
    payloads: dict[str, bytes | memoryview] = {}
    for name, value in shard.sample(row).items():
        if name == KEY:
            if has_keys:
                payloads[KEY] = str(value).encode("utf-8", "surrogateescape")
        else:
            assert isinstance(value, bytes)
            payloads[name] = value
    return payloads


def _compare(dataset: Dataset, digest: str, expected: str) -> None:
    if digest != expected:
        raise ShardError(
            dataset.location,
            f"holds other rows than were read from the source (digest {digest}, expected {expected}): the "
            "disk or the memory is not to be trusted; nothing was published",
        )
