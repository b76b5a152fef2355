"""`shardkit clean`: remove files that a build does not use from its work folder."""

from __future__ import annotations

import argparse

from shardkit.cli.common import (
    add_json_argument,
    add_override_argument,
    add_storage_arguments,
    print_json,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import add_options, given
from shardkit.units import format_bytes


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "clean",
        help="remove intermediate files that a build does not use",
        description="Remove the finished tasks that the build of a recipe does not use from its work folder. "
        "A build itself only removes what was read for the last time, so an earlier recipe reuses the rest. "
        "Stages after one that has to run are not cleaned, because it is not known yet which of their tasks "
        "will be used: build first, then clean.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, as given to shardkit build")
    parser.add_argument(
        "--output", metavar="PLACE", help="as given to shardkit build (default: the recipe's output.path)"
    )
    add_override_argument(parser, "pack.sequence_length=4096, with the same values as for shardkit build")
    parser.add_argument(
        "--all", action="store_true", help="remove the whole work folder (default: only unused tasks)"
    )
    add_options(
        parser,
        "shardkit.writers.explain:clean_work",
        dry_run="print what would be removed, but do not remove it",
        force="clean a work folder in a store even while a driver holds its lease",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Clean, and print what was removed."""
    from shardkit.writers.explain import clean_work

    report = clean_work(
        arguments.recipe,
        output=arguments.output,
        overrides=arguments.overrides,
        storage=storage_options(arguments),
        everything=arguments.all,
        **given(arguments, "dry_run", "force"),
    )
    if arguments.json:
        print_json(report.to_dict())
        return 0
    console = stdout_console()
    for task in report.removed:
        console.print(f"{format_bytes(task.bytes):>10}  {task.key}", highlight=False)
    verb = "would be removed" if report.dry_run else "removed"
    console.print(
        f"{report.work}: {len(report.removed):,} tasks ({format_bytes(report.removed_bytes)}) {verb}, "
        f"{report.kept:,} ({format_bytes(report.kept_bytes)}) kept"
    )
    return 0
