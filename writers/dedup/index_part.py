"""One part of an index (index.py): a split's part without the documents that were removed, and their n-grams.

Everything is gone through in the order of documents: memory is a chunk of rows, a run of keys and of band
keys, and the n-grams of some megabytes of text (or of one document), whatever the split's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.hashing import hash_file
from shardkit.writers.dedup.array_file import CHUNK_ROWS, Rows, RowsWriter
from shardkit.writers.dedup.array_rows import RowFile
from shardkit.writers.dedup.bands import BandWriter
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.exact import KeyFile, read_key_runs
from shardkit.writers.dedup.minhash import band_keys
from shardkit.writers.dedup.parts import KEYS_FILE, bands_and_rows
from shardkit.writers.dedup.population import (
    BAND_RUNS_FILE,
    BANDS_FILE,
    DOCUMENT,
    DOCUMENTS_FILE,
    SIGNATURES_FILE,
)
from shardkit.writers.dedup.shingle_store import SETS_FILE, SHINGLES_FILE, ShingleReader, ShingleWriter
from shardkit.writers.dedup.shingles import shingle_batch
from shardkit.writers.documents import text_offsets
from shardkit.writers.execution.work_files import open_arrow

__all__ = ["INDEX_PART_FILES", "copy_sketches", "index_part"]

INDEX_PART_FILES = (
    DOCUMENTS_FILE,
    SIGNATURES_FILE,
    BANDS_FILE,
    BAND_RUNS_FILE,
    KEYS_FILE,
    SETS_FILE,
    SHINGLES_FILE,
)
_PIECE_BYTES = 4 << 20  # of text whose n-grams are held at once: 32 MiB at most
_COPY_BYTES = 16 << 20


def index_part(
    documents: Path,
    part: Path,
    removed: npt.NDArray[np.int64],
    config: NearDedupConfig,
    sketch: int,
    folder: Path,
) -> dict[str, Any]:
    """Write the part of an index that a split gives into `folder`; counts.

    `documents` is the split's Arrow file, `part` what `sign_documents` made of it; `removed` are the rows of
    the Arrow file to leave out, in any order; other rows than the part's do no harm. Of each set of n-grams
    the `sketch` smallest hashes are kept, all if 0.

    {"documents", "bytes": of their texts, "removed": documents left out, "sketches": sets that are not whole,
    "files": {name: {"bytes", "xxh3_128"}}}
    """
    assert config.scope == "global", "check_indexable"
    removed = np.sort(removed)
    count, text_bytes = _filter_tables(part, removed, config, folder)
    sketches = _write_sketches(documents, part, removed, config.minhash, sketch, folder)
    files = {
        name: {"bytes": (folder / name).stat().st_size, **hash_file(folder / name, ["xxh3_128"])}
        for name in INDEX_PART_FILES
    }
    left_out = len(Rows(part / DOCUMENTS_FILE, DOCUMENT)) - count
    return {
        "documents": count,
        "bytes": text_bytes,
        "removed": left_out,
        "sketches": sketches,
        "files": files,
    }


def copy_sketches(
    part: Path, first_number: int, numbers: npt.NDArray[np.uint64], folder: Path
) -> dict[str, int]:
    """Write the stored sets of an index part's documents into `folder`, under their numbers in a population.

    `first_number` is that of the part's first document, `numbers` ascend.
    """
    reader = ShingleReader([part])
    hashes = 0
    with ShingleWriter(folder) as writer:
        for sets in reader.chunks(numbers - np.uint64(first_number), _COPY_BYTES):
            writer.copy(sets, first_number)
            hashes += len(sets.hashes)
    return {"documents": len(numbers), "hashes": hashes}


def _filter_tables(
    part: Path, removed: npt.NDArray[np.int64], config: NearDedupConfig, folder: Path
) -> tuple[int, int]:
    """Write all files of a part but the sets; (documents, bytes of their texts)."""
    bands, rows = bands_and_rows(config)
    table, values = Rows(part / DOCUMENTS_FILE, DOCUMENT), RowFile(part / SIGNATURES_FILE)
    start = text_bytes = 0
    with ExitStack() as stack:
        to_table = stack.enter_context(RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT))
        width = config.minhash.permutations
        to_values = stack.enter_context(RowsWriter(folder / SIGNATURES_FILE, "<u4", width=width))
        to_entries = stack.enter_context(BandWriter(folder))
        to_keys = stack.enter_context(KeyFile(folder / KEYS_FILE))
        for run in read_key_runs(part / KEYS_FILE):
            for begin in range(0, len(run), CHUNK_ROWS):
                keys = run[begin : begin + CHUNK_ROWS]
                described = table.read(start, start + len(keys))
                stay = np.flatnonzero(_stays(described["row"], removed))
                signatures = values.read(stay + start)
                described = described[stay]
                described["row"] = np.arange(to_table.rows, to_table.rows + len(stay))
                to_entries.write(band_keys(signatures, bands, rows), to_table.rows)
                to_keys.write(keys[stay])
                to_values.write(signatures)
                to_table.write(described)
                text_bytes += int(described["bytes"].sum())
                start += len(keys)
    assert start == len(table) == values.rows, part
    return to_table.rows, text_bytes


def _write_sketches(
    documents: Path,
    part: Path,
    removed: npt.NDArray[np.int64],
    config: MinHashConfig,
    sketch: int,
    folder: Path,
) -> int:
    """Write the sets of n-grams; returns how many are not whole."""
    number = sketches = 0
    with ShingleWriter(folder, smallest=sketch or None) as sets:
        for texts in _texts(documents, part, removed):
            numbers = np.arange(number, number + len(texts), dtype=np.uint64)
            sets.write(numbers, *shingle_batch(texts, config))
            number += len(texts)
    if sketch:
        for rows in ShingleReader([folder]).tables():
            sketches += int((rows["stored"] < rows["distinct"]).sum())
    return sketches


def _texts(documents: Path, part: Path, removed: npt.NDArray[np.int64]) -> Iterator[pa.LargeStringArray]:
    """The texts of the part's documents that stay, in order, some megabytes at a time."""
    table = Rows(part / DOCUMENTS_FILE, DOCUMENT)
    start = at = 0
    with open_arrow(documents) as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for batch in range(reader.num_record_batches):
            texts = reader.get_batch(batch).column("text")
            rows = table.read(at, min(at + len(texts), len(table)))["row"]
            rows = rows[: np.searchsorted(rows, start + len(texts))]
            at += len(rows)
            stay = rows[_stays(rows, removed)] - start
            start += len(texts)
            yield from _pieces(texts.take(pa.array(stay)))
    assert at == len(table), part


def _pieces(texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
    """The texts in slices of at most `_PIECE_BYTES`, or one text."""
    offsets = text_offsets(texts)
    begin = 0
    while begin < len(texts):
        end = int(np.searchsorted(offsets, offsets[begin] + _PIECE_BYTES, "right")) - 1
        end = max(end, begin + 1)
        yield texts.slice(begin, end - begin)
        begin = end


def _stays(rows: npt.NDArray[np.int64], removed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of `rows` are not in `removed`; both ascend."""
    places = np.searchsorted(removed, rows)
    stays = np.ones(len(rows), np.bool_)
    inside = places < len(removed)
    stays[inside] = removed[places[inside]] != rows[inside]
    return stays
