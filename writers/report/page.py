"""The dataset's card (`dataset.json`) and its picture (`report.html`).

Both are functions of the recipe and of counts: no times, no folder names, no number of workers, so the same
build gives the same bytes anywhere. The report is one file without scripts or references.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from shardkit.units import format_bytes
from shardkit.writers.report.dedup import STYLE, render_dedup
from shardkit.writers.report.filters import render_filters

__all__ = ["render_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 58rem; margin: 2rem auto; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2rem .6rem; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr + tr td { border-top: 1px solid #e3e7ed; } td.bar { width: 40%; }
.bar span { display: block; height: .9rem; border-radius: 2px; min-width: 1px; }
.read { background: #7b8794; } .kept { background: #2f855a; } .dropped { background: #d69e2e; }
.quarantined { background: #c53030; } code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; } p.note { color: #566270; }
"""


def render_report(card: Mapping[str, Any]) -> bytes:
    """The card as one HTML page."""
    body = [
        "<h1>Dataset report</h1>",
        f"<p>Fingerprint <code>{escape(card['fingerprint'])}</code>, made by shardkit "
        f"{escape(card['shardkit_version'])}.</p>",
        _facts(card),
        "<h2>Funnel</h2>",
        _funnel(card["funnel"]),
        '<p class="note">Every record that was read is kept, dropped by a rule or quarantined as unreadable; '
        "what is cut is parts of documents. Bars show documents.</p>",
        "<h2>Sources</h2>",
        _sources(card),
        render_filters(card["filters"], card["funnel"]["read"]) if card["filters"] else "",
        render_dedup(card["dedup"]) if card["dedup"] else "",
        "<h2>Recipe</h2>",
        f"<pre>{escape(json.dumps(card['recipe'], indent=2, sort_keys=True, ensure_ascii=False))}</pre>",
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Dataset report</title>'
        f"<style>{_STYLE}{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )
    return page.encode()


def _facts(card: Mapping[str, Any]) -> str:
    cells = card["tokens"] + card["padding"]
    packing, tokenizer = card["packing"], card["tokenizer"]
    facts = {
        "Samples": f"{card['samples']:,} rows of {card['sequence_length']:,} tokens ({card['dtype']})",
        "Shards": f"{card['shards']:,} ({card['format']}), {format_bytes(card['stored_bytes'])}",
        "Tokens": f"{card['tokens']:,}",
        "Padding": f"{card['padding']:,} ({_percent(card['padding'], cells)} of all)",
        "Documents cut": f"{packing['cut_documents']:,} of {packing['documents']:,}; "
        f"{packing['needless_cuts']:,} of them would have fitted into one row",
        "Tokenizer": f"{tokenizer['file']}, digest {tokenizer['digest']}, "
        f"eos {tokenizer['eos']} = {tokenizer['eos_id']}",
        "Seed": f"{card['recipe']['seed']}",
    }
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _funnel(funnel: Mapping[str, Any]) -> str:
    steps = [("read", "read", funnel["read"])]
    for kind in ("quarantined", "dropped"):
        for reason, lost in funnel[kind].items():  # editors cut parts of documents that stay
            steps.append((kind, f"{kind if lost['documents'] else 'cut'}: {reason}", lost))
    steps.append(("kept", "kept", funnel["kept"]))
    whole = max(1, funnel["read"]["documents"])
    rows = "".join(
        f'<tr><td>{escape(label)}</td><td class="n">{number["documents"]:,}</td>'
        f'<td class="n">{_percent(number["documents"], whole)}</td>'
        f'<td class="n">{format_bytes(number["bytes"])}</td>'
        f'<td class="bar"><span class="{kind}" '
        f'style="width:{100 * number["documents"] / whole:.2f}%"></span></td></tr>'
        for kind, label, number in steps
    )
    head = '<tr><th></th><th class="n">documents</th><th class="n"></th><th class="n">text</th><th></th></tr>'
    return f"<table>{head}{rows}</table>"


def _sources(card: Mapping[str, Any]) -> str:
    head = "".join(f'<th class="n">{name}</th>' for name in ("files", "stored", "read", "kept", "tokens"))
    rows = "".join(
        f"<tr><td>{escape(source['source'])}</td>"
        + "".join(
            f'<td class="n">{value}</td>'
            for value in (
                f"{source['files']:,}",
                format_bytes(source["bytes"]),
                f"{source['funnel']['read']['documents']:,}",
                f"{source['funnel']['kept']['documents']:,}",
                f"{source['tokens']:,}",
            )
        )
        + "</tr>"
        for source in card["inputs"]
    )
    return f"<table><tr><th>source</th>{head}</tr>{rows}</table>"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
