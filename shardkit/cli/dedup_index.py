"""`shardkit dedup-index`: build or describe an index of a corpus that later builds deduplicate against."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    add_recipe_arguments,
    add_storage_arguments,
    print_columns,
    print_json,
    print_message,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import add_options, given
from shardkit.display import counted
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.storage.store import StorageOptions


# Copies of constants in shardkit.writers.dedup.index, whose import would make --help slow.
DEFAULT_SKETCH, MIN_SKETCH, MAX_SKETCH = 1024, 64, 1 << 20


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "dedup-index",
        help="index a corpus, so that later builds remove near-duplicates of its documents",
        description="Build an index of the documents that a recipe keeps, or describe an index. A later "
        "recipe that names the index under dedup.near.against drops near-duplicates of these documents, "
        "without reading their texts again. Finished work is not redone, and the index is the same byte for "
        "byte with any number of workers.",
        usage="%(prog)s [options] RECIPE INDEX\n       %(prog)s [--json] --show INDEX",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="YAML file; relative paths start from its folder"
    )
    parser.add_argument("index", metavar="INDEX", nargs="?", help="folder or URL for the index")
    parser.add_argument("--show", metavar="INDEX", help="describe this index (default: build one)")
    add_recipe_arguments(parser, example="dedup.near.similarity=0.7")
    parser.add_argument(
        "--sketch",
        type=_sketch,
        default=DEFAULT_SKETCH,
        metavar="K",
        help="keep the K smallest n-gram hashes of each document, or all if 0 (default: 1024; in longer "
        "documents, this estimates a similarity of 0.8 with a standard deviation of 0.0125)",
    )
    add_options(parser, "shardkit.writers.index_build:build_dedup_index", replace="replace an existing index")
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, misuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Build an index, or describe one."""
    if arguments.show is not None:
        if arguments.recipe is not None:
            arguments.misuse("--show takes only the index, no RECIPE")
        _show(arguments.show, storage_options(arguments), as_json=arguments.json)
        return 0
    if arguments.index is None:
        arguments.misuse("give RECIPE and INDEX, or --show INDEX")
    from shardkit.writers import build_dedup_index

    result = build_dedup_index(
        arguments.recipe,
        arguments.index,
        overrides=arguments.overrides,
        sketch=arguments.sketch,
        progress=not arguments.quiet,
        storage=storage_options(arguments, is_job=True),
        **given(arguments, "workers", "engine", "ray_address", "replace"),
    )
    if arguments.json:
        print_json(result.to_dict())
    else:
        lines = [
            f"removed: {reason}: {counted(lost, 'document')}"
            for reason, lost in sorted(result.removed.items())
        ]
        lines.append(
            f"{result.location} holds the signatures of {counted(result.documents, 'document')}, "
            f"{format_bytes(result.bytes)} of text"
        )
        print_message(arguments, "\n".join(lines))
    return 0


def _sketch(text: str) -> int:
    """Parse an argparse value: 0, or a number of hashes that is large enough for an estimate."""
    size = int(text) if text.isdecimal() else -1
    if size and not MIN_SKETCH <= size <= MAX_SKETCH:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 or from {MIN_SKETCH} to {MAX_SKETCH}")
    return size


def _show(location: str, storage: StorageOptions | None, *, as_json: bool) -> None:
    from shardkit.writers.dedup.bands import render_curve
    from shardkit.writers.dedup.index import open_index

    index = open_index(location, storage)
    facts = index.to_dict()
    if as_json:
        print_json(facts)
        return
    sketch = f"the {facts['sketch']:,} smallest hashes" if facts["sketch"] else "all hashes"
    lines = [
        ("documents", f"{index.documents:,}, {format_bytes(index.bytes)} of text"),
        ("size", f"{format_bytes(index.stored_bytes)} in {facts['parts']:,} parts"),
        ("n-grams", f"{sketch} of a document"),
        ("digest", index.digest),
        ("shardkit", facts["shardkit_version"]),
        *((f"made from: {name}", _plain(value)) for name, value in facts["made_from"].items()),
        *((f"setting: {name}", _plain(value)) for name, value in index.settings.items()),
    ]
    print_columns("", ("", ""), lines, left=(0, 1))
    stdout_console().print()
    stdout_console().print(render_curve(index.settings["bands"], index.settings["rows"]))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(one) for one in value) or "nothing"
    return value if isinstance(value, str) else json.dumps(value)
