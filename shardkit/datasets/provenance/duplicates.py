"""Find the documents that were kept in place of removed duplicates, by the table `duplicates/` of a dataset.

The dataset holds the text of a removed duplicate only as the text of the document that was kept in its place.
If that document was itself removed in a later stage, as a near-duplicate, it takes two steps to find the one
that was kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.outputs import document_ids
from shardkit.datasets.provenance.search import Selection
from shardkit.formats.dropped_table import DUPLICATES_FOLDER, DUPLICATES_SCHEMA

_Ids = npt.NDArray[np.bytes_]


class Duplicates:
    """The table of removed duplicates of a dataset; empty if the dataset has no such table."""

    def __init__(self, dataset: OpenDataset) -> None:
        self.folder = ParquetFolder(dataset, DUPLICATES_FOLDER, DUPLICATES_SCHEMA)

    def follow(self, selection: Selection) -> Followed:
        """Find the removed documents that match a selection, and those finally kept in their place."""
        columns = ["document_id", "kept_document_id"]
        asked = list(self.folder.search(selection, columns)) if self.folder.names else []
        found = [_pairs(table) for table in asked]
        removed, kept = (np.concatenate([np.empty(0, "S16"), *(pair[n] for pair in found)]) for n in (0, 1))
        wanted, known = len(removed), removed
        while len(open_ := np.setdiff1d(kept, known)) and self.folder.names:
            known = np.union1d(known, open_)
            more = Selection(documents=[one.ljust(16, b"\0") for one in open_.tolist() if one])
            if not more.documents:
                break
            pairs = [_pairs(table) for table in self.folder.search(more, columns)]
            removed, kept = (
                np.concatenate([a, *(p[n] for p in pairs)]) for n, a in enumerate((removed, kept))
            )
        order = np.argsort(removed, kind="stable")
        return Followed(np.sort(removed[:wanted]), removed[order], kept[order])


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of `Duplicates.follow`; all fields hold document ids, S16[n].

    `asked` are the removed documents that match the selection. `kept[i]` was kept in place of `removed[i]`.
    `removed` is sorted; it also has the removed documents that were kept in place of others at first.
    """

    asked: _Ids
    removed: _Ids
    kept: _Ids

    def chain(self, document: bytes) -> list[bytes]:
        """Return the documents that were kept in place of a removed one, stage by stage; the last one stays.

        Returns [] if the document that stays is in another corpus.
        """
        found: list[bytes] = []
        while True:
            at = int(np.searchsorted(self.removed, document))
            if at == len(self.removed) or self.removed[at].ljust(16, b"\0") != document:
                return found
            document = self.kept[at].ljust(16, b"\0")
            if not self.kept[at]:
                return []
            found.append(document)

    @property
    def stays(self) -> list[bytes]:
        """The documents of the dataset that were finally kept in place of the documents in `asked`."""
        kept = np.setdiff1d(self.kept, self.removed)
        return [one.ljust(16, b"\0") for one in kept.tolist() if one]


NOTHING_FOLLOWED = Followed(*(np.empty(0, "S16") for _ in range(3)))


def _pairs(table: pa.Table) -> tuple[_Ids, _Ids]:
    kept = pc.fill_null(table.column("kept_document_id").cast(pa.binary()), b"\0" * 16).cast(pa.binary(16))
    table = table.set_column(1, "kept_document_id", kept)
    return document_ids(table), document_ids(table.select([1]).rename_columns(["document_id"]))
