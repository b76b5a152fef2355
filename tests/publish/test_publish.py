"""Publication: never an index without its shards, whatever interrupts it, and no foreign file lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError, ShardError
from shardkit.formats import mds
from shardkit.manifest import FileInfo, Manifest
from shardkit.publish.transports import Placer
from shardkit.storage.store import StoreError
from shardkit.writers import publish as module
from shardkit.writers.card import card_bytes, describe_file
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.task import Commit, Output
from shardkit.writers.publish import find_published, finish_published, global_shards, publish
from support.small_build import tree


class Built:
    """Finished shards in a work folder, ready to be published."""

    def __init__(self, work: Path, shards: int, first: int = 0) -> None:
        work.mkdir()
        rows = (first + np.arange(shards * 8 * 4, dtype=np.uint16)).reshape(-1, 4)
        parts = [
            mds.write_rows_shard(work, f"part-00000.{n:05d}.mds", rows[n * 8 : n * 8 + 8], hashes=["xxh64"])
            for n in range(shards)
        ]
        named = global_shards([(Artifact(work), parts)])
        self.manifest = Manifest("mds", [shard for _, shard in named])
        self.links = {shard.stored.basename: file for file, shard in named}
        (work / "table").write_text(f"table of {first}")
        self.links["provenance/part-00000.parquet"] = Artifact(work / "table")
        if not first:  # the dataset that takes its place has none
            self.links["annotations/part-00000.parquet"] = Artifact(work / "table")
        self.texts = {"report.html": b"report"}
        files = {name: describe_file(text) for name, text in self.texts.items()}
        tables = {name: file for name, file in self.links.items() if file.path.name == "table"}
        files |= {name: describe_file(file.read_bytes()) for name, file in tables.items()}
        card = {"fingerprint": self.manifest.fingerprint, "samples": len(rows), "files": files}
        self.texts["dataset.json"] = card_bytes(card)

    def publish(self, output: Path, *, replace: bool = False) -> None:
        publish(output, self.manifest, self.links, self.texts, replace=replace)


@pytest.fixture
def old(tmp_path: Path) -> Built:
    return Built(tmp_path / "old", 5)


@pytest.fixture
def new(tmp_path: Path) -> Built:
    return Built(tmp_path / "new", 3, first=1000)


def test_shards_get_numbers_over_all_parts(tmp_path: Path) -> None:
    rows = np.zeros((4, 4), np.uint16)
    parts = []
    for part, count in enumerate((2, 0, 1)):
        folder = tmp_path / str(part)
        folder.mkdir()
        names = [f"part-{part:05d}.{n:05d}.mds" for n in range(count)]
        shards = [mds.write_rows_shard(folder, n, rows, compression="zstd:3") for n in names]
        parts.append((Artifact(folder), shards))
    named = global_shards(parts)
    assert [shard.raw.basename for _, shard in named] == [f"shard.0000{n}.mds" for n in range(3)]
    assert [shard.stored.basename for _, shard in named] == [f"shard.0000{n}.mds.zstd" for n in range(3)]
    assert all(file.path.exists() for file, _ in named)


def test_a_new_folder_holds_the_dataset_and_nothing_else(tmp_path: Path, old: Built) -> None:
    output = tmp_path / "some" / "out"
    old.publish(output)
    assert set(tree(output)) == {*old.links, *old.texts, "index.json"}
    assert verify(output).ok
    found = find_published(output)
    assert found is not None
    assert found.problem is None


def test_another_dataset_is_kept_unless_replaced(tmp_path: Path, old: Built, new: Built) -> None:
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    old.publish(output)
    before = tree(output)
    with pytest.raises(BuildError, match="use --replace"):
        new.publish(output)
    assert tree(output) == before
    (output / "notes.txt").write_text("mine")
    new.publish(output, replace=True)
    new.publish(fresh)
    assert tree(output) == tree(fresh) | {"notes.txt": tree(output)["notes.txt"]}


@pytest.fixture(params=[False, True], ids=["links", "copies"])
def copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether hard links are impossible, as between file systems."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    if request.param:
        monkeypatch.setattr(os, "link", refuse)
    return bool(request.param)


class PulledPlugError(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles a power cut."""


OPERATIONS = [
    (os, "link"),
    (os, "fsync"),
    (Path, "unlink"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
]


def interrupted_at(limit: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> bool:
    """Run `action` until its operation number `limit` on the file system; whether it got there."""
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **settings: Any) -> Any:
            nonlocal done
            done += 1
            if done > limit:
                raise PulledPlugError
            return real(*arguments, **settings)

        return operation

    with monkeypatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            action()
        except PulledPlugError:
            return True
    return False


def check_reader(output: Path, datasets: list[Built]) -> None:
    """Either there is no index, or it is of one of `datasets` and all of its shards are whole."""
    try:
        fingerprint = open_dataset(output).fingerprint
    except ShardError:
        assert not (output / "index.json").exists()
        return
    assert fingerprint in [dataset.manifest.fingerprint for dataset in datasets]
    assert not [problem for problem in verify(output).problems if problem.file != "dataset.json"]


@pytest.mark.usefixtures("copying")
def test_an_interruption_anywhere_leaves_no_false_index_and_is_made_good(
    tmp_path: Path, old: Built, new: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_THREADS", 1)
    new.publish(tmp_path / "fresh")
    expected = tree(tmp_path / "fresh")
    for limit in range(1000):
        output = tmp_path / f"out-{limit}"
        old.publish(output)
        publish_new = partial(new.publish, output, replace=True)
        interrupted = interrupted_at(limit, monkeypatch, publish_new)
        check_reader(output, [old, new])
        publish_new()
        assert tree(output) == expected
        if not interrupted:
            break
    assert 25 < limit < 900


def test_what_is_cut_short_after_its_index_is_finished_without_publishing_again(
    tmp_path: Path, old: Built, new: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_THREADS", 1)
    monkeypatch.setattr("shardkit.formats.mds.index.TABLE_SHARDS", 1)
    new.publish(tmp_path / "fresh")
    expected, finished = tree(tmp_path / "fresh"), 0
    assert "index.bin" in expected
    for limit in range(1000):
        output = tmp_path / f"out-{limit}"
        old.publish(output)
        interrupted = interrupted_at(limit, monkeypatch, partial(new.publish, output, replace=True))
        found = find_published(output)
        contents = None if found is None else found.contents
        if contents is not None and contents.manifest.fingerprint == new.manifest.fingerprint:
            finished += 1
            finish_published(output, contents)
            assert tree(output) == expected
        if not interrupted:
            break
    assert finished > 5


def test_another_file_system_gets_the_same_files(tmp_path: Path, old: Built) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    old.publish(tmp_path / "out")
    with TemporaryDirectory(dir=memory) as folder:
        old.publish(Path(folder) / "out")
        assert tree(Path(folder) / "out") == tree(tmp_path / "out")


def test_a_folder_of_other_files_is_refused(tmp_path: Path, old: Built) -> None:
    output = tmp_path / "home"
    output.mkdir()
    (output / "letter.txt").write_text("dear")
    for replaced in (False, True):
        with pytest.raises(BuildError, match=r"holds files that are no dataset \(first: letter\.txt\)"):
            old.publish(output, replace=replaced)
    assert set(tree(output)) == {"letter.txt"}
    with pytest.raises(BuildError, match="is not a folder"):
        old.publish(output / "letter.txt")


def test_a_marker_that_names_files_elsewhere_is_not_believed(tmp_path: Path, old: Built) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (tmp_path / "victim").write_text("precious")
    (output / ".shardkit-publishing.json").write_text('{"files": ["../victim"]}')
    with pytest.raises(BuildError, match="leaves the dataset's folder"):
        old.publish(output)
    assert (tmp_path / "victim").exists()


def test_a_full_disk_is_said_and_made_good(
    tmp_path: Path, old: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(placer: Placer, file: FileInfo) -> None:
        raise StoreError(file.basename, "cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Placer, "place", full)
        with pytest.raises(BuildError, match=r"No space left on device.*the same command continues"):
            old.publish(tmp_path / "out")
    old.publish(tmp_path / "out")
    assert verify(tmp_path / "out").ok


def test_damage_is_looked_for_in_the_files_of_reused_tasks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("changed since")
    with Journal(tmp_path / "work") as journal:
        made = Commit("pack", "a", tmp_path, "digest", {}, {"file": Output(13, "0" * 32)})
        with pytest.raises(BuildError, match="file was damaged after it was written"):
            journal.forget_damaged(made)
    assert not tmp_path.exists()
