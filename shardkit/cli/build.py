"""`shardkit build`: a recipe to a dataset."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.cli.common import (
    add_recipe_arguments,
    add_storage_arguments,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)
from shardkit.errors import BuildError
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from shardkit.writers import BuildResult
    from shardkit.writers.execution.scheduler import TaskSlice
    from shardkit.writers.maintenance import Explanation

__all__ = ["add_parser", "run", "task_slice"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "build",
        help="recipe to dataset; continues where an interrupted build stopped",
        description="Build the dataset that a recipe describes. Finished work is not redone: after an "
        "interruption or a crash the same command goes on, and the result is the same byte for byte, "
        "whatever the number of workers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file; its relative paths start from its folder"
    )
    parser.add_argument(
        "--output",
        metavar="PLACE",
        help="folder or URL, such as s3://bucket/prefix, for the dataset (default: the recipe's output.path)",
    )
    add_recipe_arguments(parser, example="pack.sequence_length=4096")
    parser.add_argument(
        "--task-slice",
        type=task_slice,
        metavar="I/N",
        help="share the work folder with other processes that run the same build: this one is number I, from "
        "0, of N and begins with its own part (default: use the work folder alone)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="build even if the output holds a dataset, and put the new one in its place (default: refuse)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run nothing: tell which tasks are finished, which have to run and why (default: build)",
    )
    parser.add_argument(
        "--timings",
        type=Path,
        metavar="FILE",
        help="write when each stage ran, its tasks and rates: a page if FILE ends in .html, else JSON "
        "(default: only a table on stderr; the dataset itself knows no times)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (default: a table on stderr)"
    )
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build, and print what was made."""
    from shardkit.writers import build

    if arguments.explain:
        return _explain(arguments)
    if arguments.timings is not None and not arguments.timings.absolute().parent.is_dir():
        raise BuildError(f"--timings {arguments.timings}: its folder does not exist; make it first")
    result = build(
        arguments.recipe,
        output=arguments.output,
        workers=arguments.workers,
        overrides=arguments.overrides,
        engine=arguments.engine,
        ray_address=arguments.ray_address,
        task_slice=arguments.task_slice,
        progress=not arguments.quiet,
        replace=arguments.replace,
        storage=storage_options(arguments),
    )
    if arguments.timings is not None:
        _write_timings(arguments.timings, result)
    if arguments.json:
        print_json(result.to_dict())
    elif not arguments.quiet:
        _show(result)
    return 0


def task_slice(text: str) -> TaskSlice:
    """argparse's type of --task-slice."""
    from shardkit.writers.execution.scheduler import TaskSlice

    try:
        index, count = (int(part) for part in text.split("/"))
        return TaskSlice(index, count)
    except (ValueError, BuildError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N, such as 0/4") from error


def _write_timings(path: Path, result: BuildResult) -> None:
    from shardkit.files import publish_bytes
    from shardkit.writers.report.page import render_times

    if path.suffix == ".html":
        data = render_times(result)
    else:
        names = ("output", "fingerprint", "total_seconds", "tasks", "tasks_reused", "stages")
        told = result.to_dict()
        data = json.dumps({name: told[name] for name in names}, indent=2).encode() + b"\n"
    try:
        publish_bytes(path, data)
    except OSError as error:
        raise BuildError(f"--timings {path}: {error.strerror}; the dataset is whole") from error


def _explain(arguments: argparse.Namespace) -> int:
    from shardkit.writers.maintenance import explain_build

    explanation = explain_build(
        arguments.recipe,
        output=arguments.output,
        overrides=arguments.overrides,
        storage=storage_options(arguments),
    )
    if arguments.json:
        print_json(explanation.to_dict())
    else:
        _show_explanation(explanation)
    return 0


def _show_explanation(explanation: Explanation) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("stage", "left"), ("tasks", "right"), ("finished", "right"), ("to run", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("why", overflow="fold")
    for plan in explanation.stages:
        why = "\n".join(f"{r.what} ({r.tasks:,}, such as {r.example})" for r in plan.reasons)
        missing = plan.tasks - plan.finished
        table.add_row(
            plan.stage, f"{plan.tasks:,}", f"{plan.finished:,}", f"{missing:,}" if missing else "", why
        )
    for name in explanation.later:
        table.add_row(name, "", "", "?", "what the stages above give anew")
    console.print(table)
    if not explanation.later and all(plan.finished == plan.tasks for plan in explanation.stages):
        console.print("every task is finished: the build would only publish, or find its output up to date")
    if explanation.stale:
        size = format_bytes(sum(task.bytes for task in explanation.stale))
        console.print(
            f"not used by this build: {len(explanation.stale):,} of the finished tasks in {explanation.work} "
            f"({size}); `shardkit clean` with the same arguments removes them"
        )


def _show(result: BuildResult) -> None:
    from rich.table import Table

    console = stderr_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("what")
    table.add_column("documents", justify="right")
    table.add_column("text", justify="right")
    funnel = result.funnel
    table.add_row("read", f"{funnel.read.documents:,} documents", format_bytes(funnel.read.bytes))
    for kind, losses in (("quarantined", funnel.quarantined), ("dropped", funnel.dropped)):
        for reason, lost in sorted(losses.items()):
            what = kind if lost.documents else "cut"  # parts of documents that stay
            table.add_row(f"  {what}: {reason}", f"-{lost.documents:,}", format_bytes(lost.bytes))
    table.add_row("kept", f"{funnel.kept.documents:,} documents", format_bytes(funnel.kept.bytes))
    console.print(table)
    cells = max(1, result.tokens + result.padding)
    console.print(
        f"{result.samples:,} rows of {result.sequence_length:,} tokens in {result.shards:,} shards "
        f"({result.format}), {result.tokens:,} tokens, {100 * result.padding / cells:.3f} % padding"
    )
    console.print(f"fingerprint {result.fingerprint}")
    if result.up_to_date:
        console.print(f"{result.location} is up to date: nothing to do")
        return
    console.print(_stage_table(result))
    reused = f", {result.tasks_reused:,} of {result.tasks:,} tasks reused" if result.tasks_reused else ""
    console.print(
        f"{result.location} built in {result.total_seconds:.1f} s{reused}: "
        f"{format_bytes(result.text_bytes_per_second)}/s of text, {result.tokens_per_second:,.0f} tokens/s"
    )


def _stage_table(result: BuildResult) -> Table:
    """When each stage ran."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage")
    for name in ("tasks", "reused", "from s", "for s", "text", "text/s"):
        table.add_column(name, justify="right")
    for stage in result.stages:
        table.add_row(
            stage.stage,
            f"{stage.tasks:,}" if stage.tasks else "",
            f"{stage.tasks_reused:,}" if stage.tasks_reused else "",
            f"{stage.start:,.1f}",
            f"{stage.seconds:,.1f}",
            format_bytes(stage.bytes) if stage.bytes else "",
            f"{format_bytes(stage.bytes_per_second)}/s" if stage.bytes else "",
        )
    return table
