"""How fast the pages of `shardkit view` are: a made dataset, or one of yours, in a server of its own.

    python tests/benchmarks/bench_explore.py [DATASET] [--documents 1000000] [--runs 5] [--folder DIR]

Builds short documents, of which filters drop some and duplicates are removed, unless DATASET is given. Then
starts the command once, follows links from the first page, and searches. `first` is a page's first time in
the server's life, `seconds` the median of the next ones; the peak of memory is the server's whole life's.
"""

from __future__ import annotations

import html
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from figures import Heads, benchmark_parser, give
from shardkit.writers import build
from soak_dedup import write_documents
from support.small_build import make_corpus

RECIPE = """\
inputs: [{path: "documents-*.jsonl", id: id}]
filters: [{length: {min_words: 40}}, {gopher_repetition: {}}]
dedup: {exact: true, near: 0.8, max_removed_fraction: 1}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 2049}
output: out
"""
PAGES = {
    "the first page": "/",
    "kept documents": "/kept",
    "duplicates": "/clusters",
    "a row": "/row?row=1000",
    "a training step": "/step?step=100",
}
SEARCHES = {"an id": "12345", "a URL that is not there": "https://example.org/none", "words": "qqq not there"}
HEADS: Heads = {"page": ("page", ""), "first": ("first, s", ".2f"), "seconds": ("seconds", ".2f")}


def make(folder: Path, documents: int) -> Path:
    """Build the dataset."""
    recipe = make_corpus(folder, 20, RECIPE)
    write_documents(folder, documents, seed=1)
    build(recipe)
    return folder / "out"


def peak_bytes(process: int) -> int:
    """The most memory that a running process had."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


def timed(address: str) -> tuple[float, str]:
    """Seconds, and the page."""
    began = time.perf_counter()
    with urlopen(address, timeout=60) as answer:
        page = answer.read().decode()
    return time.perf_counter() - began, page


def main() -> None:
    """Make, serve, time, print."""
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("dataset", nargs="?", metavar="DATASET", help="(default: one that is made)")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the dataset is made (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        dataset = arguments.dataset or make(Path(place), arguments.documents)
        began = time.perf_counter()
        command = [sys.executable, "-m", "shardkit", "view", str(dataset), "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            base = server.stdout.readline().split()[0].rstrip("/")
            _, front = timed(base)
            rows: list[dict[str, object]] = [
                {"page": "command and page", "first": time.perf_counter() - began, "seconds": None}
            ]
            rules = re.findall(r'href="(/rule\?[^"]+)"', front)
            pages = PAGES | {"a rule": html.unescape(rules[0])} if rules else PAGES
            pages = pages | {
                f"search: {name}": f"/search?q={quote(words)}" for name, words in SEARCHES.items()
            }
            for name, path in pages.items():
                first, *others = [timed(base + path)[0] for _ in range(arguments.runs + 1)]
                rows.append({"page": name, "first": first, "seconds": statistics.median(others)})
            print(f"at most {peak_bytes(server.pid) / 1e6:,.0f} MB of memory", file=sys.stderr)
            server.terminate()
    give(arguments, rows, HEADS)


if __name__ == "__main__":
    main()
