"""Filters, exact keys and tokenization: MB of UTF-8 per CPU second, shardkit beside released tools.

    python tests/benchmarks/bench_filters.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 8] [--runs 5]
                                             [--tasks …] [--venvs DIR] [--json | --markdown] [--png FILE]

    fineweb     Gopher repetition and quality, C4 without its rule of line ends, FineWeb's own rules, until a
                document fails: our profile fineweb_rules, FineWeb without URL lists, extraction and language
    repetition  Gopher repetition alone
    gopher      Gopher repetition and quality; dolma's tagger gives all their values and drops nothing
    keys        128-bit keys of exact duplicates
    tokenize    text that was never seen before, in rows of ids: what a build runs and `tokenizers`

Documents are those of the corpus (JSONL and Parquet files with a `text`; without --corpus that of
$SHARDKIT_TEST_DATA, else made-up text), shuffled, without those of over 100,000 characters, that each run has
much the same; each run has others. Every side is one process on one core with one thread. After a run that
warms up, the sides of a task take turns, the first one moving on each run. CPU is user and system time of
the process; reading the file and making it the tool's kind of documents is not counted. "x" is the median
over the runs of our rate by theirs on the same run's text; `kept` shows that they do alike. Very slow sides
get the first documents of a run only.

Peers get an environment each under --venvs, by pip, when it is not there yet. "datatrove" is given the same
words as ours, str.split, in the place of its splitter; "datatrove spaCy" is as released.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "dedup_peers"))

import numpy as np
import pyarrow as pa
from near_texts import read_sources
from peer_environments import Environment, SideProcess, environments

from figures import Heads, add_output_arguments, give

HERE = Path(__file__).resolve().parent / "filter_peers"
DEFAULT_VENVS = Path("~/.cache/shardkit-peers")
LONGEST = 100_000
HEADS: Heads = {
    "task": ("task", ""),
    "side": ("side", ""),
    "version": ("version", ""),
    "documents": ("documents", ",d"),
    "MB": ("MB", ".1f"),
    "kept": ("kept", ".1%"),
    "MB_per_cpu_s": ("MB/CPU s", ".2f"),
    "x": ("shardkit x", ".1f"),
}


@dataclass(frozen=True, slots=True)
class Side:
    """A tool with its settings; `share` of the documents is what it gets, by its speed."""

    tool: str
    share: float = 1.0
    request: dict[str, Any] = field(default_factory=dict)


SPLIT, SPACY = {"words": "split"}, {"words": "spacy"}
TASKS: dict[str, dict[str, Side]] = {
    "fineweb": {
        "shardkit": Side("shardkit"),
        "datatrove": Side("datatrove", request=SPLIT),
        "datatrove spaCy": Side("datatrove", share=0.05, request=SPACY),
    },
    "repetition": {"shardkit": Side("shardkit"), "datatrove": Side("datatrove", request=SPLIT)},
    "gopher": {
        "shardkit": Side("shardkit"),
        "datatrove": Side("datatrove", request=SPLIT),
        "dolma": Side("dolma"),
    },
    "keys": {"shardkit": Side("shardkit", request={"repeat": 20})},
    "tokenize": {
        "gigatoken": Side("shardkit", request={"engine": "gigatoken"}),
        "tokenizers": Side("shardkit", request={"engine": "tokenizers"}),
    },
}


def write_runs(folder: Path, corpus: Path | None, megabytes: float, runs: int) -> list[tuple[Path, int]]:
    """A file of other documents for each run, and one to warm up; with the number of documents of each."""
    texts = [text for text in read_sources(corpus) if len(text) <= LONGEST]
    if not texts:  # the made-up ones are long
        texts = [text[at : at + 4000] for text in read_sources(corpus) for at in range(0, len(text), 4000)]
    order = iter(np.random.default_rng(0).permutation(len(texts)).tolist())
    files = []
    for run in range(runs + 1):
        chosen, size = [], 0
        while size < megabytes * 1e6:
            number = next(order, None)
            if number is None:
                raise SystemExit(f"the corpus has no {runs + 1} times {megabytes} MB; ask for less")
            chosen.append(texts[number])
            size += len(texts[number].encode())
        file = folder / f"{run}.arrow"
        table = pa.table({"text": pa.array(chosen, pa.large_string())})
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        files.append((file, len(chosen)))
    return files


def measure(
    task: str, sides: dict[str, Environment], files: list[tuple[Path, int]], common: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The answers of every side, one a run."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with ExitStack() as stack:
        running = {}
        for name, place in sides.items():
            tool = TASKS[task][name].tool
            process = SideProcess(tool, place.python, core=0, script=HERE / f"{tool}_filters.py")
            running[name] = stack.enter_context(process)
        for run, (file, documents) in enumerate(files):
            names = list(running)
            start = run % len(names)
            for name in names[start:] + names[:start]:
                side = TASKS[task][name]
                count = max(20, round(documents * side.share))
                asked = {"task": task, "file": str(file), "documents": count, **common, **side.request}
                running[name].ask(asked)
                answer = running[name].answer()
                answer["bytes"] *= side.request.get("repeat", 1)
                if run:  # the first warms up
                    answers[name].append(answer)
    return answers


def report(
    task: str, sides: dict[str, Environment], answers: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    ours = [rate(answer) for answer in next(iter(answers.values()))]
    rows = []
    for name, runs in answers.items():
        rates = [rate(answer) for answer in runs]
        documents, kept = (sum(answer[key] for answer in runs) for key in ("documents", "result"))
        rows.append(
            {
                "task": task,
                "side": name,
                "version": sides[name].version,
                "documents": documents,
                "MB": sum(answer["bytes"] for answer in runs) / 1e6,
                "kept": kept / documents if task in ("fineweb", "repetition", "gopher") else None,
                "MB_per_cpu_s": statistics.median(rates),
                "runs": [round(one, 2) for one in rates],
                "x": statistics.median(a / b for a, b in zip(ours, rates, strict=True)),
                "peak_rss_MB": max(answer["peak_rss_MB"] for answer in runs),
            }
        )
    return rows


def rate(answer: dict[str, Any]) -> float:
    return float(answer["bytes"] / 1e6 / answer["cpu_seconds"])


def show(rows: list[dict[str, Any]]) -> None:
    head = (
        f"{'task':12}{'side':18}{'version':>9}{'documents':>11}{'MB':>9}{'kept':>8}{'MB/CPU s':>10}{'x':>8}"
    )
    print(head)
    for row in rows:
        kept = f"{row['kept']:.1%}" if row["kept"] is not None else ""
        print(
            f"{row['task']:12}{row['side']:18}{row['version']:>9}{row['documents']:11,}{row['MB']:9.1f}"
            f"{kept:>8}{row['MB_per_cpu_s']:10.2f}{row['x']:8.1f}"
        )


def tokenizer_file(given: Path | None) -> Path | None:
    data = os.environ.get("SHARDKIT_TEST_DATA")
    return given or (Path(data) / "tokenizers" / "gpt2" / "tokenizer.json" if data else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: gpt2 of the test data)")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=8, help="of text a run (default: 8)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="default: %(default)s")
    add_output_arguments(parser)
    arguments = parser.parse_args()
    tokenizer = tokenizer_file(arguments.tokenizer)
    common = {"tokenizer": str(tokenizer), "eos": arguments.eos}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        files = write_runs(Path(scratch), arguments.corpus, arguments.megabytes, arguments.runs)
        for task in arguments.tasks.split(","):
            if task == "tokenize" and tokenizer is None:
                print("tokenize is left out: name a --tokenizer", file=sys.stderr)
                continue
            tools = {name: side.tool for name, side in TASKS[task].items()}
            sides = environments(list(tools), tools, arguments.venvs.expanduser())
            rows += report(task, sides, measure(task, sides, files, common))
    title = "Filters, keys of exact duplicates and tokenization, one core"
    give(arguments, rows, HEADS, lambda: show(rows), title=title, unit="MB per CPU second", runs="runs")


if __name__ == "__main__":
    main()
