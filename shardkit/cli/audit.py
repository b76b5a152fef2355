"""`shardkit audit`: check that every sample is delivered exactly once, by the plan or in a run's logs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    OF_FILES,
    PATH_HELP,
    add_json_argument,
    add_loader_arguments,
    add_storage_arguments,
    count,
    file_options,
    file_path,
    loader_options,
    natural,
    print_columns,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import given

if TYPE_CHECKING:
    from shardkit.loaders.config import Stream
    from shardkit.tools.audit.findings import AuditReport, Walk
    from shardkit.tools.audit.plan import Leg


SHOWN_OF_KIND = 5
SHOWN_SHARDS = 8


def _counts(text: str) -> list[int]:
    """Parse an argparse value: numbers of at least 1, separated by commas."""
    return [count(part.strip()) for part in text.split(",")]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "audit",
        help="prove that every sample is delivered exactly once, by plan or by a run's logs",
        description="Prove that every epoch delivers each sample once, and that every step delivers the "
        "samples of its positions, on any number of ranks and across restarts. Checks the plan of all ranks, "
        "from the index alone, or a real run, from the usage logs of its loaders (loader option "
        "usage_log=FOLDER). Exit status 1 if anything is wrong; the first wrong deliveries are listed.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", nargs="?", help=PATH_HELP)
    parser.add_argument(
        "--stream",
        metavar="PATH[=WEIGHT]",
        action="append",
        default=[],
        help="a dataset of a mixture, instead of PATH; may be repeated (default weight: 1, or as logged)",
    )
    parser.add_argument(
        "--exclude",
        metavar="[PATH=]FILE",
        action="append",
        default=[],
        help="exclusion list of PATH, a --stream; PATH may be left out if there is only one dataset "
        "(default: none)",
    )
    parser.add_argument(
        "--logs", metavar="FOLDER", type=file_path, help="check these usage logs (default: check the plan)"
    )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=count,
        help="check the logs of a run in progress again and again, a line each time, until something is "
        "wrong or Ctrl-C is pressed (default: once)",
    )
    _add_plan_arguments(parser)
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, misuse=parser.error)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the plan to check")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--batch-size", type=count, metavar="B", help="sequences per rank and step (default: 8)"
    )
    size.add_argument(
        "--global-batch",
        type=count,
        metavar="G",
        help="sequences per step over all ranks, equal for all world sizes; also checks that their steps "
        "hold the same samples (default: B times the world size)",
    )
    group.add_argument(
        "--world-sizes",
        type=_counts,
        metavar="R,R…",
        default=[1, 2, 3, 8],
        help="world sizes to check, one after another (default: 1,2,3,8)",
    )
    group.add_argument(
        "--resume-at",
        type=_counts,
        metavar="STEP,…",
        default=[],
        help="also check a run that stops after each of these steps and resumes from the saved state with "
        "the next world size (default: none)",
    )
    group.add_argument("--epochs", type=count, default=2, metavar="E", help="number of epochs (default: 2)")
    group.add_argument(
        "--workers", type=natural, default=0, metavar="K", help="DataLoader workers per rank (default: 0)"
    )
    add_loader_arguments(group, "epoch_samples", *OF_FILES)


def run(arguments: argparse.Namespace) -> int:
    """Audit the plan or the logs, and print the report."""
    if (arguments.path is None) == (not arguments.stream):
        arguments.misuse("give either PATH, or --stream for each dataset of a mixture")
    if arguments.every is not None and arguments.logs is None:
        arguments.misuse("--every needs --logs")
    try:
        report = _audit(arguments) if arguments.every is None else _watch(arguments)
    except ValueError as error:
        arguments.misuse(str(error))
    if arguments.json:
        print_json(report.to_dict())
    else:
        _show(report)
    return 0 if report.ok else 1


def _watch(arguments: argparse.Namespace) -> AuditReport:
    """Audit the logs every so many seconds and print a line each time, until two audits in a row find errors.

    A single one may have read the log of one rank before another rank's had its first step. After Ctrl-C,
    returns the last report.
    """
    report: AuditReport | None = None
    while True:
        try:
            before, report = report, _audit(arguments)
            if report.ok:
                _show_line(report)
            elif before is not None and not before.ok:
                return report
            _sleep(arguments.every)
        except KeyboardInterrupt:
            if report is None:
                raise
            return report


def _sleep(seconds: float) -> None:
    """Sleep in short turns: a signal that comes just before a sleep is seen only after it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))


def _show_line(report: AuditReport) -> None:
    [walk] = report.walks
    stderr_console().print(
        f"{time.strftime('%H:%M:%S')}  step {walk.steps:,} (position {walk.end:,}): {walk.samples:,} "
        f"samples, {walk.epochs_proved:,} whole epochs proved, {report.shard_count:,} shards used as expected"
    )


def _audit(arguments: argparse.Namespace) -> AuditReport:
    from shardkit.loaders.config import LoaderConfig
    from shardkit.loaders.streams import open_streams
    from shardkit.tools.audit.logs import audit_logs
    from shardkit.tools.audit.plan import audit_plan

    options = loader_options(arguments)
    if arguments.logs is not None:  # the logs record the order, so no other option is needed
        options = file_options(arguments)
    config = LoaderConfig(**options, storage=storage_options(arguments))
    opened = open_streams(_streams(arguments), config, 1)
    if arguments.logs is not None:
        return audit_logs(arguments.logs, opened.streams.datasets, opened.exclusions)
    run = {name: getattr(arguments, name) for name in ("epochs", "resume_at", "workers")}
    return audit_plan(opened, config, _legs(arguments), **run, **given(arguments, "seed", "shuffle", "tail"))


def _streams(arguments: argparse.Namespace) -> list[Stream]:
    """Return the streams of the command line; raise ValueError if --exclude names an unknown dataset."""
    from shardkit.loaders.config import Stream

    paths: dict[str, float] = {}
    for text in [arguments.path] if arguments.path is not None else arguments.stream:
        path, has_weight, weight = text.rpartition("=")
        if has_weight and arguments.path is None and _is_number(weight):
            paths[path] = float(weight) if "." in weight else int(weight)
        else:
            paths[text] = 1
    excluded: dict[str, str] = {}
    for text in arguments.exclude:
        path, _, file = text.rpartition("=")
        if not path and len(paths) == 1:
            path = next(iter(paths))
        if path not in paths:
            raise ValueError(f"--exclude {text}: give PATH=FILE with PATH as in --stream")
        excluded[path] = file
    return [Stream(path, weight, exclude=excluded.get(path)) for path, weight in paths.items()]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _legs(arguments: argparse.Namespace) -> list[Leg]:
    from shardkit.tools.audit.plan import Leg

    if arguments.global_batch is None:
        return [Leg(arguments.batch_size or 8, ranks) for ranks in arguments.world_sizes]
    for ranks in arguments.world_sizes:
        if arguments.global_batch % ranks:
            raise ValueError(f"--global-batch {arguments.global_batch} is not a multiple of {ranks} ranks")
    return [Leg(arguments.global_batch // ranks, ranks) for ranks in arguments.world_sizes]


def _show(report: AuditReport) -> None:
    """Print tables and a verdict on stdout, notices on stderr."""
    from shardkit.tools.audit.findings import KINDS  # imported here, because NumPy would slow down --help

    for notice in report.findings.notices:
        stderr_console().print(f"notice: {notice}")
    out = stdout_console()
    out.print(f"{report.audit} of {report.dataset}: {_settings(report.settings)}")
    if report.runs:
        _table(
            "run", "ranks x batch", "from position", "up to", "logs", "steps", "replayed later",
            rows=[
                (
                    str(run["run"]), f"{run['world_size']} x {run['batch_size']}", f"{run['start']:,}",
                    "the end" if run["stop"] is None else f"{run['stop']:,}", f"{run['ranks']:,}",
                    f"{run['steps']:,}", f"{run['superseded']:,}",
                )
                for run in report.runs
            ],
        )  # fmt: skip
    _table(
        "ranks x batch", "steps", "samples", "whole epochs", "in part", "padding", "dropped", "samples/s",
        rows=[_walk(walk) for walk in report.walks],
    )  # fmt: skip
    _show_proofs(report)
    _show_shards(report)
    if report.ok:
        dropped = max(walk.dropped for walk in report.walks)
        exceptions = f", except {dropped:,} that the tail drops at the end of epochs" if dropped else ""
        out.print(f"OK: every sample exactly once per epoch{exceptions}")
        return
    out.print("FAILED:")
    for kind in KINDS:
        if number := report.findings.counts[kind]:
            out.print(f"  {number:,} {KINDS[kind]} ({kind})")
    out.print("first findings:")
    # Show only some findings of each kind, so that many lost samples do not hide the rank that lost them.
    for kind in KINDS:
        for finding in [one for one in report.findings.kept if one.kind == kind][:SHOWN_OF_KIND]:
            out.print(f"  {finding}")


def _settings(settings: dict[str, Any]) -> str:
    order = settings["order"]
    text = f"seed {order['seed']}, shuffle {order['shuffle']}"
    if order["shuffle"] == "window":
        text += f" ({order['lanes']:,} lanes, windows of {order['window']:,})"
    streams = settings["streams"]
    samples = ", ".join(f"{stream['samples']:,}" for stream in streams[:8])
    return f"{text}, tail {settings['tail']}, {samples}{', …' if len(streams) > 8 else ''} samples"


def _walk(walk: Walk) -> tuple[str, ...]:
    part = sum(samples for _, _, samples in walk.partial)
    whole = f"{walk.epochs_proved:,} proved" + (f", {walk.epochs_wrong:,} WRONG" if walk.epochs_wrong else "")
    return (
        walk.name if len(walk.name) <= 60 else f"{walk.name[:50]}… ({walk.runs} runs)",
        f"{walk.steps:,}",
        f"{walk.samples:,}",
        whole,
        f"{part:,} samples",
        f"{walk.padding:,}",
        f"{walk.dropped:,}",
        f"{walk.samples / max(walk.seconds, 1e-9):,.0f}",
    )


def _show_proofs(report: AuditReport) -> None:
    from shardkit.tools.audit.sums import FALSE_ACCEPTANCE  # imported here, as NumPy would slow down --help

    counts = report.findings.counts

    def verdict(*kinds: str) -> str:
        return "NO" if any(counts[kind] for kind in kinds) else "yes"

    held = (
        (
            "every epoch holds each sample once",
            f"count, sum and 128-bit keyed sum of ids equal the index's (miss rate below {FALSE_ACCEPTANCE})",
            verdict("epoch", "lost", "repeated", "foreign", "excluded", "gap", "rank", "resume", "log"),
        ),
        (
            "every step holds the samples of its positions, at any world size",
            "exact: each id is mapped back to its position",
            verdict("lost", "repeated", "moved", "part", "steps", "foreign", "excluded", "settings", "world",
                    "rank"),
        ),
        (
            "steps follow one another, on all ranks and across restarts",
            "nothing is skipped, dropped or padded except by the tail's rule",
            verdict("gap", "resume", "rank", "steps", "padding", "log"),
        ),
        (
            "every shard is used as often as its rows require",
            f"{report.shard_count:,} shards",
            verdict("shard", "rank", "gap"),
        ),
    )  # fmt: skip
    stdout_console().print("proved:")
    for claim, how, answer in held:
        stdout_console().print(f"  {answer:3}  {claim} ({how})")


def _show_shards(report: AuditReport) -> None:
    rows = []
    for use in report.shards[:SHOWN_SHARDS]:
        due = f"{use.least:,}" if use.least == use.most else f"{use.least:,} to {use.most:,}"
        right = use.least <= use.delivered + use.dropped <= use.most
        rows.append((use.shard, f"{use.delivered:,}", f"{use.dropped:,}", due, "" if right else "WRONG"))
    _table("shard", "delivered", "dropped", "expected in total", "", rows=rows)
    if (more := report.shard_count - len(rows)) > 0:
        wrong = report.findings.counts["shard"]
        stdout_console().print(f"and {more:,} more shards ({wrong:,} wrong in total; --json lists more)")


def _table(*names: str, rows: Sequence[tuple[str, ...]]) -> None:
    print_columns("", names, rows, left=range(len(names)))
