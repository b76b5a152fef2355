"""`shardkit pack`: pack a token store into rows of any length."""

from __future__ import annotations

import argparse

from shardkit.cli.common import (
    add_json_argument,
    add_override_argument,
    add_storage_arguments,
    count,
    print_json,
    print_message,
    storage_options,
)
from shardkit.cli.declared import add_options, given


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "pack",
        help="pack a token store into rows of any length, without raw text or tokenizer",
        description="Pack the documents of a token store, a dataset built with `output.format: tokens`, into "
        "rows of any length. The result has the same bytes as a build of that length from the raw text. To "
        "continue an interrupted run, run the same command again.",
        allow_abbrev=False,
    )
    parser.add_argument("store", metavar="STORE", help="folder or URL of the token store")
    parser.add_argument("output", metavar="OUTPUT", help="folder or URL for the dataset")
    parser.add_argument("--sequence-length", type=count, metavar="L", help="tokens per row (default: 2048)")
    parser.add_argument(
        "--strategy",
        choices=["best_fit", "concat", "best_fit_truncate", "best_fit_crop"],
        help="how documents become rows (default: best_fit)",
    )
    parser.add_argument(
        "--format",
        choices=["mds", "wds", "megatron", "olmo", "nanogpt", "llmc", "datatrove"],
        help="format of the shards (default: mds), or whole documents for another trainer",
    )
    add_override_argument(parser, "output.shard_bytes=256MiB (only keys of pack and output)")
    add_options(parser, "shardkit.writers.executors:Execution", "workers", number=count)
    add_options(parser, "shardkit.writers.token_store:pack_store", replace="replace a dataset at OUTPUT")
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pack, and print the result."""
    from shardkit.writers.token_store import pack_store

    own = {
        "pack.sequence_length": arguments.sequence_length,
        "pack.strategy": arguments.strategy,
        "output.format": arguments.format,
    }
    overrides = [f"{key}={value}" for key, value in own.items() if value is not None]
    result = pack_store(
        arguments.store,
        arguments.output,
        overrides=[*overrides, *arguments.overrides],
        progress=not arguments.quiet,
        storage=storage_options(arguments, is_job=True),
        **given(arguments, "workers", "replace"),
    )
    if arguments.json:
        print_json(result.to_dict())
    else:
        print_message(arguments, repr(result))
    return 0
