"""`shardkit verify`: check that all files of a dataset are complete and undamaged."""

from __future__ import annotations

import argparse

from shardkit.cli.common import (
    PATH_HELP,
    add_json_argument,
    add_storage_arguments,
    count,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import add_options, given
from shardkit.display import counted
from shardkit.units import format_bytes


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "verify",
        help="check every shard's hashes and structure, the index and the card",
        description="Check a dataset: hashes and structure of every shard, counts in index and card, "
        "fingerprint, and other files of the dataset. Exit status 1 if anything is wrong; each damaged file "
        "is named.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)
    add_options(
        parser,
        "shardkit.datasets.verify:verify",
        number=count,
        quick="check sizes and structure only (default: hashes, too)",
        threads="number of shards checked at a time (default: one per core, at most 32)",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify and print what was found."""
    from shardkit.datasets.verify import verify

    chosen = given(arguments, "quick", "threads")
    report = verify(arguments.path, storage=storage_options(arguments), **chosen)
    if arguments.json:
        print_json(report.to_dict())
        return 0 if report.ok else 1
    for problem in report.problems:
        stderr_console().print(f"{problem.file}: {problem.problem}")
    if report.problem_count > len(report.problems):
        stderr_console().print(f"… and {report.problem_count - len(report.problems):,} more")
    hashes = "" if report.quick else f"hashes of {counted(report.hashed, 'shard')}, "
    how = f"{hashes}sizes and structure"
    verdict = "intact" if report.ok else counted(report.problem_count, "problem")
    stdout_console().print(
        f"{report.path}: {verdict}: {counted(report.shards, 'shard')}, {counted(report.samples, 'sample')}, "
        f"{format_bytes(report.bytes)} checked ({how}); fingerprint {report.fingerprint}"
    )
    return 0 if report.ok else 1
