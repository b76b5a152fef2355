"""The part of the report that tells what duplicate removal did, and how well: tables and one S-curve.

A function of the card's `dedup`, which is plain data without times, paths or numbers of workers:

    near        None without near-duplicate removal, or {"similarity", "containment", "unit", "ngram",
                "permutations", "bands", "rows", "scope", "against": names of indexes, "counts": of near.py}
    stages      [{"stage": reason, "documents", "bytes"}] in the order they ran
    sources     [{"source", "documents", "bytes", "removed": {reason: {"documents", "bytes"}}}], one an input,
                `documents` and `bytes` being what the first stage was given
    groups      [{"copies": "1", "2", "3-10", …, "groups"}]: documents that stayed, by how many they stand for
    largest_group  documents that one stands for at most
    recall      None or what shardkit.writers.dedup.measure.measure_recall gives
    precision   None or what shardkit.writers.dedup.measure.measure_precision gives

The page has no scripts; `STYLE` also gives the whole report its colours in the dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardkit.units import format_bytes
from shardkit.writers.dedup.lsh import probability

__all__ = ["STYLE", "render_dedup"]

STYLE = """
:root { color-scheme: light dark; --curve: #2b6cb0; --measured: #b7410e; --axis: #9aa5b1; --grid: #e3e7ed; }
svg { width: 100%; max-width: 44rem; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; } .grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.curve { fill: none; stroke: var(--curve); stroke-width: 2; }
.expected { fill: none; stroke: var(--curve); stroke-width: 1.5; }
.measured { fill: var(--measured); stroke: var(--measured); stroke-width: 1.5; }
.threshold { stroke: var(--axis); stroke-dasharray: 4 3; } .wrong { color: #c53030; font-weight: 600; }
td.text { font-size: 13px; overflow-wrap: anywhere; vertical-align: top; width: 44%; }
@media (prefers-color-scheme: dark) {
:root { --curve: #63b3ed; --measured: #f6ad55; --axis: #6b7785; --grid: #2d3540; }
body { color: #dde3ea; background: #14181f; } tr + tr td { border-color: #2d3540; }
pre { background: #1e242d; } p.note { color: #9aa7b5; } .wrong { color: #fc8181; }
}
"""

_PLOT = (60, 20, 560, 240)  # left, top, width, height of the field in the picture's units
_CURVE_POINTS = 100
_LEAST_SIMILARITY = 0.5
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")


def render_dedup(dedup: Mapping[str, Any]) -> str:
    """The section as HTML."""
    near, recall, precision = dedup["near"], dedup["recall"], dedup["precision"]
    body = ["<h2>Duplicates</h2>", _stages(dedup["stages"], dedup["sources"])]
    body += ["<h3>Removed, by source</h3>", _sources(dedup["stages"], dedup["sources"])]
    body.append("<h3>Documents that stayed, by how many they stand for</h3>")
    body.append(_groups(dedup["groups"], dedup["largest_group"]))
    if near is not None:
        body += ["<h2>Near-duplicates</h2>", _parameters(near)]
        if recall is not None:
            body += ["<h3>Recall</h3>", _picture(near, recall["bands"]), _recall(recall)]
        if precision is not None:
            body += ["<h3>Precision</h3>", _precision(precision), _excerpts(precision["excerpts"])]
    return "\n".join(body)


def _stages(stages: Sequence[Mapping[str, Any]], sources: Sequence[Mapping[str, Any]]) -> str:
    documents = sum(source["documents"] for source in sources)
    whole = sum(source["bytes"] for source in sources)
    steps = [("read", "compared", documents, whole)]
    steps += [("dropped", s["stage"].replace("_", " "), s["documents"], s["bytes"]) for s in stages]
    rows = [
        [
            _cell(escape(label)),
            _number(f"{count:,}"),
            _number(_percent(count, documents)),
            _number(format_bytes(size)),
            _number(_percent(size, whole)),
            _bar(kind, count, documents),
        ]
        for kind, label, count, size in steps
    ]
    return _table(["", *_right("documents", "", "text", ""), "<th></th>"], rows)


def _sources(stages: Sequence[Mapping[str, Any]], sources: Sequence[Mapping[str, Any]]) -> str:
    reasons = [stage["stage"] for stage in stages]
    rows = []
    for source in sources:
        row = [_cell(escape(source["source"])), _number(f"{source['documents']:,}")]
        for reason in reasons:
            lost = source["removed"].get(reason, {"documents": 0, "bytes": 0})
            row.append(_number(f"{lost['documents']:,} ({_percent(lost['documents'], source['documents'])})"))
            row.append(_number(format_bytes(lost["bytes"])))
        rows.append(row)
    names = [name for reason in reasons for name in (_label(reason), "text")]
    return _table(["source", *_right("documents", *names)], rows)


def _groups(groups: Sequence[Mapping[str, Any]], largest: int) -> str:
    most = max((group["groups"] for group in groups), default=0)
    rows = [
        [
            _cell(escape(group["copies"])),
            _number(f"{group['groups']:,}"),
            _bar("kept", group["groups"], most),
        ]
        for group in groups
    ]
    table = _table(["stands for", *_right("documents"), "<th></th>"], rows)
    return f'{table}<p class="note">One document stands for {largest:,} at most, itself included.</p>'


def _parameters(near: Mapping[str, Any]) -> str:
    facts = {
        "Removed if": f"Jaccard similarity of the sets of n-grams is at least {near['similarity']:g}"
        + (f", or containment at least {near['containment']:g}" if near["containment"] is not None else "")
        + ", verified on all n-grams",
        "n-grams": f"{near['ngram']} {near['unit']}",
        "Candidates": f"{near['permutations']} permutations, {near['bands']} bands of {near['rows']} rows",
        "Scope": near["scope"],
    }
    if (counts := near.get("counts", {})).get("hubs"):
        facts["Large buckets"] = (
            f"{counts['hubs']:,}, the largest of {counts['largest_bucket']:,} documents, "
            "compared by sub-bands and leaders; "
            f"{counts['bounded']:,} times a document had more alike ones than pairs are made of"
        )
    if near["against"]:
        facts["Against"] = ", ".join(near["against"])
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _picture(near: Mapping[str, Any], bands: Sequence[Mapping[str, Any]]) -> str:
    """The curve of theory, and for each band what theory expects of its pairs and what was measured."""
    left, top, width, height = _PLOT
    steps = [
        _LEAST_SIMILARITY + (1 - _LEAST_SIMILARITY) * i / _CURVE_POINTS for i in range(_CURVE_POINTS + 1)
    ]
    curve = " ".join(f"{_x(s):.1f},{_y(probability(s, near['bands'], near['rows'])):.1f}" for s in steps)
    parts = [_axes(), f'<polyline class="curve" points="{curve}"/>']
    if near["similarity"] >= _LEAST_SIMILARITY:
        x = f"{_x(near['similarity']):.1f}"
        parts.append(f'<line class="threshold" x1="{x}" y1="{top}" x2="{x}" y2="{top + height}"/>')
        parts.append(f'<text x="{x}" y="12" text-anchor="middle">least similarity</text>')
    for band in bands:
        if band["low"] >= _LEAST_SIMILARITY:
            parts.append(_mark(band))
    y = top + height + 66
    legend = (
        f'<line class="curve" x1="{left}" y1="{y}" x2="{left + 24}" y2="{y}"/>'
        f'<text x="{left + 32}" y="{y + 4}">S-curve of {near["bands"]} x {near["rows"]}</text>'
        f'<circle class="expected" cx="{left + 170}" cy="{y}" r="5"/>'
        f'<text x="{left + 182}" y="{y + 4}">expected of the planted pairs</text>'
        f'<circle class="measured" cx="{left + 382}" cy="{y}" r="3"/>'
        f'<text x="{left + 392}" y="{y + 4}">measured, 95 % interval</text>'
    )
    return (
        f'<svg viewBox="0 0 {left + width + 20} {top + height + 80}" role="img" '
        'aria-label="Share of planted pairs that became candidates, by similarity; the table below has the '
        f'numbers">{"".join(parts)}{legend}</svg>'
    )


def _axes() -> str:
    left, top, width, height = _PLOT
    parts = []
    for share in (0, 25, 50, 75, 100):
        y = _y(share / 100)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share} %</text>')
    for tenth in range(5, 11):
        x = _x(tenth / 10)
        bottom = top + height
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{tenth / 10:.1f}</text>')
    middle, bottom = left + width / 2, top + height
    parts.append(f'<line class="axis" x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}"/>')
    parts.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">Jaccard similarity</text>')
    return "".join(parts)


def _mark(band: Mapping[str, Any]) -> str:
    x = f"{_x((band['low'] + band['high']) / 2):.1f}"
    low, high = (f"{_y(end):.1f}" for end in band["interval"])
    expected, measured = (f"{_y(band[name] / band['pairs']):.1f}" for name in ("expected", "candidates"))
    return (
        f'<line class="measured" x1="{x}" y1="{low}" x2="{x}" y2="{high}"/>'
        f'<circle class="expected" cx="{x}" cy="{expected}" r="5"/>'
        f'<circle class="measured" cx="{x}" cy="{measured}" r="3"/>'
    )


def _x(similarity: float) -> float:
    return _PLOT[0] + _PLOT[2] * (similarity - _LEAST_SIMILARITY) / (1 - _LEAST_SIMILARITY)


def _y(share: float) -> float:
    return _PLOT[1] + _PLOT[3] * (1 - share)


def _recall(recall: Mapping[str, Any]) -> str:
    rows = []
    for band in recall["bands"]:
        low, high = band["interval"]
        rows.append(
            [
                _cell(f"{band['low']:.2f} to {band['high']:.2f}"),
                _number(f"{band['pairs']:,}"),
                _number(_percent(band["candidates"], band["pairs"])),
                _number(f"{100 * low:.2f} to {100 * high:.2f} %"),
                _number(_percent(band["expected"], band["pairs"])),
                _number(_percent(band["verified"], band["pairs"])),
            ]
        )
    names = ("planted pairs", "candidates", "95 % interval", "expected", "verified")
    note = "Planted pairs are copies of documents with words replaced, at known similarity; none is written."
    if recall["left_out"]:
        note += f" {recall['left_out']:,} more were planted beside documents that had been removed before."
    return f'{_table(["similarity", *_right(*names)], rows)}<p class="note">{note}</p>'


def _precision(precision: Mapping[str, Any]) -> str:
    checked, wrong = precision["checked"], precision["wrong"]
    right = checked - wrong
    text = (
        f"Of the removed documents, {checked:,} were drawn by hash and compared again, word by word, with "
        f"what stayed in their place: {right:,} ({_percent(right, checked)}) are rightly removed"
    )
    if precision["contained"]:
        text += f", {precision['contained']:,} of them as contained in it"
    if precision["least"] is not None:
        text += f"; the least similarity among the similar is {precision['least']:.4f}"
    text = f"{text}." if checked else "No removed document was compared again."
    if precision["left_out"]:
        text += f" {precision['left_out']:,} more lost to an index, which holds no texts."
    alarm = f'<p class="wrong">{wrong:,} were wrongly removed.</p>' if wrong else ""
    return f"<p>{text}</p>{alarm}"


def _excerpts(excerpts: Sequence[Mapping[str, Any]]) -> str:
    if not excerpts:
        return ""
    rows = [
        [
            _number(f"{pair['similarity']:.3f}"),
            *(f'<td class="text" dir="auto">{_excerpt(pair[side])}</td>' for side in ("removed", "kept")),
        ]
        for pair in excerpts
    ]
    return _table([*_right("similarity"), "removed, its beginning", "what stayed"], rows)


def _excerpt(text: str) -> str:
    return escape(text.translate(_CONTROLS))


def _label(reason: str) -> str:
    return escape(reason.replace("_", " "))


def _right(*names: str) -> list[str]:
    return [f'<th class="n">{name}</th>' for name in names]


def _cell(content: str) -> str:
    return f"<td>{content}</td>"


def _number(content: str) -> str:
    return f'<td class="n">{content}</td>'


def _bar(kind: str, part: int, whole: int) -> str:
    width = 100 * part / whole if whole else 0
    return f'<td class="bar"><span class="{kind}" style="width:{width:.2f}%"></span></td>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(name if name.startswith("<th") else f"<th>{name}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><tr>{names}</tr>{lines}</table>"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
