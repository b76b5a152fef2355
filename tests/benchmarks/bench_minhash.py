"""MinHash signatures from raw text: MB of UTF-8 per CPU second, shardkit against released tools.

    python tests/benchmarks/bench_minhash.py [--corpus FOLDER] [--megabytes 100] [--runs 5] [--sides …]
                                             [--venvs DIR] [--no-scaling] [--json] [--save PREFIX]

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

import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import Heads, give
from peer_processes import Answers, Side, SideProcess, median_ratio, peer_parser, running, take_turns
from texts import read_sources, write_documents

MEAN_WORDS = 550
HEADS: Heads = {
    "side": ("side", ""),
    "version": ("version", ""),
    "permutations": ("functions", "d"),
    "MB": ("MB", ".1f"),
    "MB_per_cpu_s": ("MB/CPU s", ".1f"),
    "x": ("shardkit x", ".1f"),
    "scaling": ("2 cores", ".2f"),
}
XXHASH = {"hash_function": "xxhash3_64"}
SIDES = {
    "shardkit": Side("shardkit"),
    "shardkit 112": Side("shardkit", request={"permutations": 112}),
    "daft": Side("daft", request=XXHASH),
    "daft+": Side("daft", request={**XXHASH, "normalize": True}),
    "datasketch": Side("datasketch", share=0.1),
    "rensa": Side("rensa", share=0.2),
    "rensa rho": Side("rensa", share=0.2, request={"rho": True}),
    "datatrove": Side("datatrove", share=0.005),
}


def request(side: Side, file: Path, documents: int) -> dict[str, Any]:
    taken = max(100, round(documents * side.share))
    common = {"task": "signatures", "file": str(file), "documents": taken, "permutations": 128}
    return common | side.request


def scaling(side: Side, venvs: Path, asked: dict[str, Any], runs: int) -> float:
    """Two processes at once over one, by the wall clock; medians."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    with (
        SideProcess.of(side.tool, venvs, core=0) as one,
        SideProcess.of(side.tool, venvs, core=1) as two,
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


def report(answers: Answers, versions: dict[str, str], scalings: dict[str, float]) -> list[dict[str, Any]]:
    rates = {
        name: [run["bytes"] / 1e6 / run["cpu_seconds"] for run in runs] for name, runs in answers.items()
    }
    return [
        {
            "side": name,
            "version": versions[name],
            "permutations": SIDES[name].request.get("permutations", 128),
            "MB": runs[0]["bytes"] / 1e6,
            "documents": runs[0]["documents"],
            "MB_per_cpu_s": statistics.median(rates[name]),
            "runs": [round(one, 2) for one in rates[name]],
            "x": median_ratio(rates.get("shardkit", []), rates[name]),
            "scaling": scalings.get(name),
            "peak_rss_MB": max(run["peak_rss_MB"] for run in runs),
        }
        for name, runs in answers.items()
    ]


def main() -> None:
    parser = peer_parser(__doc__, runs=5)
    parser.add_argument("--megabytes", type=int, default=100, help="of text (default: 100)")
    parser.add_argument("--sides", default=",".join(SIDES), help="default: %(default)s")
    parser.add_argument("--no-scaling", action="store_true", help="leave out the runs of two processes")
    arguments = parser.parse_args()
    sides = {name: SIDES[name] for name in arguments.sides.split(",")}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "documents.arrow"
        documents = arguments.megabytes * 1_000_000 // (MEAN_WORDS * 7)
        sources = read_sources(arguments.corpus)
        write_documents(file, documents, seed=1, sources=sources, mean_words=MEAN_WORDS, copies=0.0)
        asked = {name: request(side, file, documents) for name, side in sides.items()}
        with running(sides, arguments.venvs, core=0) as processes:
            answers = take_turns(processes, lambda name, _: asked[name], arguments.runs)
            versions = {name: process.version for name, process in processes.items()}
        assert all(run["result"] > 0.99 * run["documents"] for runs in answers.values() for run in runs)
        scalings = {}
        for name in answers if not arguments.no_scaling else ():
            scalings[name] = scaling(sides[name], arguments.venvs, asked[name], arguments.runs)
    title = "MinHash of word 5-grams from raw text, one core"
    give(arguments, report(answers, versions, scalings), HEADS, title=title, unit="MB per CPU second")


if __name__ == "__main__":
    main()
