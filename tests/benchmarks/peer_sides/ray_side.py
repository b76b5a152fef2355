"""Ray Data: filter, exact duplicates, tokens, shuffle and packing, by its hash shuffle on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from peer_side import Request, measured, serve, write_jsonl


def clean(batch: pa.Table, min_words: int) -> pa.Table:
    """Documents of at least so many words, with the hash of their text."""
    import xxhash

    texts = batch.column("text").to_pylist()
    kept = [text for text in texts if len(text.split()) >= min_words]
    keys = [xxhash.xxh3_128_digest(text.encode()) for text in kept]
    return pa.table({"text": pa.array(kept, pa.large_string()), "key": pa.array(keys, pa.binary())})


def first_of_each(batch: pa.Table) -> pa.Table:
    """One document of each key; all of a key are in one block."""
    rows = {key: row for row, key in enumerate(batch.column("key").to_pylist())}
    return batch.take(pa.array(sorted(rows.values())))


def tokenize(batch: pa.Table, path: str, eos: str) -> pa.Table:
    """Tokens of each document, the eos id last."""
    import gigatoken
    import tokenizers

    loaded = vars(gigatoken).setdefault("loaded_by_benchmark", {})  # once in a worker: Ray copies this module
    if not loaded:
        data = Path(path).read_text()
        loaded["tokenizer"] = gigatoken.Tokenizer.from_json(data)
        loaded["eos"] = tokenizers.Tokenizer.from_str(data).token_to_id(eos)
    encoded = loaded["tokenizer"].encode_batch(batch.column("text").to_pylist(), parallel=False)
    tokens = [np.append(np.asarray(ids), loaded["eos"]).astype(np.uint16).tobytes() for ids in encoded]
    return pa.table({"key": batch.column("key"), "tokens": pa.array(tokens, pa.large_binary())})


def pack(batch: pa.Table, length: int, folder: str) -> pa.Table:
    """Documents in the order of their hashes, cut into rows; a file a block."""
    order = pa.compute.sort_indices(batch, [("key", "ascending")])
    joined = b"".join(batch.column("tokens").take(order).to_pylist())
    tokens = np.frombuffer(joined, np.uint16)
    rows = np.zeros(-(-len(tokens) // length) * length, np.uint16)
    rows[: len(tokens)] = tokens
    np.save(Path(folder) / f"{os.getpid()}-{time.monotonic_ns()}.npy", rows.reshape(-1, length))
    return pa.table({"tokens": [len(tokens)], "documents": [len(batch)]})


def build(texts: Path, request: Request) -> dict[str, Any]:
    """The documents and tokens that were packed."""
    import ray

    with measured() as usage, tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=request["workers"], include_dashboard=False, log_to_driver=False)
        try:
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            data: Any = ray.data.read_json(str(texts))  # its types do not know fn_kwargs
            arrow: dict[str, Any] = {"batch_format": "pyarrow"}
            data = data.map_batches(clean, fn_kwargs={"min_words": request["min_words"]}, **arrow)
            blocks = request["partitions"]
            data = data.repartition(blocks, keys=["key"]).map_batches(first_of_each, batch_size=None, **arrow)
            arguments = {"path": request["tokenizer"], "eos": request["eos"]}
            data = data.map_batches(tokenize, batch_size=1024, fn_kwargs=arguments, **arrow)
            data = data.repartition(blocks, keys=["key"])
            packing = {"length": request["sequence_length"], "folder": folder}
            packed = data.map_batches(pack, batch_size=None, fn_kwargs=packing, **arrow).take_all()
        finally:
            ray.shutdown()
    return {name: sum(row[name] for row in packed) for name in ("tokens", "documents")} | {"usage": usage}


if __name__ == "__main__":
    serve({"build": build}, write_jsonl)
