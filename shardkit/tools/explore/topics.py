"""Shows the clusters of `dedup.semantic`: a map of all by size, and each with example documents.

A build keeps the number of each document's cluster if the recipe gives it a metadata `field`, and how typical
the document is if it has a `distance`; it keeps no vectors, so the map is of sizes, not of places. The
numbers are read from the metadata in provenance/, in the background, in an order that is spread over the
files: what is counted so far is a sample of all documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.tools.explore.background import Background
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params, number_param
from shardkit.tools.explore.kept import describe_lines
from shardkit.tools.explore.scan import Place, read_lines
from shardkit.tools.explore.summary import spread_order

_EXAMPLES = 12  # documents of each cluster whose places are kept
_TILES = 300  # the largest clusters, which have a tile of their own
_LISTED = 40
_MOST_CLUSTERS = 1 << 20  # as in the recipe; a larger number is not a cluster
_SHADES = 5
_SHADED = 0.5  # share of removed duplicates at which a tile is darkest
_ASPECT = 2.0  # width of the map in heights

_NUMBER = "^(?P<number>-?[0-9]+(?:[.][0-9]+)?(?:[eE][-+]?[0-9]+)?)[,}]"

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of the map, in percent, for one cluster, or for all that are too small (`cluster` None)."""

    x: float
    y: float
    width: float
    height: float
    cluster: int | None
    documents: int
    removed: int

    @property
    def shade(self) -> int:
        """A number below `_SHADES`, by the share of documents that were removed in favor of these."""
        share = self.removed / ((self.documents + self.removed) or 1)
        return min(_SHADES - 1, int(_SHADES * share / _SHADED))

    @property
    def has_label(self) -> bool:
        return self.width > 8 and self.height > 7


class Topics:
    """Counts the documents of each cluster; arrays have an entry per cluster, by its number."""

    def __init__(self, explored: Explored) -> None:
        self._explored = explored
        card = explored.card
        recipe = card.recipe if card is not None and card.has("recipe") else {}
        config = _semantic(recipe)
        self.exists = config is not None
        """Whether the recipe has `dedup.semantic`."""
        self.field, self.distance = (config or {}).get("field"), (config or {}).get("distance")
        self.work = Background(self.count)
        self._lock = Lock()
        self._sources = max(1, len(explored.tracer.labels))
        self._documents = self._removed = np.zeros(0, np.int64)
        self._by_source = np.zeros((0, self._sources), np.int64)
        # (cluster, rank, file, group, line) of examples, those with the lowest ranks of each cluster
        self._examples = np.zeros((0, 5))

    def count(self, report: Callable[[float], None]) -> Topics:
        """Count the table and return self; `report` is called with the share of work done."""
        folder = self._explored.provenance
        files = spread_order(len(folder.names))
        groups = [(file, n) for file in files for n in range(folder.footer(file)[0].num_row_groups)]
        with closing(folder.run(self._read, iter(groups))) as tables:
            for done, (job, found) in enumerate(tables, 1):
                with self._lock:
                    self._add(Place(*job), *found)
                report(done / len(groups))
        return self

    def so_far(self) -> tuple[_Ints, _Ints]:
        """Return the numbers of kept documents, and of duplicates removed in their favor, by cluster."""
        with self._lock:
            return self._documents.copy(), self._removed.copy()

    def sources(self, cluster: int) -> list[tuple[str, int]]:
        """Return (source, documents) of a cluster, most first."""
        with self._lock:
            counts = self._by_source[cluster].tolist()
        named = [(self._explored.source(number), count) for number, count in enumerate(counts) if count]
        return sorted(named, key=lambda one: -one[1])

    def examples(self, cluster: int) -> list[Place]:
        """Return places of documents of a cluster: the most typical ones; random ones without distances."""
        with self._lock:
            held = self._examples[self._examples[:, 0] == cluster]
        return [Place(*map(int, row)) for row in held[:, 2:].tolist()]

    def _read(self, job: tuple[int, int]) -> tuple[tuple[int, int], Any]:
        """Return, of the documents in a row group with a cluster: cluster, rank, source, copies and line."""
        columns = ["document_start", "document_id", "copies", "source", "metadata"]
        with self._explored.provenance.open(job[0]) as opened:
            table = opened.read_row_group(job[1], columns=columns, use_threads=False)
        lines = np.flatnonzero(table.column("document_start").to_numpy() == 0)
        table = table.take(pa.array(lines))
        clusters = _numbers(table.column("metadata"), str(self.field))
        known = (clusters >= 0) & (clusters < _MOST_CLUSTERS)
        if self.distance is None:
            ids = table.column("document_id").combine_chunks()
            ranks = np.frombuffer(ids.buffers()[1], "<u8")[2 * ids.offset :][: 2 * len(ids) : 2] / 2**64
        else:
            ranks = np.nan_to_num(_numbers(table.column("metadata"), str(self.distance)), nan=9.0)
        sources, copies = (table.column(name).to_numpy()[known] for name in ("source", "copies"))
        return job, (clusters[known].astype(np.int64), ranks[known], sources, copies, lines[known])

    def _add(
        self, group: Place, clusters: _Ints, ranks: Any, sources: _Ints, copies: _Ints, lines: _Ints
    ) -> None:
        if not len(clusters):
            return
        count = max(len(self._documents), int(clusters.max()) + 1)
        more = count - len(self._documents)
        self._documents = np.pad(self._documents, (0, more)) + np.bincount(clusters, minlength=count)
        removed = np.bincount(clusters, copies - 1, minlength=count).astype(np.int64)
        self._removed = np.pad(self._removed, (0, more)) + removed
        cells = clusters * self._sources + np.clip(sources, 0, self._sources - 1)
        counted = np.bincount(cells, minlength=count * self._sources).reshape(count, self._sources)
        self._by_source = np.pad(self._by_source, ((0, more), (0, 0))) + counted
        place = np.broadcast_to((group.file, group.group), (len(lines), 2))
        new = np.column_stack([clusters, ranks, place, lines])
        self._examples = _lowest_of_each(np.concatenate([self._examples, _lowest_of_each(new)]))


def show_map(explored: Explored, params: Params, topics: Topics) -> dict[str, object]:
    """Return the facts for the map of semantic clusters."""
    facts = None if explored.card is None else explored.card.dedup
    page: dict[str, object] = {"facts": facts and facts.semantic, "field": topics.field, "tiles": None}
    if topics.field is None or not explored.provenance.names:
        return page
    is_counted = topics.work.wait() is not None
    documents, removed = topics.so_far()
    order = np.argsort(-documents, kind="stable")
    order = order[documents[order] > 0]
    return page | {
        "tiles": _tiles(documents, removed, order),
        "clusters": len(order),
        "documents": int(documents.sum()),
        "listed": [_listed(explored, topics, n, documents, removed) for n in order[:_LISTED].tolist()],
        "share": None if is_counted else topics.work.share,
    }


def show_topic(explored: Explored, params: Params, topics: Topics) -> dict[str, object]:
    """Return the facts for one cluster: its size, sources, and example documents."""
    cluster = number_param(params, "cluster", 0, most=_MOST_CLUSTERS)
    is_counted = topics.field is not None and topics.work.wait() is not None
    documents, removed = topics.so_far()
    if cluster >= len(documents) or not documents[cluster]:
        if topics.field is not None and not is_counted:
            return {"share": topics.work.share}
        raise PageNotFoundError(f"no document is in a semantic cluster {cluster:,}")
    lines = read_lines(explored.provenance, topics.examples(cluster))
    return {
        "cluster": cluster,
        "documents": int(documents[cluster]),
        "removed": int(removed[cluster]),
        "of_all": int(documents.sum()),
        "sources": topics.sources(cluster),
        "examples": describe_lines(explored, lines),
        "is_typical": topics.distance is not None,
        "counted": None if is_counted else topics.work.share,
    }


def _semantic(recipe: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of `semantic` in a recipe, which stands in `dedup` or among the `steps`."""
    listed = [recipe.get("dedup"), *(recipe.get("steps") or ())]
    found = [one.get("semantic") for one in listed if isinstance(one, Mapping)]
    return next((one for one in found if isinstance(one, Mapping)), None)


def _numbers(metadata: pa.ChunkedArray, field: str) -> npt.NDArray[np.float64]:
    """Return float64[n]: a number that a build added to the JSON objects in a column; NaN where it lacks.

    A build adds fields at the end, so of several equal names, such as in an object inside, the last counts.
    In a text, quotes are escaped, so the name with its quotes and the colon is a key.
    """
    texts = pc.fill_null(metadata.combine_chunks(), "")
    key = f"{json.dumps(field, ensure_ascii=False)}:"
    parts = pc.split_pattern(texts, key, max_splits=1, reverse=True)
    ends = parts.offsets.to_numpy()[1:]
    is_there = np.diff(parts.offsets.to_numpy()) == 2
    behind = parts.values.take(pa.array(np.maximum(ends - 1, 0), mask=~is_there))
    found = pc.struct_field(pc.extract_regex(behind, _NUMBER), "number")
    return np.asarray(pc.cast(found, pa.float64()).fill_null(np.nan).to_numpy(), np.float64)


def _lowest_of_each(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return, of rows (cluster, rank, …), the `_EXAMPLES` with the lowest ranks of each cluster."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    starts = np.searchsorted(rows[:, 0], rows[:, 0])
    return rows[np.arange(len(rows)) - starts < _EXAMPLES]


def _listed(
    explored: Explored, topics: Topics, cluster: int, documents: _Ints, removed: _Ints
) -> dict[str, object]:
    source, count = topics.sources(cluster)[0]
    share = count / int(documents[cluster])
    facts = {"cluster": cluster, "documents": int(documents[cluster]), "removed": int(removed[cluster])}
    return facts | {"source": source, "source_share": share}


def _tiles(documents: _Ints, removed: _Ints, order: _Ints) -> list[Tile]:
    """Return the tiles of the map, whose areas are numbers of documents; small clusters share the last."""
    shown, rest = order[:_TILES], order[_TILES:]
    sizes = [*documents[shown].tolist(), *([int(documents[rest].sum())] if len(rest) else [])]
    gone = [*removed[shown].tolist(), *([int(removed[rest].sum())] if len(rest) else [])]
    names: list[int | None] = [*shown.tolist(), *([None] if len(rest) else [])]
    places = _squarified(sizes, _ASPECT, 1.0)
    return [
        Tile(100 * x / _ASPECT, 100 * y, 100 * w / _ASPECT, 100 * h, *facts)
        for (x, y, w, h), *facts in zip(places, names, sizes, gone, strict=True)
    ]


def _squarified(
    sizes: Sequence[int], width: float, height: float
) -> Iterator[tuple[float, float, float, float]]:
    """Yield (x, y, width, height) of rectangles of these sizes, descending, that are nearly squares.

    Rectangles are laid in strips along the shorter side of the room that is left; a strip takes more of them
    as long as its worst ratio of sides gets better (Bruls, Huizing and van Wijk 2000).
    """
    x = y = 0.0
    left, at = float(sum(sizes)), 0
    while at < len(sizes):
        side, scale = min(width, height), width * height / left
        end, total, worst = at, 0.0, float("inf")
        while end < len(sizes):
            more = total + sizes[end] * scale
            areas = sizes[at] * scale, sizes[end] * scale
            ratio = max(side**2 * areas[0] / more**2, more**2 / (side**2 * areas[1]))
            if ratio > worst:
                break
            end, total, worst = end + 1, more, ratio
        depth, along = total / side, 0.0
        for size in sizes[at:end]:
            length = size * scale / depth
            yield (x, y + along, depth, length) if width >= height else (x + along, y, length, depth)
            along += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        left -= sum(sizes[at:end])
        at = end
