"""MinHash signatures from raw text: MB of UTF-8 per CPU second, shardkit beside released tools.

    python tests/benchmarks/bench_minhash.py [--corpus FOLDER] [--megabytes 100] [--runs 5] [--sides …]
                                             [--venvs DIR] [--no-scaling] [--json | --markdown] [--png FILE]

Word 5-grams, 128 permutations (112, the default of a build, for ours too). Documents are cuts of the corpus
(JSONL and Parquet files with a `text`; without --corpus that of $SHARDKIT_TEST_DATA, else made-up text).
Every side is one process on one core with one thread; it is warmed up, then the sides take turns, the first
one moving on each run. Slow tools get the first documents only: their MB are given. CPU is user and system
time of the process, reading the file and making it the tool's kind of strings not counted. "x" is the median
over the runs of our rate by theirs in the same run. Scaling: the rate of two processes on two cores at once,
by the wall clock, over that of one.

Peers get an environment each under --venvs, by pip, when it is not there yet. What each is given:

    daft         its `minhash` of the text as it is, words between single spaces, its fastest hash
    daft+        the same after its own normalization, which is nearer to what ours does
    datasketch   xxh32 of 5-grams of text.lower().split(), vectorised batches
    rensa        full-set R-MinHash of the same 5-grams; rho: its sampling sketch
    datatrove    its signature stage without files: spaCy's words, 32-bit hashes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "dedup_peers"))

from near_texts import read_sources, write_documents
from peer_environments import Environment, SideProcess, environments

from figures import Heads, add_output_arguments, give

MEAN_WORDS = 550
DEFAULT_VENVS = Path("~/.cache/shardkit-peers")
HEADS: Heads = {
    "side": ("side", ""),
    "version": ("version", ""),
    "permutations": ("functions", "d"),
    "MB": ("MB", ".1f"),
    "MB_per_cpu_s": ("MB/CPU s", ".1f"),
    "x": ("shardkit x", ".1f"),
    "scaling": ("2 cores", ".2f"),
}


@dataclass(frozen=True, slots=True)
class Side:
    """A tool with its settings; `share` of the documents is what it gets, by its speed."""

    tool: str
    share: float = 1.0
    request: dict[str, Any] = field(default_factory=dict)
    permutations: int = 128


SIDES = {
    "shardkit": Side("shardkit"),
    "shardkit 112": Side("shardkit", permutations=112),
    "daft": Side("daft", request={"hash_function": "xxhash3_64"}),
    "daft+": Side("daft", request={"hash_function": "xxhash3_64", "normalize": True}),
    "datasketch": Side("datasketch", share=0.1),
    "rensa": Side("rensa", share=0.2),
    "rensa rho": Side("rensa", share=0.2, request={"rho": True}),
    "datatrove": Side("datatrove", share=0.005),
}


def request(side: Side, file: Path, documents: int) -> dict[str, Any]:
    return {
        "task": "signatures",
        "file": str(file),
        "documents": max(100, round(documents * side.share)),
        "permutations": side.permutations,
        **side.request,
    }


def rate(answer: dict[str, Any], seconds: str) -> float:
    return float(answer["bytes"] / 1e6 / answer[seconds])


def measure(
    sides: dict[str, Environment], file: Path, documents: int, runs: int
) -> dict[str, list[dict[str, Any]]]:
    """The answers of every side, a list of `runs`."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(SideProcess(SIDES[name].tool, place.python, core=0))
            for name, place in sides.items()
        }
        for run in range(-1, runs):  # the first warms up
            names = list(running)
            start = run % len(names)
            for name in names[start:] + names[:start]:
                running[name].ask(request(SIDES[name], file, documents))
                answer = running[name].answer()
                assert answer["result"] > 0.99 * answer["documents"], answer
                if run >= 0:
                    answers[name].append(answer)
    return answers


def scaling(side: Side, place: Environment, file: Path, documents: int, runs: int) -> float:
    """Two processes at once over one, by the wall clock; medians."""
    asked = request(side, file, documents)
    rates: dict[int, list[float]] = {1: [], 2: []}
    with (
        SideProcess(side.tool, place.python, core=0) as one,
        SideProcess(side.tool, place.python, core=1) as two,
    ):
        for run in range(-1, runs):
            for processes in ([one], [one, two]):
                for process in processes:
                    process.ask(asked)
                answers = [process.answer() for process in processes]
                if run >= 0:
                    wall = max(answer["seconds"] for answer in answers)
                    megabytes = sum(answer["bytes"] for answer in answers) / 1e6
                    rates[len(processes)].append(megabytes / wall)
    return statistics.median(rates[2]) / statistics.median(rates[1])


def report(
    sides: dict[str, Environment], answers: dict[str, list[dict[str, Any]]], scalings: dict[str, float]
) -> list[dict[str, Any]]:
    ours = [rate(run, "cpu_seconds") for run in answers.get("shardkit", ())]
    rows = []
    for name, runs in answers.items():
        rates = [rate(run, "cpu_seconds") for run in runs]
        ratios = [a / b for a, b in zip(ours, rates, strict=True)] if ours else []
        rows.append(
            {
                "side": name,
                "version": sides[name].version,
                "permutations": SIDES[name].permutations,
                "MB": runs[0]["bytes"] / 1e6,
                "documents": runs[0]["documents"],
                "MB_per_cpu_s": statistics.median(rates),
                "runs": [round(one, 2) for one in rates],
                "x": statistics.median(ratios) if ratios else None,
                "scaling": scalings.get(name),
                "peak_rss_MB": max(run["peak_rss_MB"] for run in runs),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'side':24}{'version':>10}{'functions':>10}{'MB':>8}{'MB/CPU s':>10}{'x':>8}{'2 cores':>9}")
    for row in rows:
        ratio = f"{row['x']:.1f}" if row["x"] else ""
        scaled = f"{row['scaling']:.2f}" if row["scaling"] else ""
        print(
            f"{row['side']:24}{row['version']:>10}{row['permutations']:>10}{row['MB']:8.1f}"
            f"{row['MB_per_cpu_s']:10.1f}{ratio:>8}{scaled:>9}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--megabytes", type=int, default=100, help="of text (default: 100)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sides", default=",".join(SIDES), help=f"default: {', '.join(SIDES)}")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="default: %(default)s")
    parser.add_argument("--no-scaling", action="store_true", help="leave out the runs of two processes")
    add_output_arguments(parser)
    arguments = parser.parse_args()
    tools = {name: side.tool for name, side in SIDES.items()}
    sides = environments(arguments.sides.split(","), tools, arguments.venvs.expanduser())
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "documents.arrow"
        documents = arguments.megabytes * 1_000_000 // (MEAN_WORDS * 7)
        sources = read_sources(arguments.corpus)
        write_documents(file, documents, seed=1, sources=sources, mean_words=MEAN_WORDS, copies=0.0)
        answers = measure(sides, file, documents, arguments.runs)
        scalings = {}
        for name in sides if not arguments.no_scaling else ():
            scalings[name] = scaling(SIDES[name], sides[name], file, documents, arguments.runs)
    rows = report(sides, answers, scalings)
    title = "MinHash of word 5-grams from raw text, one core"
    give(arguments, rows, HEADS, lambda: show(rows), title=title, unit="MB per CPU second", runs="runs")


if __name__ == "__main__":
    main()
