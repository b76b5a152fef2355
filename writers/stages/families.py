"""Families of documents: all those with one value of the metadata field `split.by`, such as a repository.

`split` puts a whole family into one part. Before any text is read, it finds the families that fit:

    draw      a split: its documents whose family has a hash below a bound                DRAWN
    fit       a range of hashes: the whole families that are no larger than a part    candidates.npy
    families  by split: the rows of these documents                                       FITTING

A family's hash is that of the field's value, so it does not depend on which documents have the value. A
family counts for the source that is first in the recipe of those that have a document of it. Memory does not
grow with the largest family: families that do not fit are left out while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.hashing import keyed_hashes
from shardkit.kernels.numba_support import Int64s, UInt64s
from shardkit.writers.dedup.outcomes import SplitRemovals, document_keys, write_tables
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.tokens.groups import metadata_field

DRAWN = Table(
    "drawn.run",
    np.dtype(
        [
            ("key", "<u8"),  # hash of the document's family
            ("row", "<u4"),
            ("part", "<i4"),
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
)
# Keyed by `document_keys`; `family` is the key of DRAWN.
FITTING = Table("fitting.run", np.dtype([("key", "<u8"), ("family", "<u8")]))
FITTED = np.dtype([("row", "<u4"), ("family", "<u8")])  # a row of FITTING in its split

CANDIDATES = "candidates.npy"
_COLUMNS = ("document_id", "source", "metadata")
_MEMORY = 64 << 20
_PURPOSE = "split"

Wanted = int | list[int]
"""The number of documents that a part should get: from all sources together, or from each source."""


@dataclass(frozen=True, slots=True)
class Families:
    """Tells which documents are a family: those with one value of the field `by`; None: each is its own.

    A document without the field is a family of its own, under its document id. So with `by: document_id`, a
    document that was rewritten in another build is in one family with its source.
    """

    seed: int
    by: Annotated[str | None, RecipeKey("split.by")] = None
    labels: Labels = ()

    def hashes(self, documents: pa.RecordBatch) -> UInt64s:
        """Return uint64[n], the hash of each document's family."""
        ids = documents.column("document_id").to_pylist()
        if self.by is not None:
            values = metadata_field(documents.column("metadata"), self.by)
            names = (own.hex() if one is None else one for own, one in zip(ids, values, strict=True))
            ids = [name.encode() for name in names]
        return keyed_hashes(ids, self.seed, _PURPOSE)


def remaining_batches(
    documents: Artifact, removed: SplitRemovals, labels: Labels = (), columns: Sequence[str] = ()
) -> Iterator[tuple[int, pa.RecordBatch, Int64s]]:
    """Yield (row of the batch's first document, batch, kept rows in it) for batches with kept rows.

    With `columns`, only these columns are decompressed.
    """
    lost, start = removed.load(), 0
    fields = [DOCUMENT_SCHEMA.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(included_fields=fields)  # an empty list means all
    with documents.open_arrow() as source:
        for batch in marked_batches(pa.ipc.open_file(source, options=options), labels):
            here = lost.within(start, batch.num_rows)
            keep = here.left(batch.num_rows)
            if keep.any():
                yield start, batch, np.flatnonzero(keep)
            start += batch.num_rows


def draw(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    stops: Sequence[int],
    families: Annotated[Families, RecipeKey()],
    limits: Limits,
) -> int:
    """Write the documents whose family has a hash below the last of `stops`; return their number."""
    count, ends = 0, np.array(stops, np.uint64)
    with RunWriter(folder / DRAWN.file, DRAWN, memory_bytes=_MEMORY, limits=limits) as run:
        for start, batch, kept in remaining_batches(documents, removed, families.labels, _COLUMNS):
            taken = batch.take(pa.array(kept))
            hashes = families.hashes(taken)
            parts = np.searchsorted(ends, hashes, side="right")
            drawn = np.flatnonzero(parts < len(ends))
            rows = np.zeros(len(drawn), DRAWN.dtype)
            rows["key"], rows["part"] = hashes[drawn], parts[drawn]
            rows["row"], rows["split"] = start + kept[drawn], -1  # `split` is set by the exchange
            rows["source"] = taken.column("source").to_numpy()[drawn]
            run.write(rows)
            count += len(rows)
    return count


SPLIT_DRAW = Stage("split_draw", "split", draw, cost=1)


def fit(folder: Path, drawn: Slice, wanted: Sequence[Wanted], sources: int, limits: Limits) -> None:
    """Write the documents of the families in a range of hashes that are no larger than one of the parts.

    `wanted` has the sizes of the parts. In candidates.npy `source` is that of the family, and `part` is the
    number of parts if the family does not fit into the part that it was drawn for.
    """
    rooms = np.array([[one] * sources if isinstance(one, int) else one for one in wanted], np.int64)
    candidates = [np.empty(0, DRAWN.dtype)]
    with RunWriter(folder / FITTING.file, FITTING, memory_bytes=_MEMORY, limits=limits) as run:
        for rows in _whole_families(drawn, int(rooms.max())):
            _, first, sizes = np.unique(rows["key"], return_index=True, return_counts=True)
            homes, parts = np.minimum.reduceat(rows["source"], first), rows["part"][first]
            keep = np.repeat(sizes <= rooms[:, homes].max(axis=0), sizes)
            parts = np.where(sizes <= rooms[parts, homes], parts, len(rooms))
            taken = rows[keep]
            taken["source"] = np.repeat(homes, sizes)[keep]
            taken["part"] = np.repeat(parts, sizes)[keep]
            candidates.append(taken)
            fitting = np.empty(len(taken), FITTING.dtype)
            fitting["key"], fitting["family"] = document_keys(taken["split"], taken["row"]), taken["key"]
            run.write(fitting)
    np.save(folder / CANDIDATES, np.concatenate(candidates))


def _whole_families(drawn: Slice, most: int) -> Iterator[npt.NDArray[np.void]]:
    """Yield the rows in the order of keys, all rows of a family together.

    Of a family of more than `most` documents there may be fewer rows, but more than `most`.
    """
    held = np.empty(0, DRAWN.dtype)
    for rows, _ in drawn.stream(drawn.limits.read_memory_bytes):
        rows = np.concatenate([held, rows])
        if len(rows):
            last = int(np.searchsorted(rows["key"], rows["key"][-1]))
            if last:
                yield rows[:last]
            held = rows[last : last + most + 1]
    if len(held):
        yield held


SPLIT_FIT = Stage("split_fit", "split", fit)
SPLIT_FAMILIES = Stage("split_families", "split", write_tables)
