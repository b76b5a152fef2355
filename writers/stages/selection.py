"""Which documents of a split a dataset has: those that no stage removed and that its output asks for.

Each that goes is booked under the reason it goes for, once: as a duplicate, as one of another part of the
split, or as one that `output.where` leaves to other outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.settings import Bounds
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.ledger import Count, Ledger

NOT_SELECTED = "output/elsewhere"  # the reason of documents that an output's `where` leaves out


@dataclass(frozen=True, slots=True)
class Selection:
    """Which documents an output has: those with one of the values, or a number in the range, of each name.

    `copies` is how many documents one stands for, unless the inputs have a field of that name (`own_copies`
    is false then).
    """

    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranges: tuple[tuple[str, Bounds], ...] = ()
    own_copies: bool = True

    @classmethod
    def of(cls, recipe: Recipe) -> Selection | None:
        """Return the selection of the recipe of one dataset; None if it has all documents."""
        if recipe.output.where is None:
            return None
        items = sorted(recipe.output.where.items())
        where = tuple((name, one) for name, one in items if not isinstance(one, Bounds))
        ranges = tuple((name, one) for name, one in items if isinstance(one, Bounds))
        named = "copies" in recipe.output.where
        own_copies = not named or not any("copies" in config.metadata for config in recipe.inputs)
        return cls(where, ranges, own_copies)

    def others(
        self, documents: pa.RecordBatch, source: str, languages: Sequence[str | None] | None, removed: Removed
    ) -> npt.NDArray[np.bool_]:
        """bool[n]: the documents of one source that are not in the output; `removed` has their copies."""
        left = np.zeros(documents.num_rows, np.bool_)
        for name, values in self.where:
            wanted, found = set(values), self._values(name, documents, source, languages, removed)
            left |= [(one if isinstance(one, str) else str(one)) not in wanted for one in found]
        for name, bounds in self.ranges:
            found = self._values(name, documents, source, languages, removed)
            is_number = [isinstance(one, int | float) and not isinstance(one, bool) for one in found]
            numbers = np.array(
                [one if good else np.nan for one, good in zip(found, is_number, strict=True)], np.float64
            )
            fails = bounds.fails(numbers)
            left |= ~np.array(is_number, np.bool_) if fails is None else np.isnan(numbers) | fails
        return left

    def _values(
        self,
        name: str,
        documents: pa.RecordBatch,
        source: str,
        languages: Sequence[str | None] | None,
        removed: Removed,
    ) -> Sequence[object]:
        """Return the value that each document has under a name; None if it has none."""
        if name == "source":
            return [source] * documents.num_rows
        if name == "language":
            assert languages is not None
            return languages
        if name == "copies" and self.own_copies:
            copies: list[object] = _copies(documents, removed).tolist()
            return copies
        rows = documents.column("metadata").to_pylist()
        return [None if row is None else orjson.loads(row).get(name) for row in rows]


def _copies(documents: pa.RecordBatch, removed: Removed) -> npt.NDArray[np.int32]:
    """int32[n]: how many documents each stands for, itself included."""
    copies = np.ones(documents.num_rows, np.int32)
    copies[removed.copied] = removed.copies
    return copies


def remaining(
    batch: pa.RecordBatch,
    removed: Removed,
    ledger: Ledger,
    twins: TwinsFile,
    others: npt.NDArray[np.bool_] | None = None,
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32]]:
    """The documents of a batch that stay, and how many documents each stands for; `others` go, too.

    The ledger gets what is read and what goes; `twins` what goes as a duplicate, and what stays for one.
    """
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    copies = _copies(batch, removed)
    keep = np.ones(batch.num_rows, np.bool_)
    for reason, losers in removed.rows.items():
        if len(losers):
            ledger.drop(reason, len(losers), int(sizes[losers].sum()))
            twins.remove(batch, reason, losers, removed.outcomes.get(reason))
            keep[losers] = False
    twins.keep(batch, removed.copied)
    elsewhere = removed.elsewhere(batch.num_rows)
    elsewhere |= {} if others is None else {NOT_SELECTED: others}
    for reason, rows in elsewhere.items():
        rows = rows & keep
        ledger.drop(reason, int(rows.sum()), int(sizes[rows].sum()))
        keep &= ~rows
    if keep.all():
        return batch, copies
    return batch.filter(pa.array(keep)), copies[keep]
