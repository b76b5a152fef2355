"""The map stages of a build (clean, signatures, tokenize) in this process, on one worker and on two.

    python tests/benchmarks/bench_scaling.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 160] [--runs 5]
                                             [--workers 1,2] [--work DIR] [--json]

The corpus (without --corpus that of $SHARDKIT_TEST_DATA, else made-up text; four times, with mutations) lies
in files of 2 MB of text, so that a stage has many tasks. In every run each engine does every stage once, in
a new work folder, the first engine moving on; its workers live on from run to run. One run before all others
starts them, compiles kernels and loads the tokenizer, and is not counted. Times are of a stage's tasks, from
the first to the last commit, writing and syncing included. "x" is the median over the runs of one worker's
time by that of others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from figures import Heads, benchmark_parser, give, in_turns
from shardkit.progress import make_listener
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.signatures import SIGN, bands_and_rows
from shardkit.writers.execution.engine import Engine, InlineEngine, LocalEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.work import Work
from shardkit.writers.inputs import scan
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages import clean, tokenize
from shardkit.writers.stages.flow import Build, Documents
from shardkit.writers.stages.inputs import BuildInputs
from texts import EOS, documents, put_tokenizer, write_corpus

RECIPE = f"""\
inputs: [{{path: "texts/*.jsonl", source: texts}}]
filters: [{{length: {{min_words: 20}}}}, {{gopher_repetition: {{}}}}]
dedup: {{exact: {{}}, near: {{}}}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
output: {{path: out}}
"""
COPIES = 4
STAGES = ("clean", "signatures", "tokenize")
HEADS: Heads = {
    "stage": ("stage", ""),
    "engine": ("engine", ""),
    "seconds": ("seconds", ".2f"),
    "MB_per_s": ("MB/s", ".1f"),
    "x": ("x", ".2f"),
}


def run_stages(recipe: Recipe, engine: Engine, folder: Path) -> dict[str, float]:
    """Seconds of each stage in a new work folder."""
    near, inputs = recipe.dedup.near, BuildInputs.of(recipe, scan.scan_inputs(recipe))
    assert near is not None
    assert inputs.tokenizer is not None
    with Journal(Work.at(folder)) as journal, make_listener(False) as listener:
        runner = Runner(journal, engine, listener)
        build = Build(inputs, runner.run)
        documents = clean.read_and_filter(Documents(recipe, inputs.splits), build)
        how, signing = (near.minhash, *bands_and_rows(near), near.scope), []
        for split in documents.described():
            args = split.documents, SplitRemovals(), *how, None, build.memory_bytes
            signing.append(SIGN.task(split.name, split.bytes, *args))
        runner.run(signing)
        runner.run(tokenize.tasks(recipe, documents, inputs.tokenizer, "gigatoken", ()))
        seconds = {stage: runner.seconds[stage] for stage in STAGES}
        journal.remove()
    return seconds


def measure(recipe: Recipe, options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Of each engine the seconds of each run."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {"inline": stack.enter_context(InlineEngine())}
        for workers in map(int, options.workers.split(",")):
            engines[f"{workers} workers"] = stack.enter_context(LocalEngine(workers))
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for run in range(options.runs + 1):
            for name in in_turns(list(engines), run):
                seconds = run_stages(recipe, engines[name], folder / "work")
                if run:
                    taken[name].append(seconds)
    return taken


def summary(taken: dict[str, list[dict[str, float]]], size: int) -> list[dict[str, Any]]:
    base = taken.get("1 workers") or taken["inline"]
    rows = []
    for stage in (*STAGES, "all"):
        for name, runs in taken.items():
            times = [sum(run.values()) if stage == "all" else run[stage] for run in runs]
            bases = [sum(run.values()) if stage == "all" else run[stage] for run in base]
            rows.append(
                {
                    "stage": stage,
                    "engine": name,
                    "seconds": statistics.median(times),
                    "MB_per_s": size / 1e6 / statistics.median(times),
                    "x": statistics.median(a / b for a, b in zip(bases, times, strict=True)),
                }
            )
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--corpus", type=Path, help="folder of documents")
    parser.add_argument("--tokenizer", type=Path, help="with <|endoftext|> (default: one made here)")
    parser.add_argument("--megabytes", type=float, default=160, help="of text (default: %(default)s)")
    parser.add_argument("--workers", default="1,2", help="default: %(default)s")
    parser.add_argument("--work", type=Path, help="a folder for all files (default: a temporary one)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        folder = Path(name)
        put_tokenizer(folder, options.tokenizer)
        size = write_corpus(
            folder / "texts",
            documents(options.corpus, options.megabytes / COPIES),
            COPIES,
            file_bytes=2_000_000,
        )
        (folder / "recipe.yaml").write_text(RECIPE)
        rows = summary(measure(load_recipe(folder / "recipe.yaml"), options, folder), size)
    print(f"load average before: {load:.1f}", file=sys.stderr)
    give(options, rows, HEADS, title=f"Stages of a build by workers, {size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
