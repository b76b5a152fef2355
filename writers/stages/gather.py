"""Stage `gather`: joins neighboring splits that keep little text, so that later stages have fewer tasks.

The first pass of filters may keep 1 % of a split. A task of each later stage would cost as much for such a
split as for a large one: a start, a commit, some requests to a store. So neighboring splits of one input that
keep little are joined: a task writes the files of all of them as the files of one split, and later stages do
not see the difference. Other splits stay as they are and have no task.

Which splits are joined depends only on their names and on how much text they keep (`neighbors`), never on
workers. The text that joined splits should have together grows with all kept text (`Limits.gathered`): 1 MiB
to 32 MiB in builds of up to 128 GB, so that there are tasks for many workers, then about 4,096 such splits,
of at most 4 GiB. As in `group_small_files`, the hash of a split's name decides where to cut, so a further
input file changes only the splits next to it. With `annotate`, no splits are joined: annotations have a line
for each document that was read, and later tasks hold those of a split in memory.

A task writes into its folder the files of passes.py that later stages read: documents.arrow, in batches of
the usual size, keys.run and url_keys.run with the new rows, languages.npy and buckets.npy. It holds a batch
of documents and a run of keys. Texts are compressed anew: all of it takes about 10 s of CPU per GB of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.population import LANGUAGE_CODE
from shardkit.writers.dedup.tables import CHUNK_ROWS, Rows, RowsWriter, read_header
from shardkit.writers.dedup.urls import URL_KEYS
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.inputs.scan import Split, parts_of
from shardkit.writers.rows.documents import DOCUMENT_OPTIONS, DOCUMENTS_FILE, joined_batches
from shardkit.writers.rows.filtered import FilterCost
from shardkit.writers.rows.funnel import FilterCounts
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages.flow import Filtering
from shardkit.writers.stages.labels import BUCKETS_FILE
from shardkit.writers.stages.languages import LANGUAGES_FILE
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.passes import KEYS_MEMORY_BYTES

_TABLES = (KEYS, URL_KEYS)
_FILES = (DOCUMENTS_FILE, LANGUAGES_FILE, BUCKETS_FILE, *(table.file for table in _TABLES))


def neighbors(
    splits: Sequence[Split], kept: Sequence[Count], limits: Limits, *, annotate: bool = False
) -> list[range]:
    """Return the numbers of the splits that are joined, in ranges that cover all splits in their order.

    `kept` has the documents and bytes that each split keeps. A split that keeps a quarter of what joined
    splits should have is a range of its own, and so is each of a few small ones.
    """
    if annotate:
        return [range(number, number + 1) for number in range(len(splits))]
    wanted = limits.gathered(sum(one.bytes for one in kept))
    weights = [limits.gathered_weight(one.documents, one.bytes, wanted) for one in kept]
    found: list[range] = []
    start = 0
    for stop in range(1, len(splits) + 1):
        is_small = 4 * weights[stop - 1] < wanted
        if is_small and stop < len(splits) and splits[stop].source == splits[start].source:
            continue
        last = stop if is_small else stop - 1
        if last - start < limits.gather_splits:
            found += [range(number, number + 1) for number in range(start, last)]
        else:
            found += _cut(splits, weights, wanted, range(start, last))
        found += [] if is_small else [range(last, stop)]
        start = stop
    return found


def _cut(splits: Sequence[Split], weights: Sequence[int], wanted: int, small: range) -> Iterator[range]:
    """Cut small splits into ranges with half of `wanted` to a little more than all of it."""
    start, size = small.start, 0
    for number in small:
        size += weights[number]
        chance = xxhash.xxh3_64_intdigest(splits[number].task_name.encode())
        ends = 2 * size >= wanted and chance * wanted < 2 * weights[number] << 64
        if ends or size >= wanted or number == small[-1]:
            yield range(start, number + 1)
            start, size = number + 1, 0


def gather_splits(
    run: RunTasks,
    ranges: Sequence[range],
    splits: Sequence[Split],
    cleaned: Sequence[Commit],
    labels: Sequence[tuple[str, ...] | None],
) -> tuple[list[Split], list[Commit]]:
    """Join the files of the splits in each range; return the joined splits and the commits with their files.

    `labels` has the languages of each split, as in `Filtering`.
    """
    made = [splits[one.start] if len(one) == 1 else _joined([splits[n] for n in one]) for one in ranges]
    made = [replace(split, index=index) for index, split in enumerate(made)]
    tasks = []
    for split, one in zip(made, ranges, strict=True):
        if len(one) > 1:
            held = cleaned[one.start].outputs
            names = [name for name in _FILES if name in held]
            files, spoken = [cleaned[n].files for n in one], [labels[n] or () for n in one]
            tasks.append(GATHER.task(split.task_name, split.bytes, files, names, spoken))
    [gathered] = run(tasks) if tasks else [[]]
    left = iter(gathered)
    return made, [next(left) if len(one) > 1 else cleaned[one.start] for one in ranges]


def _joined(splits: Sequence[Split]) -> Split:
    """Return one split with the parts of several."""
    first, *rest = parts_of(splits)
    return replace(first, bytes=sum(split.bytes for split in splits), rest=tuple(rest))


def merged(results: Sequence[Filtering]) -> Filtering:
    """Return the counts of several splits as those of one split."""
    if len(results) == 1:
        return results[0]
    ledger, counts, costs = Ledger(), FilterCounts(), dict[str, FilterCost]()
    for one in results:
        ledger.merge(one.ledger)
        counts.reasons, counts.edits = one.filters.reasons, one.filters.edits  # the same for all splits
        counts.add(one.filters)
        for name, cost in one.costs.items():
            costs.setdefault(name, FilterCost()).add(cost)
    spoken = [one.languages for one in results if one.languages is not None]
    labels = _labels(spoken) if spoken else None
    return Filtering(ledger, counts, labels, sum(one.urls for one in results), costs)


def _labels(of_splits: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(label for labels in of_splits for label in labels))


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of a task: a ledger that counts the documents of all its splits as read and kept."""

    ledger: Ledger


def gather(
    folder: Path, splits: Sequence[Artifact], names: Sequence[str], labels: Sequence[Sequence[str]]
) -> Gathered:
    """Write the files `names` of `splits`, which are folders, as those of one split into `folder`.

    `labels` has the languages of each split, whose codes are in its LANGUAGES_FILE.
    """
    rows, kept = _gather_documents(folder / DOCUMENTS_FILE, [files / DOCUMENTS_FILE for files in splits])
    starts = [0, *accumulate(rows)][:-1]
    for table in _TABLES:
        if table.file in names:
            _gather_keys(folder / table.file, table, [files / table.file for files in splits], starts)
    if LANGUAGES_FILE in names:
        codes = {label: code for code, label in enumerate(_labels(labels))}
        with RowsWriter(folder / LANGUAGES_FILE, LANGUAGE_CODE) as file:
            for files, own in zip(splits, labels, strict=True):
                new = np.array([codes[label] for label in own], LANGUAGE_CODE)
                for piece in _pieces(Rows(files / LANGUAGES_FILE, LANGUAGE_CODE)):
                    file.write(new[piece])
    if BUCKETS_FILE in names:
        _, _, dtype = read_header(splits[0] / BUCKETS_FILE)
        with RowsWriter(folder / BUCKETS_FILE, dtype) as file:
            for files in splits:
                for piece in _pieces(Rows(files / BUCKETS_FILE, dtype)):
                    file.write(piece)
    return Gathered(Ledger(read=kept, kept=kept))


GATHER = Stage("gather", "read and filter", gather, cost=2)


def _gather_documents(path: Path, files: Sequence[Artifact]) -> tuple[list[int], Count]:
    """Write the documents of all files in their order; return the rows of each file, and the sizes of all."""
    rows, ledger = [], Ledger()

    def batches() -> Iterator[pa.RecordBatch]:
        for one in files:
            rows.append(0)
            with one.open_arrow() as source:
                reader = pa.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    offsets = text_offsets(batch.column("text"))
                    ledger.read += Count(batch.num_rows, int(offsets[-1] - offsets[0]))
                    ledger.kept = ledger.read
                    rows[-1] += batch.num_rows
                    yield batch
                    PULSE.tell(ledger)

    with files[0].open_arrow() as first:
        schema = pa.ipc.open_file(first).schema
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=DOCUMENT_OPTIONS) as out:
        for batch in joined_batches(batches()):
            out.write_batch(batch)
    return rows, ledger.kept


def _gather_keys(path: Path, table: Table, files: Sequence[Artifact], starts: Sequence[int]) -> None:
    """Write the runs of all splits as one run; `starts` has the new number of each split's first row."""
    with RunWriter(path, table, memory_bytes=KEYS_MEMORY_BYTES) as run:
        for file, start in zip(files, starts, strict=True):
            for keys, _ in Slice.whole(table, [file]).stream(KEYS_MEMORY_BYTES // 3):
                keys["row"] += start
                run.write(keys)


def _pieces(rows: Rows) -> Iterator[Any]:
    return (rows.read(at, min(at + CHUNK_ROWS, len(rows))) for at in range(0, len(rows), CHUNK_ROWS))


def needs(n: Needs) -> None:
    """Add the requests and bytes of joining splits, if any are joined."""
    c = n.corpus
    if c.gathered == c.splits:
        return
    text, tables = c.text_bytes * DOCUMENTS, 1 + ("url" in c.steps)
    gets, read = n.scans(text, c.splits)
    gets += (tables + c.shape.columns) * c.splits
    moved = tables * c.documents * KEYS.row_bytes
    files = 1 + tables + c.shape.columns
    n.add(GATHER, c.gathered, gets, read + moved, files=files, written=text + moved)
