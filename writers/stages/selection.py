"""Which documents of a split a dataset contains: those that no stage removed and that its output selects.

The ledger counts each other document under exactly one reason: as a duplicate, as beyond its source's amount,
as a member of another part (such as train), or as not selected by `output.where`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.kernels.text_arrays import text_offsets
from shardkit.settings import Bounds
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.documents import metadata_values, numbers_of
from shardkit.writers.rows.ledger import Count, Ledger

NOT_SELECTED = "output/elsewhere"  # ledger reason of documents that `output.where` does not select


@dataclass(frozen=True, slots=True)
class Selection:
    """The condition of `output.where`: for each name, the allowed values or the range of a document's value.

    The name `copies` means the number of documents that one represents, unless the inputs have a field of
    that name (then `own_copies` is false).
    """

    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranges: tuple[tuple[str, Bounds], ...] = ()
    own_copies: bool = True

    @classmethod
    def of(cls, recipe: Recipe) -> Selection | None:
        """Return the selection of the recipe of one dataset; None if it selects all documents."""
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
        """Return bool[n]: which documents of a source are not selected; `removed` has their copy counts."""
        left = np.zeros(documents.num_rows, np.bool_)
        for name, values in self.where:
            wanted, found = set(values), self._values(name, documents, source, languages, removed)
            left |= [(one if isinstance(one, str) else str(one)) not in wanted for one in found]
        for name, bounds in self.ranges:
            found = self._values(name, documents, source, languages, removed)
            numbers = numbers_of(found)
            fails = bounds.fails(numbers)
            left |= np.isnan(numbers) if fails is None else np.isnan(numbers) | fails
        return left

    def _values(
        self,
        name: str,
        documents: pa.RecordBatch,
        source: str,
        languages: Sequence[str | None] | None,
        removed: Removed,
    ) -> Sequence[object]:
        """Return the value of the field `name` for each document; None where a document has no value.

        The field is source, language, copies or a metadata field.
        """
        if name == "source":
            return [source] * documents.num_rows
        if name == "language":
            assert languages is not None
            return languages
        if name == "copies" and self.own_copies:
            copies: list[object] = removed.copies_of(documents.num_rows).tolist()
            return copies
        return metadata_values(documents.column("metadata"), name)


def remaining(
    batch: pa.RecordBatch,
    removed: Removed,
    ledger: Ledger,
    twins: TwinsFile,
    others: npt.NDArray[np.bool_] | None = None,
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32]]:
    """Return the remaining documents of a batch, and how many documents each represents, int32[n].

    Drops documents in `removed` and, as not selected, those marked in `others`. Counts read and dropped
    documents in the ledger, and adds duplicates and their kept documents to `twins`.
    """
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    copies = removed.copies_of(batch.num_rows)
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
