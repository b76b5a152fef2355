"""The demo from end to end: corpus, tokenizer, two datasets, and the claims about them, each computed.

Everything it writes lies in one folder. A folder that holds anything else is refused; what an earlier demo
left there is replaced.

The demo's result for people: what was built, what was proved, where it lies and what to try next.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardkit.errors import ShardkitError
from shardkit.tools.demo.corpus import EOS, Document, train_tokenizer, write_corpus
from shardkit.tools.demo.proofs import (
    Proof,
    measure_loader,
    prove_exactly_once,
    prove_intact,
    prove_provenance,
    prove_resume,
    prove_same_rows,
)
from shardkit.units import format_bytes

__all__ = ["DemoReport", "clean_demo", "print_report", "run_demo"]

MIN_MEGABYTES, MAX_MEGABYTES = 1.0, 1000.0

MARKER = ".shardkit-demo"

OWN_NAMES = (
    "corpus",
    "tokenizer.json",
    "recipe.yaml",
    "work",
    "mds",
    "tar",
    "training",
    "report.json",
    MARKER,
)

SEQUENCE_LENGTH = 2048

RECIPE = f"""\
# Written by `shardkit demo`. Build it again with: shardkit build recipe.yaml --set output.path=again
inputs:
  - path: corpus/documentation.parquet
    source: documentation
    metadata: [kind]
  - path: corpus/source-*.jsonl.gz
    source: python
    metadata: [kind]
filters:
  - length: {{min_words: 20}}
dedup:
  exact: {{}}
tokenizer:
  path: tokenizer.json
  eos: "{EOS}"
pack:
  sequence_length: {SEQUENCE_LENGTH}
  strategy: best_fit
output:
  path: mds
  format: mds
  shard_bytes: 1MiB
work: work
"""


@dataclass(frozen=True)
class DemoReport:
    """All that the demo measured; `to_dict` is what `--json` prints."""

    output: Path
    seconds: float
    corpus: Mapping[str, Any]
    vocabulary: int
    tokenizer_seconds: float
    builds: Mapping[str, Mapping[str, Any]]
    funnel: Mapping[str, Any]
    loader: Mapping[str, float] | None
    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        """No claim failed; a skipped one does not count."""
        return all(proof.passed is not False for proof in self.proofs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self) | {"passed": self.passed, "output": str(self.output)}


def run_demo(output: Path, megabytes: float, say: Callable[[str], None]) -> DemoReport:
    """Run every step in `output`; `say` hears what happens next."""
    start = time.perf_counter()
    if not MIN_MEGABYTES <= megabytes <= MAX_MEGABYTES:
        raise ShardkitError(f"--megabytes {megabytes:g}: choose from {MIN_MEGABYTES:g} to {MAX_MEGABYTES:g}")
    output = output.absolute()
    _prepare(output)
    say("gathering text from this Python installation")
    corpus, documents = write_corpus(output / "corpus", int(megabytes * 1e6))
    say("training a tokenizer")
    vocabulary, tokenizer_seconds = _train_tokenizer(output / "tokenizer.json", documents)
    builds, funnel = _build_both(output, say)
    say("comparing, counting, tracing")
    mds, tar = output / "mds", output / "tar"
    proofs = [
        prove_same_rows([mds, tar]),
        prove_intact([mds, tar]),
        prove_provenance(mds, output, output / "tokenizer.json"),
        prove_exactly_once(mds, builds["mds"]["samples"]),
    ]
    say("training, killing, resuming")
    proofs.append(prove_resume(mds, output / "training", vocabulary))
    say("timing the loader")
    report = DemoReport(
        output=output,
        seconds=time.perf_counter() - start,
        corpus=dataclasses.asdict(corpus),
        vocabulary=vocabulary,
        tokenizer_seconds=tokenizer_seconds,
        builds=builds,
        funnel=funnel,
        loader=measure_loader(mds),
        proofs=tuple(proofs),
    )
    report = dataclasses.replace(report, seconds=time.perf_counter() - start)
    (output / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def clean_demo(output: Path) -> None:
    """Remove what the demo wrote, and the folder if nothing else is in it."""
    for name in OWN_NAMES:
        path = output / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()


def _prepare(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ShardkitError(f"{output} is not a folder; choose another --output")
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise ShardkitError(f"{output} holds files that no demo wrote; choose another --output")
        clean_demo(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("This folder was made by `shardkit demo`.\n")


def _train_tokenizer(file: Path, documents: list[Document]) -> tuple[int, float]:
    start = time.perf_counter()
    vocabulary = train_tokenizer(file, documents)
    return vocabulary, time.perf_counter() - start


def _build_both(output: Path, say: Callable[[str], None]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Build MDS, then tar shards, from the recipe on disk; both through the public `build`."""
    from shardkit.writers import build

    recipe = output / "recipe.yaml"
    recipe.write_text(RECIPE)
    builds = {}
    for name, overrides in (("mds", []), ("tar", ["output.path=tar", "output.format=wds"])):
        say(f"building the {name} dataset")
        builds[name] = build(recipe, overrides=overrides, progress=False).to_dict()
    return builds, builds["mds"]["funnel"]


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
