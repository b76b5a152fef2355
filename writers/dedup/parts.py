"""A part of the population: the documents of one split that can be near-duplicates, with their signatures.

Left out are rows that lost to an equal text already, and texts without any word, which are like nothing. The
files are those of `population.py`; rows stand in the order of the split's documents. Memory is one batch of
documents and one run of band keys, whatever the split's size.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.array_file import RowsWriter
from shardkit.writers.dedup.bands import BandWriter
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.exact import KEY_DTYPE, KeyFile
from shardkit.writers.dedup.lsh import optimal_parameters
from shardkit.writers.dedup.minhash import Signatures, band_keys, sign_batch
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, SIGNATURES_FILE
from shardkit.writers.documents import content_ranks, text_digests, text_offsets
from shardkit.writers.execution.work_files import open_arrow
from shardkit.writers.spill import Removed

__all__ = ["KEYS_FILE", "bands_and_rows", "part_settings", "sign_documents"]

KEYS_FILE = "keys.npy"


def bands_and_rows(config: NearDedupConfig) -> tuple[int, int]:
    """The recipe's, or the best for its similarity."""
    if config.bands is not None and config.rows is not None:
        return config.bands, config.rows
    return optimal_parameters(config.similarity, config.minhash.permutations)


def part_settings(config: NearDedupConfig) -> dict[str, Any]:
    """All of the settings that decide a part's files: parts compare only where these are the same."""
    bands, rows = bands_and_rows(config)
    return {
        # Older indexes name their scheme, so that those of another one are refused.
        "minhash": config.minhash.model_dump(mode="json") | {"scheme": "shardkit"},
        "bands": bands,
        "rows": rows,
        "by_source": config.scope == "source",
    }


def sign_documents(
    documents: Path, removed: Removed, config: NearDedupConfig, folder: Path
) -> dict[str, int]:
    """Write the part of `documents` (an Arrow file of DOCUMENT_SCHEMA) into `folder`; counts.

    Of what is `removed` already there is no trace but the number of copies that others stand for.
    """
    bands, rows = bands_and_rows(config)
    losers = np.sort(np.concatenate([np.zeros(0, np.int64), *removed.rows.values()]))
    by_source = config.scope == "source"
    start = wordless = 0
    with ExitStack() as stack:
        source = stack.enter_context(open_arrow(documents))
        table = stack.enter_context(RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT))
        width = config.minhash.permutations
        values = stack.enter_context(RowsWriter(folder / SIGNATURES_FILE, "<u4", width=width))
        entries = stack.enter_context(BandWriter(folder))
        keys = stack.enter_context(KeyFile(folder / KEYS_FILE))
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[0, 1, 4]))
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            kept = _kept_rows(losers, start, batch.num_rows)
            signed, described = _sign_batch(batch, kept, config)
            copies, here = np.ones(batch.num_rows, np.int64), removed.part(start, batch.num_rows)
            copies[here.copied] = here.copies
            described["copies"] = copies[described["row"]]
            described["row"] += start
            start += batch.num_rows
            wordless += len(kept) - len(described)
            sources = described["source"] if by_source else None
            entries.write(band_keys(signed.values, bands, rows, sources), table.rows)
            keys.write(_key_rows(signed, described, by_source))
            values.write(signed.values.astype("<u4", copy=False))
            table.write(described)
    return {"documents": table.rows, "wordless": wordless, "bands": bands}


def _kept_rows(losers: npt.NDArray[np.int64], start: int, count: int) -> npt.NDArray[np.int64]:
    first, last = np.searchsorted(losers, [start, start + count])
    return np.delete(np.arange(count), losers[first:last] - start)


def _sign_batch(
    batch: pa.RecordBatch, kept: npt.NDArray[np.int64], config: NearDedupConfig
) -> tuple[Signatures, npt.NDArray[np.void]]:
    """Signatures and DOCUMENT rows (`row` within the batch) of those of `kept` that have words."""
    if len(kept) < batch.num_rows:
        batch = batch.take(pa.array(kept))
    signed = sign_batch(batch.column("text"), config.minhash)
    some = np.flatnonzero(signed.shingles)
    described = np.empty(len(kept), DOCUMENT)
    described["id"] = content_ranks(text_digests(batch.column("text")), batch.column("document_id"))
    described["row"] = kept
    described["bytes"] = np.diff(text_offsets(batch.column("text")))
    described["source"] = batch.column("source").to_numpy()
    described["copies"] = 1
    if len(some) < len(kept):
        signed = Signatures(signed.values[some], signed.keys[some], signed.shingles[some])
        described = described[some]
    return signed, described


def _key_rows(signed: Signatures, described: npt.NDArray[np.void], by_source: bool) -> npt.NDArray[np.void]:
    rows = np.empty(len(described), KEY_DTYPE)
    rows["key"] = signed.keys
    if by_source:  # equal words of different sources must not meet
        scattered = (described["source"].astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        rows["key"][:, :8] ^= scattered.astype("<u8").view(np.uint8).reshape(-1, 8)
    for name in ("id", "bytes", "source"):
        rows[name] = described[name]
    return rows
