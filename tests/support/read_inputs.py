"""Reading one input file as a build does: all documents, quarantine entries and the checked ledger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardkit.writers.documents import DOCUMENT_SCHEMA
from shardkit.writers.inputs.readers import SuspectDataError, read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.ledger import Count, Ledger, Quarantine
from shardkit.writers.recipe import recipe_from_mapping

Bad = dict[str, Any]


def read(
    folder: Path,
    name: str,
    *,
    split_bytes: int = 1 << 26,
    allowed: float = 1.0,
    limit: int = 1 << 26,
    **config: Any,
) -> tuple[pa.Table, list[Bad], Ledger]:
    """All documents of one input file, its quarantine and its checked ledger."""
    data = {
        "inputs": [{"path": name, **config}],
        "tokenizer": {"path": "t.json", "eos": "</s>"},
        "output": {"path": "out"},
    }
    recipe = recipe_from_mapping(data, folder=folder)
    ledger = Ledger()
    batches: list[pa.RecordBatch] = []
    entries = []
    for split in scan_inputs(recipe, split_bytes=split_bytes):
        suspect = None
        for _ in range(2):
            part = Ledger()
            try:
                with Quarantine(folder / "q.jsonl", max_bad_fraction=allowed) as quarantine:
                    found = list(
                        read_split(
                            split,
                            recipe.inputs[0],
                            part,
                            quarantine,
                            max_record_bytes=limit,
                            suspect=suspect,
                        )
                    )
            except SuspectDataError as error:
                suspect = error
            else:
                break
        batches += found
        ledger.merge(part)
        entries += (folder / "q.jsonl").read_bytes().splitlines()
    table = pa.Table.from_batches(batches, DOCUMENT_SCHEMA)
    table.validate(full=True)
    texts = table["text"].to_pylist()
    ledger.kept += Count(len(texts), sum(len(text.encode()) for text in texts))
    ledger.check(name)
    bad = [json.loads(line) for line in entries]
    return table, bad, ledger


def put(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return name


def data_folder() -> Path:
    """The corpora to test against; skips the test without them."""
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"])
