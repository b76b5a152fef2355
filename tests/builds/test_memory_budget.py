"""In no stage a worker takes more than `memory` and its libraries, and none takes more for more documents."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from shardkit.progress import make_listener
from shardkit.writers import build
from shardkit.writers.dedup.index import index_settings
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.index_build import publish_index
from shardkit.writers.index_files import INDEX, INDEX_TABLES, write_index
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import load_recipe
from shardkit.writers.stages.flow import Build
from shardkit.writers.stages.graph import find_survivors, run_build
from shardkit.writers.stages.inputs import BuildInputs
from support.rss_meter import RssMeter, workers_of
from support.small_build import make_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_dedup import write_documents

MEMORY = 1 << 28
LIBRARIES = 390_000_000  # RSS of a worker that has loaded all kernels, with what zstd keeps; half is shared
TASK = MEMORY // 5  # of duplicate removal: writers/stages/flow.py
LARGE = {"tokenize", "parity", "pack", "provenance", "duplicates"}  # the last, as others leave its workers
DOCUMENTS = 190_000
RECIPE = """\
inputs:
  - {path: "documents-*.jsonl", source: plain}
  - {path: "one.jsonl.zst", source: "one split"}
filters: [{length: {min_words: 10}}, {gopher_repetition: {dup_n_grams: []}}]
annotate: true
dedup: {exact: {}, lines: {}, near: {}, max_removed_fraction: 1}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 2048}
output: {path: out, shard_bytes: 16MiB}
work: work
memory: 256MiB
"""


def test_a_copy_of_the_process_that_has_not_run_exec_yet_is_no_worker() -> None:
    """It would count with all that earlier tests left in memory."""
    if (copy := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    with subprocess.Popen(["sleep", "60"]) as worker:
        found = workers_of(os.getpid())
        worker.kill()
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    assert worker.pid in found
    assert copy not in found


@pytest.mark.extended
def test_no_stage_holds_more_than_memory_and_libraries(tmp_path: Path) -> None:
    shutil.copy(make_corpus(tmp_path / "small", 20).parent / "tokenizer.json", tmp_path)
    write_documents(tmp_path, 2000, seed=2)
    (tmp_path / "one.jsonl.zst").write_bytes(
        zstandard.compress((tmp_path / "documents-0.jsonl").read_bytes())
    )
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    build(tmp_path / "recipe.yaml", workers=2, progress=False)  # compiles kernels, which takes more once
    write_documents(tmp_path, DOCUMENTS, seed=1)
    halves = sorted(tmp_path.glob("documents-*.jsonl"))[::2]
    (tmp_path / "one.jsonl.zst").write_bytes(
        zstandard.compress(b"".join(half.read_bytes() for half in halves), 1)
    )
    for half in halves:
        half.unlink()
    with RssMeter() as meter:
        build(tmp_path / "recipe.yaml", workers=2, replace=True, progress=meter.progress)
    written = sum(commit.bytes for _, commit in Work.at(tmp_path / "work").commits())
    assert written > 1.2 * MEMORY  # so that who held it all would be seen
    assert {"clean", "exact", "lines", "signatures", "tokenize"} <= meter.stages.keys()  # long enough to see
    assert min(meter.stages[stage].rss for stage in ("clean", "lines", "tokenize")) > 64 << 20  # it measures
    bounds = {stage: LIBRARIES + (MEMORY if stage in LARGE else TASK) for stage in meter.stages}
    assert {stage: peak for stage, peak in meter.stages.items() if peak.rss > bounds[stage]} == {}


SMALL_MEMORY = 4 << 20
SPLIT_DOCUMENTS = 200
FIXED = 900_000  # what has the same size in every task: buffers, tables of kernels
SMALL_RECIPE = """\
inputs: [{path: "part-*.jsonl", source: plain}]
filters: [{length: {min_words: 3}}]
dedup: {exact: {}, lines: {}, near: {}, max_removed_fraction: 1}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 64KiB}
"""


def write_splits(folder: Path, splits: int) -> Path:
    """Each second document is nearly the one before it in the split before; a few are the same in all."""
    recipe = make_corpus(folder, 20, SMALL_RECIPE)
    for split in range(splits):
        lines = []
        for number in range(SPLIT_DOCUMENTS):
            is_like = number % 2 == 1 and split
            words = words_of(split - 1, number - 1) if is_like else words_of(split, number)
            text = " ".join([*words, *(["end"] if is_like else [])])
            lines.append(json.dumps({"text": text + "\na line of all of them"}) + "\n")
        (folder / f"part-{split:05d}.jsonl").write_text("".join(lines))
    return recipe


def words_of(split: int, number: int) -> list[str]:
    drawn = random.Random(number if number < 10 else f"{split} {number}")
    return [f"w{drawn.randrange(99_991)}" for _ in range(60)]


def peaks_of(folder: Path, splits: int, *, is_traced: bool = True) -> dict[str, int]:
    """Bytes that a task of each stage had allocated at most, above what was there before it.

    Of an index of the documents, and of a build of these documents, changed, against it.
    """
    changes = {"memory": SMALL_MEMORY, "max_failed_splits": 1}  # a task for each file
    recipe = load_recipe(write_splits(folder, splits)).model_copy(update=changes)
    assert recipe.dedup.near is not None
    limits = replace(DEFAULT_LIMITS.within(SMALL_MEMORY).divided(256), fan_in=8, least_segments=8)
    peaks: dict[str, int] = defaultdict(int)

    def counted(task: Task, digest: str, work: Work) -> Commit:
        if is_traced:
            tracemalloc.start()
        try:
            return run_task(task, digest, work)
        finally:
            peaks[task.stage] = max(peaks[task.stage], tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    with (
        Journal(Work.at(folder / "work")) as journal,
        InlineEngine(counted) as engine,
        make_listener(False) as listener,
    ):
        runner = Runner(journal, engine, listener)
        inputs = replace(BuildInputs.of(recipe, scan_inputs(recipe)), limits=limits)
        documents = find_survivors(Build(inputs, runner.run, to_index=True))
        made = write_index(runner.run, documents, recipe.dedup.near, 64, limits=limits)
        settings = index_settings(recipe.dedup.near)
        parts = [(one.folder, INDEX.result(one)) for one in made.parts.values()]
        tables = [(one.folder, INDEX_TABLES.result(one)) for one in made.tables.values()]
        publish_index(parts, tables, folder / "index", {}, settings, sketch=64)
        for number, path in enumerate(sorted(folder.glob("part-*.jsonl"))):  # a word of 9, or of 90
            path.write_text(path.read_text().replace(*[(" w1", " x1"), (" w11", " x11")][number % 2]))
        near = recipe.dedup.near.model_copy(update={"against": ("index",)})
        recipe = recipe.model_copy(update={"dedup": recipe.dedup.model_copy(update={"near": near})})
        inputs = replace(BuildInputs.of(recipe, scan_inputs(recipe)), limits=limits)
        run_build(inputs, runner.run)
    return dict(peaks)


@pytest.mark.extended
def test_tasks_of_no_stage_hold_more_of_sixteen_times_the_documents(tmp_path: Path) -> None:
    """NumPy's arrays are counted, Arrow's are not: those are batches of bounded size."""
    peaks_of(tmp_path / "first", 12, is_traced=False)  # merges, too, so that their kernels are compiled
    some, more = peaks_of(tmp_path / "some", 5), peaks_of(tmp_path / "more", 80)
    assert {"candidates", "shingles", "verify", "near", "near_lost"} <= some.keys()
    assert {"line_keys", "lines", "index"} <= some.keys()
    assert {"equal-equal_keys-merge-2", "verify-texts-merge-2", "pack-tokens-addresses"} <= more.keys()
    merges = {stage for stage in more if "-merge-" in stage}
    whole = {
        "tokenize",
        "pack",
        "pack-tokens-addresses",
        "provenance",
        *merges,
    }  # may hold all of the memory, the others a fifth
    bounds = {stage: FIXED + (SMALL_MEMORY if stage in whole else SMALL_MEMORY // 5) for stage in more}
    bounds |= {"tokenizer": 8 << 20, "parity": 32 << 20}  # a tokenizer, and a sample of texts
    assert {stage: (peak, bounds[stage]) for stage, peak in more.items() if peak > bounds[stage]} == {}
