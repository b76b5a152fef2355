"""What a build asks of a store as its corpus grows: requests, bytes and CPU of each stage, with exponents.

    python tests/benchmarks/bench_requests.py [--splits 31,61,122,243] [--scale 256] [--split-megabytes 256]
                                              [--lines] [--corpus FOLDER] [--tokenizer FILE]

The whole pipeline runs in one process for each size, with its work folder in a store in memory that counts
requests and bytes. So that megabytes stand for gigabytes, whatever has a size in bytes or rows is divided by
`scale`: the recipe's memory (2 GB), shards (64 MiB), checked blocks, ranges of reads, sorted runs, and the
limits of the exchange. A split is a file of `--split-megabytes` over `scale`. Documents cannot be divided, so
they are cut after 4,000 characters: a longer one would be large against what is divided. There should be
many originals: what is repeated with mutations has more and more partners. Footers of runs, which stay below
64 KiB whatever the size of a run, cannot be divided either: their bytes are divided before they are counted.

A range counts as one request however long it is. CPU is that of the process, with the copies of the store in
memory. An exponent is the slope of log(value) over log(text) between two neighboring sizes: 1 is linear
growth. The requests of a TB are those of a byte of text, at the sizes that stand for the real ones.

Left out are latency, retries, the records of commits (bench_driver.py), publishing, and the raw input, which
is read from local files.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Heads, benchmark_parser, give
from shardkit.progress import make_listener
from shardkit.storage.store import Body, Store
from shardkit.writers.dedup.lines import MAKE_LINE_KEYS
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import RUN_SUFFIX
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.inputs import scan
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages import graph
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.pack import PACK
from support.stores import WrappedStore
from texts import EOS, documents, put_tokenizer, write_corpus

T = TypeVar("T")
RECIPE = f"""\
inputs: [{{path: "TEXTS/*.jsonl", source: texts}}]
filters: [{{length: {{min_words: 20}}}}]
dedup: {{exact: {{}}, LINESnear: {{}}, max_removed_fraction: 1}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 256}}
output: {{path: OUT/out}}
"""
HEADS: Heads = {
    "what": ("stage", ""),
    "tasks": ("tasks", ",d"),
    "gets": ("GETs", ",d"),
    "puts": ("PUTs", ",d"),
    "read_MB": ("MB read", ",.1f"),
    "written_MB": ("MB written", ",.1f"),
    "cpu_seconds": ("CPU s", ".1f"),
    "exponents": ("exponents: GETs, bytes read, CPU", ""),
    "gets_a_TB": ("M GETs a TB", ".2f"),
}
LONGEST = 4000  # characters of a document
MEMORY_BYTES = 2_000_000_000
SHARD_BYTES = 64 << 20
# Constants in bytes or rows that are divided by the scale, by module.
SCALED = {
    "shardkit.writers.execution.commit": ("BLOCK_BYTES",),
    "shardkit.writers.execution.checked_ranges": ("BLOCK_BYTES", "CACHE_BYTES"),
    "shardkit.storage.object_file": ("FIRST_RANGE_BYTES", "MOST_RANGE_BYTES", "_BUFFER_BYTES"),
    "shardkit.writers.inputs.records": ("BATCH_TEXT_BYTES",),
    "shardkit.writers.stages.rows": ("PARTITION_TEXT_BYTES",),
    "shardkit.writers.stages.passes": ("KEYS_MEMORY_BYTES",),
    "shardkit.writers.dedup.candidates": ("_CHUNK",),
    "shardkit.writers.dedup.pairs": ("RUN_PAIRS",),
    "shardkit.writers.dedup.outcomes": ("_MEMORY_BYTES", "_CHUNK_ROWS"),
    "shardkit.writers.dedup.tables": ("CHUNK_ROWS", "_READ_BYTES", "_GAP_BYTES", "_PIECE_BYTES"),
    "shardkit.writers.dedup.lines": ("CHUNK_ROWS", "_KEYS_MEMORY_BYTES"),
}


class Usage:
    """What one stage asked for."""

    def __init__(self) -> None:
        self.gets = self.puts = self.others = self.bytes_read = self.bytes_written = 0
        self.cpu_seconds = 0.0
        self.tasks = 0

    def to_dict(self) -> dict[str, float]:
        return dict(vars(self))


class Held:
    """Bytes of all objects in a store, now and at most."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._sizes: dict[str, int] = {}

    def book(self, key: str, size: int) -> None:
        self._now += size - self._sizes.get(key, 0)
        self._sizes[key], self.most = size, max(self.most, self._now)


class CountingStore(WrappedStore):
    """Books every request on the stage that runs (one at a time: tasks run inline).

    The bytes of footers, which are at the end of runs, are divided by `scale`.
    """

    def __init__(
        self, below: Store, stages: dict[str, Usage], current: list[str], held: Held, scale: int
    ) -> None:
        super().__init__(below)
        self._stages, self._current, self._held, self._scale = stages, current, held, scale
        self._lock = threading.Lock()

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        with self._lock:
            usage = self._stages[self._current[0]]
            if operation == "put":
                usage.puts += 1
            else:
                usage.others += 1
        done = action()
        if operation in ("put", "delete"):
            with self._lock:
                self._held.book(key, 0 if operation == "delete" else self.below.head(key).bytes)
        return done

    def opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        body = self.below.open(key, start, stop, version=version)
        end = self.below.head(key).bytes
        size = (end if stop is None else stop) - start
        if key.endswith(RUN_SUFFIX) and start and stop == end:
            size //= self._scale
        with self._lock:
            usage = self._stages[self._current[0]]
            usage.gets += 1
            usage.bytes_read += size
        return body


def scaled(recipe: Recipe, scale: int) -> Recipe:
    """The recipe with its sizes divided, below what a user may set."""
    output = recipe.output.model_copy(update={"shard_bytes": SHARD_BYTES // scale})
    changes = {"memory": MEMORY_BYTES // scale, "output": output}
    return recipe.model_copy(update=changes | {"max_failed_splits": 1})  # files stand for large ones


def run_build(recipe_path: Path, scale: int) -> dict[str, Any]:
    """Run all stages in this process; what each of them took."""
    stages: dict[str, Usage] = defaultdict(Usage)
    current = ["driver"]
    with ExitStack() as stack:
        for name, constants in SCALED.items() if scale > 1 else ():
            module = importlib.import_module(name)
            for constant in constants:
                divided = max(1, getattr(module, constant) // scale)
                stack.enter_context(patch.object(module, constant, divided))
        recipe = scaled(load_recipe(recipe_path), scale)
        held = Held()
        around = lambda store: CountingStore(store, stages, current, held, scale)  # noqa: E731
        scratch = recipe_path.parent / "scratch"
        work = Work(f"memory://requests-{os.getpid()}/work", scratch, around=around)
        splits = scan.scan_inputs(recipe, None)

        def counted(task: Task, digest: str, work: Work) -> Commit:
            current[0] = task.stage
            began = time.process_time()
            try:
                return run_task(task, digest, work)
            finally:
                usage = stages[task.stage]
                usage.cpu_seconds += time.process_time() - began
                usage.tasks += 1
                current[0] = "driver"

        with (
            Journal(work) as journal,
            InlineEngine(counted) as engine,
            make_listener(False) as listener,
        ):
            runner = Runner(journal, engine, listener)
            began = time.process_time()
            inputs = replace(
                BuildInputs.of(recipe, splits), limits=DEFAULT_LIMITS.within(MEMORY_BYTES).divided(scale)
            )
            made = graph.run_build(inputs, runner.run)
            [outputs], kept = made.outputs, made.written[0].kept
            whole = time.process_time() - began
            stages["driver"].cpu_seconds = whole - sum(usage.cpu_seconds for usage in stages.values())
            lines = 0
            for _, commit in journal.work.commits():
                stages[commit.stage].bytes_written += commit.bytes
                lines += MAKE_LINE_KEYS.result(commit).keys if commit.stage == "line_keys" else 0
        return {
            "splits": len(splits),
            "text_bytes": kept.bytes,
            "documents": kept.documents,
            "partitions": len(outputs.packed),
            "tokens": sum(PACK.result(commit).tokens for commit in outputs.packed),
            "lines": lines,
            "most_bytes": held.most,
            "stages": {name: usage.to_dict() for name, usage in stages.items()},
        }


def measure(folder: Path, originals: list[str], splits: int, options: Namespace) -> dict[str, Any]:
    """Write the corpus and build from it, in a process of its own."""
    folder.mkdir()
    put_tokenizer(folder, options.tokenizer)
    file_bytes = int(options.split_megabytes * 1e6 / options.scale)
    held = sum(len(text.encode()) for text in originals)
    write_corpus(folder / "TEXTS", originals, 1 + int(splits * file_bytes / held), file_bytes=file_bytes)
    for surplus in sorted((folder / "TEXTS").iterdir())[splits:]:
        surplus.unlink()
    recipe = RECIPE.replace("LINES", "lines: {}, " if options.lines else "")
    (folder / "recipe.yaml").write_text(recipe)
    command = [sys.executable, __file__, "--one", str(folder / "recipe.yaml"), "--scale", str(options.scale)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return dict(json.loads(printed))


def exponents(results: list[dict[str, Any]], stage: str, name: str) -> str:
    """The slopes between neighboring sizes."""
    slopes = []
    for a, b in pairwise(results):
        first, last = a["stages"].get(stage, {}).get(name, 0), b["stages"].get(stage, {}).get(name, 0)
        grown = math.log(b["text_bytes"] / a["text_bytes"])
        slopes.append(f"{math.log(last / first) / grown:.2f}" if first and last and grown else "-")
    return " ".join(slopes)


def rows_of(results: list[dict[str, Any]], scale: int) -> list[dict[str, Any]]:
    """A row for each stage of the largest build, and for each whole build."""
    rows = []
    for name, use in sorted(results[-1]["stages"].items()):
        slopes = (exponents(results, name, figure) for figure in ("gets", "bytes_read", "cpu_seconds"))
        rows.append({"what": name, **use, "exponents": " | ".join(slopes), "gets_a_TB": None})
    for result in results:
        text = result["text_bytes"]
        uses = result["stages"].values()
        total = {name: sum(use[name] for use in uses) for name in next(iter(uses))}
        what = f"{result['splits']} splits, {text / 1e6:.0f} MB, {result['partitions']} partitions"
        rows.append({"what": what, **total, "exponents": "", "gets_a_TB": total["gets"] / text / scale * 1e6})
    return [
        row | {"read_MB": row["bytes_read"] / 1e6, "written_MB": row["bytes_written"] / 1e6} for row in rows
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--corpus", type=Path, help="folder of documents (default: $SHARDKIT_TEST_DATA/corpus)"
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with <|endoftext|>")
    parser.add_argument("--splits", default="31,61,122,243", help="default: %(default)s")
    parser.add_argument(
        "--split-megabytes", type=float, default=256, help="before scaling (default: %(default)s)"
    )
    parser.add_argument("--scale", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--megabytes", type=float, default=80, help="of original text (default: %(default)s)")
    parser.add_argument("--lines", action="store_true", help="remove duplicate lines, too")
    parser.add_argument("--work", type=Path, help="a folder for all files (default: a temporary one)")
    parser.add_argument("--one", type=Path, help="run one build (used by this benchmark itself)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_build(options.one, options.scale)))
        return
    whole = documents(options.corpus, options.megabytes)
    originals = [text[at : at + LONGEST] for text in whole for at in range(0, len(text), LONGEST)]
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        results = [
            measure(Path(folder) / splits, originals, int(splits), options)
            for splits in options.splits.split(",")
        ]
    give(options, rows_of(results, options.scale), HEADS, title="Requests of a build by stage")


if __name__ == "__main__":
    main()
