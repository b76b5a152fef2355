"""Multiplies a built dataset, so that a large one is there in minutes.

Shards are links to the same file. Every table is written by the writers of a build, with other document ids
in each copy, and in as many files as a build of that size has: `provenance/` sorted by the hashes of ids, a
file of `dropped/` and `annotations/` for each split, and one of `duplicates/` for a million. All counts of
the card are multiplied. Texts are those of the small dataset, and ids in rows are any document's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.datasets.dataset import open_dataset
from shardkit.formats.dropped_table import (
    DROPPED_FOLDER,
    DROPPED_SCHEMA,
    DUPLICATES_FOLDER,
    DUPLICATES_SCHEMA,
    part_name,
)
from shardkit.formats.mds.index import write_index
from shardkit.formats.mds.writer import write_rows_shard
from shardkit.formats.provenance import (
    PROVENANCE_FOLDER,
    PROVENANCE_SCHEMA,
    ROW_GROUP_PIECES,
    HashRange,
    provenance_name,
)
from shardkit.hashing import keyed_id_hashes
from shardkit.manifest import ShardInfo
from shardkit.settings import ANNOTATIONS_FOLDER
from shardkit.writers.dedup.duplicates import DUPLICATES_OF_FILE
from shardkit.writers.rows.annotations import ROW_GROUP_DOCUMENTS, _open_writer
from shardkit.writers.rows.dropped_file import RemovedFile, without_text
from shardkit.writers.stages.provenance import _writer

PARTITION_DOCUMENTS = 1 << 17  # of a file of provenance/
SPLIT_DOCUMENTS = 50_000  # of a file of dropped/ and annotations/: 64 MB of text or so

_U64 = npt.NDArray[np.uint64]


def multiply(small: Path, folder: Path, documents: int) -> Path:
    """Write a dataset of at least `documents` kept documents into `folder`; returns it."""
    folder.mkdir(parents=True)
    with open_dataset(small) as dataset:
        assert dataset.card is not None
        copies = -(-documents // dataset.card.funnel.kept.documents)
        _write_shards(dataset, folder, copies)
        starts, card = dataset.manifest.shard_starts, dict(dataset.card.data)
    _write_provenance(small, folder, copies, starts, card["recipe"].get("seed", 17))
    masks = np.random.default_rng(17).integers(0, 1 << 63, (copies, 2), np.uint64)
    _write_removed(small, folder, DROPPED_FOLDER, masks, SPLIT_DOCUMENTS)
    _write_removed(small, folder, DUPLICATES_FOLDER, masks, DUPLICATES_OF_FILE)
    _write_annotations(small, folder, masks)
    with open_dataset(folder) as dataset:
        facts = {key: _times(value, copies) for key, value in card.items() if key in _COUNTED}
        facts |= {"shards": copies, "fingerprint": dataset.fingerprint, "files": {}}
    (folder / "dataset.json").write_text(json.dumps(card | facts))
    return folder


_COUNTED = (
    *("bytes", "stored_bytes", "tokens", "padding", "samples", "inputs"),
    *("funnel", "dedup", "filters", "packing", "histograms"),
)
_SAME = ("similarity", "ngram", "permutations", "bands", "rows", "dimensions", "probes", "one_in", "record")


def _times(value: Any, copies: int, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _times(one, copies, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_times(one, copies, key) for one in value]
    return value * copies if type(value) is int and key not in _SAME else value


def _write_shards(dataset: Any, folder: Path, copies: int) -> None:
    column = dataset.token_column
    parts = [dataset.shard(n).fixed_rows(column) for n in range(len(dataset.manifest.shards))]
    rows = np.concatenate(parts)
    first = write_rows_shard(folder, "shard.00000.mds", rows, column=column, hashes=["xxh3_128"])
    shards: list[ShardInfo] = [first]
    for number in range(1, copies):
        name = f"shard.{number:05d}.mds"
        os.link(folder / first.raw.basename, folder / name)
        shards.append(replace(first, raw=replace(first.raw, basename=name)))
    write_index(folder, shards)


def _write_provenance(small: Path, folder: Path, copies: int, starts: Any, seed: int) -> None:
    (folder / PROVENANCE_FOLDER).mkdir()
    table = pq.read_table(small / PROVENANCE_FOLDER).combine_chunks()
    rows = starts[table.column("shard").to_numpy()] + table.column("row").to_numpy()
    first = table.column("document_start").to_numpy() == 0
    documents = int(first.sum())
    number = np.where(
        first, np.cumsum(first) - 1, np.random.default_rng(1).integers(0, documents, len(first))
    )
    random = np.random.default_rng(7).integers(0, 256, (documents * copies, 16), np.uint8)
    hashes = keyed_id_hashes(random, seed, "shuffle")
    order = np.argsort(hashes)
    ids, hashes = random[order], hashes[order]
    together = max(1, PARTITION_DOCUMENTS // documents)
    for file, begin in enumerate(range(0, copies, together)):
        some = range(begin, min(begin + together, copies))
        pieces = []
        for copy in some:
            changed = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), len(number), [None, pa.py_buffer(ids[copy * documents + number].tobytes())]
            )
            part = table.set_column(0, "shard", pa.array(np.full(len(rows), copy, np.int32)))
            part = part.set_column(1, "row", pa.array(rows.astype(np.int32)))
            pieces.append(part.set_column(4, "document_id", changed))
        held = hashes[begin * documents : (some[-1] + 1) * documents]
        range_of = HashRange(seed, int(held[0]), int(held[-1])).to_metadata()
        schema = PROVENANCE_SCHEMA.with_metadata(range_of)
        whole = pa.concat_tables(pieces).cast(PROVENANCE_SCHEMA).replace_schema_metadata(range_of)
        with _writer(folder / provenance_name(file), schema) as writer:
            writer.write_table(whole, row_group_size=ROW_GROUP_PIECES)


def _write_removed(small: Path, folder: Path, name: str, masks: _U64, of_file: int) -> None:
    (folder / name).mkdir()
    schema = DROPPED_SCHEMA if name == DROPPED_FOLDER else DUPLICATES_SCHEMA
    table = pq.read_table(small / name).combine_chunks()
    documents = pq.read_table(small / ANNOTATIONS_FOLDER).num_rows if name == DROPPED_FOLDER else len(table)
    for file, some in enumerate(_together(masks, documents, of_file)):
        with RemovedFile(folder / part_name(name, file), schema) as written:
            for number, mask in enumerate(some):
                part = _other_ids(table, mask)
                written.write(without_text(part) if number else part)


def _write_annotations(small: Path, folder: Path, masks: _U64) -> None:
    if not (small / ANNOTATIONS_FOLDER).exists():
        return
    (folder / ANNOTATIONS_FOLDER).mkdir()
    table = pq.read_table(small / ANNOTATIONS_FOLDER).combine_chunks()
    for file, some in enumerate(_together(masks, len(table), SPLIT_DOCUMENTS)):
        with _open_writer(folder / part_name(ANNOTATIONS_FOLDER, file), table.schema) as writer:
            whole = pa.concat_tables([_other_ids(table, mask) for mask in some])
            writer.write_table(whole, row_group_size=ROW_GROUP_DOCUMENTS)


def _together(masks: _U64, documents: int, of_file: int) -> Iterator[_U64]:
    step = max(1, of_file // max(1, documents))
    for at in range(0, len(masks), step):
        yield masks[at : at + step]


def _other_ids(table: pa.Table, mask: _U64) -> pa.Table:
    """Return a table with other ids: equal ones stay equal, in all tables."""
    for name in ("document_id", "kept_document_id"):
        if name not in table.column_names:
            continue
        column = table.column(name).combine_chunks()
        ids = np.frombuffer(column.buffers()[1], np.uint64, 2 * len(column), 16 * column.offset)
        data = (ids.reshape(-1, 2) ^ mask).tobytes()
        nulls = None if not column.null_count else pa.array(column.is_valid()).buffers()[1]
        other = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(column), [nulls, pa.py_buffer(data)])
        table = table.set_column(table.column_names.index(name), table.schema.field(name), other)
    return table
