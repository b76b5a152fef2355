"""How `shardkit audit` tells people what it found: what was walked, what is proved, who offends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.audit.findings import KINDS
from shardkit.audit.fingerprint import FALSE_ACCEPTANCE
from shardkit.cli.output import stderr_console, stdout_console

if TYPE_CHECKING:
    from shardkit.audit.report import AuditReport, Walk

__all__ = ["show"]

SHOWN_OF_KIND = 5
SHOWN_SHARDS = 8


def show(report: AuditReport) -> None:
    """Tables and a verdict on stdout, notices on stderr."""
    for notice in report.findings.notices:
        stderr_console().print(f"notice: {notice}")
    out = stdout_console()
    out.print(f"{report.audit} of {report.dataset}: {_settings(report.settings)}")
    if report.runs:
        _table(
            ("run", "ranks x batch", "from position", "up to", "logs", "steps", "replayed later"),
            [
                (
                    str(run["run"]),
                    f"{run['world_size']} x {run['batch_size']}",
                    f"{run['start']:,}",
                    "the end" if run["stop"] is None else f"{run['stop']:,}",
                    f"{run['ranks']:,}",
                    f"{run['steps']:,}",
                    f"{run['superseded']:,}",
                )
                for run in report.runs
            ],
        )
    _table(
        ("ranks x batch", "steps", "samples", "whole epochs", "in part", "padding", "dropped", "samples/s"),
        [_walk(walk) for walk in report.walks],
    )
    _show_proofs(report)
    _show_shards(report)
    if report.ok:
        dropped = max(walk.dropped for walk in report.walks)
        but = f", but for {dropped:,} that the tail drops at epochs' edges" if dropped else ""
        out.print(f"OK: every sample exactly once an epoch{but}")
        return
    out.print("FAILED:")
    for kind in KINDS:
        if number := report.findings.counts[kind]:
            out.print(f"  {number:,} {KINDS[kind]} ({kind})")
    out.print("first offenders:")
    # A few of each kind: hundreds of lost samples must not hide the rank that lost them.
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
    counts = report.findings.counts

    def verdict(*kinds: str) -> str:
        return "NO" if any(counts[kind] for kind in kinds) else "yes"

    held = (
        (
            "every epoch holds each sample once",
            f"count, sum and 128-bit keyed sum of its ids are the index's (misses: below {FALSE_ACCEPTANCE})",
            verdict("epoch", "lost", "repeated", "foreign", "excluded", "gap", "rank", "resume", "log"),
        ),
        (
            "every step holds the samples of its positions, whatever the ranks",
            "exact: each id taken back to its position",
            verdict(
                "lost",
                "repeated",
                "moved",
                "part",
                "steps",
                "foreign",
                "excluded",
                "settings",
                "world",
                "rank",
            ),
        ),
        (
            "steps follow one another, on all ranks and across restarts",
            "nothing skipped, dropped or padded but by the tail's rule",
            verdict("gap", "resume", "rank", "steps", "padding", "log"),
        ),
        (
            "every shard is used as often as its rows ask for",
            f"{report.shard_count:,} shards",
            verdict("shard", "rank", "gap"),
        ),
    )
    stdout_console().print("proved:")
    for claim, how, answer in held:
        stdout_console().print(f"  {answer:3}  {claim} ({how})")


def _show_shards(report: AuditReport) -> None:
    rows = []
    for name, delivered, dropped, least, most in report.shards[:SHOWN_SHARDS]:
        due = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        right = least <= delivered + dropped <= most
        rows.append((name, f"{delivered:,}", f"{dropped:,}", due, "" if right else "WRONG"))
    _table(("shard", "delivered", "dropped", "expected of both", ""), rows)
    if (more := report.shard_count - len(rows)) > 0:
        wrong = report.findings.counts["shard"]
        stdout_console().print(f"and {more:,} more shards ({wrong:,} wrong in all; --json lists more)")


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns side by side, whole: a line may be longer than a terminal, but nothing is cut."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        stdout_console().print(line.rstrip())
