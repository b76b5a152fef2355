"""shardkit, from large_string arrays as a build has them."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
    from shardkit.writers.dedup.signatures import sign_batch

    config = MinHashConfig(ngram=NGRAM, permutations=request["permutations"])
    return sum(len(sign_batch(batch, config).values) for batch in batches)


def near(_: list[pa.LargeStringArray], request: Request) -> list[int]:
    """From documents.arrow to the rows to remove, every file on disk; verified."""
    from shardkit.writers.dedup.config import NearDedupConfig
    from shardkit.writers.dedup.near import find_near_duplicates

    config = NearDedupConfig(similarity=request["similarity"], bands=BANDS, rows=ROWS)
    with tempfile.TemporaryDirectory(dir=request["scratch"]) as folder:
        result = find_near_duplicates(
            [Path(request["file"])], config, folder=Path(folder), memory_bytes=request["memory_bytes"]
        )
        rows: list[int] = result.losers["row"].tolist()
        return rows


if __name__ == "__main__":
    serve({"signatures": signatures, "near": near}, prepare)
