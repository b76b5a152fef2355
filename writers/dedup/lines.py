"""Line dedup: cuts lines that occur in several documents. Three steps, each a stage of a build.

All rules for lines hold also for paragraphs, and for the windows of words that find shared spans
(kernels/line_units.py). Of the documents that contain a line, the `keep` ones of highest priority (lowest
source, then lowest content rank, rows/documents.py) keep all its occurrences; all others lose it. So the
result depends on the texts alone, not on their names or on how they are divided into files, splits and
partitions. The probability that any two of n different lines have the same 128-bit hash, so that one is cut
in error, is n^2 / 2^129: 10^-17 for 10^11 lines.

1. `write_line_keys`, one task per split, hashes all lines:
       line_keys.run    LINE_KEYS, which the exchange sorts by the first half of the hash
       line_losers.bin  CUT_LINE, sorted: lines that `keep` other documents of the same chunk already keep.
                        They get no keys, so a line of every document makes only `keep` keys per chunk.
2. `find_line_losers`, one task per partition of keys, decides which documents lose which lines:
       line_losers.run  LINE_LOSERS, which go back to their splits (dedup/outcomes.py)
3. `cut_lines`, one task per split, writes the documents again:
       documents.arrow  DOCUMENT_SCHEMA, in the same order, without the documents that earlier steps removed
                        and without documents that have only white space left
       rows.npy         int64[n]: the former row of each document
       outcomes.bin     outcomes.OUTCOME: documents that represent removed duplicates, with their new rows
       duplicates.run   removed documents, and the documents that were kept for them (duplicates.py)
   Its ledger: read = kept + dropped. Reasons for dropping are those of earlier removals, and
   "duplicate_lines", which counts all bytes that were cut, and the documents that have nothing left.

Memory: a batch of documents and a share of the budget. Step 1 holds a chunk of lines (with less memory there
are more chunks, so more keys, and the same lines are cut). Step 2 holds a batch of a partition; the documents
that so far keep the last line of a batch are carried over to the next. Keys take 48 bytes per line on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.kernels.text_arrays import text_offsets, text_pieces
from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.exact import partition_bounds, repeated, row_batches
from shardkit.writers.dedup.outcomes import (
    SplitRemovals,
    SplitRows,
    SplitTable,
    by_split,
    document_keys,
    latest_outcomes,
    write_tables,
)
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.rewriting import RewrittenRows
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.kernels.line_units import Units, cut_spans, cut_units, find_spans, find_units
from shardkit.writers.rows.documents import (
    DOCUMENT_OPTIONS,
    DOCUMENT_SCHEMA,
    content_ranks,
    text_digests,
)
from shardkit.writers.rows.ledger import Count, Ledger

CHUNK_ROWS = 1 << 19  # maximum number of lines of a split that are compared with each other in memory

_PEAK_BYTES_PER_ROW = 160  # measured peak memory per row of a chunk where all lines are repeated

_PEAK_BYTES_PER_UNIT = 100  # peak memory per line or window while rows of LINE_KEYS are made

LINE_KEYS = Table(
    "line_keys.run",
    np.dtype(
        [
            ("key", "<u8"),  # the first half of the line's hash; `low` is the second half
            ("low", "<u8"),
            ("id", "<u8", (2,)),  # the halves of the content rank, as numbers in the same order
            ("row", "<u4"),  # row of the document in documents.arrow
            ("unit", "<u4"),  # index of the line in the document
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
)

# A line that a document loses: `document_keys` of the document, and the index of the line in it.
LINE_LOSERS = Table("line_losers.run", np.dtype([("key", "<u8"), ("unit", "<u4")]))

CUT_LINE = np.dtype([("row", "<u4"), ("unit", "<u4")])  # a lost line: row of its document, index of the line

_OWN_LOSERS_FILE = "line_losers.bin"

_KEYS_MEMORY_BYTES = 64 << 20  # maximum memory for sorting keys; a sorted run takes a third of it


@dataclass(frozen=True, slots=True)
class LineKeys:
    """Counts of one split: all `lines`, those long enough to be `compared`, and the written `keys`."""

    lines: int
    compared: int
    keys: int


def write_line_keys(
    folder: Path,
    documents: Artifact,
    config: Annotated[LinesDedupConfig, RecipeKey("dedup.lines")],
    removals: SplitRemovals,
    memory_bytes: MemoryBytes,
) -> LineKeys:
    """Step 1, one task per split: write the keys of all lines of documents that are not in `removals`."""
    decided = removals.stream()
    lines = compared = start = 0
    least = 2 if config.unit == "span" else config.min_characters + 1  # minimum bytes of text per unit
    piece_bytes = memory_bytes // 8 // _PEAK_BYTES_PER_UNIT * least
    with _KeyWriter(folder, config.keep, memory_bytes) as writer, documents.open_arrow() as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            whole = reader.get_batch(number)
            for first, stop in text_pieces(whole.column("text"), piece_bytes):
                batch = whole.slice(first, stop - first)
                wanted = np.ones(batch.num_rows, np.bool_)
                for outcomes in decided.values():
                    wanted[_lost_rows(outcomes.before(start + batch.num_rows)) - start] = False
                texts = batch.column("text")
                units = _units(texts, wanted, config)
                ranks = content_ranks(text_digests(texts), batch.column("document_id")).view(">u8")
                rows = np.empty(len(units.unit), LINE_KEYS.dtype)
                rows["key"], rows["low"], rows["unit"] = units.high, units.low, units.unit
                rows["row"] = units.document + start
                rows["id"] = ranks[units.document]
                rows["source"] = batch.column("source").to_numpy()[units.document]
                rows["split"] = -1  # set by the exchange when it reads the run
                writer.write(rows)
                lines += units.found
                compared += len(rows)
                start += batch.num_rows
    return LineKeys(lines, compared, writer.keys)


MAKE_LINE_KEYS = Stage("line_keys", "repeated lines", write_line_keys, cost=8)


def _units(texts: pa.LargeStringArray, wanted: npt.NDArray[np.bool_], config: LinesDedupConfig) -> Units:
    if config.unit == "span":
        return find_spans(texts, wanted, config.words)
    return find_units(texts, wanted, config)


def _lost_rows(outcomes: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Return the row numbers of the removed documents in a table of OUTCOME."""
    lost: npt.NDArray[np.int64] = outcomes["row"][outcomes["copies"] == 0].astype(np.int64)
    return lost


def find_line_losers(
    folder: Path,
    keys: Slice,
    keep: Annotated[int, RecipeKey("dedup.lines.keep")],
    memory_bytes: MemoryBytes,
) -> None:
    """Step 2, one task per partition of keys: write which documents lose which lines."""
    carried = np.empty(0, LINE_KEYS.dtype)
    file, limits = folder / LINE_LOSERS.file, keys.limits
    with RunWriter(file, LINE_LOSERS, memory_bytes=memory_bytes // 4, limits=limits) as writer:
        for batch in row_batches(keys, memory_bytes):
            rows = np.concatenate([carried, batch])
            is_lost = np.zeros(len(rows), np.bool_)
            is_lost[_lost(rows, keep)] = True
            lost = rows[is_lost]
            found = np.empty(len(lost), LINE_LOSERS.dtype)
            found["key"], found["unit"] = document_keys(lost["split"], lost["row"]), lost["unit"]
            writer.write(found)
            carried = rows[~is_lost & (rows["key"] == rows["key"][-1])]  # may continue in the next batch


FIND_LINE_LOSERS = Stage("line_losers", "repeated lines", find_line_losers, cost=4)
LINES_REMOVED = Stage("lines_removed", "repeated lines", write_tables)


class _KeyWriter:
    """Writes line_keys.run and line_losers.bin of a split; `keys` is the number of keys written."""

    def __init__(self, folder: Path, keep: int, memory_bytes: int) -> None:
        self.keys = 0
        self._keep = keep
        chunk_rows = min(CHUNK_ROWS, max(1, memory_bytes // 2 // _PEAK_BYTES_PER_ROW))
        self._chunk = np.empty(chunk_rows, LINE_KEYS.dtype)
        self._count = 0
        sort_bytes = min(_KEYS_MEMORY_BYTES, memory_bytes // 4)
        self._table = RunWriter(folder / LINE_KEYS.file, LINE_KEYS, memory_bytes=sort_bytes)
        self._losers = (folder / _OWN_LOSERS_FILE).open("wb")

    def write(self, rows: npt.NDArray[np.void]) -> None:
        while len(rows):
            some, rows = np.split(rows, [len(self._chunk) - self._count])
            self._chunk[self._count : self._count + len(some)] = some
            self._count += len(some)
            if self._count == len(self._chunk):
                self._write_chunk()

    def _write_chunk(self) -> None:
        rows, self._count = self._chunk[: self._count], 0
        is_lost = np.zeros(len(rows), np.bool_)
        is_lost[_lost(rows, self._keep)] = True
        losers = np.empty(int(is_lost.sum()), CUT_LINE)
        losers["row"], losers["unit"] = rows["row"][is_lost], rows["unit"][is_lost]
        self._losers.write(losers.data if len(losers) else b"")
        self._table.write(rows[~is_lost])
        self.keys += len(rows) - len(losers)

    def __enter__(self) -> _KeyWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._table, self._losers:
            if kind is None:
                self._write_chunk()


def _lost(rows: npt.NDArray[np.void], keep: int) -> npt.NDArray[np.int64]:
    """Return the indices of rows of LINE_KEYS whose document is not among the first `keep` of its line."""
    chosen = repeated(rows["key"])
    by = ("source", "low", "key")
    halves = [rows["id"][chosen, half] for half in (1, 0)]
    chosen = chosen[np.lexsort([*halves, *(rows[name][chosen] for name in by)])]
    new_line = np.ones(len(chosen), np.bool_)
    new_line[1:] = _differ(rows["key"], chosen) | _differ(rows["low"], chosen)
    new_document = new_line.copy()
    for field in (rows["id"][:, 0], rows["id"][:, 1], rows["source"]):
        new_document[1:] |= _differ(field, chosen)
    number = np.cumsum(new_document)
    first = np.maximum.accumulate(np.where(new_line, number, 0))
    lost: npt.NDArray[np.int64] = chosen[number - first >= keep]
    return lost


def _differ(field: npt.NDArray[Any], chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    values = field[chosen]
    different: npt.NDArray[np.bool_] = values[1:] != values[:-1]
    return different


_DOCUMENTS_FILE = "documents.arrow"


@dataclass(frozen=True, slots=True)
class CutLines:
    """The result of cutting lines in a split: how many documents and bytes were kept and dropped."""

    ledger: Ledger


def cut_lines(
    folder: Path,
    documents: Artifact,
    unit: Annotated[str, RecipeKey("dedup.lines.unit")],
    words: Annotated[int, RecipeKey("dedup.lines.words")],
    own_losers: Artifact,
    line_losers: SplitTable,
    removals: SplitRemovals,
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> CutLines:
    """Step 3, one task per split: write the remaining documents without their lost lines into `folder`.

    `own_losers` and `line_losers` are the split's lost lines (CUT_LINE) from steps 1 and 2.
    """
    own = Rows(own_losers, CUT_LINE, header=False)
    cuts = SplitRows(CUT_LINE, [(own, 0, len(own)), *line_losers.pieces(CUT_LINE)], then=["unit"])
    decided = removals.stream()
    ledger = Ledger()
    start = 0
    with (
        _Writer(folder) as writer,
        TwinsFile(folder, memory_bytes=memory_bytes // 4, limits=limits) as twins,
        documents.open_arrow() as file,
    ):
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            whole = reader.get_batch(number)
            end = start + whole.num_rows
            mine = cuts.before(end)
            cut_rows = mine["row"].astype(np.int64) - start
            found = {reason: outcomes.before(end) for reason, outcomes in decided.items()}
            winners = latest_outcomes(rows[rows["copies"] > 0] for rows in found.values())
            twins.keep(whole, winners["row"].astype(np.int64) - start)
            kept = _without_lost(whole, start, found, twins, ledger)
            batch, left = _cut_batch(whole, cut_rows, mine["unit"], kept, unit, words, ledger)
            twins.remove(whole, "duplicate_lines", np.flatnonzero(kept & ~left))
            writer.write(batch, np.flatnonzero(left) + start, winners)
            start = end
    ledger.check(str(folder))
    return CutLines(ledger)


CUT_LINES = Stage("lines", "repeated lines", cut_lines, cost=15)


def _without_lost(
    batch: pa.RecordBatch,
    start: int,
    found: Mapping[str, npt.NDArray[np.void]],
    twins: TwinsFile,
    ledger: Ledger,
) -> npt.NDArray[np.bool_]:
    """Count and record the documents of a batch that earlier stages removed; return bool[n], which are left.

    `start` is the row of the batch's first document; `found` has the batch's OUTCOME rows by reason.
    """
    sizes = np.diff(text_offsets(batch.column("text")))
    kept = np.ones(batch.num_rows, np.bool_)
    for reason, outcomes in found.items():
        lost = outcomes[outcomes["copies"] == 0]
        rows = _lost_rows(lost) - start
        if len(rows):
            twins.remove(batch, reason, rows, lost)
            ledger.drop(reason, len(rows), int(sizes[rows].sum()))
            kept[rows] = False
    return kept


def _cut_batch(
    batch: pa.RecordBatch,
    rows: npt.NDArray[np.int64],
    units: npt.NDArray[np.uint32],
    kept: npt.NDArray[np.bool_],
    unit: str,
    words: int,
    ledger: Ledger,
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
    """Cut line units[i] out of document rows[i], for all i, and count in the ledger what is kept and cut.

    Returns the remaining documents of the batch, and bool[n], which documents of the batch they are.
    """
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    if len(rows):
        texts = batch.column("text")
        if unit == "span":
            texts, blank = cut_spans(texts, rows, units, words)
        else:
            texts, blank = cut_units(texts, rows, units, unit)
        assert kept[rows].all(), "no line of a removed document was compared"
        kept = kept & ~blank
        left = np.where(kept, np.diff(text_offsets(texts)), 0)
        before = int(sizes[kept | blank].sum())
        ledger.drop("duplicate_lines", int(blank.sum()), before - int(left.sum()))
        columns = [texts if name == "text" else batch.column(name) for name in DOCUMENT_SCHEMA.names]
        batch = pa.RecordBatch.from_arrays(columns, schema=DOCUMENT_SCHEMA)
    if not kept.all():
        batch = batch.filter(pa.array(kept))
    ledger.kept += Count(batch.num_rows, int(np.diff(text_offsets(batch.column("text"))).sum()))
    return batch, kept


class _Writer:
    """Writes documents.arrow, rows.npy and outcomes.bin of a split."""

    def __init__(self, folder: Path) -> None:
        self._documents = pa.ipc.new_file(folder / _DOCUMENTS_FILE, DOCUMENT_SCHEMA, options=DOCUMENT_OPTIONS)
        self._rows = RewrittenRows(folder)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._documents, self._rows:
            pass

    def write(
        self, batch: pa.RecordBatch, rows: npt.NDArray[np.int64], winners: npt.NDArray[np.void]
    ) -> None:
        """Append documents and their former `rows`; `winners` (OUTCOME) are also numbered by former rows."""
        winners = winners[np.isin(winners["row"], rows)]
        copies = np.ones(len(rows), np.int32)
        copies[np.searchsorted(rows, winners["row"])] = winners["copies"]
        self._rows.write(rows, copies)
        if batch.num_rows:
            self._documents.write_batch(batch)


def remove_lines(
    run: RunTasks,
    splits: Sequence[SplitDocuments],
    removals: Sequence[SplitRemovals],
    config: LinesDedupConfig,
    memory_bytes: int,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Commit]:
    """Run all three steps and return one commit of step 3 per split.

    `removals` are the documents of each split that earlier stages removed.
    """
    tasks = []
    for split, removed in zip(splits, removals, strict=True):
        tasks.append(
            MAKE_LINE_KEYS.task(split.name, split.bytes, split.documents, config, removed, memory_bytes)
        )
    [keys] = run(tasks)

    partitions = limits.partitions(
        sum(MAKE_LINE_KEYS.result(commit).keys for commit in keys), LINE_KEYS.dtype
    )
    exchanged = exchange(run, FIND_LINE_LOSERS, LINE_KEYS, keys, readers=partitions, limits=limits)
    tasks = []
    for number in range(partitions):
        piece = exchanged.slice(*partition_bounds(number, partitions))
        name = partition_name(number, partitions)
        tasks.append(FIND_LINE_LOSERS.task(name, piece.bytes, piece, config.keep, memory_bytes))
    [decided] = run(tasks)
    losers = by_split(run, LINES_REMOVED, LINE_LOSERS, decided, len(splits), limits=limits)

    tasks = []
    for split, own, lost, removed in zip(splits, keys, losers, removals, strict=True):
        documents, own_losers = split.documents, own.file(_OWN_LOSERS_FILE)
        args = documents, config.unit, config.words, own_losers, lost, removed, memory_bytes, limits
        tasks.append(CUT_LINES.task(split.name, split.bytes, *args))
    [cut] = run(tasks)
    return cut
