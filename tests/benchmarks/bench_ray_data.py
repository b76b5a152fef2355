"""A build against the same recipe on Ray Data: two shuffles, CPU, memory and time on this machine.

    python tests/benchmarks/bench_ray_data.py --tokenizer FILE [--eos TOKEN] [--corpus FOLDER]
                                              [--documents 50000] [--runs 5] [--venvs DIR] [--json]

Both sides read the same JSON Lines, keep documents of 20 words or more, keep one of each text, tokenize with
gigatoken, put the documents into the order of a hash and cut them into rows of 2,048 tokens; they must agree
on documents and tokens. Ray Data does it with two hash shuffles (`repartition(keys=...)`), on a Ray of its
own with two CPUs; `shardkit build` has two workers. Ours also writes checksums, provenance, quarantine, card
and report, and commits every task; Ray Data writes plain arrays, and has lost its work if it is killed.

CPU is of all processes, daemons included, sampled every 0.2 s; memory is the most that they held together
(PSS). Starting Ray is part of its time, as starting workers is of ours. Sides take turns after a run over
2,000 documents.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_minhash import MEAN_WORDS
from bench_near import make_documents
from figures import Heads, give
from peer_processes import Side, median_ratio, peer_parser, running, take_turns

HEADS: Heads = {
    "side": ("side", ""),
    "version": ("version", ""),
    "MB": ("MB", ",.0f"),
    "cpu_s": ("CPU s", ".1f"),
    "wall_s": ("wall s", ".1f"),
    "x": ("x shardkit's CPU", ".2f"),
    "x_wall": ("x shardkit's time", ".2f"),
    "peak_MB": ("PSS MB", ",.0f"),
    "documents": ("documents", ",d"),
    "tokens": ("tokens", ",d"),
}
SIDES = {"shardkit": Side("shardkit"), "ray": Side("ray")}


def report(name: str, version: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of one side; `ours` are shardkit's runs."""
    used, base = ([run["result"]["usage"] for run in side] for side in (runs, ours))
    cpu, seconds = ([use[n] for use in used] for n in ("cpu_seconds", "seconds"))
    return {
        "side": name,
        "version": version,
        "MB": runs[0]["bytes"] / 1e6,
        "cpu_s": statistics.median(cpu),
        "cpu_runs": [round(one, 2) for one in cpu],
        "wall_s": statistics.median(seconds),
        "x": median_ratio(cpu, [use["cpu_seconds"] for use in base]),
        "x_wall": median_ratio(seconds, [use["seconds"] for use in base]),
        "peak_MB": max(use["peak_MB"] for use in used),
        "documents": runs[0]["result"]["documents"],
        "tokens": runs[0]["result"]["tokens"],
    }


def main() -> None:
    parser = peer_parser(__doc__, runs=5)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=50_000, help="default: %(default)s")
    arguments = parser.parse_args()
    request = {"task": "build", "workers": 2, "min_words": 20, "sequence_length": 2048}
    request |= {"tokenizer": str(arguments.tokenizer.absolute()), "eos": arguments.eos}
    request["partitions"] = max(2, arguments.documents * MEAN_WORDS * 7 // 50_000_000)
    with tempfile.TemporaryDirectory() as scratch:
        file, warm_up, _ = make_documents(Path(scratch), arguments.corpus, arguments.documents)
        with running(SIDES, arguments.venvs) as processes:
            files = {True: str(warm_up), False: str(file)}
            answers = take_turns(
                processes, lambda _, run: {**request, "file": files[run < 0]}, arguments.runs
            )
            versions = {name: process.version for name, process in processes.items()}
    made = {
        (run["result"]["documents"], run["result"]["tokens"]) for runs in answers.values() for run in runs
    }
    if len(made) > 1:
        sys.exit(f"the sides disagree on documents and tokens: {sorted(made)}")
    rows = [report(name, versions[name], runs, answers["shardkit"]) for name, runs in answers.items()]
    title = f"A build of {arguments.documents:,} documents"
    give(arguments, rows, HEADS, title=title, unit="CPU seconds", runs="cpu_runs")


if __name__ == "__main__":
    main()
