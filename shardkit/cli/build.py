"""`shardkit build`: build a dataset from a recipe."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardkit.cli.common import (
    add_json_argument,
    add_recipe_arguments,
    add_storage_arguments,
    count,
    file_path,
    print_columns,
    print_json,
    print_message,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import add_options, given
from shardkit.errors import BuildError
from shardkit.progress import write_log
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.writers import BuildResult, Recipe
    from shardkit.writers.explain import Explanation


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "build",
        help="build a dataset from a recipe; continue where an interrupted build stopped",
        description="Build the dataset that a recipe describes. To continue after an interruption or a "
        "crash, run the same command again; finished work is not redone. The result is the same byte for "
        "byte with any number of workers.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; relative paths start from its folder")
    parser.add_argument(
        "--output",
        metavar="PLACE",
        help="folder or URL, such as s3://bucket/prefix, for the dataset (default: the recipe's output.path)",
    )
    parser.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help="build a trial from at most N records of each input, spread evenly over its files, in a "
        "separate output folder with -limit-N added to its name (default: build everything)",
    )
    add_recipe_arguments(parser, example="pack.sequence_length=4096")
    add_options(parser, "shardkit.writers.executors:Execution", "task_seconds", "retry_failed", "speculate")
    add_options(parser, "shardkit.writers.pipeline:build", replace="replace a dataset in the output folder")
    parser.add_argument(
        "--explain",
        "--dry-run",
        action="store_true",
        help="print which tasks are finished, which have to run and why, without building (default: build)",
    )
    parser.add_argument(
        "--timings",
        type=file_path,
        metavar="FILE",
        help="write the time, tasks and rate of each stage: as a page if FILE ends in .html, else as JSON "
        "(default: print the total and the longest steps only; the dataset itself stores no times)",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build, and print the result."""
    from shardkit.writers.recipe.recipe import load_recipe

    if arguments.explain and arguments.limit is None:
        return _explain(arguments.recipe, arguments.overrides, arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides)  # before slow imports, so errors come at once
    if arguments.limit is not None:
        recipe = recipe.as_trial(arguments.limit)
    if arguments.explain:
        return _explain(recipe, (), arguments)
    if arguments.timings is not None and not arguments.timings.absolute().parent.is_dir():
        raise BuildError(f"--timings {arguments.timings}: its folder does not exist; create it first")
    from shardkit.writers import build

    how = ("workers", "engine", "ray_address", "task_seconds", "retry_failed", "speculate", "replace")
    with _ended_by_sigterm():
        result = build(
            recipe,
            output=arguments.output,
            progress=not arguments.quiet,
            storage=storage_options(arguments, is_job=True),
            **given(arguments, *how),
        )
    if arguments.timings is not None:
        _write_timings(arguments.timings, result)
    if arguments.json:
        print_json(result.to_dict())
    else:
        print_message(arguments, _already_built(result) if result.up_to_date else repr(result))
    return 0


def _already_built(result: BuildResult) -> str:
    """Return what to do about an output that has the dataset of this recipe and these inputs."""
    places = [one.location for one in (result, *result.others)]
    first = shlex.quote(places[0])
    return (
        f"{', '.join(places)}: already built: nothing to do\n"
        "to build it again, add --replace; to change it, edit the recipe or give --set KEY=VALUE, with "
        f"another --output or --replace\nnext: shardkit view {first}, or: shardkit info {first}"
    )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that workers end and the lease is released; then end by SIGTERM."""
    came = threading.Event()

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
        came.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # left to the calling program
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt as interrupt:  # Ray may raise a new one in place of the one from `end`
        if not came.is_set():
            raise
        said = "; ".join(
            ["terminated", *getattr(interrupt, "__notes__", []), "run the same command again to continue"]
        )
        sys.stderr.write(f"shardkit: {said}\n")
        sys.stderr.flush()
        write_log(said)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _write_timings(path: Path, result: BuildResult) -> None:
    from shardkit.files import publish_bytes
    from shardkit.writers.report.page import render_times

    if path.suffix == ".html":
        data = render_times(result)
    else:
        names = ("output", "fingerprint", "total_seconds", "tasks", "tasks_reused", "stages", "costs")
        facts = result.to_dict()
        others = [{"output": one.location, "fingerprint": one.fingerprint} for one in result.others]
        told = {name: facts[name] for name in names} | {"others": others}
        data = json.dumps(told, indent=2).encode() + b"\n"
    try:
        publish_bytes(path, data)
    except OSError as error:
        raise BuildError(
            f"--timings {path}: {error.strerror}; the dataset itself was published successfully"
        ) from error


def _explain(recipe: Recipe | str, overrides: Sequence[str], arguments: argparse.Namespace) -> int:
    from shardkit.writers.explain import explain_build

    explanation = explain_build(
        recipe,
        output=arguments.output,
        overrides=overrides,
        storage=storage_options(arguments, is_job=True),
    )
    if arguments.json:
        print_json(explanation.to_dict())
    else:
        _show_explanation(explanation)
    return 0


def _show_explanation(explanation: Explanation) -> None:
    console = stdout_console()
    rows = []
    for plan in explanation.stages:
        missing = plan.tasks - plan.finished
        why = [f"{r.what} ({r.tasks:,}, such as {r.example})" for r in plan.reasons]
        counts = (f"{plan.tasks:,}", f"{plan.finished:,}", f"{missing:,}" if missing else "")
        rows.append((plan.stage, *counts, why[0] if why else ""))
        rows += [("", "", "", "", each) for each in why[1:]]
    rows += [(name, "", "", "?", "depends on the results of the stages above") for name in explanation.later]
    print_columns("", ("stage", "tasks", "finished", "to run", "why"), rows, left=(0, 4))
    if not explanation.later and all(plan.finished == plan.tasks for plan in explanation.stages):
        console.print("every task is finished: a build would only publish, or find its output up to date")
    if explanation.stale:
        size = format_bytes(sum(task.bytes for task in explanation.stale))
        console.print(
            f"not used by this build: {len(explanation.stale):,} of the finished tasks in {explanation.work} "
            f"({size}); `shardkit clean` with the same arguments removes them"
        )
