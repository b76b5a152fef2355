"""The part of the report that tells what the filters did: each rule in order and alone, cuts, excerpts.

A function of the card's `filters` (filter_counts.filters_card), which is plain data:

    sampled, one_in  documents that every rule judged alone, whatever else they fail: one in so many
    rules      [{"rule": "<filter>/<rule>", "documents", "bytes", "alone", "excerpts"}] in the order they were
               tried; documents and bytes as dropped by it first, `alone` among the sampled; excerpts
               [{"file", "record", "text"}] of documents it dropped, as they were then
    cut        [{"edit": "<filter>/<name>", "bytes"}] taken out of texts; negative where they grew
    counts     [{"name": "<filter>/<name>", "count"}] of what editors counted, such as addresses redacted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.units import format_bytes
from shardkit.writers.report.html import bars, name, number, percent, section, size, table, text

__all__ = ["render_filters"]


def render_filters(filters: Mapping[str, Any], read: Mapping[str, int]) -> str:
    """The section as HTML; `read` are the documents and bytes that came in."""
    parts = []
    if filters["rules"]:
        parts += [_rules(filters, read), _note(filters)]
    if filters["cut"]:
        parts.append(_cut(filters["cut"], read["bytes"]))
    if filters["counts"]:
        parts.append(_counts(filters["counts"]))
    if shown := [rule for rule in filters["rules"] if rule["excerpts"]]:
        parts += ["<h3>Some of what was dropped</h3>", _excerpts(shown)]
    return section("Filters", *parts)


def _rules(filters: Mapping[str, Any], read: Mapping[str, int]) -> str:
    most = max((rule["documents"] for rule in filters["rules"]), default=0)
    most_alone = max((rule["alone"] for rule in filters["rules"]), default=0)
    rows = [
        [
            name(rule["rule"]),
            number(rule["documents"]),
            number(percent(rule["documents"], read["documents"])),
            bars(most, ("dropped", rule["documents"])),
            number(format_bytes(rule["bytes"])),
            number(percent(rule["alone"], filters["sampled"])),
            bars(most_alone, ("dropped", rule["alone"])),
        ]
        for rule in filters["rules"]
    ]
    head = ("rule", ">documents", ">of read", "|dropped, in order", ">text", ">fail it", "|alone")
    return table(head, rows, caption="What each rule dropped, in the order in which they were tried")


def _note(filters: Mapping[str, Any]) -> str:
    return (
        '<p class="note">In order: by the first rule that a document fails. Alone: of a sample of '
        f"{filters['sampled']:,} documents (one in {filters['one_in']:,}, drawn by hash), those that fail "
        "the rule whatever else they fail.</p>"
    )


def _cut(cut: Sequence[Mapping[str, Any]], whole: int) -> str:
    most = max((abs(one["bytes"]) for one in cut), default=0)
    rows = [
        [
            name(one["edit"]),
            number(size(one["bytes"])),
            number(percent(abs(one["bytes"]), whole)),
            bars(most, ("dropped", one["bytes"])),
        ]
        for one in cut
    ]
    return table(("edit", ">text", ">of read", "|"), rows, caption="Cut out of documents")


def _counts(counts: Sequence[Mapping[str, Any]]) -> str:
    rows = [[name(one["name"]), number(one["count"])] for one in counts]
    return table(("what", ">count"), rows, caption="Counted by editors")


def _excerpts(rules: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for rule in rules:
        for place, shown in enumerate(rule["excerpts"]):
            found = f"<bdi>{text(shown['file'])}</bdi>, record&nbsp;{shown['record']:,}"
            excerpt = f'<td class="text" dir="auto">{text(shown["text"])}</td>'
            rows.append([name(rule["rule"] if not place else ""), f'<td class="place">{found}</td>', excerpt])
    head = ("rule", "document", "its beginning, when it was dropped")
    return table(head, rows, caption="Up to three documents of each rule, drawn by hash")
