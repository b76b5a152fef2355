"""Which documents of a split were removed as duplicates, and how many documents the others represent.

Decisions are made in partitions of keys or of edges, but later stages need them by split. A deciding task
writes an OUTCOMES run: a row for each document that is removed, or that represents others. `by_split` brings
rows back to their splits, through the exchange:

    deciding tasks   OUTCOMES (or another table keyed by `document_keys`), in any order
    <stage>          one task per SPLITS_PER_GROUP splits: a file of their rows by (split, row); its result
                     has the range, the digest and the removed documents of each split

The driver opens none of these files. It holds one `SplitTable` per split: a handle to its rows in the file of
its group. A split's later tasks receive only their own handles (`SplitRemovals`), and depend on the digests
of these rows: one more duplicate, or one more input file, repeats only the splits whose decisions change.

`SplitRows` reads in step with a pass over the split's documents, so that memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.card import Count
from shardkit.settings import TRAIN
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.exchange.exchange import Limits, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage

OUTCOMES = Table(
    "outcomes.run",
    np.dtype(
        [
            ("key", "<u8"),  # `document_keys` of the document
            ("bytes", "<i8"),  # size of a removed document's text; 0 for others
            ("copies", "<i4"),  # documents that this one represents, itself included; 0: it is removed
            # The halves of the content rank of the document that a removed one duplicates; 0 for others. The
            # first half is inverted if that is a document of an index.
            ("kept_text", "<u8"),
            ("kept_id", "<u8"),
            ("similarity", "<f4"),  # similarity of the removed and the kept document
        ]
    ),
)

# The fields of OUTCOME. None depends on split numbers, so the digest of a split's rows does not either.
_SHARED = ("copies", "kept_text", "kept_id", "similarity")
OUTCOME = np.dtype([("row", "<u4"), *((name, OUTCOMES.dtype[name]) for name in _SHARED)])

SPLITS_PER_GROUP = 64

GROUP_SIZES = (1, 2, 10, 100, 1000)  # inclusive upper limits of the classes; the last class is over 1000

_ROWS_FILE = "rows.bin"

_MOST_COPIES = np.iinfo(np.int32).max  # provenance stores copies as int32

_MEMORY_BYTES = 64 << 20

_CHUNK_ROWS = 1 << 17  # rows of one table that SplitRows reads at a time


def document_keys(split: npt.ArrayLike, row: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return split << 32 | row, the keys for `by_split`; rows are numbered over all batches of a file."""
    splits, rows = np.asarray(split).astype(np.uint64), np.asarray(row).astype(np.uint64)
    return splits << np.uint64(32) | rows


def outcomes(
    keys: npt.NDArray[np.uint64],
    *,
    bytes: npt.ArrayLike = 0,
    copies: npt.ArrayLike = 0,
    kept: npt.ArrayLike = 0,
    similarity: npt.ArrayLike = 0,
) -> npt.NDArray[np.void]:
    """Return rows of OUTCOMES, either for removed documents or for documents that represent others.

    For removed ones, pass `bytes` (text sizes), `kept` (content ranks of the kept documents, uint64[n, 2])
    and `similarity`; for the others, pass `copies` (how many documents each represents).
    """
    rows = np.empty(len(keys), OUTCOMES.dtype)
    rows["key"], rows["bytes"], rows["copies"] = keys, bytes, np.minimum(copies, _MOST_COPIES)
    ranks = np.broadcast_to(np.asarray(kept, np.uint64), (len(keys), 2))
    rows["kept_text"], rows["kept_id"], rows["similarity"] = ranks[:, 0], ranks[:, 1], similarity
    return rows


def count_groups(copies: npt.NDArray[np.integer[Any]]) -> list[int]:
    """Count documents by the number of documents they represent, in the classes of GROUP_SIZES."""
    classes = np.searchsorted(GROUP_SIZES, copies)
    counts: list[int] = np.bincount(classes, minlength=len(GROUP_SIZES) + 1).tolist()
    return counts


@dataclass(frozen=True, slots=True)
class SplitTable:
    """The rows of one split: rows [first, first + count) of a file, with their digest `content`.

    `lost` counts the documents that a table of outcomes removes.
    """

    file: Artifact
    first: int
    count: int
    content: str
    lost: Count = field(default_factory=Count)

    def pieces(self, dtype: np.dtype[Any]) -> list[Piece]:
        """Return the rows as an argument for `SplitRows`; an empty list if the split has no rows."""
        if not self.count:
            return []
        return [(Rows(self.file, dtype, header=False), self.first, self.first + self.count)]

    def read(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Read all rows in one request and compare their bytes with the digest."""
        if not self.count:
            return np.empty(0, dtype)
        start, stop = (row * dtype.itemsize for row in (self.first, self.first + self.count))
        rows: npt.NDArray[Any] = self.file.read_range(start, stop, self._is_right).view(dtype)
        return rows

    def _is_right(self, data: npt.NDArray[np.uint8]) -> bool:
        return xxhash.xxh3_128_hexdigest(data.data) == self.content


NOTHING = SplitTable(Artifact(Path()), 0, 0, xxhash.xxh3_128_hexdigest(b""))


@dataclass(frozen=True, slots=True)
class SplitTables:
    """The splits of a group that have rows, by number: (rows, digest, removed documents, removed bytes)."""

    splits: Mapping[str, tuple[int, str, int, int]]


def by_split(
    run: RunTasks,
    stage: Stage[[Slice], SplitTables],
    table: Table,
    decided: Sequence[Commit],
    splits: int,
    *,
    limits: Limits = DEFAULT_LIMITS,
    consumed: bool = True,
) -> list[SplitTable]:
    """Bring the rows of `table` in the commits `decided` to their splits; return one handle per split.

    With `consumed=False`, the rows are read again later.

    The table's `key` must be `document_keys`. The rows of a split have the field `row` instead of `key`, and
    no `bytes`; they are sorted by all of their fields.
    """
    shift = (SPLITS_PER_GROUP - 1).bit_length() + 32
    groups = -(-splits // SPLITS_PER_GROUP)
    end = groups << shift
    exchanged = exchange(
        run, stage, table, decided, readers=groups, end=end, limits=limits, consumed=consumed
    )
    tasks = []
    for group in range(groups):
        piece = exchanged.slice(group << shift, group + 1 << shift)
        tasks.append(stage.task(f"{group:05d}", piece.bytes, piece))
    [commits] = run(tasks)
    found = []
    for group, commit in enumerate(commits):
        file, first = commit.files / _ROWS_FILE, 0
        counted = stage.result(commit).splits
        for split in range(group * SPLITS_PER_GROUP, min((group + 1) * SPLITS_PER_GROUP, splits)):
            if (counts := counted.get(str(split))) is None:
                found.append(NOTHING)
                continue
            rows, digest, documents, size = counts
            found.append(SplitTable(file, first, rows, digest, Count(documents, size)))
            first += rows
    return found


def write_tables(folder: Path, piece: Slice) -> SplitTables:
    fields = [(name, piece.table.dtype[name]) for name in piece.table.dtype.names or ()]
    others = [(name, dtype) for name, dtype in fields if name not in ("key", "bytes")]
    splits: dict[str, tuple[int, str, int, int]] = {}
    hashers: dict[str, xxhash.xxh3_128] = {}
    with (folder / _ROWS_FILE).open("wb") as file:
        for rows, _ in piece.stream(_MEMORY_BYTES):
            if (rows["key"][1:] == rows["key"][:-1]).any():
                rows = rows[np.lexsort([*(rows[name] for name, _ in reversed(others)), rows["key"]])]
            stored = np.empty(len(rows), [("row", "<u4"), *others])
            stored["row"] = rows["key"] & np.uint64((1 << 32) - 1)
            for name, _ in others:
                stored[name] = rows[name]
            file.write(stored.data)
            numbers = (rows["key"] >> np.uint64(32)).astype(np.int64)
            edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
            for begin, end in pairwise(edges):
                split = str(numbers[begin])
                hasher = hashers.setdefault(split, xxhash.xxh3_128())
                hasher.update(stored[begin:end].data)
                count, _, documents, size = splits.get(split, (0, "", 0, 0))
                lost = _lost(rows[begin:end])
                documents, size = documents + lost.documents, size + lost.bytes
                splits[split] = (count + end - begin, hasher.hexdigest(), documents, size)
    return SplitTables(splits)


def _lost(rows: npt.NDArray[np.void]) -> Count:
    if rows.dtype != OUTCOMES.dtype:
        return Count()
    lost = rows["copies"] == 0
    return Count(int(lost.sum()), int(rows["bytes"][lost].sum()))


@dataclass(frozen=True, slots=True)
class Removed:
    """Removed documents and copy counts of one split. Row numbers count over all batches of its file.

    `rows` maps the reason for dropping documents to their ascending row numbers; no row has two reasons.
    `copied` are the ascending rows that represent more documents than themselves, `copies` how many each.
    `outcomes` has a row of OUTCOME for each of `rows`, by reason. With a `part`, `part_rows` are the
    ascending rows that belong to a named part, and `part_codes` the indexes of these parts in its `names`.
    """

    rows: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    copied: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    outcomes: Mapping[str, npt.NDArray[np.void]] = field(default_factory=dict)
    part: Part | None = None
    part_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    part_codes: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        for rows in (*self.rows.values(), self.copied, self.part_rows):
            assert (rows[1:] >= rows[:-1]).all(), "row numbers do not ascend"

    def elsewhere(self, count: int) -> dict[str, npt.NDArray[np.bool_]]:
        """Return, by reason, bool[count]: which of `count` rows belong to another part, such as train."""
        if self.part is None:
            return {}
        codes = np.full(count, len(self.part.names), np.int32)  # rows without an entry belong to train
        codes[self.part_rows] = self.part_codes
        names = (*self.part.names, TRAIN)
        others = [(name, codes == code) for code, name in enumerate(names) if name != self.part.name]
        return {f"{SPLIT}/{name}": mask for name, mask in others if mask.any()}

    def left(self, count: int) -> npt.NDArray[np.bool_]:
        """Return bool[count]: which of `count` rows are not removed."""
        left = np.ones(count, np.bool_)
        for rows in self.rows.values():
            left[rows] = False
        return left

    def copies_of(self, count: int) -> npt.NDArray[np.int32]:
        """Return int32[count]: how many documents each of `count` rows represents, itself included."""
        copies = np.ones(count, np.int32)
        copies[self.copied] = self.copies
        return copies

    def within(self, start: int, count: int) -> Removed:
        """Return the removals and copies of rows [start, start + count), renumbered from 0."""
        here = {reason: _between(rows, start, count) for reason, rows in self.rows.items()}
        rows = {reason: self.rows[reason][part] - start for reason, part in here.items()}
        copied = _between(self.copied, start, count)
        outcomes = {reason: found[here[reason]] for reason, found in self.outcomes.items()}
        parts = _between(self.part_rows, start, count)
        found = self.part, self.part_rows[parts] - start, self.part_codes[parts]
        return Removed(rows, self.copied[copied] - start, self.copies[copied], outcomes, *found)


def _between(ascending: npt.NDArray[np.int64], start: int, count: int) -> slice:
    first, last = np.searchsorted(ascending, [start, start + count])
    return slice(first, last)


AMOUNT = "amount"  # reason for documents of a source beyond its amount
NOT_SAMPLED = "not_sampled"  # reason for documents that a `sample` did not take
SPLIT = "split"  # prefix of the reason for documents in another part: split/NAME

PART = np.dtype([("row", "<u4"), ("part", "<i4")])


@dataclass(frozen=True, slots=True)
class Part:
    """The part `name` of the documents: one of `names`, or TRAIN, which has all other documents.

    `table` has a row of PART for each document of this split that is in one of the parts `names`.
    """

    name: str
    names: tuple[str, ...]
    table: SplitTable


@dataclass(frozen=True, slots=True)
class SplitRemovals:
    """Tables of outcomes of one split by reason, in the order of stages, as arguments of its later tasks.

    If two tables count the copies of a document, the later one is valid. With a `part`, documents of other
    parts are removed, too.
    """

    tables: Annotated[Mapping[str, SplitTable], RecipeKey()] = field(default_factory=dict)
    part: Part | None = None

    def also(self, reason: str, table: SplitTable) -> SplitRemovals:
        """Return a copy with the table of a later stage."""
        return replace(self, tables={**self.tables, reason: table})

    def stream(self) -> dict[str, SplitRows]:
        """Return one reader of OUTCOME rows per reason, for a caller that reads the documents in order."""
        return {reason: SplitRows(OUTCOME, table.pieces(OUTCOME)) for reason, table in self.tables.items()}

    def of_part(self, part: Part) -> SplitRemovals:
        """Return a copy that also removes all documents that are not in `part`."""
        return replace(self, part=part)

    def load(self) -> Removed:
        """Read all tables into memory."""
        rows: dict[str, npt.NDArray[np.int64]] = {}
        outcomes: dict[str, npt.NDArray[np.void]] = {}
        others = []
        for reason, table in self.tables.items():
            found = table.read(OUTCOME)
            lost = found["copies"] == 0
            outcomes[reason] = found[lost]
            rows[reason] = outcomes[reason]["row"].astype(np.int64)
            others.append(found[~lost])
        kept = latest_outcomes(others)
        copied, copies = (kept[name].astype(np.int64) for name in ("row", "copies"))
        if self.part is None:
            return Removed(rows, copied, copies, outcomes)
        parts = self.part.table.read(PART)
        codes = parts["part"].astype(np.int32)
        return Removed(rows, copied, copies, outcomes, self.part, parts["row"].astype(np.int64), codes)


def latest_outcomes(tables: Iterable[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Merge tables of OUTCOME, ordered by row; if several tables have a document, the last table wins."""
    rows = np.concatenate([np.empty(0, OUTCOME), *tables])
    rows = rows[np.argsort(rows["row"], kind="stable")]
    latest: npt.NDArray[np.void] = rows[np.append(rows["row"][1:] != rows["row"][:-1], True)[: len(rows)]]
    return latest


Piece = tuple[Rows, int, int]  # rows [begin, end) of a table


class SplitRows:
    """Merges the rows of several pieces, each sorted by `row` and then by the fields in `then`."""

    def __init__(
        self,
        dtype: npt.DTypeLike,
        pieces: Iterable[Piece],
        *,
        then: Sequence[str] = (),
        chunk_rows: int = _CHUNK_ROWS,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._order = (*reversed(then), "row")
        self._cursors = [_Cursor(piece, chunk_rows) for piece in pieces if piece[1] < piece[2]]

    def before(self, row: int) -> npt.NDArray[Any]:
        """Return the next rows in order, up to but excluding `row`."""
        parts = [part for cursor in self._cursors for part in cursor.take(row)]
        rows = np.concatenate([np.empty(0, self._dtype), *parts])
        ordered: npt.NDArray[Any] = rows[np.lexsort([rows[name] for name in self._order])]
        return ordered


class _Cursor:
    def __init__(self, piece: Piece, chunk_rows: int) -> None:
        self._chunk_rows = chunk_rows
        self._table, self._next, self._end = piece
        self._held = self._read()

    def _read(self) -> npt.NDArray[Any]:
        start = self._next
        self._next = min(start + self._chunk_rows, self._end)
        return self._table.read(start, self._next)

    def take(self, row: int) -> Iterator[npt.NDArray[Any]]:
        while len(self._held):
            count = int(np.searchsorted(self._held["row"], row))
            yield self._held[:count]
            self._held = self._held[count:]
            if len(self._held):
                return
            self._held = self._read()
