"""What `shardkit info` draws of a card: funnel, rules, sources, languages and lengths as short tables.

Everything is optional: cards of older versions and of conversions have only some of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardkit.funnel_steps import funnel_steps
from shardkit.histogram import Histogram
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bar", "card_tables", "printable", "sparkline"]

BAR_CELLS = 10
MOST_RULES = 8
MOST_LANGUAGES = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = ".:-=+*#@"


def bar(part: float, whole: float, *, blocks: bool, cells: int = BAR_CELLS) -> str:
    """A bar of up to `cells` characters, in eighths of one with `blocks`; what is above 0 can be seen."""
    filled = min(1.0, part / whole) * cells if whole > 0 and part > 0 else 0.0
    if not blocks:
        return "#" * max(round(filled), filled > 0)
    eighths = max(round(8 * filled), filled > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparkline(counts: Sequence[int], *, blocks: bool) -> str:
    """One character a count, the most of them the highest; a space where there is none."""
    levels, most = _LEVELS if blocks else _ASCII_LEVELS, max(counts, default=0)
    return "".join(levels[(len(levels) * n - 1) // most] if n else " " for n in counts)


def printable(text: str) -> str:
    """Text of a card without what would command a terminal, or turn the direction of a line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def card_tables(card: Mapping[str, Any], *, blocks: bool) -> list[Table]:
    """The tables of what the card has; KeyError, TypeError and others if it is not ours."""
    tables = [
        _funnel(card, blocks) if card.get("funnel") else None,
        _rules(card["funnel"], blocks) if card.get("funnel") else None,
        _sources(card["inputs"], blocks) if card.get("inputs") else None,
        _languages(card.get("inputs") or (), blocks),
        _histograms(card.get("histograms") or {}, blocks),
    ]
    return [table for table in tables if table is not None and table.row_count]


def _funnel(card: Mapping[str, Any], blocks: bool) -> Table:
    steps = funnel_steps(card)
    rows = []
    for step in steps:
        rows.append(
            (
                f"quarantined: {step.label}" if step.kind == "quarantined" else step.label,
                f"-{step.lost_documents:,}" if step.lost_documents else "",
                f"{step.documents:,}",
                _percent(step.documents, steps[0].documents),
                bar(step.documents, steps[0].documents, blocks=blocks),
                format_bytes(step.bytes),
                bar(step.bytes, steps[0].bytes, blocks=blocks),
            )
        )
    return _table(("funnel", ">lost", ">documents", ">of read", "|", ">text", "|"), rows)


def _rules(funnel: Mapping[str, Any], blocks: bool) -> Table:
    """The rules that dropped most documents."""
    dropped = [(lost["documents"], reason) for reason, lost in funnel["dropped"].items()]
    dropped = sorted((one for one in dropped if one[0]), key=lambda one: (-one[0], one[1]))
    most = dropped[0][0] if dropped else 0
    rows = [
        (
            reason,
            f"{documents:,}",
            _percent(documents, funnel["read"]["documents"]),
            bar(documents, most, blocks=blocks),
        )
        for documents, reason in dropped[:MOST_RULES]
    ]
    if rest := dropped[MOST_RULES:]:
        documents = sum(count for count, _ in rest)
        share = _percent(documents, funnel["read"]["documents"])
        rows.append((f"{len(rest)} others", f"{documents:,}", share, ""))
    return _table(("dropped most by", ">documents", ">of read", "|"), rows)


def _sources(inputs: Sequence[Mapping[str, Any]], blocks: bool) -> Table:
    tokens = [source.get("tokens", 0) for source in inputs]
    rows = [
        (
            str(source["source"]),
            f"{source['files']:,}",
            f"{source['funnel']['read']['documents']:,}",
            f"{source['funnel']['kept']['documents']:,}",
            f"{count:,}",
            _percent(count, sum(tokens)),
            bar(count, max(tokens), blocks=blocks),
        )
        for source, count in zip(inputs, tokens, strict=True)
    ]
    return _table(("sources", ">files", ">read", ">kept", ">tokens", ">of all", "|"), rows)


def _languages(inputs: Iterable[Mapping[str, Any]], blocks: bool) -> Table:
    tokens: dict[str, int] = {}
    documents: dict[str, int] = {}
    for source in inputs:
        for label, counts in (source.get("languages") or {}).items():
            tokens[label] = tokens.get(label, 0) + counts["tokens"]
            documents[label] = documents.get(label, 0) + counts["documents"]
    order = sorted(tokens, key=lambda label: (-tokens[label], label))
    whole, most = sum(tokens.values()), max(tokens.values(), default=0)
    rows = [
        (
            label,
            f"{documents[label]:,}",
            f"{tokens[label]:,}",
            _percent(tokens[label], whole),
            bar(tokens[label], most, blocks=blocks),
        )
        for label in order[:MOST_LANGUAGES]
    ]
    if rest := order[MOST_LANGUAGES:]:
        counts = sum(tokens[label] for label in rest)
        kept = f"{sum(documents[label] for label in rest):,}"
        rows.append((f"{len(rest)} others", kept, f"{counts:,}", _percent(counts, whole), ""))
    return _table(("languages", ">documents", ">tokens", ">of all", "|"), rows)


def _histograms(histograms: Mapping[str, Any], blocks: bool) -> Table:
    """One line each: range, mean, and the counts of bins that double in width."""
    rows = []
    for name, what in (
        ("lengths", "tokens a document"),
        ("row_padding", "padding a row"),
        ("row_pieces", "pieces a row"),
    ):
        if name in histograms:
            histogram = Histogram.from_dict(histograms[name])
            if bins := histogram.bins():
                line = sparkline([one.count for one in bins], blocks=blocks)
                mean = histogram.sum / histogram.count
                rows.append((what, f"{mean:,.1f}", f"{bins[0].low:,}", line, f"{bins[-1].high:,}"))
    return _table(("histograms", ">mean", ">from", "by powers of two", "to"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """In `head`, ">" before a name is of numbers, "|" of bars; other columns may be broken."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in head:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            table.add_column(column.removeprefix("|"), overflow="fold", no_wrap=column.startswith("|"))
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
