"""A finished build keeps no run of the exchange, and makes those again that a change or a loss needs."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from crash.builds import STAGES, make_recipe
from shardkit.writers import build, build_dedup_index
from shardkit.writers.execution.artifacts import may_be_gone
from shardkit.writers.execution.work import COMMIT_NAME, Work
from support.small_build import tree

KEPT = {"keys.run", "url_keys.run", "duplicates.run"}
"""Small runs of tasks that read or judge texts: of their keys, and of removed documents (`Table.stays`)."""


class Finished(NamedTuple):
    folder: Path
    recipe: Path

    def build(self, folder: Path, *overrides: str) -> tuple[dict[str, Any], set[str]]:
        """Build in a copy of this finished build without its output: the files, and the stages that ran."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return built(folder, overrides)


def built(folder: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    before = {commit.key: commit for _, commit in Work.at(folder / "work").commits()}
    places = [f"work={folder / 'work'}", f"output.path={folder / 'out'}", *overrides]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of damaged files
        build(folder / "recipe.yaml", workers=1, overrides=places, progress=False)
    made = {commit.stage for key, commit in Work.at(folder / "work").commits() if key not in before}
    files = tree(folder / "out")
    shutil.rmtree(folder / "out")
    return files, made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    made = Finished(folder, make_recipe(folder))
    built(folder)
    return made


@pytest.fixture(scope="module")
def expected(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return finished.build(tmp_path_factory.mktemp("expected"))[0]


def runs_in(work: Path) -> list[str]:
    """Files that go with their last reader and have rows; an empty run is not exchanged."""
    runs = [path for path in work.rglob("*") if may_be_gone(path.name) and path.stat().st_size > 32]
    return sorted(f"{path.parent.parent.name}/{path.name}" for path in runs if path.name not in KEPT)


def test_no_run_outlives_its_last_reader(finished: Finished) -> None:
    assert runs_in(finished.folder / "work") == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["lost", "flipped"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_lost_or_damaged_is_made_again(
    finished: Finished, expected: dict[str, Any], tmp_path: Path, stage: str, fault: str
) -> None:
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    files = [path for path in (tmp_path / "work" / stage).rglob("*") if path.is_file()]
    assert files
    for path in files:
        if fault == "lost":
            path.unlink()
        elif path.name != COMMIT_NAME and (data := bytearray(path.read_bytes())):
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    found, _ = built(tmp_path)
    assert found == expected
    assert runs_in(tmp_path / "work") == []


CHANGES = {
    "near": 'steps=["exact", {"near": {"small_shingles": 0, "similarity": 0.5}}]',
    "tokens": "pack.sequence_length=32",
    "order": "seed=7",
    "memory": "memory=1GB",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recipe_brings_the_bytes_of_a_fresh_build(
    finished: Finished, tmp_path: Path, change: str
) -> None:
    fresh = tmp_path / "fresh"
    shutil.copytree(finished.folder, fresh, ignore=shutil.ignore_patterns("work"))
    assert finished.build(tmp_path / "changed", CHANGES[change])[0] == built(fresh, [CHANGES[change]])[0]
    assert runs_in(tmp_path / "changed" / "work") == []


def test_an_index_in_the_work_folder_of_a_build_is_the_one_made_alone(
    finished: Finished, tmp_path: Path
) -> None:
    """It is made of signatures whose last reader, in the build, was another stage."""
    found = []
    for name in ("alone", "behind"):
        folder = tmp_path / name
        shutil.copytree(finished.folder, folder, ignore=shutil.ignore_patterns("work"))
        if name == "behind":
            built(folder, [CHANGES["near"]])
        places = [f"work={folder / 'work'}", CHANGES["near"]]
        build_dedup_index(
            folder / "recipe.yaml", folder / "index", overrides=places, workers=1, progress=False
        )
        found.append(tree(folder / "index"))
    assert found[0] == found[1]
