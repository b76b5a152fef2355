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

SHOWN_FINDINGS = 20
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
        out.print("OK: every sample exactly once")
        return
    out.print("FAILED:")
    for kind in KINDS:
        if number := report.findings.counts[kind]:
            out.print(f"  {number:,} {KINDS[kind]} ({kind})")
    # A few of each kind: hundreds of lost samples must not hide the rank that lost them.
    shown = [f for kind in KINDS for f in [f for f in report.findings.kept if f.kind == kind][:5]]
    out.print("first offenders:")
    for finding in sorted(shown[:SHOWN_FINDINGS], key=lambda f: f.step if f.step is not None else -1):
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
        walk.name,
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
        return "no" if any(counts[kind] for kind in kinds) else "yes"

    rows = [
        (
            "each epoch holds every sample once",
            verdict("epoch", "lost", "repeated", "foreign", "excluded", "gap", "rank", "resume", "log"),
            f"count, sum and 128-bit keyed sum equal the index's (chance to miss: {FALSE_ACCEPTANCE})",
        ),
        (
            "each step holds the samples of its positions",
            verdict("lost", "repeated", "moved", "part", "steps", "foreign", "excluded", "settings"),
            "exact: ids taken back to positions, so the set depends on no world size",
        ),
        (
            "steps follow one another, on all ranks",
            verdict("gap", "resume", "rank", "steps", "padding", "world", "log"),
            "positions by the tail's rule; nothing lost, repeated or padded in silence",
        ),
        (
            "each shard is used as often as its rows ask for",
            verdict("shard"),
            f"{report.shard_count:,} shards, samples counted by shard",
        ),
    ]
    _table(("proved", "", "how"), rows)


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
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)
