"""Columns of constant size are gathered from where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardkit.datasets.dataset import open_dataset
from shardkit.formats import mds
from shardkit.loaders.gather import FixedColumn, FixedRows
from shardkit.loaders.streams import Streams
from support.loader_data import make_dataset, token_rows


@pytest.mark.parametrize("kind", ["mds", "two_columns", "tar"])
def test_shards_are_read_in_place_whatever_lies_between_their_rows(tmp_path: Path, kind: str) -> None:
    rows = token_rows(53)
    if kind == "two_columns":
        columns = {"label": "int", "tokens": "ndarray:uint16:8"}
        with mds.MdsWriter(tmp_path, columns=columns, shard_bytes=500) as writer:
            for number, row in enumerate(rows):
                writer.write({"label": number, "tokens": row})
    else:
        make_dataset(tmp_path, kind)
    dataset = open_dataset(tmp_path)
    name = dataset.token_column
    assert name is not None
    stored = rows.dtype
    source = FixedRows(Streams([dataset], ["all"]), {"tokens": FixedColumn((name,), (8,), stored, stored)})
    shards = np.arange(len(dataset.manifest.shards), dtype=np.int32)
    starts = dataset.manifest.shard_starts[:-1]
    read, _ = source.open_rows(shards, np.zeros(len(shards), dtype=np.int64))
    found = read(0, len(shards))["tokens"]
    assert np.array_equal(np.asarray(found), rows[starts])
    for number, held in source._columns["tokens"]._maps.items():
        in_file = dataset.shard(number).fixed_rows(name)
        assert in_file is not None
        assert np.shares_memory(held, in_file)
