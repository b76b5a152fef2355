"""Semantic duplicates: documents a second to static vectors; time, memory and recall of their removal.

    python tests/benchmarks/bench_semantic.py [--documents 1000000] [--dimensions 256] [--probes 1,4]
                                              [--corpus FOLDER] [--parts vectors,joined,removal]
                                              [--save PREFIX]

vectors: documents of 400 words, cut from the corpus (JSONL and Parquet files with a `text`; without --corpus
that of $SHARDKIT_TEST_DATA, else made-up text), become vectors by a WordPiece vocabulary of their 30,000 most
common words and random token vectors; one process, one thread. `first` are a quarter of the documents, most
of whose words the process had not met; `later` are new documents after three quarters. `tokenizers` is the
same model with the tokenizer's library for each text; it gets fewer documents.

joined: 400,000 random vectors (float32) with ids, in four Parquet files, are sorted into a table; then the
vectors of 100,000 random ids are looked up, 4,096 at a time, which is what a document costs later.

removal: `--documents` vectors around random topics. A tenth are copies of others at cosines from 0.90 to 1
(uniform); recall is the share of the copies at `similarity` (0.95) or above that went: these are known by
construction, so that all pairs need not be compared. All stages that follow run in a process of its own,
one after another; its peak memory is the largest resident size that it had, with `memory: 2GB`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from figures import Heads, benchmark_parser, give
from shardkit.hashing import hash_file
from shardkit.progress import make_listener
from shardkit.writers.dedup.config import EmbedConfig, SemanticDedupConfig
from shardkit.writers.dedup.outcomes import OUTCOME
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part
from shardkit.writers.dedup.semantic import VECTORS_FILE, remove_semantic
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.work import Work
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.embed import StaticModel
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.needs import task_memory
from shardkit.writers.stages.vectors import sort_vectors
from texts import read_sources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.static_model import make_static_model

MEMORY = 2_000_000_000
SIMILARITY = 0.95
COPIES = 0.1
TOPICS = 2000
PART = 50_000
HEADS: Heads = {
    "part": ("part", ""),
    "documents": ("documents", ",d"),
    "rate": ("documents/s", ",.0f"),
    "cpu_s": ("CPU s", ",.1f"),
    "peak_bytes": ("peak memory, bytes", ",d"),
    "recall": ("recall", ".4f"),
    "wrong": ("wrong removals", "d"),
}


def cut(corpus: Path | None, documents: int) -> list[str]:
    """Documents of 400 words, about 500 tokens."""
    words = [text.split() for text in read_sources(corpus)]
    cuts = [" ".join(one[at : at + 400]) for one in words for at in range(0, len(one) - 399, 400)]
    return [cuts[number % len(cuts)] for number in range(documents)]


def measure_vectors(corpus: Path | None, documents: int, dimensions: int) -> list[dict[str, Any]]:
    texts = cut(corpus, documents)
    counts = Counter(word for text in texts for word in text.lower().split() if word.isalnum())
    common = [word for word, _ in counts.most_common(30_000)]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_static_model(folder, common, dimensions)
        model = StaticModel(folder / "vectors.safetensors", folder / "words.json", 512)
        quarter = documents // 4
        slow = StaticModel(folder / "vectors.safetensors", folder / "words.json", 512)
        slow._words = None
        slices = {"first": (model, 0, quarter), "": (model, quarter, 3 * quarter)}
        slices |= {"later": (model, 3 * quarter, documents), "tokenizers": (slow, 0, quarter // 20)}
        model(pa.array(texts[:200], pa.large_string()))
        for name, (one, start, stop) in slices.items():
            some = pa.array(texts[start:stop], pa.large_string())
            began = time.process_time()
            for at in range(0, len(some), 4096):
                one(some[at : at + 4096])
            cpu = time.process_time() - began
            side = f"static vectors, {name}"
            if name:
                rows.append({"part": side, "documents": len(some), "rate": len(some) / cpu, "cpu_s": cpu})
    return rows


def measure_joined(folder: Path, documents: int, dimensions: int) -> list[dict[str, Any]]:
    rng, most = np.random.default_rng(1), documents // 4
    for part in range(4):
        values = pa.array(rng.standard_normal(most * dimensions, np.float32))
        column = pa.FixedSizeListArray.from_arrays(values, dimensions)
        ids = [f"{part * most + number:032x}" for number in range(most)]
        pq.write_table(pa.table({"document_id": ids, "embedding": column}), folder / f"{part}.parquet")
    data = {"inputs": ["none.jsonl"], "output": {"path": "out", "format": "jsonl"}}
    semantic = {"embed": {"vectors": str(folder / "*.parquet")}}
    recipe = recipe_from_mapping(data | {"dedup": {"semantic": semantic}}, folder=folder)
    given = BuildInputs.of(recipe, []).vectors
    assert given is not None
    with (
        Journal(Work.at(folder / "work")) as journal,
        InlineEngine() as engine,
        make_listener(False) as listener,
    ):
        of = given.splits, given.config, dimensions, task_memory(MEMORY), DEFAULT_LIMITS.within(MEMORY)
        began = time.process_time()
        joined = sort_vectors(Runner(journal, engine, listener).run, *of)
        sorting = time.process_time() - began
        lookup, looked = joined.open(), [rng.integers(0, documents, 4096) for _ in range(24)]
        names = [[f"{number:032x}" for number in some.tolist()] for some in looked]
        began = time.process_time()
        for some in names:
            lookup(some)
        looking = time.process_time() - began
    count = sum(map(len, names))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        {"part": "joined, sorted", "documents": documents, "rate": documents / sorting, "cpu_s": sorting}
        | {"peak_bytes": peak},
        {"part": "joined, looked up", "documents": count, "rate": count / looking, "cpu_s": looking},
    ]


def make_vectors(folder: Path, documents: int, dimensions: int) -> int:
    """Write parts with vectors, and truth.npy: (copy, original, cosine); returns the number of parts."""
    rng = np.random.default_rng(1)
    topics = rng.standard_normal((TOPICS, dimensions)).astype(np.float32)
    truth: list[tuple[int, int, float]] = []
    parts = -(-documents // PART)
    for part in range(parts):
        count = min(PART, documents - part * PART)
        (folder / f"{part:03d}").mkdir()
        found = topics[rng.integers(0, TOPICS, count)] + rng.standard_normal((count, dimensions), np.float32)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        copies = np.arange(int(count * (1 - COPIES)), count)
        originals = rng.permutation(copies[0])[: len(copies)]
        cosine = rng.uniform(0.90, 1.0, len(copies))
        noise = rng.standard_normal((len(copies), dimensions)).astype(np.float32)
        noise -= (noise * found[originals]).sum(axis=1, keepdims=True) * found[originals]
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        side = np.sqrt(1 - cosine**2)[:, None]
        found[copies] = (cosine[:, None] * found[originals] + side * noise).astype(np.float32)
        stored = found.astype(np.float16)
        exact = stored.astype(np.float64)
        exact /= np.linalg.norm(exact, axis=1, keepdims=True)
        real = (exact[copies] * exact[originals]).sum(axis=1)
        truth += zip((part * PART + copies).tolist(), (part * PART + originals).tolist(), real, strict=True)
        rows = np.zeros(count, DOCUMENT)
        rows["id"] = rng.integers(0, 256, (count, 16), dtype=np.uint8)
        rows["row"], rows["copies"], rows["bytes"] = (
            np.arange(count),
            1,
            5000 - 1000 * (np.arange(count) >= copies[0]),
        )
        with RowsWriter(folder / f"{part:03d}" / DOCUMENTS_FILE, DOCUMENT) as writer:
            writer.write(rows)
        with RowsWriter(folder / f"{part:03d}" / VECTORS_FILE, "<f2", width=dimensions) as vectors:
            vectors.write(stored)
    np.save(folder / "truth.npy", np.array(truth, [("copy", "<i8"), ("original", "<i8"), ("cosine", "<f8")]))
    return parts


def remove_one(folder: Path, dimensions: int, probes: int) -> None:
    """Run all stages on the vectors of `make_vectors`, and print what it took and found."""
    given = EmbedConfig(function="my_vectors:embed")
    config = SemanticDedupConfig(embed=given, similarity=SIMILARITY, probes=probes)
    parts = []
    for path in sorted(one for one in folder.iterdir() if one.name.isdigit()):
        content = hash_file(path / VECTORS_FILE, ["xxh3_128"])["xxh3_128"]
        count = len(np.load(path / DOCUMENTS_FILE, mmap_mode="r"))
        parts.append(Part(Artifact(path, content=content), count))
    began = time.process_time()
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as work,
        Journal(Work.at(Path(work))) as journal,
        InlineEngine() as engine,
        make_listener(False) as listener,
    ):
        runner = Runner(journal, engine, listener)
        names = [f"{number:05d}" for number in range(len(parts))]
        found = remove_semantic(
            runner.run, parts, names, dimensions, config, task_memory(MEMORY), DEFAULT_LIMITS.within(MEMORY)
        )
        gone = [table.read(OUTCOME) for table in found.removed]
        stages = {stage: round(seconds, 1) for stage, seconds in runner.seconds.items()}
    rows = np.concatenate(
        [one["row"][one["copies"] == 0].astype(np.int64) + PART * part for part, one in enumerate(gone)]
    )
    truth = np.load(folder / "truth.npy")
    alike = truth["copy"][truth["cosine"] >= SIMILARITY]
    answer = {
        "cpu_s": time.process_time() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "recall": float(np.isin(alike, rows).mean()),
        "wrong": int((~np.isin(rows, alike)).sum()),
        "counts": dict(found.counts),
        "stages": stages,
    }
    print(json.dumps(answer))


def measure_removal(folder: Path, documents: int, dimensions: int, probes: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(folder), str(dimensions), str(probes)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | one_thread)
    answer: dict[str, Any] = json.loads(done.stdout)
    rate = documents / answer["cpu_s"]
    return {"part": f"removal, probes: {probes}", "documents": documents, "rate": rate} | answer


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--texts", type=int, default=16_000, help="documents that become vectors")
    parser.add_argument("--dimensions", type=int, default=256)
    parser.add_argument("--probes", default="1,4")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER")
    parser.add_argument("--joined", type=int, default=400_000, help="vectors that are joined by id")
    parser.add_argument("--parts", default="vectors,joined,removal")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        remove_one(Path(arguments.one[0]), int(arguments.one[1]), int(arguments.one[2]))
        return
    rows = []
    if "vectors" in arguments.parts:
        rows += measure_vectors(arguments.corpus, arguments.texts, arguments.dimensions)
    if "joined" in arguments.parts:
        with tempfile.TemporaryDirectory() as place:
            rows += measure_joined(Path(place), arguments.joined, arguments.dimensions)
    if "removal" in arguments.parts:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "vectors"
            folder.mkdir()
            make_vectors(folder, arguments.documents, arguments.dimensions)
            for probes in arguments.probes.split(","):
                rows.append(measure_removal(folder, arguments.documents, arguments.dimensions, int(probes)))
    rows = [dict.fromkeys(HEADS) | row for row in rows]
    give(arguments, rows, HEADS, title="semantic duplicates", unit="documents/s")


if __name__ == "__main__":
    main()
