"""Compares two builds: their funnels, and the documents that only one of them has.

Documents are compared by their ids. In builds with more than `_IDS` pieces of documents, only a share of all
ids is compared, selected by the ids themselves. Both sides therefore select the same documents, and memory is
bounded. Counts are then estimates, and the page says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Count, DatasetCard
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import pieces_of
from shardkit.tools.explore.background import Background
from shardkit.tools.explore.explored import Explored, Params
from shardkit.tools.explore.overview import funnel_rows
from shardkit.tools.explore.scan import scan

_IDS = 4_000_000  # maximum number of ids compared per build; the memory is 2 * 16 bytes per id
_EXAMPLES = 20
_EXAMINED = 2000  # maximum number of lost documents that are looked up in the other build's tables
_LOOK_UP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FunnelChange:
    """A step or rule with its counts in both funnels; None if a funnel does not have it."""

    label: str
    before: Count | None
    after: Count | None

    @property
    def documents(self) -> int:
        """The difference in documents: after minus before."""
        return (self.after or Count()).documents - (self.before or Count()).documents


@dataclass(frozen=True, slots=True)
class Difference:
    """Documents that only one of two builds has; `sources` has counts (source, in both, gained, lost).

    `gained` and `lost` describe some documents that only the second or only the first build has. One in
    `one_in` documents was compared. `fates` counts why the second build lacks `examined` of the lost ones.
    """

    one_in: int
    sources: list[tuple[str, int, int, int]]
    gained: list[dict[str, object]]
    lost: list[dict[str, object]]
    fates: list[tuple[str, int]]
    examined: int


class Comparison:
    """Compares `explored`, the build before a change, with `other`, the build after it."""

    def __init__(self, explored: Explored, other: Explored) -> None:
        self._before, self._after = explored, other
        self.work = Background(self._compare)

    def show(self, explored: Explored, params: Params) -> dict[str, object]:
        """Return the facts for the page, or the share of work done if the comparison is not finished."""
        before, after = self._before, self._after
        page: dict[str, object] = {"after": after.name, "funnel": None, "difference": None}
        if before.card is not None and after.card is not None and before.has_funnel and after.has_funnel:
            page["funnel"] = compare_funnels(before.card, after.card)
        if not before.provenance.names or not after.provenance.names:
            return page
        found = self.work.wait()
        if found is None:
            return {"share": self.work.share}
        return page | {"difference": found, "gained": found.gained, "lost": found.lost}

    def _compare(self, report: Callable[[float], None]) -> Difference:
        sides = (self._before, self._after)
        lines = max(side.provenance.lines() for side in sides)
        one_in = max(1, -(-lines // _IDS))
        parts = []
        for number, side in enumerate(sides):
            parts.append(_ids(side, one_in))
            report((number + 1) / 2)
        (before, of_before), (after, of_after) = parts
        gained, lost = ~np.isin(after, before), ~np.isin(before, after)
        labels = list(dict.fromkeys([*sides[0].tracer.labels, *sides[1].tracer.labels]))
        gains = Counter(_labels(sides[1], of_after[gained]))
        losses = Counter(_labels(sides[0], of_before[lost]))
        both = Counter(_labels(sides[0], of_before[~lost]))
        named = [(label, both[label], gains[label], losses[label]) for label in labels]
        examined = _some(before[lost], _EXAMINED)
        return Difference(
            one_in,
            [entry for entry in named if any(entry[1:])],
            _described(sides[1], _some(after[gained], _EXAMPLES)),
            _described(sides[0], _some(before[lost], _EXAMPLES)),
            _fates(sides[1], examined),
            len(examined),
        )


def compare_funnels(before: DatasetCard, after: DatasetCard) -> list[FunnelChange]:
    """Return the losses of each step and rule in two builds; the first entry is "read", the last "kept"."""
    rows = [{(row.rule or row.label): row for row in funnel_rows(card)} for card in (before, after)]
    order = list(rows[1])
    order[-1:-1] = [name for name in rows[0] if name not in rows[1]]  # of the first only: before "kept"
    found = []
    for name in order:
        counts = [
            None
            if name not in side
            else side[name].left
            if side[name].kind in ("read", "kept")
            else side[name].lost
            for side in rows
        ]
        if any(count is not None and count.documents for count in counts):
            found.append(FunnelChange(name, *counts))
    return found


def _ids(side: Explored, one_in: int) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int32]]:
    """Select one in `one_in` documents; return their ids (dtype S16, sorted) and their source numbers."""
    ids, sources = [np.empty(0, "S16")], [np.empty(0, np.int32)]
    columns = ["document_id", "document_start", "source"]
    for number in range(len(side.provenance.names)):
        with side.provenance.open(number) as opened:
            for group in range(opened.num_row_groups):
                table = opened.read_row_group(group, columns=columns, use_threads=False)
                table = table.filter(pa.array(table.column("document_start").to_numpy() == 0))
                data = table.column("document_id").combine_chunks()
                found = np.frombuffer(data.buffers()[1], "S16")[data.offset : data.offset + len(data)]
                chosen = found.view("<u8").reshape(-1, 2)[:, 0] % one_in == 0
                ids.append(found[chosen])
                sources.append(table.column("source").to_numpy()[chosen])
    whole = np.concatenate(ids)
    ids_found, firsts = np.unique(whole, return_index=True)  # a repeated document counts once
    return ids_found, np.concatenate(sources)[firsts]


def _labels(side: Explored, sources: npt.NDArray[np.int32]) -> dict[str, int]:
    numbers, counts = np.unique(sources, return_counts=True)
    found: Counter[str] = Counter()
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        found[side.source(number)] += count
    return found


def _some(ids: npt.NDArray[np.bytes_], count: int) -> list[bytes]:
    """Return the first `count` ids, which are a random sample because ids are hashes."""
    return [one.ljust(16, b"\0") for one in ids[:count].tolist()]


def _fates(side: Explored, documents: list[bytes]) -> list[tuple[str, int]]:
    """Return (rule or kind of duplicate by which `side` removed them, number of `documents`), descending."""
    found: Counter[str] = Counter()
    if documents:
        for folder, name in ((side.dropped, "rule"), (side.duplicates, "reason")):
            wanted = Selection(documents=documents)
            columns = ["document_id", name]
            lines = scan(folder, wanted, columns=columns, limit=len(documents), seconds=_LOOK_UP_SECONDS)
            found.update(str(line[name]) for line in lines.lines)
        if rest := len(documents) - found.total():
            found["not found in its tables of removed documents"] = rest
    return found.most_common()


def _described(side: Explored, documents: Iterable[bytes]) -> list[dict[str, object]]:
    """Return source, file, record and the beginning of the text of documents of a dataset."""
    wanted = list(documents)
    if not wanted:
        return []
    pieces = {}
    for table in side.tracer.known().search(Selection(documents=wanted)):
        for piece in pieces_of(table):
            if piece.document_start == 0:
                pieces[piece.document_id] = piece
    return side.tracer.pieces(list(pieces.values()))
