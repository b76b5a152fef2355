"""The same inputs and recipe give the same bytes, for any workers and folder.

After any crash, too: tests/execution/test_crash_matrix.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from shardkit.datasets.verify import verify
from shardkit.writers import build
from shardkit.writers.inputs import scan
from shardkit.writers.stages import rows
from support.small_build import make_corpus, tree

VARIANTS = {
    "mds best_fit": ["output.format=mds", "annotate=true"],
    "mds concat zstd": ["output.compression=zstd", "pack.strategy=concat", "output.hashes=[sha256, xxh3_64]"],
    "wds best_fit": ["output.format=wds"],
}

# Each worker is a process that takes a second to start.
WORKERS = {"mds best_fit": (1, 2), "mds concat zstd": (4, 1), "wds best_fit": (1, 2)}


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small corpus into as many splits and partitions as a large one has."""
    monkeypatch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=5000))
    monkeypatch.setattr(rows, "PARTITION_TEXT_BYTES", 12_000)


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
    trees, works = [], []
    for workers, place in zip(WORKERS[variant], ("a", "some/where/else"), strict=True):
        recipe = make_corpus(tmp_path / place)
        result = build(recipe, workers=workers, overrides=[*VARIANTS[variant], "work=work"], progress=False)
        assert result.tasks > 30
        trees.append(tree(result.output))
        works.append(outputs_of_tasks(recipe.parent / "work"))
    assert trees[0] == trees[1]
    assert works[0] == works[1]
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


def outputs_of_tasks(work: Path) -> list[tuple[str, str, str]]:
    """(stage, name, SHA-256) of what tasks wrote.

    Their folders, commits and notes name states of inputs; the marker has a random id.
    """
    files = [(Path(name), digest) for name, digest in tree(work).items() if not name.startswith("notes/")]
    others = {"commit.json", "shardkit-work.txt"}
    return sorted((path.parts[0], path.name, digest) for path, digest in files if path.name not in others)
