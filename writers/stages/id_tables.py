"""Tables of values by the id of a document, from files that were computed elsewhere: scores, and vectors.

The files have one row per document, with its id, in any order. They are Parquet or JSON lines, also
compressed, on a local disk or in a store; only the columns that are asked for are read.

    sort_split  a split of a file -> a run of rows, by a hash of the id
    write_part  a range of these hashes, of all runs -> a part of the table
    IdTable     all parts, in which tasks look up documents

No task holds more than a share of the budget, so the files may be larger than memory. An id that has two rows
with different values ends the build. Each part is a folder with

    table.npy   rows (key, low, values), sorted: the halves of xxh3-128 of the id, and the values
    index.npy   the key of the first row of each block of rows (`block_rows`)

A lookup holds the index of all parts (8 bytes per block: 63 MB for a billion documents with a score, 80 MB
for 100 million vectors of 768 dimensions), finds the block of each id there, and reads the blocks that a
batch needs, each once. So memory does not grow with the values, a batch costs at most one small read per
document, and the order of files and documents does not matter. Two of n ids share their hash, so that one
gets the other's values, with probability n^2 / 2^129.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.tables import RowFile, Rows, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.inputs.decompress import ContainerError, decompressed, plain_range
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.first_bytes import compression_of
from shardkit.writers.inputs.scan import Split
from shardkit.writers.rows.documents import text_digests
from shardkit.writers.stages.needs import Needs

TABLE_FILE = "table.npy"
INDEX_FILE = "index.npy"

_MOST_BLOCK_ROWS, _BLOCK_BYTES = 128, 16 << 10  # a block has no more rows than this, and is about this large
_LOOKED_BYTES = 16 << 20  # of blocks that a lookup reads at a time
_BATCH_ROWS, _BATCH_BYTES = 1 << 16, 16 << 20  # of a file that are read at a time

Where = Annotated[str, DecidesNoByte("the recipe's key, for messages")]


def row_dtype(kind: str, values: int) -> np.dtype[np.void]:
    """Return the dtype of table rows with this number of values of a NumPy type, such as <f8."""
    return np.dtype([("key", "<u8"), ("low", "<u8"), ("values", kind, (values,))])


def block_rows(dtype: np.dtype[np.void]) -> int:
    """Return the number of rows in a block of a table with rows of this dtype."""
    return max(1, min(_MOST_BLOCK_ROWS, _BLOCK_BYTES // dtype.itemsize))


def id_keys(ids: pa.LargeStringArray) -> npt.NDArray[np.uint64]:
    """Return the halves of the hashes of ids, uint64[2, n]: the keys, and the fields `low`."""
    return text_digests(ids).view(">u8").astype(np.uint64).T


def id_text(one: str | bytes | None) -> str | None:
    """Return an id as it is compared: text, of bytes their hexadecimal digits."""
    return one.hex() if isinstance(one, bytes) else one


@dataclass(frozen=True, slots=True)
class IdTable:
    """The parts of a table, and the first key of each; `content` is the digest of all parts."""

    parts: tuple[Artifact, ...]
    starts: tuple[int, ...]
    dtype: np.dtype[np.void]
    content: str

    def open(self) -> OpenTable:
        """Read the indexes; if the table is in a store, its parts are copied to this machine once."""
        return OpenTable(self)


class OpenTable:
    """An open table, a function from ids to values; it holds no open file between calls."""

    def __init__(self, table: IdTable) -> None:
        self._values = table.dtype["values"]
        self._block_rows = block_rows(table.dtype)
        self._most = max(1, _LOOKED_BYTES // (self._block_rows * table.dtype.itemsize))
        self._starts = np.array(table.starts, np.uint64)
        for part in table.parts:
            (part / TABLE_FILE).local()
        self._parts = [RowFile(part / TABLE_FILE) for part in table.parts]
        self._indexes = [Rows(part / INDEX_FILE, "<u8").read() for part in table.parts]

    def __call__(self, ids: Sequence[str | bytes | None]) -> npt.NDArray[Any]:
        """Return the values of n ids, [n, values], with NaN where the table has no row."""
        found = self._nothing(len(ids))
        known = [number for number, one in enumerate(ids) if one is not None]
        texts = [id_text(ids[number]) for number in known]
        found[known] = self.find(*id_keys(pa.array(texts, pa.large_string())))
        return found

    def find(self, keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Return the values of ids by the halves `keys` and `lows` of their hashes; NaN for unknown ids."""
        found = self._nothing(len(keys))
        owners = np.searchsorted(self._starts, keys, side="right") - 1
        for number in np.unique(owners).tolist():
            all_mine = np.flatnonzero(owners == number)
            for start in range(0, len(all_mine), self._most):
                mine = all_mine[start : start + self._most]
                rows = self._near(number, keys[mine])
                if len(rows):
                    at, has = _places(rows, keys[mine], lows[mine])
                    found[mine[has]] = rows["values"][at[has]]
        return found

    def _nothing(self, count: int) -> npt.NDArray[Any]:
        return np.full((count, *self._values.shape), np.nan, self._values.base)

    def _near(self, number: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Return the rows of all blocks of part `number` that may contain the keys, in order."""
        index, part = self._indexes[number], self._parts[number]
        if not part.rows:
            return np.empty(0, part.dtype)
        # The rows of a key may begin in the block before the block that begins with this key.
        first, last = (np.searchsorted(index, keys, side=side) - 1 for side in ("left", "right"))
        blocks = np.unique(np.maximum(np.concatenate([first, last]), 0))
        rows = (blocks[:, None] * self._block_rows + np.arange(self._block_rows)).reshape(-1)
        found: npt.NDArray[np.void] = part.read(rows[rows < part.rows]).reshape(-1)
        return found


def _places(
    rows: npt.NDArray[np.void], keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the index in `rows` of each (key, low), int64[n], and whether such a row exists, bool[n]."""
    stored = np.append(rows["key"], np.uint64(0))  # a sentinel, so that the index after the last is valid
    others = np.append(rows["low"], np.uint64(0))
    at = np.searchsorted(stored[:-1], keys)
    while True:
        same = (at < len(rows)) & (stored[at] == keys)
        wrong = same & (others[at] != lows)
        if not wrong.any():
            return at, same
        at = at + wrong


def sort_split(
    folder: Path,
    split: Split,
    table: Table,
    names: Sequence[str],
    values: Callable[[pa.Table, pa.LargeStringArray], npt.NDArray[Any]],
    where: str,
    memory_bytes: int,
    limits: Limits,
) -> int:
    """Write a sorted run with a row of `table` per record of a split; return the number of rows.

    The first of the columns `names` has the ids. `values` makes the values of records from these columns and
    the ids as text.
    """
    count = 0
    with RunWriter(folder / table.file, table, memory_bytes=memory_bytes, limits=limits) as writer:
        for batch in read_rows(split, names, where, table.dtype["values"].shape[0]):
            ids = _ids(batch.column(names[0]), split, names[0], where)
            found = np.empty(batch.num_rows, table.dtype)
            found["key"], found["low"] = id_keys(ids)
            found["values"] = values(batch, ids)
            writer.write(found)
            count += len(found)
    return count


def write_part(folder: Path, piece: Slice, where: Where) -> None:
    """Write one part of a table. Raises BuildError if two rows of an id have different values."""
    memory_bytes, block = piece.limits.read_memory_bytes, block_rows(piece.table.dtype)
    with (
        RowsWriter(folder / TABLE_FILE, piece.table.dtype) as writer,
        RowsWriter(folder / INDEX_FILE, "<u8") as index,
    ):
        for rows, _ in piece.stream(memory_bytes):
            rows = rows[np.lexsort((rows["low"], rows["key"]))]
            again = np.append(
                False,
                (rows["key"][1:] == rows["key"][:-1]) & (rows["low"][1:] == rows["low"][:-1]),
            )
            at = np.flatnonzero(again)
            if not np.array_equal(rows["values"][at], rows["values"][at - 1], equal_nan=True):
                raise BuildError(
                    f"{where}: an id has two rows with different values; keep one row per document"
                )
            rows = rows[~again]
            first = -writer.rows % block
            index.write(np.ascontiguousarray(rows["key"][first::block]))
            writer.write(rows)


def make_table(
    run: RunTasks,
    stage: Stage[[Slice, str], None],
    table: Table,
    runs: Sequence[Commit],
    rows: int,
    where: str,
    limits: Limits,
    *,
    prefix: str = "",
) -> IdTable:
    """Make a table of `runs`, which have `rows` rows in all, by tasks of a stage that runs `write_part`.

    The names of the tasks begin with `prefix`.
    """
    partitions = limits.partitions(rows, table.dtype)
    moved = exchange(run, stage, table, runs, readers=partitions, limits=limits)
    bounds = [partition_bounds(part, partitions) for part in range(partitions)]
    tasks = []
    for part, (start, stop) in enumerate(bounds):
        piece = moved.slice(start, stop)
        tasks.append(stage.task(prefix + partition_name(part, partitions), piece.bytes, piece, where))
    [parts] = run(tasks)
    content = digest_of([commit.content for commit in parts])
    starts = tuple(start for start, _ in bounds)
    return IdTable(tuple(commit.files for commit in parts), starts, table.dtype, content)


def table_needs(n: Needs, sort: Stage[..., Any], part: Stage[..., Any], table: Table) -> int:
    """Add the requests and bytes of making a table with a row per document, by the stages `sort` and `part`.

    Returns the number of requests of a task that opens the table.
    """
    c, readers = n.corpus, n.corpus.limits.partitions(n.corpus.documents, table.dtype)
    size = c.documents * table.row_bytes
    n.add(sort, c.splits, 0, files=1, written=size)
    runs = n.exchange(part, table, c.splits, c.documents, readers)
    n.add(part, readers, *n.slices(runs, readers), files=2, written=size)
    return 2 * readers


def read_rows(split: Split, names: Sequence[str], where: str, values: int = 1) -> Iterator[pa.Table]:
    """Yield the columns `names` of a split in batches, for rows that have this number of values each.

    Raises BuildError if the file cannot be read or lacks a column; in lines, only the first one must exist.
    """
    read = _read_parquet if split.format == "parquet" else _read_lines
    try:
        yield from read(split, names, where, max(1, min(_BATCH_ROWS, _BATCH_BYTES // (8 * values))))
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error
    except (ContainerError, pa.ArrowException, UnicodeDecodeError) as error:  # the last one: of a name
        raise BuildError(f"{split.path}: is damaged: {error}; make the file again") from error


def _read_parquet(split: Split, names: Sequence[str], where: str, rows: int) -> Iterator[pa.Table]:
    with open_input(split.input) as stored:
        # A buffer, because a column of vectors is too large to be read at once.
        file = pq.ParquetFile(stored, buffer_size=1 << 20, page_checksum_verification=True)
        columns = file.schema_arrow.names
        for name in names:
            if columns.count(name) != 1:
                problem = f"more than one column {name!r}" if name in columns else f"no column {name!r}"
                raise BuildError(f"{where}: {split.path}: has {problem}; it has {', '.join(columns)}")
        groups = list(range(split.start, split.end))
        for batch in file.iter_batches(rows, row_groups=groups, columns=list(names)):
            yield pa.Table.from_batches([batch])


def _read_lines(split: Split, names: Sequence[str], where: str, rows: int) -> Iterator[pa.Table]:
    records: list[Mapping[str, Any]] = []
    size = 0
    for number, line in enumerate(_lines(split)):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except ValueError as error:
            raise BuildError(f"{split.path}: {_place(split, number)}: is not valid JSON: {error}") from None
        if not isinstance(record, dict) or record.get(names[0]) is None:
            raise BuildError(
                f"{split.path}: {_place(split, number)}: must be a JSON object with a value of {names[0]!r}"
            )
        records.append({name: record.get(name) for name in names})
        size += len(line)
        if len(records) == rows or size > _BATCH_BYTES:
            yield _table(records, split, names)
            records, size = [], 0
    if records:
        yield _table(records, split, names)


def _lines(split: Split) -> Iterator[bytes]:
    with open_input(split.input) as file:
        compression = split.compression if split.start else compression_of(file, split.compression)
        pieces = (
            decompressed(file, compression, split.input.bytes)
            if compression
            else plain_range(file, split.start, split.end)
        )
        rest = b""
        for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _place(split: Split, number: int) -> str:
    return f"line {number:,}" + (f" after byte {split.start:,}" if split.start else "")


def _table(records: Sequence[Mapping[str, Any]], split: Split, names: Sequence[str]) -> pa.Table:
    columns = []
    for name in names:
        try:
            columns.append(pa.array([record[name] for record in records]))
        except pa.ArrowException as error:
            raise BuildError(f"{split.path}: {name!r} has values of several types: {error}") from None
    return pa.table(columns, names=list(names))


def _ids(column: pa.ChunkedArray, split: Split, name: str, where: str) -> pa.LargeStringArray:
    """Return ids as text: integers in decimal, bytes in hexadecimal."""
    if column.null_count:
        raise BuildError(f"{where}: {split.path}: {name!r} is null in {column.null_count:,} rows")
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.array([one.hex() for one in column.to_pylist()], pa.large_string())
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise BuildError(f"{where}: {split.path}: {name!r} is {kind}; ids must be text or integers")
    return column.cast(pa.large_string()).combine_chunks()
