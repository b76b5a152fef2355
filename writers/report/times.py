"""How long a build took, as a page of its own: a dataset's report knows no times, which are of one run."""

from __future__ import annotations

from shardkit.units import format_bytes
from shardkit.writers.report.html import bars, cell, facts, number, section, table
from shardkit.writers.report.page import html_page
from shardkit.writers.result import BuildResult

__all__ = ["render_times"]


def render_times(result: BuildResult) -> bytes:
    """When each stage ran and what it did, as one HTML page in the style of `report.html`."""
    rows = [
        [
            cell(stage.stage),
            number(f"{stage.start:,.1f}"),
            number(f"{stage.seconds:,.1f}"),
            bars(result.total_seconds, ("gap", stage.start), ("other", stage.seconds)),
            number(stage.tasks),
            number(stage.tasks_reused),
            number(f"{format_bytes(stage.bytes)}" if stage.bytes else ""),
            number(f"{format_bytes(stage.bytes_per_second)}/s" if stage.bytes else ""),
        ]
        for stage in result.stages
    ]
    told = {
        "Dataset": result.location,
        "Fingerprint": result.fingerprint,
        "In all": f"{result.total_seconds:,.1f} s, {format_bytes(result.text_bytes_per_second)}/s of text "
        f"read, {result.tokens_per_second:,.0f} tokens/s written",
        "Tasks": f"{result.tasks:,}, {result.tasks_reused:,} of them finished before this run",
    }
    head = ("stage", ">from s", ">for s", "|", ">tasks", ">reused", ">text", ">text/s")
    note = (
        '<p class="note">Stages may run side by side. Text is what this run read in a stage, not what tasks '
        "that were reused had read.</p>"
    )
    found = table(head, rows, caption=f"Stages in {result.total_seconds:,.1f} s")
    parts = [facts(told, caption="This run"), section("Stages", found, note)]
    return html_page("Build times", ["<h1>Build times</h1>", *parts])
