"""What two builds differ in: their funnels, and the documents that one has and the other has not.

Documents are compared by their ids. Of builds with more than `_IDS` pieces of documents, a share of all ids
is compared, which is chosen by the ids themselves: both sides choose the same documents, memory is bounded,
and counts are estimates, which the page says.
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

_IDS = 4_000_000  # of each side, 16 bytes each, and as much again while they are compared
_EXAMPLES = 20
_EXAMINED = 2000  # lost documents that are looked up in the other build's tables of what was removed
_LOOK_UP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FunnelChange:
    """A step or rule of both funnels; None where one has none."""

    label: str
    before: Count | None
    after: Count | None

    @property
    def documents(self) -> int:
        """How many more it has after."""
        return (self.after or Count()).documents - (self.before or Count()).documents


@dataclass(frozen=True, slots=True)
class Difference:
    """Documents of both builds, by source; `gained` are in the second one only, `lost` in the first only.

    One in `one_in` documents was compared. `fates`: what became of lost documents in the second build.
    """

    one_in: int
    sources: list[tuple[str, int, int, int]]
    gained: list[bytes]
    lost: list[bytes]
    fates: list[tuple[str, int]]
    examined: int


class Comparison:
    """Compares `other`, the build after a change, with `explored`, the one before."""

    def __init__(self, explored: Explored, other: Explored) -> None:
        self._before, self._after = explored, other
        self.work = Background(self._compare)

    def show(self, explored: Explored, params: Params) -> dict[str, object]:
        """The page."""
        before, after = self._before, self._after
        page: dict[str, object] = {"after": after.name, "funnel": None, "difference": None}
        if before.card is not None and after.card is not None and before.has_funnel and after.has_funnel:
            page["funnel"] = compare_funnels(before.card, after.card)
        if not before.provenance.names or not after.provenance.names:
            return page
        found = self.work.wait()
        if found is None:
            return {"share": self.work.share}
        return page | {
            "difference": found,
            "gained": _described(after, found.gained),
            "lost": _described(before, found.lost),
        }

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
            _some(after[gained], _EXAMPLES),
            _some(before[lost], _EXAMPLES),
            _fates(sides[1], examined),
            len(examined),
        )


def compare_funnels(before: DatasetCard, after: DatasetCard) -> list[FunnelChange]:
    """Compare what steps and rules lost, in the order of the second build: first what was read, last kept."""
    rows = [{(row.rule or row.label): row for row in funnel_rows(card)} for card in (before, after)]
    order = list(rows[1])
    order[-1:-1] = [name for name in rows[0] if name not in rows[1]]  # before "kept"
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
    """(ids, sources) of the documents of a dataset whose ids are chosen; S16, sorted."""
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
    order = np.argsort(whole, kind="stable")
    return whole[order], np.concatenate(sources)[order]


def _labels(side: Explored, sources: npt.NDArray[np.int32]) -> dict[str, int]:
    numbers, counts = np.unique(sources, return_counts=True)
    found: Counter[str] = Counter()
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        found[side.source(number)] += count
    return found


def _some(ids: npt.NDArray[np.bytes_], count: int) -> list[bytes]:
    """The first ones: ids are hashes, so they are drawn at random."""
    return [one.ljust(16, b"\0") for one in ids[:count].tolist()]


def _fates(side: Explored, documents: list[bytes]) -> list[tuple[str, int]]:
    """Count documents of a build by the rule that dropped them or the kind of duplicate, most first."""
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
    """Describe where documents of a dataset are from, with the beginnings of their texts."""
    wanted = list(documents)
    if not wanted:
        return []
    pieces = {}
    for table in side.tracer.known().search(Selection(documents=wanted)):
        for piece in pieces_of(table):
            if piece.document_start == 0:
                pieces[piece.document_id] = piece
    return side.tracer.pieces(list(pieces.values()))
