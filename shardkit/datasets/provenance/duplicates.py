"""Find the documents that were kept for removed duplicates, in the table `duplicates/` of a dataset.

The text of a removed duplicate is in the dataset only as the text of the document that was kept for it. For
an exact duplicate of a document that was itself removed as a near-duplicate, finding it takes two steps.
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
        """Find the removed documents that match a selection, and the documents finally kept for them."""
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
    """The result of `Duplicates.follow`. `asked`, S16[n], are the removed documents that match the selection.

    `kept[i]` was kept for `removed[i]`. `removed` is sorted and includes intermediate documents.
    """

    asked: _Ids
    removed: _Ids
    kept: _Ids

    def chain(self, document: bytes) -> list[bytes]:
        """Return the chain of documents after a removed one up to the one that was finally kept.

        It is empty if the kept document is in another corpus.
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
        """The documents finally kept for all documents in `asked`."""
        kept = np.setdiff1d(self.kept, self.removed)
        return [one.ljust(16, b"\0") for one in kept.tolist() if one]


NOTHING_FOLLOWED = Followed(*(np.empty(0, "S16") for _ in range(3)))


def _pairs(table: pa.Table) -> tuple[_Ids, _Ids]:
    kept = pc.fill_null(table.column("kept_document_id").cast(pa.binary()), b"\0" * 16).cast(pa.binary(16))
    table = table.set_column(1, "kept_document_id", kept)
    return document_ids(table), document_ids(table.select([1]).rename_columns(["document_id"]))
