"""`shardkit info`: what a dataset is, from its index and card alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardkit.cli.output import print_json, stdout_console
from shardkit.cli.storage_arguments import add_storage_arguments, storage_options
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.storage.store import StorageOptions

__all__ = ["add_parser", "describe", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "info",
        help="what a dataset is: counts, columns, fingerprint, tokens, funnel",
        description="Tell what a dataset is, from its index and card; any MDS dataset, folder of WebDataset "
        "tars, or pattern such as 'data/*.tar'. Shards are opened only where no index describes them.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="folder, index file, tar, pattern or URL")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes (default: a table)")
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
    """The facts as plain data; what is not known is null."""
    from shardkit.dataset import open_dataset

    with open_dataset(path, storage=storage) as dataset:
        manifest, dtype = dataset.manifest, dataset.token_dtype
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
            "card": dataset.card,
        }


def _total(sizes: Iterable[int]) -> int | None:
    """The sum; None if the index does not state all sizes."""
    known = list(sizes)
    return None if any(size < 0 for size in known) else sum(known)


def _size(count: int | None) -> str:
    return "sizes not stated" if count is None else format_bytes(count)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from shardkit.cli.info_card import card_tables, printable

    console = stdout_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines, pictures = _lines(facts), []
    try:
        card = facts["card"] or {}
        lines += _card_lines(card)
        pictures = card_tables(card, blocks=console.encoding.lower().startswith("utf"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        lines.append(("card", f"is not one that shardkit wrote ({error!r})"))
    for name, value in lines:
        table.add_row(name, printable(value))
    console.print(table)
    for picture in pictures:
        console.print()
        console.print(picture)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each line for people."""
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


def _card_lines(card: dict[str, Any]) -> list[tuple[str, str]]:
    """What the card says in one line each; whatever an older one lacks is left out."""
    lines = []
    if {"tokens", "padding"} <= card.keys():
        share = 100 * card["padding"] / max(1, card["tokens"] + card["padding"])
        lines.append(("tokens", f"{card['tokens']:,}, and {card['padding']:,} of padding ({share:.3f} %)"))
    if tokenizer := card.get("tokenizer"):
        eos = f"eos {tokenizer.get('eos')} = {tokenizer.get('eos_id')}"
        lines.append(("tokenizer", f"{tokenizer.get('file')}, {eos}, digest {tokenizer.get('digest')}"))
    if "recipe_digest" in card:
        lines.append(("recipe", f"digest {card['recipe_digest']}, shardkit {card.get('shardkit_version')}"))
    return lines
