"""Near-duplicate removal end to end: CPU seconds and recall, shardkit against daft and datasketch.

    python tests/benchmarks/bench_near.py [--corpus FOLDER] [--documents 100000] [--runs 3] [--sides …]
                                          [--work DIR] [--venvs DIR] [--json] [--save PREFIX]

Documents (about 425 MB for 100,000) are cuts of the corpus, as in bench_minhash.py; 15 % of them are copies
of another one with words replaced, at similarities spread over 0.5 to 1.0 (exact Jaccard of sets of 5-grams).
Each side gets the same documents, 14 bands x 8 rows of word 5-grams, and says which documents it would
remove. A pair is found when one of its two is removed. A removal is needless when the document is in no pair
of 0.8 or more; a few cuts of very repetitive texts are alike by nature and counted here, too.

    shardkit     from an Arrow file through signatures, bands, candidates and exact verification, all on disk
    daft         in memory: minhash, bands, explode, group-by; then union-find in Python; unverified
    daft+        the same after its normalization of the text
    datasketch   in memory: MinHash with xxh32, MinHashLSH: query, insert what is new; unverified

CPU is user and system time of the process and its children, on all cores, after a run over 2,000 documents;
reading the documents is not counted for the peers and is for ours. Sides take turns; figures are medians, "x"
is the median over the runs of their CPU time by ours in the same run. --work keeps the documents.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench_minhash import MEAN_WORDS, XXHASH
from figures import Heads, give
from peer_processes import Answers, Side, median_ratio, peer_parser, running, take_turns
from texts import PAIR, read_sources, write_documents

SIMILARITY = 0.8
EDGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0 + 1e-9)
COPIES = 0.15
WARM_UP_DOCUMENTS = 2000
HEADS: Heads = {
    "side": ("side", ""),
    "version": ("version", ""),
    "MB": ("MB", ",.0f"),
    "cpu_s": ("CPU s", ".1f"),
    "wall_s": ("wall s", ".1f"),
    "x": ("x shardkit's CPU", ".1f"),
    "peak_rss_MB": ("RSS MB", ",.0f"),
    "removed": ("removed", ",d"),
    "needless": ("needless", ",d"),
    "recall": ("recall", ".3f"),
}


SIDES = {
    "shardkit": Side("shardkit"),
    "daft": Side("daft", request=XXHASH),
    "daft+": Side("daft", request={**XXHASH, "normalize": True}),
    "datasketch": Side("datasketch"),
}


def make_documents(
    folder: Path, corpus: Path | None, documents: int
) -> tuple[Path, Path, npt.NDArray[np.void]]:
    """(documents, warm-up documents, pairs of the first), made unless they are there."""
    file, warm_up = folder / f"documents-{documents}.arrow", folder / "warm-up.arrow"
    pairs = file.with_suffix(".npy")
    if not pairs.exists():
        print(f"making {documents} documents", file=sys.stderr)
        sources = read_sources(corpus)
        settings: dict[str, Any] = {"sources": sources, "mean_words": MEAN_WORDS, "copies": COPIES}
        write_documents(warm_up, WARM_UP_DOCUMENTS, seed=2, **settings)
        np.save(pairs, write_documents(file, documents, seed=1, **settings))
    found: npt.NDArray[np.void] = np.load(pairs)
    assert found.dtype == PAIR
    return file, warm_up, found


def quality(removed: list[int], pairs: npt.NDArray[np.void], documents: int) -> dict[str, Any]:
    """Recall by band and from the threshold up; needless removals."""
    gone = np.zeros(documents, np.bool_)
    gone[removed] = True
    found = gone[pairs["original"]] | gone[pairs["copy"]]
    close = pairs["similarity"] >= SIMILARITY
    needed = np.zeros(documents, np.bool_)
    for name in ("original", "copy"):
        needed[pairs[name][close]] = True
    bands = {}
    for low, high in itertools.pairwise(EDGES):
        inside = (pairs["similarity"] >= low) & (pairs["similarity"] < high)
        bands[f"{low:.2f}"] = float(found[inside].mean()) if inside.any() else None
    return {
        "removed": int(gone.sum()),
        "needless": int((gone & ~needed).sum()),
        "recall": float(found[close].mean()),
        "recall_by_band": bands,
    }


def report(answers: Answers, versions: dict[str, str], pairs: npt.NDArray[np.void]) -> list[dict[str, Any]]:
    cpu = {name: [run["cpu_seconds"] for run in runs] for name, runs in answers.items()}
    return [
        {
            "side": name,
            "version": versions[name],
            "documents": runs[0]["documents"],
            "MB": runs[0]["bytes"] / 1e6,
            "cpu_s": statistics.median(cpu[name]),
            "cpu_runs": [round(one, 2) for one in cpu[name]],
            "wall_s": statistics.median(run["seconds"] for run in runs),
            "x": median_ratio(cpu[name], cpu["shardkit"]) if "shardkit" in cpu else None,
            "peak_rss_MB": max(run["peak_rss_MB"] for run in runs),
            "same_each_run": all(run["result"] == runs[0]["result"] for run in runs),
            **quality(runs[0]["result"], pairs, runs[0]["documents"]),
        }
        for name, runs in answers.items()
    ]


def show_recall(rows: list[dict[str, Any]]) -> None:
    print("\nrecall by similarity from " + "".join(f"{name:>8}" for name in rows[0]["recall_by_band"]))
    for row in rows:
        shares = row["recall_by_band"].values()
        print(f"{row['side']:26}" + "".join(f"{share:8.3f}" if share is not None else "" for share in shares))


def main() -> None:
    parser = peer_parser(__doc__, runs=3)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--sides", default=",".join(SIDES), help="default: %(default)s")
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes that shardkit may use (1 GiB)")
    parser.add_argument("--work", type=Path, help="keep the documents here, and use those that are there")
    arguments = parser.parse_args()
    sides = {name: SIDES[name] for name in arguments.sides.split(",")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        file, warm_up, pairs = make_documents(folder, arguments.corpus, arguments.documents)
        common = {"task": "near", "similarity": SIMILARITY}
        common |= {"memory_bytes": arguments.memory, "scratch": scratch}

        def request(name: str, run: int) -> dict[str, Any]:
            return {**common, **sides[name].request, "file": str(warm_up if run < 0 else file)}

        with running(sides, arguments.venvs) as processes:
            answers = take_turns(processes, request, arguments.runs)
            versions = {name: process.version for name, process in processes.items()}
    rows = report(answers, versions, pairs)
    title = f"Near-duplicates of {arguments.documents:,} documents, removed"
    give(arguments, rows, HEADS, title=title, unit="CPU seconds", runs="cpu_runs")
    if not arguments.json:
        show_recall(rows)


if __name__ == "__main__":
    main()
