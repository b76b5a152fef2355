"""Shows removed documents: the documents of a rule, a single document, and clusters of duplicates."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from shardkit.datasets.provenance.duplicates import Duplicates
from shardkit.datasets.provenance.search import Selection, parse_document_id
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params
from shardkit.tools.explore.histogram import draw_chart
from shardkit.tools.explore.kept_values import KeptRules
from shardkit.tools.explore.raw import read_raw
from shardkit.tools.explore.scan import Equal, Line, Place, read_line, read_lines, scan

_ON_PAGE = 20
_DIFF_WORDS = 1500  # maximum words compared per text: difflib's time grows with the product of both counts
_CLUSTER_LINES = 50
_OF_CLUSTER = ("reason", "kept_source", "kept_file", "kept_record", "kept_id", "kept_url")


def show_rule(explored: Explored, params: Params, kept: KeptRules) -> dict[str, object]:
    """Return the facts for a rule's page: values around its bound, and documents that the rule dropped.

    Documents are nearest to the bound, farthest from it, random, or all, as the parameter `view` selects.
    """
    rule, view = params.get("rule", ""), params.get("view", "")
    card = explored.card
    dropped = card.funnel.dropped if card is not None and explored.has_funnel else {}
    if rule not in dropped or "/" not in rule:
        near = difflib.get_close_matches(rule, [name for name in dropped if "/" in name], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PageNotFoundError(f"no rule {rule[:100]!r} dropped anything{hint}")
    page: dict[str, object] = {"rule": rule, "count": dropped[rule], "read": card and card.funnel.read}
    if not explored.dropped.names:
        return page | {"values": None, "documents": [], "view": "", "views": []}
    is_counted = explored.counted_rules.wait() is not None
    values = explored.rules.so_far(rule)
    views = ["near", "far", "drawn", "all"] if values.near else ["drawn", "all"]
    view = view if view in views else views[0]
    beside, share = kept.find(rule, waits=is_counted) if values.bins else (None, 1.0)
    chart = draw_chart(values) if beside is None else draw_chart(values, beside.values, one_in=beside.one_in)
    page |= {"values": values, "chart": chart, "kept": beside, "kept_share": share}
    page |= {"view": view, "views": views, "share": None if is_counted else explored.counted_rules.share}
    if view == "all":
        start = Place.parse(params["at"]) if "at" in params else None
        found = scan(explored.dropped, Equal({"rule": rule}), start=start, limit=_ON_PAGE)
        return page | {"documents": _plain(explored, found.lines), "next": found.next}
    ranked = {"near": values.near, "far": values.far, "drawn": values.drawn}[view]
    lines = read_lines(explored.dropped, [place for _, place in ranked[:_ON_PAGE]])
    return page | {"documents": _plain(explored, lines), "next": None}


def show_removed(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for a removed document's page; its text may have to be read from the input file."""
    table, place = params.get("table", ""), Place.parse(params.get("at", ""))
    folder = {"dropped": explored.dropped, "duplicates": explored.duplicates}.get(table)
    if folder is None:
        raise PageNotFoundError(f"there is no table {table[:40]!r}; use 'dropped' or 'duplicates'")
    line = read_line(folder, place)
    [document] = _plain(explored, [line])
    page: dict[str, object] = {"table": table, "document": document}
    page["stays"] = _stays(explored, document)
    if document["text"] is not None:
        return page | {"raw": None, "why_not": ""}
    source = line["source"]
    assert isinstance(source, int)
    raw, why_not = read_raw(explored, source, document["file"], document["record"])
    return page | {"raw": raw, "why_not": why_not}


def _stays(explored: Explored, line: Mapping[str, object]) -> str | None:
    """Return the id, in hexadecimal, of the document that was finally kept in place of a duplicate."""
    kept = line.get("kept_document_id")
    if not isinstance(kept, str):
        return None
    document = parse_document_id(str(line["document_id"]))
    found = Duplicates(explored.dataset).follow(Selection(documents=[document])).chain(document)
    return found[-1].hex() if found else kept


def _plain(explored: Explored, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return copies of a table's lines with ids in hexadecimal, and labels in place of source numbers."""
    plain: list[dict[str, Any]] = []
    for line in lines:
        shown: dict[str, Any] = {}
        for name, value in line.items():
            if isinstance(value, bytes):
                value = value.hex()
            elif name.endswith("source") and value is not None:
                value = explored.source(value)
            shown[name] = value
        plain.append(shown)
    return plain


def show_clusters(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the page of clusters of duplicates: the largest ones, or a random sample."""
    if not explored.duplicates.names:
        return {"clusters": None}
    is_counted = explored.counted_clusters.wait() is not None
    clusters = explored.clusters.so_far()
    order = "drawn" if params.get("order") == "drawn" else "largest"
    ranked = clusters.drawn if order == "drawn" else clusters.largest
    lines = read_lines(explored.duplicates, [each.at for each in ranked[:_ON_PAGE]], _OF_CLUSTER)
    shown = [
        {"size": each.size, "at": each.at, "line": line}
        for each, line in zip(ranked, _plain(explored, lines), strict=False)
    ]
    page = {"clusters": clusters, "order": order, "shown": shown, "sizes": clusters.sizes.bins()}
    return page | {"share": None if is_counted else explored.counted_clusters.share}


def show_cluster(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for a cluster's page: a kept document and its duplicates, differing words marked."""
    first = read_line(explored.duplicates, Place.parse(params.get("at", "")))
    kept = first["kept_document_id"]
    if kept is None:
        raise PageNotFoundError("all text of this document was removed, so no document was kept in its place")
    start = first["at"]
    assert isinstance(start, Place)
    found = scan(explored.duplicates, Equal({"kept_document_id": kept}), start=start, limit=_CLUSTER_LINES)
    lines = _plain(explored, found.lines)
    by_text = sorted(lines, key=lambda line: (line["text"] is None, line["similarity"] or 0))
    for line in by_text:
        line["sides"] = _marked(line["kept_text"], line["text"])
    return {"first": by_text[0], "lines": by_text, "more": found.next is not None}


def _marked(kept: str | None, removed: str | None) -> list[tuple[str, str, str]] | None:
    """Compare the beginnings of two texts; return runs of (difflib tag, kept text, removed text), or None."""
    if kept is None or removed is None:
        return None
    left, right = (list(islice(re.findall(r"\s*\S+", text), _DIFF_WORDS)) for text in (kept, removed))
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    return [(kind, "".join(left[a:b]), "".join(right[c:d])) for kind, a, b, c, d in matcher.get_opcodes()]
