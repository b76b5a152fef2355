"""`shardkit info`: describe a dataset from its index and card alone.

A card is shown as short tables: funnel, rules, sources, languages and lengths. Each table is optional,
because cards of older versions and of conversions lack some sections.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    print_json,
    stdout_console,
    storage_options,
)
from shardkit.display import printable
from shardkit.errors import ShardError
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from shardkit.card import DatasetCard, FunnelCounts, Histogram, InputFacts, LanguageCounts
    from shardkit.storage.store import StorageOptions


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "info",
        help="describe a dataset: counts, columns, fingerprint, tokens, funnel",
        description="Describe a dataset from its index and card: any MDS dataset, folder of WebDataset tars, "
        "or pattern such as 'data/*.tar'. Shards are opened only if no index describes them.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="folder, index file, tar, pattern or URL")
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the description."""
    facts = describe(arguments.path, storage_options(arguments))
    if arguments.json:
        print_json(facts)
    else:
        _show(facts)
    return 0


def describe(path: str, storage: StorageOptions | None = None) -> dict[str, Any]:
    """Return the facts about a dataset as plain data; unknown facts are None."""
    from shardkit.datasets.dataset import open_dataset

    with open_dataset(path, storage=storage) as dataset:
        manifest, dtype, card = dataset.manifest, dataset.token_dtype, dataset.card
        samples = manifest.shard_samples
        return {
            "path": str(path),
            "format": manifest.format,
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
            "shards": len(manifest.shards),
            "samples_per_shard": [int(samples.min()), int(samples.max())] if len(samples) else None,
            "bytes": _total(shard.raw.bytes for shard in manifest.shards),
            "stored_bytes": _total(shard.stored.bytes for shard in manifest.shards),
            "compression": sorted({shard.compression for shard in manifest.shards if shard.compression}),
            "hashes": sorted({name for shard in manifest.shards for name in shard.stored.hashes}),
            "columns": {column.name: column.encoding for column in dataset.columns},
            "token_column": dataset.token_column,
            "sequence_length": dataset.sequence_length,
            "dtype": None if dtype is None else dtype.name,
            "card": None if card is None else card.data,
        }


def _total(sizes: Iterable[int]) -> int | None:
    """Return the sum of sizes; None if one is below 0, which means that the index does not record it."""
    known = list(sizes)
    return None if any(size < 0 for size in known) else sum(known)


def _size(count: int | None) -> str:
    return "sizes not recorded" if count is None else format_bytes(count)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from shardkit.card import DatasetCard  # imported here, because NumPy would slow down --help

    console = stdout_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines, pictures = _lines(facts), []
    try:
        card = DatasetCard(facts["card"] or {})
        lines += _card_lines(card)
        pictures = card_tables(card, blocks=console.encoding.lower().startswith("utf"))
    except (ShardError, ArithmeticError, LookupError, ValueError) as error:
        lines.append(("card", f"not a card written by shardkit ({error})"))
    for name, value in lines:
        table.add_row(name, printable(value))
    console.print(table)
    for picture in pictures:
        console.print()
        console.print(picture)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) lines of the facts from the index."""
    size = _size(facts["stored_bytes"])
    if facts["compression"]:
        size += f" ({', '.join(facts['compression'])}; {_size(facts['bytes'])} raw)"
    lines = [
        ("format", facts["format"]),
        ("fingerprint", facts["fingerprint"]),
        ("samples", f"{facts['samples']:,}"),
        ("shards", f"{facts['shards']:,}, {size}"),
        ("hashes", ", ".join(facts["hashes"]) or "none"),
        (
            "columns",
            ", ".join(f"{name} ({encoding})" for name, encoding in facts["columns"].items()) or "unknown",
        ),
    ]
    if facts["sequence_length"]:
        lines.append(("sequence", f"{facts['sequence_length']:,} tokens of {facts['dtype']}"))
    return lines


def _card_lines(card: DatasetCard) -> list[tuple[str, str]]:
    """Return (name, text) lines of the facts in the card; an older card may lack some."""
    lines = []
    if limit := card.data.get("recipe", {}).get("limit"):
        lines.append(("trial", f"built from at most {limit:,} records of each input (--limit)"))
    if card.has("tokens", "padding"):
        share = 100 * card.padding / max(1, card.tokens + card.padding)
        lines.append(("tokens", f"{card.tokens:,}, and {card.padding:,} of padding ({share:.3f}%)"))
    if card.has("trained_tokens"):
        trained = card.data["trained_tokens"]
        share = 100 * trained / max(1, card.tokens)
        lines.append(("trained on", f"{trained:,} tokens ({share:.3f}%); the loss mask excludes the others"))
    if card.has("packing") and "repeated" in card.packing:
        repeated, documents = card.packing["repeated"], card.packing["repeated_documents"]
        lines.append(
            ("repeated", f"{repeated:,} tokens of {documents:,} documents, masked (max_repetitions)")
        )
    if card.has("packing") and (cropped := card.packing.get("cropped")):
        lines.append(("left out", f"{cropped:,} tokens at the ends of documents (pack.strategy)"))
    if card.has("packing") and (joined := card.packing.get("joined")):
        lines.append(("joined", f"{joined:,} header and end-of-text tokens left out between documents"))
    if card.has("split"):
        parts = [f"{name} {count:,}" for name, count in card.split.documents.items()]
        by = "" if card.split.by is None else f"; together by {card.split.by}"
        lines.append(("split", f"part {card.split.part}; documents: {', '.join(parts)}, train the rest{by}"))
    if card.has("tokenizer"):
        known = card.tokenizer
        eos = f"eos {known.eos} = {known.eos_id}"
        lines.append(("tokenizer", f"{known.file}, {eos}, digest {known.digest}"))
    if card.has("recipe_digest", "shardkit_version"):
        lines.append(("recipe", f"digest {card.recipe_digest}, shardkit {card.shardkit_version}"))
    return lines


BAR_CELLS = 10

MOST_RULES = 8

MOST_LANGUAGES = 8

_EIGHTHS = " ▏▎▍▌▋▊▉█"

_LEVELS = "▁▂▃▄▅▆▇█"

_ASCII_LEVELS = ".:-=+*#@"


def bar(part: float, whole: float, *, blocks: bool, cells: int = BAR_CELLS) -> str:
    """Return a bar of up to `cells` characters for part / whole, visible for any part above 0.

    With `blocks`, the resolution is one eighth of a character.
    """
    filled = min(1.0, part / whole) * cells if whole > 0 and part > 0 else 0.0
    if not blocks:
        return "#" * max(round(filled), filled > 0)
    eighths = max(round(8 * filled), filled > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparkline(counts: Sequence[int], *, blocks: bool) -> str:
    """Return one character per count, whose height is relative to the largest count; a space for 0."""
    levels, most = _LEVELS if blocks else _ASCII_LEVELS, max(counts, default=0)
    return "".join(levels[(len(levels) * n - 1) // most] if n else " " for n in counts)


def card_tables(card: DatasetCard, *, blocks: bool) -> list[Table]:
    """Return tables of the card's sections; raise ShardError if a section is malformed."""
    tables = []
    if card.has("funnel"):
        tables += [_funnel(card, blocks), _rules(card.funnel, blocks)]
    if card.has("inputs"):
        tables += [_sources(card.inputs, blocks), _languages(card.languages(), blocks)]
    if card.has("histograms"):
        tables.append(_histograms(card.histograms, blocks))
    return [table for table in tables if table.row_count]


def _funnel(card: DatasetCard, blocks: bool) -> Table:
    steps = card.funnel_steps()
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


def _rules(funnel: FunnelCounts, blocks: bool) -> Table:
    """Return a table of the rules that dropped the most documents."""
    dropped = [(lost.documents, reason) for reason, lost in funnel.dropped.items()]
    dropped = sorted((one for one in dropped if one[0]), key=lambda one: (-one[0], one[1]))
    most = dropped[0][0] if dropped else 0
    rows = [
        (
            reason,
            f"{documents:,}",
            _percent(documents, funnel.read.documents),
            bar(documents, most, blocks=blocks),
        )
        for documents, reason in dropped[:MOST_RULES]
    ]
    if rest := dropped[MOST_RULES:]:
        documents = sum(count for count, _ in rest)
        share = _percent(documents, funnel.read.documents)
        rows.append((f"{len(rest)} others", f"{documents:,}", share, ""))
    return _table(("dropped most by", ">documents", ">of read", "|"), rows)


def _sources(inputs: Sequence[InputFacts], blocks: bool) -> Table:
    tokens = [source.tokens for source in inputs]
    rows = [
        (
            source.source,
            f"{source.files:,}",
            f"{source.funnel.read.documents:,}",
            f"{source.funnel.kept.documents:,}",
            f"{source.tokens:,}",
            _percent(source.tokens, sum(tokens)),
            bar(source.tokens, max(tokens), blocks=blocks),
        )
        for source in inputs
    ]
    return _table(("sources", ">files", ">read", ">kept", ">tokens", ">of all", "|"), rows)


def _languages(languages: Mapping[str, LanguageCounts], blocks: bool) -> Table:
    tokens = [counts.tokens for counts in languages.values()]
    rows = [
        (
            label,
            f"{counts.documents:,}",
            f"{counts.tokens:,}",
            _percent(counts.tokens, sum(tokens)),
            bar(counts.tokens, max(tokens), blocks=blocks),
        )
        for label, counts in list(languages.items())[:MOST_LANGUAGES]
    ]
    if rest := list(languages.values())[MOST_LANGUAGES:]:
        documents, count = sum(c.documents for c in rest), sum(c.tokens for c in rest)
        rows.append((f"{len(rest)} others", f"{documents:,}", f"{count:,}", _percent(count, sum(tokens)), ""))
    return _table(("languages", ">documents", ">tokens", ">of all", "|"), rows)


def _histograms(histograms: Mapping[str, Histogram], blocks: bool) -> Table:
    """Return a table with one line per histogram: range, mean, and counts of bins that double in width."""
    rows = []
    for name, what in (
        ("lengths", "tokens per document"),
        ("row_padding", "padding per row"),
        ("row_pieces", "pieces per row"),
    ):
        if name in histograms:
            histogram = histograms[name]
            if bins := histogram.bins():
                line = sparkline([one.count for one in bins], blocks=blocks)
                mean = histogram.sum / histogram.count
                rows.append((what, f"{mean:,.1f}", f"{bins[0].low:,}", line, f"{bins[-1].high:,}"))
    return _table(("histograms", ">mean", ">from", "by powers of two", "to"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; in `head`, ">" marks columns of numbers, "|" columns of bars; others may be wrapped."""
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
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"
