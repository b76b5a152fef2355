"""`shardkit demo`: the whole story on text that is already on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardkit.cli.common import print_json, stderr_console, stdout_console

__all__ = ["add_parser", "run"]

DEFAULT_MEGABYTES = 16.0  # of shardkit.tools.demo.story, which is too heavy to import for --help


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "demo",
        help="the whole story on text that is already on this machine; no download",
        description="Take text from this Python installation, train a tokenizer, build MDS and tar shards, "
        "stream them, train, kill, resume, and prove each claim with figures from this run. About half a "
        "minute on two cores. Exit status 1 if any proof fails.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("shardkit-demo"),
        metavar="FOLDER",
        help="where everything goes; an earlier demo there is replaced (default: shardkit-demo)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=DEFAULT_MEGABYTES,
        metavar="MB",
        help=f"text to take, 1 to 1000 million bytes (default: {DEFAULT_MEGABYTES:g})",
    )
    fate = parser.add_mutually_exclusive_group()
    fate.add_argument("--keep", action="store_true", help="keep the folder (the default)")
    fate.add_argument("--clean", action="store_true", help="remove the folder at the end (default: keep it)")
    parser.add_argument("--json", action="store_true", help="print JSON (default: tables)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its report."""
    from shardkit.tools.demo.story import clean_demo, print_report, run_demo

    messages = stderr_console()
    report = run_demo(arguments.output, arguments.megabytes, lambda step: messages.print(f"{step} …"))
    if arguments.clean:
        clean_demo(arguments.output)
    if arguments.json:
        print_json(report.to_dict())
    else:
        print_report(report, stdout_console(), kept=not arguments.clean)
    return 0 if report.passed else 1
