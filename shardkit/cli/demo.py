"""`shardkit demo`: run all main steps once, with text that is already on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    file_path,
    print_columns,
    print_json,
    print_message,
    stdout_console,
)
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.tools.demo.run import DemoReport


_MARKS = {True: "proved", False: "FAILED", None: "skipped"}


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "demo",
        help="build, verify, stream, kill and resume, with text that is already on this machine",
        description="Take text from this Python installation, train a tokenizer, build MDS and tar shards, "
        "stream them, train, kill the run, resume it, and prove each claim with numbers from this run. Takes "
        "about a minute on two cores, without downloads. Exit status 1 if any proof fails.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        type=file_path,
        default=Path("shardkit-demo"),
        metavar="FOLDER",
        help="folder for all files; an earlier demo in it is replaced (default: shardkit-demo)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=16.0,
        metavar="MB",
        help="size of the corpus, 1 to 1000 million bytes (default: 16)",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove the folder at the end (default: keep it)"
    )
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its report."""
    from shardkit.tools.demo.run import clean_demo, run_demo

    report = run_demo(
        arguments.output, arguments.megabytes, lambda step: print_message(arguments, f"{step} …")
    )
    if arguments.clean:
        clean_demo(arguments.output)
    if arguments.json:
        print_json(report.to_dict())
    else:
        _show(report, is_kept=not arguments.clean)
    return 0 if report.passed else 1


def _show(report: DemoReport, *, is_kept: bool) -> None:
    console = stdout_console()
    print_columns("Built", ("", ""), _built(report), left=(0, 1))
    rows = [(_MARKS[proof.passed], proof.name, proof.evidence) for proof in report.proofs]
    print_columns("\nProved, on this machine, just now", ("", "", ""), rows, left=(0, 1, 2))
    counts = {mark: sum(proof.passed is mark for proof in report.proofs) for mark in _MARKS}
    verdict = f"\n{counts[True]} of {len(rows)} claims proved"
    verdict += f", {counts[None]} skipped" if counts[None] else ""
    verdict += f", {counts[False]} FAILED" if counts[False] else ""
    console.print(f"{verdict}, in {report.seconds:.0f} s.")
    if not is_kept:
        return
    output = os.path.relpath(report.output)
    console.print(f"All files are in {output}/: corpus, tokenizer.json, recipe.yaml, mds, tar, training.")
    console.print("Try next:")
    for line in (
        f"shardkit view {output}/mds",
        f"shardkit info {output}/mds",
        f"shardkit audit {output}/mds",
        f"shardkit build {output}/recipe.yaml --set pack.sequence_length=1024 --output {output}-1024",
    ):
        console.print(f"  {line}")


def _built(report: DemoReport) -> list[tuple[str, str]]:
    corpus, funnel = report.corpus, report.funnel
    rows = [
        ("corpus", f"{corpus['documents']:,} documents, {format_bytes(corpus['text_bytes'])} of text from "
                   f"{corpus['origin']} and its packages; {corpus['skipped']} files left out (not UTF-8)"),
        ("tokenizer", f"byte-level BPE, {report.vocabulary:,} ids, trained in "
                      f"{report.tokenizer_seconds:.1f} s"),
        ("funnel", f"{funnel['read']['documents']:,} documents read"),
        *(("", f"{count['documents']:,} {kind}: {reason}")
          for kind in ("dropped", "quarantined") for reason, count in funnel[kind].items()),
        ("", f"{funnel['kept']['documents']:,} kept"),
        *((f"{name} dataset", _build(build)) for name, build in report.builds.items()),
    ]  # fmt: skip
    if report.loader is not None:
        rates = {
            name.partition("_")[0]: f"{rate / 1e6:,.0f} M tokens/s" for name, rate in report.loader.items()
        }
        rows.append(("loader", f"{rates['stored']} as stored, {rates['int64']} as int64; "
                               f"a copy in memory: {rates['copy']} as stored"))  # fmt: skip
    return rows


def _build(build: Mapping[str, Any]) -> str:
    text = (
        f"{build['samples']:,} rows of {build['sequence_length']:,} tokens in {build['shards']} shards, "
        f"{build['padding'] / (build['tokens'] + build['padding']):.2%} padding; "
        f"{build['total_seconds']:.1f} s"
    )
    if build["tasks_reused"]:
        return f"{text}: {build['tasks_reused']} of {build['tasks']} tasks reused from the first build"
    return (
        f"{text}: {format_bytes(build['text_bytes_per_second'])}/s of text, "
        f"{build['tokens_per_second'] / 1e6:.2f} M tokens/s, including the start of processes"
    )
