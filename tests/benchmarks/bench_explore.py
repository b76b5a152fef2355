"""How fast the pages of `shardkit view` are: a made dataset, or one of yours, in a server of its own.

    python tests/benchmarks/bench_explore.py [DATASET] [--documents 10000000] [--built 20000] [--runs 5]

Builds short documents, of which filters drop some and duplicates are removed, and multiplies the dataset
(multiplied.py), unless DATASET is given. Then starts the command once, follows links from the first page, and
searches. `first` is a page's first time in the server's life, `CPU` what the server computed meanwhile,
`seconds` the median of the next ones. `counting` is how long a page showed that it still counts. The peak of
memory is the server's whole life's.
"""

from __future__ import annotations

import html
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

from figures import Heads, benchmark_parser, give
from multiplied import multiply
from shardkit.writers import build
from soak_dedup import write_documents
from support.small_build import make_corpus

RECIPE = """\
inputs: [{path: "documents-*.jsonl", id: id}]
filters: [{length: {min_words: 40}}, {gopher_repetition: {}}]
dedup: {exact: true, near: 0.8, max_removed_fraction: 1}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 2049}
annotate: true
output: out
"""
PAGES = {
    "the funnel": "/",
    "kept documents": "/kept",
    "duplicates": "/clusters",
    "a row": "/row?row=1000",
    "a training step": "/step?step=100",
    "a step of 1,024 rows": "/step?step=100&batch_size=1024",
}
SEARCHES = {"an id": "12345", "a URL that is not there": "https://example.org/none", "words": "qqq not there"}
HEADS: Heads = {
    "page": ("page", ""),
    "first": ("first, s", ".2f"),
    "cpu": ("CPU, s", ".2f"),
    "seconds": ("seconds", ".2f"),
    "counting": ("counting, s", ".1f"),
}
COUNTING = 'http-equiv="refresh"'


def make(folder: Path, built: int, documents: int) -> Path:
    """Build a dataset, and multiply it."""
    recipe = make_corpus(folder, 20, RECIPE)
    write_documents(folder, built, seed=1)
    build(recipe)
    return multiply(folder / "out", folder / "many", documents)


def peak_bytes(process: int) -> int:
    """The most memory that a running process had."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


def cpu_seconds(process: int) -> float:
    """The CPU time of a running process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """The command, running; `base` is its address without the token."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.base, _, token = process.stdout.readline().split()[0].partition("/?token=")
        self._headers = {"Cookie": f"shardkit-view-{self.base.rpartition(':')[2]}={token}"}

    def timed(self, path: str) -> tuple[float, float, str]:
        """Seconds, CPU seconds of the server, and the page."""
        began, spent = time.perf_counter(), cpu_seconds(self._process.pid)
        with urlopen(Request(self.base + path, headers=self._headers), timeout=60) as answer:
            page = answer.read().decode()
        return time.perf_counter() - began, cpu_seconds(self._process.pid) - spent, page

    def row(self, name: str, path: str, runs: int) -> dict[str, object]:
        """The times of a page: its first time, and the next ones once all is counted."""
        began, counting = time.perf_counter(), None
        first, cpu, page = self.timed(path)
        while COUNTING in page:
            time.sleep(0.2)
            page = self.timed(path)[2]
            counting = time.perf_counter() - began
        others = [self.timed(path)[0] for _ in range(runs)]
        times = {"first": first, "cpu": cpu, "seconds": statistics.median(others)}
        return {"page": name, **times, "counting": counting}


def main() -> None:
    """Make, serve, time, print."""
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("dataset", nargs="?", metavar="DATASET", help="(default: one that is made)")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of the dataset")
    parser.add_argument("--built", type=int, default=20_000, help="documents that are built, and multiplied")
    parser.add_argument("--folder", type=Path, help="where the dataset is made (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        dataset = arguments.dataset or make(Path(place), arguments.built, arguments.documents)
        began = time.perf_counter()
        command = [sys.executable, "-m", "shardkit", "view", str(dataset), "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            server = Server(process)
            front = server.timed("/")[2]
            elapsed, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
            rows: list[dict[str, object]] = [
                {"page": "command and page", "first": elapsed, "cpu": cpu, "seconds": None, "counting": None}
            ]
            rules = [html.unescape(one) for one in re.findall(r'href="(/rule\?[^"]+)"', front)]
            pages = {f"a rule ({number + 1})": path for number, path in enumerate(rules[:2])} | PAGES
            pages |= {f"search: {name}": f"/search?q={quote(words)}" for name, words in SEARCHES.items()}
            rows += [server.row(name, path, arguments.runs) for name, path in pages.items()]
            print(f"at most {peak_bytes(process.pid) / 1e6:,.0f} MB of memory", file=sys.stderr)
            process.terminate()
    give(arguments, rows, HEADS)


if __name__ == "__main__":
    main()
