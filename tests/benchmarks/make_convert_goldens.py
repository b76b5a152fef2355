"""The files of other libraries that tests/tools/test_convert*.py read, as those libraries write them.

    python tests/benchmarks/make_convert_goldens.py tests/golden/convert

Needs an environment of its own, because each of them pins other packages:

    python -m venv peers && peers/bin/pip install torch==2.13.0 litdata datasets zstd
    peers/bin/pip install --no-deps megatron-core

expected.json holds what the libraries themselves read from the files again.
"""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from litdata import StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
)

BLOCK = 16


def write_litdata(folder: Path, items: list[Any], **settings: Any) -> None:
    """One folder of chunks."""
    folder.mkdir()
    writer = BinaryWriter(str(folder), **settings)
    for number, item in enumerate(items):
        writer[number] = item
    writer.done()
    writer.merge()


def litdata_goldens(out: Path, random: np.random.Generator) -> dict[str, Any]:
    """Tokens of uint16, and items of many leaves, plain and compressed."""
    documents = [
        torch.from_numpy(random.integers(0, 60_000, int(n))).to(torch.uint16)
        for n in random.integers(1, 40, 12)
    ]
    write_litdata(out / "litdata_tokens", documents, chunk_size=100, item_loader=TokensLoader())
    blocks = StreamingDataset(str(out / "litdata_tokens"), item_loader=TokensLoader(block_size=BLOCK))
    items = [
        {
            "number": n,
            "name": f"größe {n}",
            "weight": n / 7,
            "flag": n % 2 == 0,
            "blob": bytes(range(n)),
            "row": np.arange(n + 1, dtype=np.float32),
            "ids": torch.arange(n + 2),
            "matrix": np.arange(6, dtype=np.int16).reshape(2, 3) + n,
            "tensor": torch.arange(6).reshape(3, 2) * n,
        }
        for n in range(7)
    ]
    write_litdata(out / "litdata_items", items, chunk_size=4)
    packed = {"chunk_size": 4, "compression": "zstd", "compression_level": "chunk"}
    arrays = [{"number": n, "ids": torch.arange(n + 1)} for n in range(6)]  # plain dicts go into Arrow
    write_litdata(out / "litdata_zstd", arrays, **packed)
    write_litdata(out / "litdata_default", arrays, chunk_size=4, compression="zstd")
    write_litdata(out / "litdata_batch", arrays, chunk_size=4, compression="zstd", compression_batch_size=3)
    write_litdata(
        out / "litdata_sample", arrays, chunk_size=4, compression="zstd:7", compression_level="sample"
    )
    write_litdata(out / "litdata_ipc", [{"number": n} for n in range(6)], **packed)
    write_litdata(out / "litdata_nested", [{"a": {"b": n}} for n in range(2)], chunk_size=4)
    return {
        "litdata_tokens": {
            "documents": [document.tolist() for document in documents],
            "block_size": BLOCK,
            "blocks": [blocks[n].tolist() for n in range(len(blocks))],
        },
        "litdata_items": [
            {
                k: v.hex() if isinstance(v, bytes) else v.tolist() if hasattr(v, "tolist") else v
                for k, v in i.items()
            }
            for i in items
        ],
    }


def megatron_goldens(out: Path, random: np.random.Generator) -> dict[str, Any]:
    """Documents of several sequences and empty ones, and a multimodal dataset."""
    documents = [random.integers(0, 60_000, n) for n in (5, 0, 7, 1, 20, 9)]
    builder = IndexedDatasetBuilder(str(out / "megatron.bin"), dtype=np.uint16)
    for document in documents[:-1]:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.add_document(torch.from_numpy(documents[-1]), [4, 5])
    builder.finalize(str(out / "megatron.idx"))
    builder = IndexedDatasetBuilder(str(out / "multimodal.bin"), dtype=np.int32, multimodal=True)
    builder.add_item(torch.arange(5), 1)
    builder.end_document()
    builder.finalize(str(out / "multimodal.idx"))
    dataset = IndexedDataset(str(out / "megatron"))
    sequences = [dataset[n].tolist() for n in range(len(dataset))]
    marks = dataset.document_indices.tolist()
    read = [[token for sequence in sequences[a:b] for token in sequence] for a, b in pairwise(marks)]
    assert read == [document.tolist() for document in documents]
    return {"megatron": read}


def arrow_goldens(out: Path, random: np.random.Generator) -> dict[str, Any]:
    """Rows of one length and of many, in two files, and splits."""
    rows = random.integers(0, 60_000, (9, 8)).tolist()
    ragged = [random.integers(0, 60_000, n).tolist() for n in (3, 1, 4, 1, 5, 9, 2, 6)]
    fixed = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 8 for _ in rows]})
    fixed.save_to_disk(str(out / "saved"), num_shards=2)
    documents = Dataset.from_dict({"tokens": ragged, "url": [f"u{n}" for n in range(len(ragged))]})
    DatasetDict({"train": documents}).save_to_disk(str(out / "splits"))
    return {"saved": rows, "splits": ragged}


def main() -> None:
    """Write them all into the folder that is named."""
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    random = np.random.default_rng(11)
    expected = {**litdata_goldens(out, random), **megatron_goldens(out, random), **arrow_goldens(out, random)}
    (out / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
