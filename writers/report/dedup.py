"""The report's section on duplicate removal; it depends only on `dedup` in the card."""

from __future__ import annotations

from shardkit.card import Count, DedupFacts, NearFacts, SemanticFacts
from shardkit.units import format_bytes
from shardkit.writers.report.html import bars, cell, counted, facts, number, percent, section, table, text


def render_dedup(dedup: DedupFacts) -> str:
    """Render the section as HTML."""
    body = [_stages(dedup), _sources(dedup), _groups(dedup)]
    for near in [*dedup.earlier_near, *([] if dedup.near is None else [dedup.near])]:
        body += ["<h3>Near-duplicates</h3>", _parameters(near)]
    if dedup.semantic is not None:
        body += ["<h3>Semantic duplicates</h3>", _semantic(dedup.semantic)]
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
        told["Estimated"] = (
            f"{counts.get('estimated', 0):,} pairs with documents of these indexes, by the upper bits of "
            "n-grams, and of long documents by a sample of them"
        )
    return facts(told, caption="How they were looked for")


def _semantic(semantic: SemanticFacts) -> str:
    counts = semantic.counts
    told = {
        "Removed if": f"cosine of the vectors is at least {semantic.similarity:g}, verified for each pair",
        "Vectors": f"{semantic.dimensions:,} dimensions, by {semantic.vectors}",
        "Compared": f"in {counts['clusters']:,} clusters, each document in the nearest {semantic.probes}; "
        f"the largest has {counts['largest_cluster']:,}",
    }
    if counts["without_vector"]:
        told["Without a vector"] = f"{counts['without_vector']:,}, which were kept"
    if counts["bounded"]:
        told["Bounded"] = f"{counts['bounded']:,} times a document had more alike ones than pairs are made of"
    return facts(told, caption="How they were looked for")


def _label(reason: str) -> str:
    return reason.replace("_", " ")
