"""Duplicate removal over millions of short documents: memory, disk and time, and how they grow.

    python tests/benchmarks/soak_dedup.py [--documents 500000,5000000] [--work DIR] [--memory 1GB]
                                          [--command "shardkit dedup-index RECIPE INDEX --workers 2"] [--json]

Documents are 30 to 60 words of a Zipf vocabulary, in 8 JSONL files (1.4 GB for 5 million, made in a minute or
two, the same each time). Among them: 8 % that have the text of another one, 8 % near-duplicates (one of the
first words replaced: Jaccard similarity of 5-grams 0.84 or more), 4 % that are nearly that (a word in the
middle replaced: 0.68 to 0.84), and 2 % from 5 templates that differ in their last words only, so that
they meet in very large buckets.

In the command, RECIPE, INDEX and FOLDER stand for the recipe (exact and near), a folder to write to and the
folder of both. Memory is of the whole process tree, every 50 ms: RSS summed over processes (shared pages as
often as they are shared) and, once a second, PSS (shared pages once). Disk is of the work folder and INDEX.
Stages are taken from the commits in the work folder: a stage ends with its last task.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import benchmark_parser
from support.disk_meter import disk_bytes
from support.rss_meter import process_tree, pss_bytes, rss_bytes
from support.small_build import EOS, make_corpus

FILES = 8
CHUNK = 10_000
VOCABULARY = 60_000
POOL = 20_000  # texts that copies are made of; each new text may take the place of one of them
TEMPLATES = 5
SHARES = {"copy": 0.08, "near": 0.08, "nearly": 0.04, "template": 0.02}
SAMPLE_SECONDS = 0.05
RECIPE = f"""\
inputs:
  - {{path: "documents-*.jsonl", source: soak}}
dedup: {{exact: {{}}, near: {{}}}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 2048}}
output: {{path: out}}
work: work
memory: MEMORY
"""


def vocabulary(random: np.random.Generator) -> npt.NDArray[np.str_]:
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    drawn = letters[np.minimum(random.geometric(0.12, (VOCABULARY * 2, 9)) - 1, 25)]
    sizes = random.integers(2, 10, len(drawn))
    words = {"".join(row[:size]) for row, size in zip(drawn.tolist(), sizes.tolist(), strict=True)}
    chosen = np.array(sorted(words))
    random.shuffle(chosen)
    return chosen[:VOCABULARY]


class Writer:
    """Makes texts, chunk by chunk; `counts` says how many of each kind."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._words = vocabulary(self._random)
        weights = 1.0 / (np.arange(len(self._words)) + 2.7)
        self._edges = np.cumsum(weights / weights.sum())
        self._pool: list[list[str]] = []
        self._templates = [self._draw([40])[0] for _ in range(TEMPLATES)]
        self.counts = dict.fromkeys(("plain", *SHARES), 0)

    def _draw(self, sizes: list[int]) -> list[list[str]]:
        """Texts of so many words each, with Zipf's frequencies."""
        chosen = np.searchsorted(self._edges, self._random.random(sum(sizes)))
        words = self._words[np.minimum(chosen, len(self._words) - 1)].tolist()
        ends = np.cumsum(sizes).tolist()
        return [words[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def chunk(self, count: int) -> Iterator[str]:
        random = self._random
        plain = iter(self._draw(random.integers(30, 61, count).tolist()))
        names, odds = list(SHARES), list(SHARES.values())
        kinds = random.choice(["plain", *names], count, p=[1 - sum(odds), *odds]).tolist()
        picks = random.integers(0, max(1, len(self._pool)), (count, 3)).tolist()
        for kind, (pick, place, other) in zip(kinds, picks, strict=True):
            if kind in ("copy", "near", "nearly") and not self._pool:
                kind = "plain"
            self.counts[kind] += 1
            if kind == "plain":
                words = next(plain)
                if len(self._pool) < POOL:
                    self._pool.append(words)
                else:
                    self._pool[pick] = words
            elif kind == "template":
                words = self._templates[pick % TEMPLATES] + next(plain)[: 1 + place % 4]
            else:
                words = self._changed(self._pool[pick], kind, place, other)
            yield " ".join(words)

    def _changed(self, words: list[str], kind: str, place: int, other: int) -> list[str]:
        if kind == "copy":
            return words
        fresh = str(self._words[-1 - other % (VOCABULARY // 2)])
        at = place % (len(words) // 13) if kind == "near" else len(words) // 2  # costs at + 1 n-grams
        return [*words[:at], fresh, *words[at + 1 :]]


def write_documents(folder: Path, documents: int, seed: int) -> dict[str, int]:
    """documents-0.jsonl … and what they hold."""
    writer, number = Writer(seed), 0
    for file in range(FILES):
        end = documents * (file + 1) // FILES
        with (folder / f"documents-{file}.jsonl").open("w") as out:
            while number < end:
                count = min(CHUNK, end - number)
                texts = enumerate(writer.chunk(count), number)
                out.write("".join(f'{{"id":"{id}","text":"{text}"}}\n' for id, text in texts))
                number += count
    return writer.counts


@dataclass
class Samples:
    """What a process tree took while it ran."""

    times: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    pss_peak: int = 0
    disk_peak: int = 0


def sample(process: subprocess.Popen[bytes], folders: list[Path], ended: threading.Event) -> Samples:
    """Until the process has ended."""
    samples, slow = Samples(), 0.0
    while not ended.wait(SAMPLE_SECONDS):
        tree = process_tree(process.pid)
        samples.rss.append(sum(map(rss_bytes, tree)))
        samples.times.append(time.time())
        if time.monotonic() - slow > 1:
            samples.pss_peak = max(samples.pss_peak, sum(map(pss_bytes, tree)))
            samples.disk_peak = max(samples.disk_peak, disk_bytes(*folders))
            slow = time.monotonic()
    return samples


def stages(work: Path, began: float, samples: Samples) -> list[dict[str, Any]]:
    """Seconds and peak RSS of each stage, in order; empty if the work folder is gone."""
    ends = {
        stage.name: max((commit.stat().st_mtime for commit in stage.glob("*/commit.json")), default=0.0)
        for stage in (work.iterdir() if work.is_dir() else ())
        if stage.is_dir()
    }
    times, rss = np.array(samples.times), np.array(samples.rss)
    rows, start = [], began
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > start:
            inside = rss[(times >= start) & (times <= end)]
            peak = int(inside.max()) if len(inside) else 0
            rows.append({"stage": name, "seconds": end - start, "peak_rss_MB": peak / 1e6})
            start = end
    return rows


def soak(folder: Path, documents: int, command: str, memory: str, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    counts = write_documents(folder, documents, seed)
    made = time.perf_counter() - began
    recipe, index = folder / "recipe.yaml", folder / "index"
    shutil.copy(make_corpus(folder / "small", 20).parent / "tokenizer.json", folder)
    recipe.write_text(RECIPE.replace("MEMORY", memory))
    for name, place in {"RECIPE": recipe, "INDEX": index, "FOLDER": folder}.items():
        command = command.replace(name, shlex.quote(str(place)))
    words = shlex.split(command)
    log, ended, samples = folder / "log.txt", threading.Event(), Samples()
    began, start = time.time(), time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)

        def watch() -> None:
            nonlocal samples
            samples = sample(process, [folder / "work", index, folder / "out"], ended)

        watcher = threading.Thread(target=watch)
        watcher.start()
        status = process.wait()
        seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
    printed = log.read_text(errors="replace")
    if status:
        raise SystemExit(f"{shlex.join(words)} ended with {status}:\n{printed[-4000:]}")
    return {
        "documents": documents,
        "input_bytes": sum(file.stat().st_size for file in folder.glob("documents-*.jsonl")),
        "made": counts,
        "making_seconds": made,
        "seconds": seconds,
        "peak_rss_MB": max(samples.rss, default=0) / 1e6,
        "peak_pss_MB": samples.pss_peak / 1e6,
        "peak_disk_MB": samples.disk_peak / 1e6,
        "stages": stages(folder / "work", began, samples),
        "printed": printed[-4000:],
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['documents']:,} documents, {result['input_bytes'] / 1e6:,.0f} MB: {result['made']}")
    for name in ("making_seconds", "seconds", "peak_rss_MB", "peak_pss_MB", "peak_disk_MB"):
        print(f"  {name:16}{result[name]:12,.1f}")
    for stage in result["stages"]:
        print(f"  {stage['stage']:16}{stage['seconds']:12.1f} s{stage['peak_rss_MB']:12,.0f} MB")
    print("  printed:", result["printed"].strip().replace("\n", "\n    "))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", default="500000,5000000", help="default: %(default)s")
    default = f"{sys.executable} -m shardkit dedup-index RECIPE INDEX --workers 2"
    parser.add_argument("--command", default=default, help="default: %(default)s")
    parser.add_argument("--memory", default="1GB", help="of the recipe (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="a folder for all files (default: a temporary one)")
    options = parser.parse_args()
    results = []
    for documents in map(int, options.documents.split(",")):
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            results.append(soak(Path(folder), documents, options.command, options.memory, options.seed))
        if not options.json:
            show(results[-1])
    if options.json:
        print(json.dumps(results))
    elif len(results) > 1:
        first, last = results[0], results[-1]
        print(f"\nfrom {first['documents']:,} to {last['documents']:,} documents, times")
        for name in ("documents", "seconds", "peak_rss_MB", "peak_pss_MB", "peak_disk_MB"):
            print(f"  {name:16}{last[name] / first[name]:8.2f}" if first[name] else f"  {name:16}")


if __name__ == "__main__":
    main()
