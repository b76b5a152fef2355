"""The demo's result for people: what was built, what was proved, where it lies and what to try next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardkit.demo.story import DemoReport
from shardkit.units import format_bytes

__all__ = ["print_report"]

_MARKS = {
    True: Text("proved", "green"),
    False: Text("FAILED", "bold red"),
    None: Text("skipped", "yellow"),
}


def print_report(report: DemoReport, console: Console, *, kept: bool) -> None:
    """Print the tables, then the verdict."""
    for table in (_built(report), _proved(report)):
        console.print(table, soft_wrap=False)
        console.print()
    counts = {mark: sum(proof.passed is mark for proof in report.proofs) for mark in _MARKS}
    verdict = f"{counts[True]} of {len(report.proofs)} claims proved"
    verdict += f", {counts[None]} skipped" if counts[None] else ""
    verdict += f", {counts[False]} FAILED" if counts[False] else ""
    console.print(f"{verdict}, in {report.seconds:.0f} s.")
    if kept:
        _print_next_steps(report, console)


def _built(report: DemoReport) -> Table:
    table = _table("Built")
    corpus = report.corpus
    table.add_row(
        "corpus",
        f"{corpus['documents']:,} documents, {format_bytes(corpus['text_bytes'])} of text from "
        f"{corpus['origin']} and the packages beside it; {corpus['skipped']} files left out (not UTF-8)",
    )
    table.add_row(
        "tokenizer", f"byte-level BPE, {report.vocabulary:,} ids, trained in {report.tokenizer_seconds:.1f} s"
    )
    table.add_row("funnel", _funnel(report.funnel))
    for name, build in report.builds.items():
        table.add_row(
            f"{name} dataset",
            f"{build['samples']:,} rows of {build['sequence_length']:,} tokens in {build['shards']} shards, "
            f"{build['padding'] / (build['tokens'] + build['padding']):.2%} padding; "
            f"{build['total_seconds']:.1f} s{_rates(build)}",
        )
    if report.loader is not None:
        rates = {name: f"{rate / 1e6:,.0f} M tokens/s" for name, rate in report.loader.items()}
        table.add_row(
            "loader",
            f"{rates['stored_tokens_per_second']} as stored, {rates['int64_tokens_per_second']} as int64; "
            f"a plain memory copy of the same rows as stored: {rates['copy_tokens_per_second']}",
        )
    return table


def _rates(build: Mapping[str, Any]) -> str:
    if build["tasks_reused"]:
        return f": {build['tasks_reused']} of {build['tasks']} tasks taken from the first build"
    return (
        f": {format_bytes(build['text_bytes_per_second'])}/s of text, "
        f"{build['tokens_per_second'] / 1e6:.2f} M tokens/s, starting processes included"
    )


def _funnel(funnel: Mapping[str, Any]) -> str:
    lines = [("read", funnel["read"])]
    lines += [(f"dropped: {reason}", count) for reason, count in funnel["dropped"].items()]
    lines += [(f"quarantined: {reason}", count) for reason, count in funnel["quarantined"].items()]
    lines += [("kept", funnel["kept"])]
    return "\n".join(f"{count['documents']:>7,} documents {what}" for what, count in lines)


def _proved(report: DemoReport) -> Table:
    table = _table("Proved, on this machine, just now")
    table.add_column()
    for proof in report.proofs:
        table.add_row(proof.name, _MARKS[proof.passed], proof.evidence)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, show_lines=True)
    table.add_column(min_width=12)
    table.add_column()
    return table


def _print_next_steps(report: DemoReport, console: Console) -> None:
    output = os.path.relpath(report.output)
    console.print(f"Everything lies in {output}/: corpus, tokenizer.json, recipe.yaml, mds, tar, training.")
    console.print("Try next:")
    for line in (
        f"shardkit info {output}/mds",
        f"shardkit verify {output}/tar",
        f"shardkit build {output}/recipe.yaml --set pack.sequence_length=1024 --output {output}-1024",
        f"python examples/train_plain.py --data {output}/mds --vocabulary {report.vocabulary} "
        "--steps 20 --batch-size 2",
    ):
        console.print(f"  {line}")
