"""shardkit, from large_string arrays as a build has them."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from peer_side import BANDS, NGRAM, ROWS, Request, serve

BATCH_DOCUMENTS = 1024


def prepare(table: pa.Table) -> list[pa.LargeStringArray]:
    column = table.column("text").cast(pa.large_string())
    return [
        chunk.slice(start, BATCH_DOCUMENTS)
        for chunk in column.chunks
        for start in range(0, len(chunk), BATCH_DOCUMENTS)
    ]


def signatures(batches: list[pa.LargeStringArray], request: Request) -> int:
    from shardkit.writers.dedup.config import MinHashConfig
    from shardkit.writers.dedup.minhash import sign_batch

    config = MinHashConfig(
        ngram=NGRAM, permutations=request["permutations"], scheme=request.get("scheme", "shardkit")
    )
    return sum(len(sign_batch(batch, config).values) for batch in batches)


def near(_: list[pa.LargeStringArray], request: Request) -> Any:
    """From documents.arrow to the rows to remove, every file on disk; verified."""
    from shardkit.writers.dedup.near import find_near_duplicates

    from shardkit.writers.dedup.config import NearDedupConfig

    config = NearDedupConfig(similarity=request["similarity"], bands=BANDS, rows=ROWS)
    with tempfile.TemporaryDirectory(dir=request["scratch"]) as folder:
        result = find_near_duplicates(
            [Path(request["file"])], config, folder=Path(folder), memory_bytes=request["memory_bytes"]
        )
        return sorted(itertools.chain.from_iterable(rows.tolist() for rows in removed_rows(result)))


def removed_rows(result: Any) -> Any:
    """int64[n] of each documents.arrow."""
    return [result.losers["row"]]


if __name__ == "__main__":
    serve({"signatures": signatures, "near": near}, prepare)
