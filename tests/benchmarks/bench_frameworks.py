"""Whole builds against the same recipe on Ray Data and on datatrove: CPU, memory and time on this machine.

    python tests/benchmarks/bench_frameworks.py RECIPE --tokenizer FILE [--eos TOKEN] [--corpus FOLDER]
                                                [--megabytes 40] [--runs 5] [--venvs DIR] [--json]

    exact     documents of 20 words or more, one of each text, tokens, the order of a hash, rows of 2,048.
              Ray Data does it with two hash shuffles (`repartition(keys=...)`), on a Ray of its own with two
              CPUs. All sides must agree on documents and tokens.
    fineweb   the filters of FineWeb (language, Gopher, C4, its own), near-duplicates by MinHash (112
              permutations of word 5-grams), tokens, shuffled. datatrove as its example for FineWeb has it,
              from its filters to merged tokens, with two workers; "datatrove+" has words by `str.split`
              in place of spaCy's, in filters and signatures; "shardkit, spaCy" has spaCy's in filters. Ours
              also removes exact duplicates first and verifies near ones. Sides differ in documents by their
              words, and by what is near (datatrove joins through chains).

Both sides read the same JSON Lines. Ours also writes checksums, provenance, quarantine, card and report, and
commits every task; `shardkit build` has two workers. CPU is of all processes, daemons included; memory is the
most that they held together (PSS, sampled every 0.2 s). Starting a framework is part of its time, as starting
workers is of ours. Sides take turns after a run over 4 MB.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from figures import Heads, give
from peer_processes import Side, median_ratio, peer_parser, running, take_turns
from shardkit.writers.filters.fasttext import language_model
from texts import documents

HEADS: Heads = {
    "side": ("side", ""),
    "version": ("version", ""),
    "MB": ("MB", ",.0f"),
    "cpu_s": ("CPU s", ".1f"),
    "wall_s": ("wall s", ".1f"),
    "MB_per_core_s": ("MB/s a core", ".2f"),
    "x": ("x shardkit's CPU", ".2f"),
    "x_wall": ("x shardkit's time", ".2f"),
    "peak_MB": ("PSS MB", ",.0f"),
    "documents": ("documents", ",d"),
    "tokens": ("tokens", ",d"),
}
SIDES = {
    "exact": {"shardkit": Side("shardkit"), "ray": Side("ray")},
    "fineweb": {
        "shardkit": Side("shardkit", request={"profile": "fineweb"}),
        "shardkit, spaCy": Side("shardkit", request={"profile": "fineweb_published"}),
        "datatrove": Side("datatrove", request={"words": "default"}),
        "datatrove+": Side("datatrove", request={"words": "split"}),
    },
}


def write_texts(file: Path, texts: list[str]) -> None:
    """As the sides read them."""
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2048)


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
        "MB_per_core_s": runs[0]["bytes"] / 1e6 / statistics.median(cpu),
        "x": median_ratio(cpu, [use["cpu_seconds"] for use in base]),
        "x_wall": median_ratio(seconds, [use["seconds"] for use in base]),
        "peak_MB": max(use["peak_MB"] for use in used),
        "documents": runs[0]["result"]["documents"],
        "tokens": runs[0]["result"]["tokens"],
    }


def main() -> None:
    parser = peer_parser(__doc__, runs=5)
    parser.add_argument("recipe", choices=SIDES, metavar="RECIPE", help=" or ".join(SIDES))
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=40, help="of text (default: %(default)s)")
    arguments = parser.parse_args()
    request = {"task": "build", "recipe": arguments.recipe, "workers": 2, "min_words": 20}
    request |= {"tokenizer": str(arguments.tokenizer.absolute()), "eos": arguments.eos}
    request |= {"sequence_length": 2048, "lid": str(language_model())}
    request["partitions"] = max(2, round(arguments.megabytes / 50))
    sides = SIDES[arguments.recipe]
    with tempfile.TemporaryDirectory() as scratch:
        files = {True: Path(scratch, "warm-up.arrow"), False: Path(scratch, "documents.arrow")}
        for is_warm_up, file in files.items():
            write_texts(file, documents(arguments.corpus, 4 if is_warm_up else arguments.megabytes))
        with running(sides, arguments.venvs) as processes:
            answers = take_turns(
                processes,
                lambda name, run: {**request, **sides[name].request, "file": str(files[run < 0])},
                arguments.runs,
            )
            versions = {name: process.version for name, process in processes.items()}
    made = {
        (run["result"]["documents"], run["result"]["tokens"]) for runs in answers.values() for run in runs
    }
    if arguments.recipe == "exact" and len(made) > 1:
        sys.exit(f"the sides disagree on documents and tokens: {sorted(made)}")
    rows = [report(name, versions[name], runs, answers["shardkit"]) for name, runs in answers.items()]
    title = f"A build of {arguments.megabytes:,.0f} MB of text, recipe {arguments.recipe}"
    give(arguments, rows, HEADS, title=title, unit="CPU seconds", runs="cpu_runs")


if __name__ == "__main__":
    main()
