"""`shardkit row-costs`: count the work of each row, for loaders that balance the work of ranks."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from shardkit.cli.common import (
    PATH_HELP,
    add_document_arguments,
    add_json_argument,
    add_quiet_argument,
    add_storage_arguments,
    print_json,
    stdout_console,
    storage_options,
)

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "row-costs",
        help="count the work of each row, for loaders with balance=",
        description="Read all rows of a dataset once and write the sum of squared document lengths of each, "
        "4 or 8 bytes a row, beside its index: loaders with the option `balance` place rows on ranks by it. "
        "A table that is there is only checked.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="COPY",
        help="write the table beside this copy of the dataset instead; may be repeated (default: PATH)",
    )
    add_document_arguments(parser)
    add_quiet_argument(parser)
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, misuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Count, write and print what rows cost."""
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.row_costs import count_row_costs, find_row_costs, write_row_costs
    from shardkit.errors import ShardError
    from shardkit.order.balance import DocumentIds

    if arguments.eos is not None and arguments.bos is not None:
        arguments.misuse("documents are found by --eos or by --bos: give one of the two")
    storage = storage_options(arguments)
    with ExitStack() as opened:
        dataset, *copies = (
            opened.enter_context(open_dataset(path, storage=storage))
            for path in (arguments.path, *arguments.to)
        )
        eos_id = arguments.eos
        if eos_id is None and arguments.bos is None and dataset.card is not None:
            eos_id = dataset.card.tokenizer.eos_id
        if eos_id is None and arguments.bos is None:
            raise ShardError(dataset.location, "states no id that ends documents: give --eos or --bos")
        for copy in copies:
            if copy.fingerprint != dataset.fingerprint:
                raise ShardError(
                    copy.location,
                    f"has the fingerprint {copy.fingerprint}, {dataset.location} {dataset.fingerprint}: it "
                    "is no copy, and has rows of its own",
                )
        ids = DocumentIds(eos_id, arguments.bos, arguments.pad)
        costs = find_row_costs(dataset, ids)
        if costs is None:
            costs = count_row_costs(dataset, ids, progress=not arguments.quiet)
        written = []
        for place in copies or [dataset]:
            if find_row_costs(place, ids) is None:
                written.append(f"{place.location}/{write_row_costs(place, ids, costs)}")
        mean, most = float(costs.squares.mean()), int(costs.squares.max())
    answer = {
        "path": arguments.path,
        "written": written,
        "rows": len(costs.squares),
        "mean": mean,
        "max": most,
    }
    if arguments.json:
        print_json(answer)
        return 0
    stdout_console().print(
        f"{arguments.path}: {len(costs.squares):,} rows; squared document lengths add up to {mean:,.0f} in a "
        f"row on average, {most:,} at most ({most / mean:.2f} times as much)"
    )
    for name in written:
        stdout_console().print(f"wrote {name}")
    if not written:
        stdout_console().print("the table was there and is whole")
    return 0
