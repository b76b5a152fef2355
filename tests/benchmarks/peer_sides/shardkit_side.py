"""shardkit: signatures, near-duplicates, filters, keys and tokenizers, from the Arrow batches of a build."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from peer_side import BANDS, FILTERS, NGRAM, ROWS, Request, measured, serve, write_jsonl

BATCH_DOCUMENTS = 4096  # as readers make them
SIGNED_DOCUMENTS = 1024  # at a time, as the stage does


def prepare(table: pa.Table) -> list[pa.RecordBatch]:
    from shardkit.writers.rows.documents import DOCUMENT_SCHEMA, document_ids

    batches = []
    for start in range(0, len(table), BATCH_DOCUMENTS):
        texts = table.column("text").slice(start, BATCH_DOCUMENTS).combine_chunks().cast(pa.large_string())
        count = len(texts)
        columns: list[Any] = [
            pa.array(document_ids("x", range(start, start + count)), pa.binary(16)),
            pa.array(np.zeros(count, np.int32)),
            pa.array(["x"] * count, pa.string()),
            pa.array(np.arange(start, start + count)),
            pa.concat_arrays([texts]),
            *(pa.nulls(count, pa.string()) for _ in range(3)),
        ]
        batches.append(pa.record_batch(columns, schema=DOCUMENT_SCHEMA))
    return batches


def signatures(batches: list[pa.RecordBatch], request: Request) -> int:
    from shardkit.writers.dedup.config import MinHashConfig
    from shardkit.writers.dedup.signatures import sign_batch

    config = MinHashConfig(ngram=NGRAM, permutations=request["permutations"])
    return sum(
        len(sign_batch(batch.column("text").slice(start, SIGNED_DOCUMENTS), config).values)
        for batch in batches
        for start in range(0, len(batch), SIGNED_DOCUMENTS)
    )


def near(_: list[pa.RecordBatch], request: Request) -> list[int]:
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


@cache
def chain(task: str) -> Any:
    from shardkit.writers.filters.chain import FilterChain
    from shardkit.writers.filters.config import FilterEntry

    entries: dict[str, dict[str, Any]] = {
        "repetition": {"gopher_repetition": {}},
        "gopher": {"profile": "gopher"},
        "fineweb": {"profile": "fineweb_rules"},
    }
    return FilterChain(FilterEntry.model_validate(entries[task]).filters())


def filters(batches: list[pa.RecordBatch], request: Request) -> int:
    """Number of documents that pass."""
    return sum(chain(request["task"]).apply(batch).kept.num_rows for batch in batches)


def keys(batches: list[pa.RecordBatch], request: Request) -> int:
    from shardkit.writers.stages.passes import exact_keys

    return sum(len(exact_keys(batch)) for _ in range(request["repeat"]) for batch in batches)


@cache
def encoder(path: str, eos: str, engine: Any) -> Any:
    from shardkit.tokens.tokenizer import Encoder

    return Encoder(Path(path), eos, engine=engine)


def tokenize(batches: list[pa.RecordBatch], request: Request) -> int:
    """Number of tokens."""
    made = encoder(request["tokenizer"], request["eos"], request["engine"])
    return sum(int(made.encode(batch.column("text"))[1].sum()) for batch in batches)


def build(batches: list[pa.RecordBatch], request: Request) -> dict[str, Any]:
    """The documents and tokens that a whole build packed, with processes of their own as workers."""
    from shardkit.writers import build as build_dataset
    from shardkit.writers.recipe.recipe import recipe_from_mapping

    texts = write_jsonl(pa.Table.from_batches(batches))
    with tempfile.TemporaryDirectory() as folder, measured() as usage:
        is_fineweb = request["recipe"] == "fineweb"
        short: dict[str, Any] = {"length": {"min_words": request["min_words"]}}
        near: dict[str, Any] = {"near": {}} if is_fineweb else {}
        recipe = {
            "inputs": [{"path": f"{texts}/*.jsonl", "source": "texts"}],
            "filters": [{"profile": request["profile"]} if is_fineweb else short],
            "dedup": {"exact": {}, **near, "max_removed_fraction": 1},
            "max_bad_fraction": 1,
            "tokenizer": {"path": request["tokenizer"], "eos": request["eos"]},
            "pack": {"sequence_length": request["sequence_length"], "strategy": "concat"},
            "output": {"path": f"{folder}/out"},
        }
        result = build_dataset(
            recipe_from_mapping(recipe, folder=Path(folder)), workers=request["workers"], progress=False
        )
        documents = result.funnel.kept.documents
    return {"tokens": result.tokens, "documents": documents, "usage": usage}


if __name__ == "__main__":
    tasks = {"signatures": signatures, "near": near, "keys": keys, "tokenize": tokenize, "build": build}
    serve({**tasks, **dict.fromkeys(FILTERS, filters)}, prepare)
