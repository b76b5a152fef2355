"""Filters, exact keys and tokenization: MB of UTF-8 per CPU second, shardkit against released tools.

    python tests/benchmarks/bench_filters.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 8] [--runs 5]
                                             [--tasks …] [--venvs DIR] [--json] [--save PREFIX]

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

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from figures import Heads, give
from peer_processes import Answers, Side, median_ratio, peer_parser, running, take_turns
from texts import read_sources

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
    task: str, venvs: Path, files: list[tuple[Path, int]], common: dict[str, Any]
) -> tuple[Answers, dict[str, str]]:
    """The answers of every side, one a run, and their versions."""

    def request(name: str, run: int) -> dict[str, Any]:
        (file, documents), side = files[run + 1], TASKS[task][name]
        count = max(20, round(documents * side.share))
        return {"task": task, "file": str(file), "documents": count, **common, **side.request}

    with running(TASKS[task], venvs, core=0) as processes:
        answers = take_turns(processes, request, len(files) - 1)
        return answers, {name: process.version for name, process in processes.items()}


def report(task: str, answers: Answers, versions: dict[str, str]) -> list[dict[str, Any]]:
    repeat = {name: side.request.get("repeat", 1) for name, side in TASKS[task].items()}
    size = {name: [run["bytes"] * repeat[name] / 1e6 for run in runs] for name, runs in answers.items()}
    rates = {
        name: [megabytes / run["cpu_seconds"] for megabytes, run in zip(size[name], runs, strict=True)]
        for name, runs in answers.items()
    }
    rows = []
    for name, runs in answers.items():
        documents, kept = (sum(answer[key] for answer in runs) for key in ("documents", "result"))
        rows.append(
            {
                "task": task,
                "side": name,
                "version": versions[name],
                "documents": documents,
                "MB": sum(size[name]),
                "kept": kept / documents if task in ("fineweb", "repetition", "gopher") else None,
                "MB_per_cpu_s": statistics.median(rates[name]),
                "runs": [round(one, 2) for one in rates[name]],
                "x": median_ratio(next(iter(rates.values())), rates[name]),
                "peak_rss_MB": max(answer["peak_rss_MB"] for answer in runs),
            }
        )
    return rows


def tokenizer_file(given: Path | None) -> Path | None:
    data = os.environ.get("SHARDKIT_TEST_DATA")
    return given or (Path(data) / "tokenizers" / "gpt2" / "tokenizer.json" if data else None)


def main() -> None:
    parser = peer_parser(__doc__, runs=5)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: gpt2 of the test data)")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=8, help="of text a run (default: 8)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
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
            rows += report(task, *measure(task, arguments.venvs, files, common))
    title = "Filters, keys of exact duplicates and tokenization, one core"
    give(arguments, rows, HEADS, title=title, unit="MB per CPU second")


if __name__ == "__main__":
    main()
