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
from html import escape
from typing import Any

from shardkit.units import format_bytes

__all__ = ["render_filters"]

_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")


def render_filters(filters: Mapping[str, Any], read: Mapping[str, int]) -> str:
    """The section as HTML; `read` are the documents and bytes that came in."""
    body = ["<h2>Filters</h2>"]
    if filters["rules"]:
        body += [_rules(filters, read), _note(filters)]
    if filters["cut"]:
        body += ["<h3>Cut out of documents</h3>", _cut(filters["cut"], read["bytes"])]
    if filters["counts"]:
        body += ["<h3>Counted by editors</h3>", _counts(filters["counts"])]
    if shown := [rule for rule in filters["rules"] if rule["excerpts"]]:
        body += ["<h3>Some of what was dropped</h3>", _excerpts(shown)]
    return "\n".join(body)


def _rules(filters: Mapping[str, Any], read: Mapping[str, int]) -> str:
    rows = []
    for rule in filters["rules"]:
        width = 100 * rule["documents"] / max(1, read["documents"])
        rows.append(
            f"<tr><td>{escape(rule['rule'])}</td>"
            + _number(f"{rule['documents']:,}")
            + _number(_percent(rule["documents"], read["documents"]))
            + _number(format_bytes(rule["bytes"]))
            + _number(_percent(rule["alone"], filters["sampled"]))
            + f'<td class="bar"><span class="dropped" style="width:{width:.2f}%"></span></td></tr>'
        )
    return _table(["rule"], ["dropped, in order", "", "text", "fail it, alone"], rows, bar=True)


def _note(filters: Mapping[str, Any]) -> str:
    return (
        '<p class="note">In order: by the first rule that a document fails. Alone: of a sample of '
        f"{filters['sampled']:,} documents (one in {filters['one_in']:,}, drawn by hash), those that fail "
        "the rule whatever else they fail.</p>"
    )


def _cut(cut: Sequence[Mapping[str, Any]], whole: int) -> str:
    rows = [
        f"<tr><td>{escape(one['edit'])}</td>"
        f"{_number(_size(one['bytes']))}{_number(_percent(one['bytes'], whole))}</tr>"
        for one in cut
    ]
    return _table(["edit"], ["text", ""], rows)


def _counts(counts: Sequence[Mapping[str, Any]]) -> str:
    rows = [f"<tr><td>{escape(one['name'])}</td>{_number(format(one['count'], ','))}</tr>" for one in counts]
    return _table(["what"], ["count"], rows)


def _excerpts(rules: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for rule in rules:
        for number, shown in enumerate(rule["excerpts"]):
            name = escape(rule["rule"]) if not number else ""
            place = f"{escape(shown['file'])}, record {shown['record']:,}"
            text = escape(shown["text"].translate(_CONTROLS))
            rows.append(f'<tr><td>{name}</td><td>{place}</td><td class="text" dir="auto">{text}</td></tr>')
    return _table(["rule", "document", "its beginning, when it was dropped"], [], rows)


def _number(content: str) -> str:
    return f'<td class="n">{content}</td>'


def _table(left: Sequence[str], right: Sequence[str], rows: Sequence[str], *, bar: bool = False) -> str:
    head = [f"<th>{name}</th>" for name in left] + [f'<th class="n">{name}</th>' for name in right]
    head += ["<th></th>"] if bar else []
    return f"<table><tr>{''.join(head)}</tr>{''.join(rows)}</table>"


def _size(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"{format_bytes(-count)} more"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
