"""The part of the report that tells what duplicate removal did, and how well: tables and one S-curve.

A function of the card's `dedup`. The picture has no scripts; what it shows is in the table below it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.card import Count, DedupFacts, NearFacts, PairFacts, PrecisionFacts, RecallBand, RecallFacts
from shardkit.units import format_bytes
from shardkit.writers.dedup.bands import probability
from shardkit.writers.report.html import bars, cell, counted, facts, number, percent, section, table, text

__all__ = ["render_dedup"]

_PLOT = (60, 20, 560, 240)  # left, top, width, height of the field in the picture's units
_CURVE_POINTS = 100
_LEAST_SIMILARITY = 0.5


def render_dedup(dedup: DedupFacts) -> str:
    """The section as HTML."""
    near, recall, precision = dedup.near, dedup.recall, dedup.precision
    body = [
        _stages(dedup),
        _sources(dedup),
        _groups(dedup),
    ]
    if near is not None:
        body += ["<h3>Near-duplicates</h3>", _parameters(near)]
        if recall is not None:
            body += ["<h3>Recall</h3>", _picture(near, recall.bands), _recall(recall)]
        if precision is not None:
            body += ["<h3>Precision</h3>", _precision(precision), _excerpts(precision.excerpts)]
    return section("Duplicates", *body)


def _stages(dedup: DedupFacts) -> str:
    whole = sum(dedup.sources, Count())
    steps = [("read", "compared", whole)] + [("dropped", _label(s.stage), s) for s in dedup.stages]
    rows = [
        [
            cell(label),
            *counted(count.documents, whole.documents, whole.documents, kind),
            number(format_bytes(count.bytes)),
            number(percent(count.bytes, whole.bytes)),
            bars(whole.bytes, (kind, count.bytes)),
        ]
        for kind, label, count in steps
    ]
    head = ("", ">documents", ">of compared", "|", ">text", ">of compared", "|")
    return table(head, rows, caption="What was compared, and what each stage removed")


def _sources(dedup: DedupFacts) -> str:
    reasons = [stage.stage for stage in dedup.stages]
    rows = []
    for source in dedup.sources:
        row = [cell(source.source), number(source.documents)]
        for reason in reasons:
            lost = source.removed.get(reason, Count())
            row.append(number(f"{lost.documents:,} ({percent(lost.documents, source.documents)})"))
            row.append(number(format_bytes(lost.bytes)))
        rows.append(row)
    names = [name for reason in reasons for name in (f">{_label(reason)}", ">text")]
    return table(("source", ">compared", *names), rows, caption="Removed, by source")


def _groups(dedup: DedupFacts) -> str:
    most = max((group.groups for group in dedup.groups), default=0)
    rows = [
        [number(text(group.copies)), number(group.groups), bars(most, ("other", group.groups))]
        for group in dedup.groups
    ]
    caption = "Documents that stayed, by how many they stand for, themselves included"
    found = table((">stands for", ">documents", "|"), rows, caption=caption)
    note = f"One document stands for {dedup.largest_group:,} at most, itself included."
    return f'{found}<p class="note">{note}</p>'


def _parameters(near: NearFacts) -> str:
    told = {
        "Removed if": f"Jaccard similarity of the sets of n-grams is at least {near.similarity:g}"
        + (f", or containment at least {near.containment:g}" if near.containment is not None else "")
        + ", verified on all n-grams",
        "n-grams": f"{near.ngram} {near.unit}",
        "Candidates": f"{near.permutations} permutations, {near.bands} bands of {near.rows} rows",
        "Scope": near.scope,
    }
    if (counts := near.counts).get("hubs"):
        told["Large buckets"] = (
            f"{counts['hubs']:,}, the largest of {counts['largest_bucket']:,} documents, "
            "compared by sub-bands and leaders; "
            f"{counts['bounded']:,} times a document had more alike ones than pairs are made of"
        )
    if near.against:
        told["Against"] = ", ".join(near.against)
    return facts(told, caption="How they were looked for")


def _picture(near: NearFacts, bands: Sequence[RecallBand]) -> str:
    """The curve of theory, and for each band what theory expects of its pairs and what was measured."""
    left, top, width, height = _PLOT
    steps = [
        _LEAST_SIMILARITY + (1 - _LEAST_SIMILARITY) * i / _CURVE_POINTS for i in range(_CURVE_POINTS + 1)
    ]
    curve = " ".join(f"{_x(s):.1f},{_y(probability(s, near.bands, near.rows)):.1f}" for s in steps)
    parts = [_axes(), f'<polyline class="curve" points="{curve}"/>']
    if near.similarity >= _LEAST_SIMILARITY:
        x = f"{_x(near.similarity):.1f}"
        parts.append(f'<line class="threshold" x1="{x}" y1="{top}" x2="{x}" y2="{top + height}"/>')
        parts.append(f'<text x="{x}" y="12" text-anchor="middle">least similarity</text>')
    for band in bands:
        if band.low >= _LEAST_SIMILARITY:
            parts.append(_mark(band))
    y = top + height + 66
    legend = (
        f'<line class="curve" x1="{left}" y1="{y}" x2="{left + 24}" y2="{y}"/>'
        f'<text x="{left + 32}" y="{y + 4}">S-curve of {near.bands} x {near.rows}</text>'
        f'<circle class="expected" cx="{left + 170}" cy="{y}" r="5"/>'
        f'<text x="{left + 182}" y="{y + 4}">expected of the planted pairs</text>'
        f'<circle class="measured" cx="{left + 382}" cy="{y}" r="3"/>'
        f'<text x="{left + 392}" y="{y + 4}">measured, 95% interval</text>'
    )
    return (
        f'<svg viewBox="0 0 {left + width + 20} {top + height + 80}" role="img" '
        'aria-labelledby="recall-title recall-text"><title id="recall-title">Recall of planted pairs by '
        'similarity</title><desc id="recall-text">Share of planted pairs that became candidates, beside the '
        f"S-curve of theory; the table below has the numbers</desc>{''.join(parts)}{legend}</svg>"
    )


def _axes() -> str:
    left, top, width, height = _PLOT
    parts = []
    for share in (0, 25, 50, 75, 100):
        y = _y(share / 100)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share}%</text>')
    for tenth in range(5, 11):
        x = _x(tenth / 10)
        bottom = top + height
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{tenth / 10:.1f}</text>')
    middle, bottom = left + width / 2, top + height
    parts.append(f'<line class="axis" x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}"/>')
    parts.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">Jaccard similarity</text>')
    return "".join(parts)


def _mark(band: RecallBand) -> str:
    x = f"{_x((band.low + band.high) / 2):.1f}"
    low, high = (f"{_y(end):.1f}" for end in band.interval)
    expected, measured = (f"{_y(n / band.pairs):.1f}" for n in (band.expected, band.candidates))
    return (
        f'<line class="measured" x1="{x}" y1="{low}" x2="{x}" y2="{high}"/>'
        f'<circle class="expected" cx="{x}" cy="{expected}" r="5"/>'
        f'<circle class="measured" cx="{x}" cy="{measured}" r="3"/>'
    )


def _x(similarity: float) -> float:
    return _PLOT[0] + _PLOT[2] * (similarity - _LEAST_SIMILARITY) / (1 - _LEAST_SIMILARITY)


def _y(share: float) -> float:
    return _PLOT[1] + _PLOT[3] * (1 - share)


def _recall(recall: RecallFacts) -> str:
    rows = []
    for band in recall.bands:
        low, high = band.interval
        rows.append(
            [
                cell(f"{band.low:.2f} to {band.high:.2f}"),
                number(f"{band.pairs:,}"),
                number(percent(band.candidates, band.pairs)),
                number(f"{100 * low:.2f} to {100 * high:.2f}%"),
                number(percent(band.expected, band.pairs)),
                number(percent(band.verified, band.pairs)),
            ]
        )
    names = (">planted pairs", ">candidates", ">95% interval", ">expected", ">verified")
    note = "Planted pairs are copies of documents with words replaced, at known similarity; none is written."
    if recall.left_out:
        note += f" {recall.left_out:,} more were planted beside documents that had been removed before."
    found = table(("similarity", *names), rows, caption="Planted pairs by similarity")
    return f'{found}<p class="note">{note}</p>'


def _precision(precision: PrecisionFacts) -> str:
    checked, wrong = precision.checked, precision.wrong
    right = checked - wrong
    said = (
        f"Of the removed documents, {checked:,} were drawn by hash and compared again, word by word, with "
        f"what stayed in their place: {right:,} ({percent(right, checked)}) are rightly removed"
    )
    if precision.contained:
        said += f", {precision.contained:,} of them as contained in it"
    if precision.least is not None:
        said += f"; the least similarity among the similar is {precision.least:.4f}"
    said = f"{said}." if checked else "No removed document was compared again."
    if precision.left_out:
        said += f" {precision.left_out:,} more lost to an index, which holds no texts."
    alarm = f'<p class="wrong">{wrong:,} were wrongly removed.</p>' if wrong else ""
    return f"<p>{said}</p>{alarm}"


def _excerpts(excerpts: Sequence[PairFacts]) -> str:
    if not excerpts:
        return ""
    rows = [
        [
            number(f"{pair.similarity:.3f}"),
            *(f'<td class="text" dir="auto">{text(side)}</td>' for side in (pair.removed, pair.kept)),
        ]
        for pair in excerpts
    ]
    head = (">similarity", "removed, its beginning", "what stayed")
    return table(head, rows, caption="Some removed documents and what stayed, least alike first")


def _label(reason: str) -> str:
    return reason.replace("_", " ")
