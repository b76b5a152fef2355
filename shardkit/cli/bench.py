"""`shardkit bench`: how fast this machine loads a dataset."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardkit.cli.common import (
    PATH_HELP,
    add_json_argument,
    add_storage_arguments,
    count,
    print_columns,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.tools.bench import PassSpeed, Speed

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "bench",
        help="how fast this machine loads a dataset: tokens/s, waits, CPU per token, ratio to a memory copy",
        description="Load batches in training order and discard them. Prints medians of several runs and "
        "compares them with a memory copy. Local files are read from the page cache; a URL first with an "
        "empty cache, then from the cache.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)
    parser.add_argument(
        "--batch-size", type=count, default=8, metavar="N", help="samples in a batch (default: 8)"
    )
    parser.add_argument(
        "--runs", type=count, default=5, metavar="N", help="number of runs of each pass (default: 5)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=3.0, metavar="S", help="maximum duration of a run (default: 3)"
    )
    parser.add_argument(
        "--dtype",
        choices=["int64", "int32", "stored"],
        default="int64",
        help="type of the tokens in batches (default: int64)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="folder for the temporary cache of a remote dataset (default: the temporary folder)",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    from shardkit.tools.bench import measure_speed

    console = stderr_console()

    def report(name: str, number: int) -> None:
        if not arguments.json:
            console.print(f"{name}: run {number + 1}", highlight=False)

    speed = measure_speed(
        arguments.path,
        batch_size=arguments.batch_size,
        seconds=arguments.seconds,
        runs=arguments.runs,
        dtype=arguments.dtype,
        cache_dir=arguments.cache_dir,
        storage=storage_options(arguments),
        progress=report,
    )
    if arguments.json:
        print_json(speed.to_dict())
    else:
        _show(speed)
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0 seconds")
    return value


def _show(speed: Speed) -> None:
    rows: list[tuple[str, Callable[[PassSpeed], str]]] = [
        ("tokens/s", lambda p: "" if p.tokens_per_second is None else f"{p.tokens_per_second:,.0f}"),
        ("samples/s", lambda p: f"{p.samples_per_second:,.0f}"),
        ("bytes/s in batches", lambda p: f"{format_bytes(p.bytes_per_second)}/s"),
        ("share of a memory copy", lambda p: f"{100 * p.copy_ratio:.1f}%"),
        ("wait for a batch, p50", lambda p: _short(p.wait_p50_seconds)),
        ("wait for a batch, p99", lambda p: _short(p.wait_p99_seconds)),
        ("wait for the first batch", lambda p: _short(p.first_batch_seconds)),
        ("CPU per token", _cpu),
        ("batches in a run", lambda p: f"{p.batches:,}"),
        ("fetched in a run", lambda p: format_bytes(p.fetched_bytes) if p.fetched_bytes else ""),
    ]
    print_columns(
        "",
        ("", *(each.name for each in speed.passes)),
        [(name, *(value(each) for each in speed.passes)) for name, value in rows],
    )
    stdout_console().print(
        f"{speed.samples:,} samples, batches of {speed.batch_size}; medians of {speed.runs} runs; "
        f"a copy in memory moves {format_bytes(speed.copy_bytes_per_second)}/s"
    )


def _cpu(speed: PassSpeed) -> str:
    return "" if speed.cpu_seconds_per_token is None else f"{speed.cpu_seconds_per_token * 1e9:.2f} ns"


def _short(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
