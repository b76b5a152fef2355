"""Line dedup: removes lines that stand in many documents. Three steps, each a stage of a build.

Of the documents that contain a line, the `keep` ones of highest priority (lowest source, then lowest content
rank, writers/documents.py) keep it, at every place; all others lose it. So the result is a property of the
texts, independent of their names and of how they are cut into files, splits and partitions. The probability
that any two of n different lines share their 128-bit hash, so that one is cut in error, is n^2 / 2^129:
10^-17 for 10^11 lines.

1. `write_line_keys`, a task a split, hashes all lines:
       line_keys.npy    LINE_KEY in runs, each sorted by the leading bits of the hash
       line_runs.npy    int64[runs + 1]: where runs begin and end, in rows
       line_losers.npy  LINE_LOSER, sorted: lines that already `keep` earlier documents of the same run have.
                        These have no keys, so a line of every document costs a partition `keep` rows a run.
2. `find_line_losers`, a task a partition of keys, decides which documents lose which lines:
       line_losers.npy  LINE_LOSER, sorted
3. `cut_lines`, a task a split, writes the documents again:
       documents.arrow  DOCUMENT_SCHEMA, in the same order, without exact duplicates (later stages have none
                        to skip) and without documents that have only white space left
       rows.npy         int64[n]: the row that each document had before
       winners.npy      WINNER_DTYPE: documents that exact duplicates lost to, with new rows; split is 0
   Its ledger: read = kept + dropped["exact_duplicate"] + dropped["duplicate_lines"]; the latter counts all
   bytes that were cut, and the documents of which nothing is left.

Memory is a batch of documents and a run (90 MB), or a partition of `partitions_for` rows. Keys take 44 bytes
a line on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.dedup.exact import (
    LOSER_DTYPE,
    MAX_PARTITIONS,
    WINNER_DTYPE,
    leading_bits,
    partition_range,
    read_range,
    repeated,
)
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, SplitRows, piece_of_split
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.documents import DOCUMENT_SCHEMA, content_ranks, text_digests
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, PlainCounts, Task, contents, partition_name
from shardkit.writers.kernels.line_units import cut_units, find_units
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.ledger import Count, Ledger

__all__ = [
    "CUT_WINNERS_FILE",
    "LINE_KEY",
    "LINE_KEYS_FILE",
    "LINE_LOSER",
    "LINE_LOSERS_FILE",
    "LINE_RUNS_FILE",
    "ROWS_FILE",
    "cut_lines",
    "cut_tasks",
    "find_line_losers",
    "key_tasks",
    "loser_tasks",
    "partitions_for",
    "write_line_keys",
]

LINE_KEYS_FILE = "line_keys.npy"

LINE_RUNS_FILE = "line_runs.npy"

LINE_LOSERS_FILE = "line_losers.npy"

RUN_ROWS = 1 << 19

PEAK_BYTES_PER_ROW = 120  # measured: 110 where most lines are repeated, 99 where few are

LINE_KEY = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("id", "<u8", (2,)),  # the halves of the content rank, as numbers that sort as it does
        ("row", "<u4"),  # in documents.arrow
        ("unit", "<u4"),  # the line's number in the document
        ("source", "<i4"),
    ]
)

LINE_LOSER = np.dtype([("split", "<i4"), ("row", "<i8"), ("unit", "<u4")])

_ROW_DTYPE = np.dtype([*LINE_KEY.descr, ("split", "<i4")])


@dataclass(frozen=True, slots=True)
class LineKeys(PlainCounts):
    """Lines of a split: `compared` ones are long enough, and have the `keys` that were written."""

    lines: int
    compared: int
    keys: int


def write_line_keys(
    folder: Path,
    documents: Artifact,
    config: LinesDedupConfig,
    split: int,
    exact_losers: Sequence[Artifact] = (),
) -> LineKeys:
    """Step 1, a task a split: the keys of all lines of documents.arrow, without documents in `exact_losers`.

    `exact_losers` are tables of LOSER_DTYPE sorted by (split, row), as `find_losers` returns them; `split`
    is this split's number in them. It is 0 in the line_losers.npy that is written.
    """
    lost = SplitRows(LOSER_DTYPE, [piece_of_split(Rows(file, LOSER_DTYPE), split) for file in exact_losers])
    lines = compared = start = 0
    with _RunWriter(folder, config.keep) as writer, documents.open_arrow() as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            wanted = np.ones(batch.num_rows, np.bool_)
            wanted[lost.before(start + batch.num_rows)["row"] - start] = False
            texts = batch.column("text")
            units = find_units(texts, wanted, config)
            ranks = content_ranks(text_digests(texts), batch.column("document_id")).view(">u8")
            rows = np.empty(len(units.unit), LINE_KEY)
            rows["high"], rows["low"], rows["unit"] = units.high, units.low, units.unit
            rows["row"] = units.document + start
            rows["id"] = ranks[units.document]
            rows["source"] = batch.column("source").to_numpy()[units.document]
            writer.write(rows)
            lines += units.found
            compared += len(rows)
            start += batch.num_rows
    return LineKeys(lines, compared, writer.keys)


def partitions_for(keys: int, memory_bytes: int) -> int:
    """Partitions that keep one within half of a memory budget; `keys` are those that all splits wrote."""
    return min(max(1, -(-keys * PEAK_BYTES_PER_ROW * 2 // memory_bytes)), MAX_PARTITIONS)


@dataclass(frozen=True, slots=True)
class LineLosers(PlainCounts):
    """The `keys` of a partition that were read, and how many lines of documents are cut: `losers`."""

    keys: int
    losers: int


def find_line_losers(
    folder: Path, split_folders: Sequence[Artifact], partition: int, partitions: int, keep: int
) -> LineLosers:
    """Step 2, a task a partition: which documents lose which lines; `split` is one of `split_folders`."""
    bits = partition_range(partition, partitions)
    parts = [np.empty(0, _ROW_DTYPE)]
    for split, source in enumerate(split_folders):
        runs = Rows(source / LINE_RUNS_FILE, np.int64).read().tolist()
        with Rows(source / LINE_KEYS_FILE, LINE_KEY) as table:
            for begin, end in pairwise(runs):
                stored = read_range(table, begin, end, bits)
                rows = np.empty(len(stored), _ROW_DTYPE)
                for name in LINE_KEY.names or ():
                    rows[name] = stored[name]
                rows["split"] = split
                parts.append(rows)
    rows = np.concatenate(parts)
    parts.clear()
    losers = _as_losers(rows, _lost(rows, keep))
    with RowsWriter(folder / LINE_LOSERS_FILE, LINE_LOSER) as writer:
        writer.write(losers[np.lexsort((losers["unit"], losers["row"], losers["split"]))])
    return LineLosers(len(rows), len(losers))


class _RunWriter:
    """Writes the three files of a split's folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.keys = 0
        self._folder = folder
        self._keep = keep
        self._pending: list[npt.NDArray[np.void]] = []
        self._count = 0
        self._table = RowsWriter(folder / LINE_KEYS_FILE, LINE_KEY)
        self._losers = RowsWriter(folder / LINE_LOSERS_FILE, LINE_LOSER)
        self._runs = [0]

    def write(self, rows: npt.NDArray[np.void]) -> None:
        while self._count + len(rows) >= RUN_ROWS:
            part, rows = np.split(rows, [RUN_ROWS - self._count])
            self._pending.append(part)
            self._write_run()
        self._pending.append(rows)
        self._count += len(rows)

    def _write_run(self) -> None:
        rows = np.concatenate([np.empty(0, LINE_KEY), *self._pending])
        self._pending, self._count = [], 0
        lost = np.zeros(len(rows), np.bool_)
        lost[_lost(rows, self._keep)] = True
        self._losers.write(_as_losers(rows, np.flatnonzero(lost)))
        stays = np.flatnonzero(~lost)
        order = np.argsort(leading_bits(rows["high"][stays]), kind="stable")
        self._table.write(rows[stays[order]])
        self.keys += len(stays)
        self._runs.append(self.keys)

    def __enter__(self) -> _RunWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._table, self._losers, RowsWriter(self._folder / LINE_RUNS_FILE, np.int64) as runs:
            self._write_run()
            runs.write(np.array(self._runs, np.int64))


def _lost(rows: npt.NDArray[np.void], keep: int) -> npt.NDArray[np.int64]:
    """Which rows (LINE_KEY, _ROW_DTYPE) are of a document that is not among the first `keep` of its line."""
    chosen = repeated(rows["high"])
    by = ("source", "low", "high")
    halves = [rows["id"][chosen, half] for half in (1, 0)]
    chosen = chosen[np.lexsort([*halves, *(rows[name][chosen] for name in by)])]
    new_line = np.ones(len(chosen), np.bool_)
    new_line[1:] = _differ(rows["high"], chosen) | _differ(rows["low"], chosen)
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


def _as_losers(rows: npt.NDArray[np.void], lost: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    losers = np.zeros(len(lost), LINE_LOSER)
    for name in ("row", "unit"):
        losers[name] = rows[name][lost]
    if "split" in (rows.dtype.names or ()):
        losers["split"] = rows["split"][lost]
    return losers


ROWS_FILE = "rows.npy"

CUT_WINNERS_FILE = "winners.npy"

_DOCUMENTS_FILE = "documents.arrow"


@dataclass(frozen=True, slots=True)
class CutLines:
    """What became of a split: `documents_cut` lost `lines_cut` lines between them."""

    ledger: Ledger
    lines_cut: int
    documents_cut: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""
        return {
            "ledger": self.ledger.to_dict(),
            "lines_cut": self.lines_cut,
            "documents_cut": self.documents_cut,
        }


def cut_lines(
    folder: Path,
    documents: Artifact,
    config: LinesDedupConfig,
    split: int,
    keys_folder: Artifact,
    line_losers: Sequence[Artifact],
    exact_losers: Sequence[Artifact] = (),
    exact_winners: Sequence[Artifact] = (),
) -> CutLines:
    """Step 3, a task a split: write the three files.

    `keys_folder` is the split's own of step 1, `line_losers` the files of all partitions of step 2;
    `exact_losers` and `exact_winners` are tables of LOSER_DTYPE and WINNER_DTYPE sorted by (split, row). In
    all tables but that in `keys_folder` this split's number is `split`.
    """

    def of_split(files: Sequence[Artifact], dtype: np.dtype[Any]) -> list[tuple[Rows, int, int]]:
        return [piece_of_split(Rows(file, dtype), split) for file in files]

    own = Rows(keys_folder / LINE_LOSERS_FILE, LINE_LOSER)
    cuts = SplitRows(LINE_LOSER, [(own, 0, len(own)), *of_split(line_losers, LINE_LOSER)], then=["unit"])
    lost = SplitRows(LOSER_DTYPE, of_split(exact_losers, LOSER_DTYPE))
    winners = SplitRows(WINNER_DTYPE, of_split(exact_winners, WINNER_DTYPE))
    ledger = Ledger()
    lines = changed = start = 0
    with _Writer(folder) as writer, documents.open_arrow() as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            end = start + batch.num_rows
            mine = cuts.before(end)
            cut_rows = mine["row"] - start
            kept = np.ones(batch.num_rows, np.bool_)
            kept[lost.before(end)["row"] - start] = False
            batch, kept = _cut_batch(batch, cut_rows, mine["unit"], kept, config, ledger)
            writer.write(batch, np.flatnonzero(kept) + start, winners.before(end))
            lines += len(mine)
            changed += len(np.unique(cut_rows))
            start = end
    ledger.check(str(folder))
    return CutLines(ledger, lines, changed)


def _cut_batch(
    batch: pa.RecordBatch,
    rows: npt.NDArray[np.int64],
    units: npt.NDArray[np.uint32],
    kept: npt.NDArray[np.bool_],
    config: LinesDedupConfig,
    ledger: Ledger,
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
    """(What is left of a batch, which documents those are) without units[i] of document rows[i]; booked."""
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    if not kept.all():
        ledger.drop("exact_duplicate", int((~kept).sum()), int(sizes[~kept].sum()))
    if len(rows):
        texts, blank = cut_units(batch.column("text"), rows, units, config)
        assert kept[rows].all(), "no line of an exact duplicate was compared"
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
    """The three files."""

    def __init__(self, folder: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._documents = pa.ipc.new_file(folder / _DOCUMENTS_FILE, DOCUMENT_SCHEMA, options=options)
        self._rows = RowsWriter(folder / ROWS_FILE, np.int64)
        self._winners = RowsWriter(folder / CUT_WINNERS_FILE, WINNER_DTYPE)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._documents, self._rows, self._winners:
            pass

    def write(
        self, batch: pa.RecordBatch, rows: npt.NDArray[np.int64], winners: npt.NDArray[np.void]
    ) -> None:
        """Append documents with the rows that they had; `winners` have rows as before."""
        first = self._rows.rows
        winners = winners[np.isin(winners["row"], rows)]
        winners["row"] = first + np.searchsorted(rows, winners["row"])
        winners["split"] = 0
        self._winners.write(winners)
        self._rows.write(rows)
        if batch.num_rows:
            self._documents.write_batch(batch)


def key_tasks(
    splits: Sequence[SplitDocuments], exact: Sequence[Commit], config: LinesDedupConfig
) -> list[Task]:
    """One task a split."""
    losers = tuple(commit.files / LOSERS_FILE for commit in exact)
    settings = {"dedup.lines": config.model_dump(mode="json")}
    duplicates = contents(exact)
    return [
        Task(
            "line_keys",
            split.name,
            settings | {"split": number},
            write_line_keys,
            (split.documents, config, number, losers),
            split.bytes,
            {"documents": split.digest, "exact": duplicates},
        )
        for number, split in enumerate(splits)
    ]


def loser_tasks(keys: Sequence[Commit], config: LinesDedupConfig, memory_bytes: int) -> list[Task]:
    """One task a partition of keys."""
    partitions = partitions_for(sum(LineKeys.of(commit).keys for commit in keys), memory_bytes)
    settings = {"dedup.lines.keep": config.keep, "partitions": partitions}
    inputs = {"keys": contents(keys)}
    folders = tuple(commit.files for commit in keys)
    return [
        Task(
            "line_losers",
            partition_name(number, partitions),
            settings | {"partition": number},
            find_line_losers,
            (folders, number, partitions, config.keep),
            inputs=inputs,
        )
        for number in range(partitions)
    ]


def cut_tasks(
    splits: Sequence[SplitDocuments],
    keys: Sequence[Commit],
    losers: Sequence[Commit],
    exact: Sequence[Commit],
    config: LinesDedupConfig,
) -> list[Task]:
    """One task a split: its documents.arrow anew, without repeated lines and exact duplicates."""
    line_losers = tuple(commit.files / LINE_LOSERS_FILE for commit in losers)
    exact_losers = tuple(commit.files / LOSERS_FILE for commit in exact)
    exact_winners = tuple(commit.files / WINNERS_FILE for commit in exact)
    settings = {"dedup.lines": config.model_dump(mode="json")}
    shared = {"losers": contents(losers), "exact": contents(exact)}
    tasks = []
    for number, (split, own) in enumerate(zip(splits, keys, strict=True)):
        inputs = shared | {"documents": split.digest, "keys": own.content}
        tables = (own.files, line_losers, exact_losers, exact_winners)
        tasks.append(
            Task(
                "lines",
                split.name,
                settings | {"split": number},
                cut_lines,
                (split.documents, config, number, *tables),
                split.bytes,
                inputs,
            )
        )
    return tasks
