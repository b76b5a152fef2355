"""How long documents are, and how rows are filled: histograms with bins of powers of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.histogram import Histogram
from shardkit.writers.report.html import bars, facts, number, percent, section, table

__all__ = ["render_lengths", "render_packing"]


def render_lengths(card: Mapping[str, Any]) -> str:
    """Documents, and the tokens in them, by length."""
    lengths = _histogram(card, "lengths")
    bins = lengths.bins()
    most = max((one.count for one in bins), default=0)
    most_tokens = max((one.sum for one in bins), default=0)
    rows = [
        [
            number(one.label),
            number(one.count),
            number(percent(one.count, lengths.count)),
            bars(most, ("other", one.count)),
            number(one.sum),
            number(percent(one.sum, lengths.sum)),
            bars(most_tokens, ("other", one.sum)),
        ]
        for one in bins
    ]
    head = (">tokens in it", ">documents", ">of all", "|", ">tokens", ">of all", "|")
    caption = "Kept documents by their number of tokens, the eos included"
    mean = f"{lengths.sum / max(1, lengths.count):,.1f} tokens a document on average."
    return section("Document lengths", table(head, rows, caption=caption), f'<p class="note">{mean}</p>')


def render_packing(card: Mapping[str, Any]) -> str:
    """What rows are made of."""
    packing, length = card["packing"], card["sequence_length"]
    cells, pieces = card["tokens"] + card["padding"], _histogram(card, "row_pieces")
    told = {
        "Strategy": card["recipe"]["pack"]["strategy"],
        "Partitions": f"{packing['partitions']:,}, packed each by itself",
        "Padding": f"{card['padding']:,} tokens, {percent(card['padding'], cells)} of all",
        "Documents cut": f"{packing['cut_documents']:,} of {packing['documents']:,} "
        f"({percent(packing['cut_documents'], packing['documents'])}); {packing['needless_cuts']:,} of them "
        "would have fitted into one row",
        "Pieces": f"{pieces.sum:,}, {pieces.sum / max(1, pieces.count):.2f} in a row on average",
    }
    return section(
        "Packing",
        facts(told, caption=f"Rows of {length:,} tokens"),
        _rows(_histogram(card, "row_padding"), ">tokens of padding", "Rows by their tokens of padding"),
        _rows(pieces, ">pieces", "Rows by the documents, or parts of some, in them"),
    )


def _rows(histogram: Histogram, name: str, caption: str) -> str:
    bins = histogram.bins()
    most = max((one.count for one in bins), default=0)
    rows = [
        [
            number(one.label),
            number(one.count),
            number(percent(one.count, histogram.count)),
            bars(most, ("other", one.count)),
        ]
        for one in bins
    ]
    return table((name, ">rows", ">of all", "|"), rows, caption=caption)


def _histogram(card: Mapping[str, Any], name: str) -> Histogram:
    return Histogram.from_dict(card["histograms"].get(name, {"counts": [], "sums": []}))
