"""In no stage a worker takes more than `memory` and its libraries, whatever the size of the corpus."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import zstandard

from shardkit.writers import build
from support.rss_meter import RssMeter
from support.small_build import make_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_dedup import write_documents

MEMORY = 1 << 28
LIBRARIES = 365_000_000  # RSS of a worker that has loaded all kernels, with what zstd keeps; half is shared
TASK = MEMORY // 5  # of duplicate removal: writers/stages/duplicate_losses.py
LARGE = {
    "tokenize",
    "parity",
    "pack",
    "provenance",
}  # runs of tokens, partitions
DOCUMENTS = 120_000
RECIPE = """\
inputs:
  - {path: "documents-*.jsonl", source: plain}
  - {path: "one.jsonl.zst", source: "one split"}
filters: [{length: {min_words: 10}}, {gopher_repetition: {dup_n_grams: []}}]
annotate: true
dedup: {exact: {}, lines: {}, near: {measure: {planted: 200}}, max_removed_fraction: 1}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 2048}
output: {path: out, shard_bytes: 16MiB}
work: work
memory: 256MiB
"""


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
    held = sum(file.stat().st_size for file in (tmp_path / "work").rglob("*"))
    assert held > 1.3 * MEMORY  # so that who held it all would be seen
    assert {"clean", "exact", "lines", "signatures", "tokenize"} <= meter.stages.keys()  # long enough to see
    assert min(meter.stages[stage].rss for stage in ("clean", "lines", "tokenize")) > 64 << 20  # it measures
    bounds = {stage: LIBRARIES + (MEMORY if stage in LARGE else TASK) for stage in meter.stages}
    assert {stage: peak for stage, peak in meter.stages.items() if peak.rss > bounds[stage]} == {}
