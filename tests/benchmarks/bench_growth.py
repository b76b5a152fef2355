"""How a build grows with its corpus: time, CPU, memory, disk and output of a full recipe, stage by stage.

    python tests/benchmarks/bench_growth.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 20]
                                            [--times 1,3,10] [--workers 2] [--work DIR] [--json]
    python tests/benchmarks/bench_growth.py --kind short --documents 1000000,10000000 [--kill-after 300,600]

The corpus (JSONL and Parquet files with a `text`; without --corpus that of $SHARDKIT_TEST_DATA, else made-up
text) is replicated with mutations (texts.py). The recipe has quality filters, exact, line and near
duplicates, and rows of 2,048 tokens. A small build before it compiles the kernels.

With --kind the corpus is recombined from units of it (scale_corpus.py), with families of copies that grow
with it. `web`: 2.5 kB a document, a recipe as FineWeb's. `short`: 350 bytes a document, exact and near
duplicates, and what stays as text. Then planted near copies tell the quality: of `SAMPLE` copies of a
document that stays, as alike as the recipe asks for, how many were removed (recall); of `SAMPLE` removals,
how many are less like the document they were removed for (needless). With --kill-after the largest build is
killed (SIGKILL, to all its processes) after so many seconds of each try, and goes on.

Seconds and CPU (of the build's process and its workers) are of the time in which a stage had tasks to do; the
checks of the tokenizer, which run beside `clean` and `tokenize`, are counted there. Memory is that of the
largest worker, sampled every 20 ms: RSS counts shared pages whole, PSS divides them. Disk is what a stage's
tasks left in the work folder. An exponent is the slope of log(value) over log(text): 1 is linear growth. "per
TB" is what one more TB of text costs, by the difference of the largest corpus and the smallest: what each
build costs, whatever its size, drops out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from figures import Heads, benchmark_parser, give
from scale_corpus import NEAR_COPY, ORIGINAL, Corpus, make_pool
from shardkit.writers import build
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.work import Work
from support.disk_meter import peak_bytes
from support.rss_meter import RssMeter, process_tree
from texts import EOS, documents, put_tokenizer, similarity, sources_by_language, write_corpus

ROWS = f"""\
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 2048}}
output: {{path: OUT/out}}
work: OUT/work
"""
GROWN = """\
inputs: [{path: "TEXTS/*.jsonl", source: texts}]
filters: [{length: {min_words: 20}}, {gopher_repetition: {}}]
dedup: {exact: {}, lines: {}, near: {}, max_removed_fraction: 1}
"""
WEB = """\
inputs: [{path: "TEXTS/*.jsonl.zst", source: texts}]
filters: [{profile: fineweb}]
dedup: {exact: {}, near: {}, max_removed_fraction: 1}
"""
SHORT = """\
inputs: [{path: "TEXTS/*.jsonl.zst", source: texts, id: id}]
dedup: {exact: {}, near: {}, max_removed_fraction: 1}
output: {path: OUT/out, format: parquet}
work: OUT/work
"""
RECIPES = {"grown": GROWN + ROWS, "web": WEB + ROWS, "short": SHORT}
SIMILARITY, SAMPLE = 0.8, 20_000
FILE_TEXT_BYTES = 64_000_000  # of a corpus of a kind
HEADS: Heads = {
    "what": ("stage", ""),
    "text_MB": ("text MB", ",.0f"),
    "seconds": ("seconds", ",.1f"),
    "cpu_s": ("CPU s", ",.1f"),
    "disk_MB": ("disk MB", ",.0f"),
    "rss_MB": ("largest worker MB", ",.0f"),
    "exponents": ("exponents: seconds, CPU, disk", ""),
    "cpu_hours": ("CPU-hours a TB", ".1f"),
    "disk_TB": ("disk TB a TB", ".3f"),
}
FIXED = {"tokenizer", "parity"}  # checks that run beside other stages, and take the same of any corpus
TICKS = os.sysconf("SC_CLK_TCK")


class Clock:
    """A build's listener: wall and CPU seconds while the same stages had tasks to do."""

    def __init__(self, meter: RssMeter) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._meter = meter
        self._running: list[str] = []
        self._since = (time.perf_counter(), 0.0)

    def __call__(self, stage: StageProgress) -> None:
        self._meter.progress(stage)
        running = [name for name in self._running if name != stage.stage]
        if not stage.finished:
            running.append(stage.stage)
        if sorted(running) == sorted(self._running):
            return
        now = (time.perf_counter(), tree_cpu_seconds())
        if self._running:
            name = "+".join(sorted(set(self._running) - FIXED) or sorted(self._running))
            self.seconds[name] = self.seconds.get(name, 0.0) + now[0] - self._since[0]
            self.cpu[name] = self.cpu.get(name, 0.0) + now[1] - self._since[1]
        self._running, self._since = running, now


def tree_cpu_seconds() -> float:
    """User and system time of this process and of all below it that live."""
    ticks = 0
    for pid in process_tree(os.getpid()):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def run_build(recipe: Path, workers: int) -> dict[str, Any]:
    """Build in this process; what it took."""
    began = time.perf_counter()
    out = recipe.parent / "OUT"
    with peak_bytes(out, seconds=0.2) as peak, RssMeter() as meter:
        clock = Clock(meter)
        result = build(recipe, workers=workers, progress=clock)
    seconds = time.perf_counter() - began
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    disk: dict[str, int] = {}
    for _, commit in Work.at(out / "work").commits():
        disk[commit.stage] = disk.get(commit.stage, 0) + commit.bytes
    return {
        "text_bytes": result.funnel.read.bytes,
        "documents": result.funnel.read.documents,
        "kept_bytes": result.funnel.kept.bytes,
        "tokens": result.tokens or 0,
        "seconds": seconds,
        "cpu_seconds": sum(use.ru_utime + use.ru_stime for use in usage),
        "peak_disk_bytes": peak[0],
        "output_bytes": sum(file.stat().st_size for file in result.output.rglob("*")),
        "rss_bytes": meter.peak.rss,
        "pss_bytes": meter.peak.pss,
        "stages": {
            name: {
                "seconds": clock.seconds[name],
                "cpu_seconds": clock.cpu[name],
                "disk_bytes": sum(disk.get(part, 0) for part in name.split("+")),
                "rss_bytes": max(
                    (meter.stages[p].rss for p in name.split("+") if p in meter.stages), default=0
                ),
            }
            for name in clock.seconds
        },
    }


def measure(
    folder: Path, write: Callable[[Path], object], kills: list[float], options: Any
) -> dict[str, Any]:
    """Write the corpus and build from it, in a process of its own, which is killed and started again."""
    folder.mkdir()
    put_tokenizer(folder, options.tokenizer)
    write(folder / "TEXTS")
    recipe = RECIPES[options.kind]
    (folder / "recipe.yaml").write_text(recipe)
    command = [sys.executable, __file__, "--one", str(folder / "recipe.yaml")]
    command += ["--workers", str(options.workers)]
    for seconds in kills:
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as started:
            with suppress(subprocess.TimeoutExpired):
                started.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def quality(corpus: Corpus, output: Path) -> dict[str, Any]:
    """Measure what became of near copies: recall, and removals for a document that is not as alike."""
    random = np.random.default_rng(0)
    gone, near, kept = np.zeros(corpus.count, np.bool_), [], []
    for file in sorted(output.glob("d*/part-*.parquet")):  # dropped/ and duplicates/
        columns = {"id", "kept_id", "reason"} & set(pq.read_schema(file).names)
        for batch in pq.ParquetFile(file).iter_batches(columns=sorted(columns)):
            numbers = batch["id"].cast(pa.int64()).to_numpy()
            gone[numbers] = True
            if "reason" in columns:
                is_near = pc.equal(batch["reason"], "near_duplicate")
                near.append(batch["id"].filter(is_near).cast(pa.int64()).to_numpy())
                kept.append(batch["kept_id"].filter(is_near).cast(pa.int64()).to_numpy())
    removed, winners = np.concatenate(near), np.concatenate(kept)
    some = random.permutation(len(removed))[:SAMPLE]
    needless = sum(
        similarity(corpus.text(one), corpus.text(other)) < SIMILARITY
        for one, other in zip(removed[some].tolist(), winners[some].tolist(), strict=True)
    )
    planted = missed = 0
    near_copies = np.zeros(corpus.count, np.bool_)
    near_copies[removed] = True
    tries = random.integers(0, corpus.count, 20 * SAMPLE)
    kinds, families = corpus.placed(tries)
    first_kinds, _ = corpus.placed(families)
    usable = (
        (kinds == NEAR_COPY)
        & (first_kinds == ORIGINAL)
        & ~gone[families]
        & (near_copies[tries] | ~gone[tries])
    )
    for one, family in zip(tries[usable].tolist(), families[usable].tolist(), strict=True):
        if planted < SAMPLE and similarity(corpus.text(one), corpus.text(family)) >= SIMILARITY:
            planted += 1
            missed += not gone[one]
    return {
        "near_removed": len(removed),
        "checked": len(some),
        "needless": needless,
        "planted": planted,
        "recall": 1 - missed / max(1, planted),
    }


def exponent(first: dict[str, Any], last: dict[str, Any], name: str) -> str:
    if min(first[name], last[name]) <= 0:
        return "-"
    grown = math.log(last["text_bytes"] / first["text_bytes"])
    return f"{math.log(last[name] / first[name]) / grown:.2f}" if grown else "-"


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each whole build, and for each stage of the largest one."""
    first, last = results[0], results[-1]
    rows = [
        {"what": f"build, {result['label']}", "text_MB": result["text_bytes"] / 1e6}
        | _growth(first if result is last else None, result, "peak_disk_bytes")
        for result in results
    ]
    for name, stage in last["stages"].items():
        before = first["stages"].get(name)
        sizes = {"text_bytes": first["text_bytes"]}, {"text_bytes": last["text_bytes"]}
        row = _growth(None if before is None else before | sizes[0], stage | sizes[1], "disk_bytes")
        rows.append({"what": name, "text_MB": None} | row)
    return rows


def _growth(first: dict[str, Any] | None, last: dict[str, Any], disk: str) -> dict[str, Any]:
    """Figures of `last`; exponents and costs of one more TB of text since `first`."""
    row: dict[str, Any] = {"seconds": last["seconds"], "cpu_s": last["cpu_seconds"]}
    row |= {"disk_MB": last[disk] / 1e6, "rss_MB": last["rss_bytes"] / 1e6}
    row |= {"exponents": "", "cpu_hours": None, "disk_TB": None}
    if first is None:
        return row
    row["exponents"] = " ".join(exponent(first, last, name) for name in ("seconds", "cpu_seconds", disk))
    if more := (last["text_bytes"] - first["text_bytes"]) / 1e12:
        row["cpu_hours"] = (last["cpu_seconds"] - first["cpu_seconds"]) / 3600 / more
        row["disk_TB"] = (last[disk] - first[disk]) / 1e12 / more
    return row


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--corpus", type=Path, help="folder of documents (default: $SHARDKIT_TEST_DATA/corpus)"
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with <|endoftext|>")
    parser.add_argument("--megabytes", type=float, default=20, help="of text (default: %(default)s)")
    parser.add_argument("--times", default="1,3,10", help="default: %(default)s")
    parser.add_argument("--kind", choices=list(RECIPES), default="grown", help="default: %(default)s")
    parser.add_argument("--documents", default="100000,1000000", help="with --kind (default: %(default)s)")
    parser.add_argument("--kill-after", default="", metavar="SECONDS,…", help="of the largest build")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--work", type=Path, help="a folder for all files (default: a temporary one)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_build(options.one, options.workers)))
        return
    kills = [float(one) for one in options.kill_after.split(",") if one]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        corpora = corpora_of(options)
        for number, (label, write, corpus) in enumerate(corpora):
            load, one = os.getloadavg()[0], Path(folder) / str(number)
            found = measure(one, write, kills if number == len(corpora) - 1 else [], options)
            if corpus is not None and number:
                print(json.dumps(quality(corpus, one / "OUT" / "out")), file=sys.stderr)
            shutil.rmtree(one)
            results.append({"label": label, "load": load, **found})
    del results[0]  # it compiled the kernels
    loads = ", ".join(f"{result['load']:.1f}" for result in results)
    print(f"load average before each: {loads}", file=sys.stderr)
    give(options, rows_of(results), HEADS, title="How a build grows with its corpus")


def corpora_of(options: argparse.Namespace) -> list[tuple[str, Callable[[Path], object], Corpus | None]]:
    """Return (label, function that writes it, its rule) of each corpus; the first is to warm up."""
    if options.kind == "grown":
        originals = documents(options.corpus, options.megabytes)
        sizes = [(originals[: len(originals) // 5 + 50], 3)]
        sizes += [(originals, times) for times in map(int, options.times.split(","))]
        return [(f"x {n}", partial(write_corpus, originals=texts, copies=n), None) for texts, n in sizes]
    pool, found = make_pool(options.kind, sources_by_language(options.corpus)), list[Any]()
    for count in [5_000, *map(int, options.documents.split(","))]:
        corpus = Corpus(pool, count)
        size = len(corpus.lines(0, min(count, 5_000))) / min(count, 5_000)
        files = max(1, round(size * count / FILE_TEXT_BYTES))
        found.append((f"{count:,d} documents", partial(corpus.write, files=files), corpus))
    return found


if __name__ == "__main__":
    main()
