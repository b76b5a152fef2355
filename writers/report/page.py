"""The page: its sections in order, each a function of the card.

No times, no folder names, no number of workers; one file without scripts and without anything to fetch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shardkit.units import format_bytes
from shardkit.writers.report.dedup import render_dedup
from shardkit.writers.report.filters import render_filters
from shardkit.writers.report.funnel import render_funnel, render_languages, render_sources
from shardkit.writers.report.html import cell, facts, section, table, text
from shardkit.writers.report.packing import render_lengths, render_packing
from shardkit.writers.report.style import STYLE

__all__ = ["html_page", "render_report"]

_SECTION = re.compile(r'<section id="([^"]+)">\n<h2>([^<]+)</h2>')


def render_report(card: Mapping[str, Any]) -> bytes:
    """The card as one HTML page."""
    body = [
        render_funnel(card),
        render_sources(card),
        render_languages(card),
        render_filters(card["filters"], card["funnel"]["read"]) if card["filters"] else "",
        render_dedup(card["dedup"]) if card["dedup"] else "",
        render_lengths(card),
        render_packing(card),
        _made_from(card),
        section("Recipe", f"<pre>{text_of_json(card['recipe'])}</pre>"),
    ]
    links = "".join(
        f'<a href="#{anchor}">{title}</a>' for part in body for anchor, title in _SECTION.findall(part)
    )
    start = (
        f"<h1>Dataset report</h1>\n<p>Fingerprint <code>{text(card['fingerprint'])}</code>, made by shardkit "
        f"{text(card['shardkit_version'])}.</p>\n<nav>{links}</nav>\n{_facts(card)}"
    )
    return html_page("Dataset report", [start, *body])


def html_page(title: str, body: list[str]) -> bytes:
    """A whole page in the report's style."""
    content = "\n".join(filter(None, body))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{content}\n</body>\n</html>\n"
    ).encode()


def text_of_json(content: Any) -> str:
    """Plain data as indented JSON in HTML; lines stay lines."""
    lines = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).split("\n")
    return "\n".join(text(line) for line in lines)


def _facts(card: Mapping[str, Any]) -> str:
    documents = card["funnel"]["kept"]["documents"]
    told = {
        "Tokens": f"{card['tokens']:,} in {documents:,} documents",
        "Samples": f"{card['samples']:,} rows of {card['sequence_length']:,} tokens ({card['dtype']})",
        "Shards": f"{card['shards']:,} ({card['format']}), {format_bytes(card['stored_bytes'])}",
        "Seed": f"{card['recipe']['seed']}",
    }
    return facts(told, caption="The dataset")


def _made_from(card: Mapping[str, Any]) -> str:
    """Digests of all that decides what the dataset is, but for the code."""
    tokenizer = card["tokenizer"]
    rows = [[cell("input"), cell(entry["source"]), _code(entry["digest"])] for entry in card["inputs"]]
    rows.append([cell("tokenizer"), cell(tokenizer["file"]), _code(tokenizer["digest"])])
    rows += [
        [cell("file of a filter"), cell(path), _code(digest)]
        for path, digest in sorted(card["filter_files"].items())
    ]
    rows.append([cell("recipe"), cell("all keys but places"), _code(card["recipe_digest"])])
    eos = f"Documents end in {text(tokenizer['eos'])} = {tokenizer['eos_id']}."
    head = ("what", "name", "digest")
    return section("Made from", table(head, rows, caption="Digests of what was read"), f"<p>{eos}</p>")


def _code(digest: str) -> str:
    return f"<td><code>{text(digest)}</code></td>"
