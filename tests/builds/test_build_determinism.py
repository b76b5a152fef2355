"""The same inputs and recipe give the same bytes: any workers, any folder, any crash."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError, ShardError
from shardkit.writers import build
from shardkit.writers.inputs import scan
from shardkit.writers.stages import graph
from support.small_build import make_corpus, tree

VARIANTS = {
    "mds best_fit": ["output.format=mds", "annotate=true"],
    "mds concat zstd": ["output.compression=zstd", "pack.strategy=concat", "output.hashes=[sha256, xxh3_64]"],
    "wds best_fit": ["output.format=wds"],
}

# Each worker is a process that takes a second to start.
WORKERS = {"mds best_fit": (1, 4), "mds concat zstd": (2, 1), "wds best_fit": (1, 2)}


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small corpus into as many splits and partitions as a large one has."""
    monkeypatch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=5000))
    monkeypatch.setattr(graph, "PARTITION_TEXT_BYTES", 12_000)
    monkeypatch.setattr("shardkit.writers.dedup.exact.partitions_for", lambda documents, memory: 3)


@pytest.mark.parametrize(
    "variant",
    [
        "mds best_fit",
        pytest.param("mds concat zstd", marks=pytest.mark.extended),
        pytest.param("wds best_fit", marks=pytest.mark.extended),
    ],
)
@pytest.mark.usefixtures("many_tasks")
def test_all_files_are_the_same_for_any_workers_and_folder(tmp_path: Path, variant: str) -> None:
    trees = []
    for workers, place in zip(WORKERS[variant], ("a", "some/where/else"), strict=True):
        recipe = make_corpus(tmp_path / place)
        result = build(recipe, workers=workers, overrides=VARIANTS[variant], progress=False)
        assert result.tasks > 30
        trees.append(tree(result.output))
    assert all(other == trees[0] for other in trees[1:])
    names = set(trees[0])
    assert {"dataset.json", "report.html", "provenance/part-00002.parquet"} <= names
    assert ("annotations/part-00003.parquet" in names) == (variant == "mds best_fit")
    ending = {"mds best_fit": ".mds", "mds concat zstd": ".mds.zstd", "wds best_fit": ".tar"}[variant]
    shards = sorted(name for name in names if name.endswith(ending))
    joint = "-" if ending == ".tar" else "."
    assert shards == [f"shard{joint}{number:05d}{ending}" for number in range(len(shards))]
    assert len(shards) > 5
    assert verify(result.output).ok
    everything = b"".join(path.read_bytes() for path in result.output.rglob("*.json"))
    assert str(tmp_path).encode() not in everything


# Runs a build that ends itself, or its workers, where `point` says.
KILLER = """
import os, signal, sys
from functools import partial
import psutil
from shardkit.publish.publication import Publication
from shardkit.writers import build
from shardkit.writers.inputs import scan
from shardkit.writers.stages import graph
recipe, point, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
scan.scan_inputs = partial(scan.scan_inputs, split_bytes=5000)
graph.PARTITION_TEXT_BYTES = 12_000
me = psutil.Process()

def watch(progress):
    if point == f"{progress.stage} {progress.tasks_done - progress.tasks_reused}":
        os.kill(os.getpid(), signal.SIGKILL)
    if point == f"workers {progress.stage}" and progress.tasks_done - progress.tasks_reused == 1:
        for child in me.children():
            child.kill()

def stop(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "before index":
    Publication._put_index = stop
if point == "after index":
    put = Publication._put_index
    Publication._put_index = lambda self: (put(self), stop())
result = build(recipe, workers=workers, progress=watch)
print(result.tasks_reused)
"""
POINTS = [
    ("clean 2", 2),
    ("workers tokenize", 2),
    ("pack 2", 1),
    ("before index", 1),
]


@pytest.mark.extended
@pytest.mark.slow
def test_a_build_killed_again_and_again_gives_the_same_bytes(tmp_path: Path, many_tasks: None) -> None:
    expected = tree(build(make_corpus(tmp_path / "whole"), workers=1, progress=False).output)
    recipe = make_corpus(tmp_path / "killed")
    output = tmp_path / "killed" / "out"

    def run(point: str, workers: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLER, str(recipe), point, str(workers)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    for point, workers in POINTS:
        done = run(point, workers)
        if point.startswith("workers"):
            assert "was killed by SIGKILL" in done.stderr, done.stderr
        else:
            assert done.returncode == -9, done.stderr
        with pytest.raises(ShardError):
            open_dataset(output)
    assert (output / "shard.00000.mds").exists()  # the last kill came when all but the index was there
    done = run("never", 2)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40  # what the killed builds had finished
    assert tree(output) == expected
    assert not output.with_name("out.work").exists()


@pytest.mark.extended
def test_a_build_killed_just_after_the_index_is_complete(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 80)
    command = [sys.executable, "-c", KILLER, str(recipe), "after index", "1"]
    assert subprocess.run(command, timeout=100).returncode == -9
    assert verify(tmp_path / "out").ok
    with pytest.raises(BuildError, match="made by another recipe"):
        build(recipe, overrides=["seed=1"], progress=False)
    assert build(recipe, progress=False).up_to_date
    assert not [name for name in tree(tmp_path / "out") if name.startswith(".")]
