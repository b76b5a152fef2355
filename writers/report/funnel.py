"""The funnel of a build, its sources and its languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.funnel_steps import funnel_steps
from shardkit.units import format_bytes
from shardkit.writers.languages import add_languages
from shardkit.writers.report.html import bars, cell, number, percent, section, table

__all__ = ["render_funnel", "render_languages", "render_sources"]

_MOST_LANGUAGES = 30


def render_funnel(card: Mapping[str, Any]) -> str:
    """What each step lost and what it left."""
    steps = funnel_steps(card)
    documents, whole = steps[0].documents, steps[0].bytes
    rows = []
    for step in steps:
        colour = step.kind if step.kind in ("read", "kept") else "read"
        rows.append(
            [
                cell(f"{step.kind}: {step.label}" if step.kind == "quarantined" else step.label),
                number(f"−{step.lost_documents:,}" if step.lost_documents else ""),
                number(step.documents),
                number(percent(step.documents, documents)),
                bars(documents, (colour, step.documents), (step.kind, step.lost_documents)),
                number(_lost(step.lost_bytes)),
                number(format_bytes(step.bytes)),
                number(percent(step.bytes, whole)),
                bars(whole, (colour, step.bytes), (step.kind, step.lost_bytes)),
            ]
        )
    head = ("step", ">lost", ">left", ">of read", "|documents", ">lost", ">left", ">of read", "|text")
    key = (
        '<p class="note key">Bars: <span class="read"></span>what a step left <span class="dropped"></span>'
        'what it lost <span class="quarantined"></span>could not be read <span class="kept"></span>kept</p>'
    )
    note = (
        '<p class="note">Every record that was read is kept, dropped by a rule or quarantined as unreadable: '
        "that the numbers add up was checked. Steps that lose text and no document cut parts out of "
        "documents that stay. Text is in bytes of UTF-8. What each rule of a filter took is below.</p>"
    )
    return section("Funnel", table(head, rows, caption="Documents and text after each step"), key, note)


def _lost(lost: int) -> str:
    if not lost:
        return ""
    return f"−{format_bytes(lost)}" if lost > 0 else f"+{format_bytes(-lost)}"


def render_sources(card: Mapping[str, Any]) -> str:
    """What each input of the recipe came to."""
    inputs = card["inputs"]
    most = max((entry["tokens"] for entry in inputs), default=0)
    rows = []
    for entry in inputs:
        read, kept = entry["funnel"]["read"]["documents"], entry["funnel"]["kept"]["documents"]
        rows.append(
            [
                cell(entry["source"]),
                number(entry["files"]),
                number(format_bytes(entry["bytes"])),
                number(read),
                number(kept),
                number(percent(kept, read)),
                number(entry["tokens"]),
                number(percent(entry["tokens"], card["tokens"])),
                bars(most, ("other", entry["tokens"])),
            ]
        )
    head = ("source", ">files", ">stored", ">read", ">kept", ">of read", ">tokens", ">of all", "|tokens")
    return section("Sources", table(head, rows, caption="Documents and tokens by source"))


def render_languages(card: Mapping[str, Any]) -> str:
    """Documents and tokens by language, if a filter of the recipe knows languages."""
    by_source = [entry["languages"] for entry in card["inputs"]]
    if any(languages is None for languages in by_source):
        return ""
    languages = add_languages(by_source)
    shown = list(languages.items())[:_MOST_LANGUAGES]
    most = max((counts["tokens"] for counts in languages.values()), default=0)
    documents = sum(counts["documents"] for counts in languages.values())
    rows = [
        _language(label, counts, documents, card["tokens"], most, _sources_of(label, card["inputs"]))
        for label, counts in shown
    ]
    if rest := list(languages.values())[_MOST_LANGUAGES:]:
        others = {name: sum(counts[name] for counts in rest) for name in ("documents", "tokens")}
        rows.append(_language(f"{len(rest):,} others", others, documents, card["tokens"], most, ""))
    head = ("language", "mostly from", ">documents", ">of all", ">tokens", ">of all", "|tokens")
    note = (
        '<p class="note">The language that the language filter found most likely for each document that was '
        "kept, when it judged it; short and mixed texts, tables and code are often taken for something else."
        "</p>"
    )
    return section("Languages", table(head, rows, caption="Documents and tokens by language"), note)


def _language(
    label: str, counts: Mapping[str, int], documents: int, tokens: int, most: int, sources: str
) -> list[str]:
    return [
        cell(label),
        cell(sources),
        number(counts["documents"]),
        number(percent(counts["documents"], documents)),
        number(counts["tokens"]),
        number(percent(counts["tokens"], tokens)),
        bars(most, ("other", counts["tokens"])),
    ]


def _sources_of(label: str, inputs: Sequence[Mapping[str, Any]]) -> str:
    """The sources with most tokens in a language."""
    tokens = [(entry["languages"].get(label, {"tokens": 0})["tokens"], entry["source"]) for entry in inputs]
    shown = [(count, name) for count, name in sorted(tokens, key=lambda one: -one[0]) if count][:2]
    whole = sum(count for count, _ in tokens)
    return ", ".join(f"{name} {100 * count / whole:.0f}\u00a0%" for count, name in shown)
