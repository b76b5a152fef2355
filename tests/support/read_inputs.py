"""Reading one input file as a build does: all documents, quarantine entries and the checked ledger."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardkit.writers.inputs.fields import NamedFields
from shardkit.writers.inputs.readers import SuspectDataError, read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA
from shardkit.writers.rows.ledger import Count, Ledger, Quarantine

Bad = dict[str, Any]


def recipe(folder: Path, *inputs: str | dict[str, Any], **settings: Any) -> Recipe:
    """A recipe in `folder` of inputs, which are paths or settings."""
    data = {
        "inputs": [{"path": one} if isinstance(one, str) else one for one in inputs],
        "tokenizer": {"path": "tokenizer.json", "eos": "<|endoftext|>"},
        "output": {"path": "out"},
    }
    return recipe_from_mapping(data | settings, folder=folder)


def read(
    folder: Path,
    name: str,
    *,
    split_bytes: int = 1 << 26,
    allowed: float = 1.0,
    limit: int = 1 << 26,
    records: int | None = None,
    notes: list[str] | None = None,
    **config: Any,
) -> tuple[pa.Table, list[Bad], Ledger]:
    """All documents of one input file, or its first `records`, its quarantine and its checked ledger.

    `notes` receives the reader's warnings.
    """
    made = recipe(folder, {"path": name, **config}, limit=records)
    ledger = Ledger()
    batches: list[pa.RecordBatch] = []
    bad: list[Bad] = []
    for split in scan_inputs(made, split_bytes=split_bytes):
        with tempfile.TemporaryDirectory() as scratch:
            path, suspect = Path(scratch) / "q.jsonl", None
            for _ in range(2):
                part, fields = Ledger(), NamedFields(made.inputs[0])
                try:
                    with Quarantine(path, max_bad_fraction=allowed) as quarantine:
                        found = read_split(
                            split,
                            made.inputs[0],
                            part,
                            quarantine,
                            max_record_bytes=limit,
                            fields=fields,
                            suspect=suspect,
                        )
                        batches += list(found)
                except SuspectDataError as error:
                    suspect = error
                else:
                    break
            if notes is not None:
                notes += fields.notes
            bad += map(json.loads, path.read_bytes().splitlines())
        ledger.merge(part)
    table = pa.Table.from_batches(batches, DOCUMENT_SCHEMA)
    table.validate(full=True)
    texts = table["text"].to_pylist()
    ledger.kept += Count(len(texts), sum(len(text.encode()) for text in texts))
    ledger.check(name)
    return table, bad, ledger


def put(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return name


def data_folder() -> Path:
    """The corpora to test against; skips the test without them."""
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"])
