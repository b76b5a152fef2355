"""Writes the files of `duplicates/`: each removed duplicate with the document that was kept for it.

`shardkit.formats.dropped_table` defines the format. A duplicate and its kept document may be in different
splits. So each stage that drops documents of a split after filtering (cutting lines, tokenizing) writes one
run of the exchange (TWINS): a row for each removed document, and a row for each document that was kept for
others, both keyed by the content rank of the kept document. `join_duplicates` reads ranges of keys, which
bring the two together, the kept one first. Memory does not grow with a split, nor with a group of duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.formats.dropped_table import DUPLICATES_SCHEMA
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.outcomes import AMOUNT, NOT_SAMPLED
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, payload_ends
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.rows.documents import content_ranks, pack_strings, text_digests, unpack_strings
from shardkit.writers.rows.dropped_file import (
    OF_DOCUMENT,
    Lowest,
    RemovedFile,
    beginnings,
    described,
    without_text,
)

DUPLICATES_FILE = "duplicates.parquet"

DUPLICATES_OF_FILE = 1_000_000

TEXTS_OF_SPLIT = 64  # maximum number of texts stored per split, for removed and for kept documents each

_TEXTS_OF_GROUP = 4  # maximum number of texts stored per batch, for duplicates of one document

BATCHES = 8  # a batch takes an eighth of the memory, since joining holds it six times

_LAST = np.iinfo(np.uint64).max

_U64 = npt.NDArray[np.uint64]

_REASONS = (
    "url_duplicate",
    "exact_duplicate",
    "near_duplicate",
    "semantic_duplicate",
    "duplicate_lines",
    "empty",
    AMOUNT,
    NOT_SAMPLED,
)
_LEFT_NOTHING = 4  # index in _REASONS; for this reason and later ones no document was kept

_STRINGS = ("file", "id", "url", "text")

TWINS = Table(
    "duplicates.run",
    np.dtype(
        [
            ("key", "<u8"),  # second half of the kept document's content rank; last bit: 1 if removed
            ("size", "<i8"),
            ("rank", "<u8"),  # first half of the kept document's content rank
            ("document_id", "u1", (16,)),
            ("record", "<i8"),
            ("bytes", "<i8"),
            ("similarity", "<f4"),
            ("source", "<i4"),
            ("reason", "<i4"),  # index in _REASONS; -1: a kept document
            *((name, "<i4") for name in _STRINGS),  # length of each in the payload, in bytes; -1: null
        ]
    ),
    payload=True,
    stays=True,
)

_SAME = ("key", "rank", "record", "bytes", "similarity", "source", "reason")


class TwinsFile:
    """Writes the run of TWINS of one split."""

    def __init__(self, folder: Path, *, memory_bytes: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._run = RunWriter(folder / TWINS.file, TWINS, memory_bytes=memory_bytes, limits=limits)
        self._samples = {goes: Lowest("score", TEXTS_OF_SPLIT) for goes in (False, True)}

    def remove(
        self,
        batch: pa.RecordBatch,
        reason: str,
        rows: npt.NDArray[np.int64],
        outcomes: npt.NDArray[np.void] | None = None,
    ) -> None:
        """Add removed documents of a batch (DOCUMENT_SCHEMA).

        `outcomes` (outcomes.OUTCOME) name the kept documents, if the reason is one for which there are any.
        """
        if not len(rows):
            return
        documents, number = batch.take(pa.array(rows)), _REASONS.index(reason)
        if outcomes is None or number >= _LEFT_NOTHING:
            ranks, ids = _ranks(documents)
            similarity = np.full(len(rows), np.nan, np.float32)
        else:
            ranks, ids, similarity = (outcomes[name] for name in ("kept_text", "kept_id", "similarity"))
        self._write(documents, ids | np.uint64(1), ranks, similarity, number)

    def keep(self, batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> None:
        """Add documents of a batch that were kept for removed duplicates."""
        if len(rows):
            documents = batch.take(pa.array(rows))
            ranks, ids = _ranks(documents)
            self._write(documents, ids & ~np.uint64(1), ranks, np.ones(len(rows), np.float32), -1)

    def _write(
        self,
        documents: pa.RecordBatch,
        keys: _U64,
        ranks: _U64,
        similarity: npt.NDArray[np.float32],
        reason: int,
    ) -> None:
        scores = _scores(keys)
        lowest = np.sort(np.argsort(scores, kind="stable")[:TEXTS_OF_SPLIT])
        columns = {
            "text": beginnings(documents, lowest),
            "key": pa.array(keys),
            "rank": pa.array(ranks),
            "similarity": pa.array(similarity),
            "reason": pa.array(np.full(len(keys), reason, np.int32)),
            "score": pa.array(scores),
        }
        rows = pa.table(described(documents) | columns)
        self._put(without_text(self._samples[reason >= 0].exchange(rows)))

    def _put(self, table: pa.Table) -> None:
        rows = np.zeros(table.num_rows, TWINS.dtype)
        for name in _SAME:
            rows[name] = table.column(name).to_numpy()
        ids = b"".join(table.column("document_id").to_pylist())
        rows["document_id"] = np.frombuffer(ids, np.uint8).reshape(-1, 16)
        self._run.write(rows, pack_strings(table, _STRINGS, rows))

    def __enter__(self) -> Self:
        self._run.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for sample in self._samples.values():
                if sample.held is not None:
                    self._put(sample.held)
        self._run.__exit__(kind, error, trace)


def _ranks(documents: pa.RecordBatch) -> tuple[_U64, _U64]:
    """Return the halves of the documents' content ranks, as numbers in the same order."""
    ranks = content_ranks(text_digests(documents.column("text")), documents.column("document_id"))
    halves = ranks.view(">u8").astype(np.uint64)
    return halves[:, 0], halves[:, 1]


def _scores(keys: _U64) -> _U64:
    """Return one score per document; the texts of the documents with the lowest scores are stored.

    The score is the key without its last bit, which only marks removed documents, so a removed duplicate and
    its kept document get the same score. Of the documents with equal keys, all after the first
    _TEXTS_OF_GROUP get the highest score.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    number = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
    scores = np.empty(len(keys), np.uint64)
    scores[order] = np.where(number < _TEXTS_OF_GROUP, ordered >> np.uint64(1), _LAST)
    return scores


def join_duplicates(
    run: RunTasks,
    written: Sequence[Commit],
    documents: int,
    memory_bytes: int,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Commit]:
    """Return the commits with the files of `duplicates/`, in order.

    `written` are all commits with a run of TWINS, `documents` is the number of removed documents in them.
    """
    files = max(1, -(-documents // DUPLICATES_OF_FILE))
    exchanged = exchange(run, DUPLICATES, TWINS, written, readers=files, limits=limits)
    tasks = []
    for number in range(files):
        start, stop = (bound & ~1 for bound in partition_bounds(number, files))
        piece = exchanged.slice(start, stop)
        tasks.append(DUPLICATES.task(partition_name(number, files), piece.bytes, piece, memory_bytes))
    [commits] = run(tasks)
    return [commit for commit in commits if DUPLICATES.result(commit)]


def write_duplicates(folder: Path, twins: Slice, memory_bytes: MemoryBytes) -> int:
    """Write the removed documents of one range of keys with the kept ones; return their number."""
    documents = 0
    kept = _unpacked(np.empty(0, TWINS.dtype), np.empty(0, np.uint8))
    with RemovedFile(folder / DUPLICATES_FILE, DUPLICATES_SCHEMA) as file:
        for rows, payload in twins.stream(memory_bytes // BATCHES):
            found, kept = _beside(pa.concat_tables([kept, _unpacked(rows, payload)]))
            documents += found.num_rows
            file.write(found)
    return documents


DUPLICATES = Stage("duplicates", "write", write_duplicates, cost=1)


def _unpacked(rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]) -> pa.Table:
    """Return rows of TWINS as a table, with their strings."""
    starts = payload_ends(rows, TWINS)[:-1]
    columns = {name: pa.array(np.ascontiguousarray(rows[name])) for name in _SAME}
    ids = np.ascontiguousarray(rows["document_id"]).tobytes()
    columns["document_id"] = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(rows), [None, pa.py_buffer(ids)]
    )
    return pa.table(columns | unpack_strings(rows, payload, starts, _STRINGS))


def _beside(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Join each removed document with its kept one.

    Returns rows of DUPLICATES_SCHEMA, and the kept documents of the last key, which the next batch may need.
    """
    keys, ranks, reasons = (table.column(name).to_numpy() for name in ("key", "rank", "reason"))
    order = np.lexsort((reasons >= 0, ranks, keys >> np.uint64(1)))
    table = table.take(pa.array(order))
    keys, ranks, reasons = keys[order] >> np.uint64(1), ranks[order], reasons[order]
    goes = reasons >= 0
    stays = np.maximum.accumulate(np.where(goes, -1, np.arange(len(goes))))
    known = (stays >= 0) & (keys == keys[stays]) & (ranks == ranks[stays]) & (reasons < _LEFT_NOTHING)
    kept = table.take(pa.array(stays[goes], mask=~known[goes]))
    removed = table.filter(pa.array(goes))
    columns = {name: removed.column(name) for name in (*OF_DOCUMENT, "bytes", "text")}
    columns |= {f"kept_{name}": kept.column(name) for name in (*OF_DOCUMENT, "text")}
    columns["reason"] = pa.array(_REASONS).take(pa.array(reasons[goes]))
    columns["similarity"] = pa.array(removed.column("similarity").to_numpy(), from_pandas=True)
    last = ~goes & (keys == keys[-1:])
    # Of several kept rows with the same key and rank, carry over only the first.
    last[1:] &= goes[:-1] | (keys[1:] != keys[:-1]) | (ranks[1:] != ranks[:-1])
    return pa.table(columns), table.filter(pa.array(last))
