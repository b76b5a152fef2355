"""Builds to a store: the same bytes as to a folder, nothing false in between, and no work done twice."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar, cast

import pytest

from shardkit import card
from shardkit.cli.main import main
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError
from shardkit.publish import upload
from shardkit.publish.contents import MARKER_NAME, content_hash
from shardkit.storage.memory import MemoryStore
from shardkit.storage.s3 import S3Store
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, Store
from shardkit.writers import BuildResult, build
from shardkit.writers.execution.artifacts import Artifact, RemoteFiles
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task
from shardkit.writers.stages import publish as module
from shardkit.writers.stages.publish import REPORT_NAME, RemoteOutput, publish
from support.killing_server import run_and_kill
from support.s3_moto import s3_server
from support.small_build import make_corpus
from support.small_dataset import Built, files_of, make_dataset
from support.stores import (
    PulledPlugError,
    WatchedStore,
    WrappedStore,
    check_reader,
    fresh_memory,
    objects,
)
from support.task_folders import TaskFolders

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("inline_builds")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), 80)


@pytest.fixture(scope="module")
def local(corpus: Path) -> dict[str, bytes]:
    """The files of the dataset as a folder has them."""
    folder = build(corpus, overrides=["work=work"], workers=1, progress=False).output
    return files_of(folder)


def build_to(corpus: Path, store: MemoryStore, *changes: str, replace: bool = False) -> BuildResult:
    """A build that takes its tasks from the work folder that `local` left, or another one of `changes`."""
    overrides = ["work=work", *changes]
    return build(corpus, output=store.url, overrides=overrides, workers=1, progress=False, replace=replace)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    ["output.format=mds", "output.format=wds", "output.compression=zstd"],
    ids=["mds", "tar", "zstd"],
)
@pytest.mark.usefixtures("local")
def test_every_object_equals_the_local_file(corpus: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(corpus.parent / "work", tmp_path / "work")
    overrides = [f"work={tmp_path / 'work'}", change]
    folder = build(corpus, output=tmp_path / "out", overrides=overrides, workers=1, progress=False).output
    memory = fresh_memory()
    result = build(corpus, output=memory.url, overrides=overrides, workers=1, progress=False)
    assert objects(memory) == files_of(folder)
    assert result.location == memory.url
    assert result.to_dict()["output"] == memory.url
    with pytest.raises(BuildError, match="is not a folder on this machine"):
        assert result.output


def test_a_build_of_many_files_lists_them_beside_its_card(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "MOST_LISTED", 1)
    changes = [f"work={tmp_path / 'work'}", "annotate=true"]
    output, memory = tmp_path / "out", fresh_memory()
    build(corpus, output=output, overrides=changes, workers=1, progress=False)
    files = json.loads((output / "files.json").read_bytes())
    assert {"annotations/part-00000.parquet", "provenance/part-00000.parquet", "report.html"} <= files.keys()
    assert list(json.loads((output / "dataset.json").read_bytes())["files"]) == ["blocks.bin", "files.json"]
    assert verify(output).ok
    assert build(corpus, output=output, overrides=changes, workers=1, progress=False).up_to_date
    build(corpus, output=memory.url, overrides=changes, workers=1, progress=False)
    assert objects(memory) == files_of(output)
    assert build(corpus, output=memory.url, overrides=changes, workers=1, progress=False).up_to_date


def test_a_finished_build_is_up_to_date_at_once_and_writes_nothing(
    corpus: Path, local: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fresh_memory()
    first = build_to(corpus, memory)
    assert objects(memory) == local
    assert not first.up_to_date
    watched = WatchedStore(memory)
    use(monkeypatch, watched)
    again = build_to(corpus, memory)
    assert again.up_to_date
    assert again.fingerprint == first.fingerprint
    assert again.location == memory.url
    assert watched.puts == []


def test_the_work_folder_is_in_the_recipes_folder_and_goes_after_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_corpus(tmp_path / "deep", 40)
    memory = MemoryStore(f"{fresh_memory().url}/name")
    with monkeypatch.context() as patch:
        use(patch, WatchedStore(memory, limit=8))
        with pytest.raises(PulledPlugError):
            build(recipe, overrides=[f"output.path={memory.url}"], workers=1, progress=False)
    assert (tmp_path / "deep" / "name.work" / "pack").is_dir()
    result = build(recipe, overrides=[f"output.path={memory.url}/"], workers=1, progress=False)
    assert result.tasks_reused == result.tasks
    assert not (tmp_path / "deep" / "name.work").exists()
    assert not list((tmp_path / "deep").rglob("*.mds")), "shards were written to this machine"


def use(patch: pytest.MonkeyPatch, store: Store) -> None:
    """Let builds reach `store`, whatever their URL says."""

    @contextmanager
    def transfer_store(*_: object) -> Iterator[Store]:
        yield store

    patch.setattr(module, "transfer_store", transfer_store)


@pytest.fixture(params=["work on this machine", "work in a store"])
def work(request: pytest.FixtureRequest, corpus: Path) -> str:
    """A work folder with all tasks done; from one in a store, tasks upload."""
    if request.param == "work on this machine":
        return "work=work"
    made = f"work={fresh_memory().url}"
    build_to(corpus, fresh_memory(), made)
    return made


@pytest.mark.sampled(1)
def test_a_publication_killed_at_any_operation_is_gone_on_with(
    corpus: Path, local: dict[str, bytes], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = json.loads(local["dataset.json"])["fingerprint"]
    monkeypatch.setattr(module, "_THREADS", 1)
    monkeypatch.setattr(module, "_TASK_THREADS", 1)
    probe = WatchedStore(fresh_memory())
    use(monkeypatch, probe)
    build_to(corpus, fresh_memory(), work)
    memory = fresh_memory()

    def watch(number: int) -> None:
        check_reader(memory, {fingerprint})

    for limit in sorted({1, 2, 5, 8, 9, 10, 12, *range(probe.operations - 4, probe.operations + 1)}):
        memory = fresh_memory()
        killed = WatchedStore(memory, limit=limit, watch=watch)
        use(monkeypatch, killed)
        with pytest.raises(PulledPlugError):
            build_to(corpus, memory, work)
        again = WatchedStore(memory)
        use(monkeypatch, again)
        build_to(corpus, memory, work)
        assert objects(memory) == local
        sent = [name for name in killed.puts + again.puts if name != MARKER_NAME]
        assert sorted(sent) == sorted(local), limit


@pytest.mark.usefixtures("local")
def test_tasks_upload_what_they_made_and_nothing_that_is_there(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, small = f"work={fresh_memory().url}", "output.shard_bytes=2KiB"
    expected = files_of(
        build(corpus, output=tmp_path / "out", overrides=["work=work", small], progress=False).output
    )
    shards = {name for name in expected if name.endswith(".mds")}
    assert len(shards) == 6
    monkeypatch.setattr(module, "_TASK_FILES", 2)
    memory = fresh_memory()
    result = build_to(corpus, memory, work, small)
    assert objects(memory) == expected
    assert result.seconds["upload"] > 0
    for name in ("index.json", "shard.00003.mds", "shard.00005.mds"):
        memory.delete(name)
    memory.put("shard.00004.mds", b"x" * len(expected["shard.00004.mds"]))
    watched = WatchedStore(memory)
    use(monkeypatch, watched)
    with pytest.raises(BuildError, match=r"shard.00004.mds: exists with other content"):
        build_to(corpus, memory, work, small)
    memory.delete("shard.00004.mds")
    build_to(corpus, memory, work, small)
    assert objects(memory) == expected
    gone = {"index.json", "shard.00003.mds", "shard.00004.mds", "shard.00005.mds", MARKER_NAME}
    assert set(watched.puts) == gone


@pytest.mark.extended
@pytest.mark.parametrize("late", [True, False], ids=["after the marker", "before the index"])
def test_a_build_process_that_is_killed_while_it_publishes_goes_on_with_the_rest(
    corpus: Path, local: dict[str, bytes], tmp_path: Path, late: bool
) -> None:
    fatal = 1 if late else 1 + len(local)  # the marker is written first, and of the files the index last
    shutil.copytree(corpus.parent / "work", tmp_path / "work")
    with s3_server() as server:
        bucket = server.new_bucket()
        options = ["--output", f"s3://{bucket}/data", "--set", f"work={tmp_path / 'work'}", "--workers", "1"]
        command = [sys.executable, "-m", "shardkit", "build", str(corpus), *options]
        run_and_kill(server, command, fatal, late=late)
        store = S3Store(f"s3://{bucket}/data")
        before = objects(store).keys()
        assert len(before) == 1 if late else local.keys() - before == {"index.json"}
        server.requests.clear()
        result = build(
            corpus,
            output=f"s3://{bucket}/data",
            overrides=[f"work={tmp_path / 'work'}"],
            workers=1,
            progress=False,
        )
        assert result.tasks_reused == result.tasks
        assert objects(store) == local
        puts = [line.split("/data/")[1] for line in server.requests if line.startswith("PUT ")]
        assert sorted(puts) == sorted(local.keys() - before)


def foreign(folder: Path) -> MemoryStore:
    """A store that holds another dataset."""
    make_dataset(folder / "foreign", shards=90)
    memory = fresh_memory()
    upload(folder / "foreign", memory, progress=False)
    return memory


def test_another_dataset_is_refused_before_any_work_and_replaced_when_told(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    memory = foreign(tmp_path)
    before = objects(memory)
    with pytest.raises(BuildError, match=r"already holds a dataset, not made by a recipe; .*--replace"):
        build_to(corpus, memory)
    assert objects(memory) == before
    build_to(corpus, memory, replace=True)
    assert objects(memory) == local


def test_a_foreign_dataset_that_appears_meanwhile_is_not_overwritten(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = foreign(tmp_path)
    before = objects(memory)
    monkeypatch.setattr("shardkit.writers.pipeline.find_published", lambda output: None)
    with pytest.raises(BuildError, match="holds another dataset; use --replace"):
        build_to(corpus, memory)
    assert objects(memory) == before


def test_a_damaged_dataset_is_told_and_made_good_when_told(corpus: Path, local: dict[str, bytes]) -> None:
    memory = fresh_memory()
    build_to(corpus, memory)
    memory.delete("shard.00001.mds")
    with pytest.raises(BuildError, match=r"which is damaged \(is incomplete: shard\.00001\.mds is missing"):
        build_to(corpus, memory)
    build_to(corpus, memory, replace=True)
    assert objects(memory) == local


def test_an_unreachable_store_is_told_before_the_work(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NoBucket(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            raise ObjectNotFoundError(self.url, "there is no such bucket", status=404)

    memory = fresh_memory()
    use(monkeypatch, NoBucket(memory.url))
    with pytest.raises(BuildError, match=r"output memory://.*: there is no such bucket"):
        build_to(corpus, memory, f"work={tmp_path / 'work'}")
    assert not (tmp_path / "work").exists()


def test_the_command_builds_to_a_url(
    corpus: Path, local: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    memory = fresh_memory()
    command = ["build", str(corpus), "--output", memory.url, "--set", "work=work", "--workers", "1"]
    assert main(command) == 0
    assert f"Dataset {memory.url}\n" in capfd.readouterr().err
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["up_to_date"] is True
    assert objects(memory) == local


class _WorkInStore:
    """Files of a work folder in a store, as artifacts see it; `read` counts bytes by who asked for them."""

    def __init__(self, folder: Path, roles: list[str]) -> None:
        self._folder, self._roles = folder, roles
        self.read = Counter[str]()
        self._lock = Lock()

    def borrow(self, path: Path) -> Path:
        source = self._folder / path.name
        with self._lock:
            self.read[self._roles[-1]] += source.stat().st_size
        copy = self._folder / f"{path.name}.borrowed"
        shutil.copyfile(source, copy)
        return copy

    def content_of(self, path: Path) -> str:
        return content_hash((self._folder / path.name).read_bytes())


@pytest.mark.parametrize("shards", [50, 500])
def test_the_driver_asks_a_store_for_as_little_whatever_the_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """Beside pages of listings: it puts marker, card and index, and reads no shard."""
    built = Built(tmp_path / "made", "mds", shards, 0, {REPORT_NAME: b"report"})
    memory, roles, lock = fresh_memory(), ["driver"], Lock()
    asked: dict[str, Counter[str]] = defaultdict(Counter)

    class Counting(WrappedStore):
        def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
            with lock:
                asked[roles[-1]][operation] += 1
            return action()

    @contextmanager
    def transfer_store(*_: object) -> Iterator[Store]:
        yield Counting(memory)

    folders = TaskFolders(tmp_path)

    def run(*groups: Sequence[Task]) -> list[list[Commit]]:
        roles.append("task")
        try:
            return folders(*groups)
        finally:
            roles.pop()

    monkeypatch.setattr(module, "transfer_store", transfer_store)
    work = _WorkInStore(tmp_path / "made", roles)
    links = {
        name: Artifact(tmp_path / "gone" / file.path.name, cast(RemoteFiles, work))
        for name, file in built.links.items()
    }
    output = RemoteOutput(memory.url)
    publish(output, built.manifest, links, built.texts, replace=False, run=run)
    assert len(objects(memory)) == shards + 3
    driver, tasks = asked["driver"], asked["task"]
    assert driver["list"] == 2
    assert sum(driver.values()) < 25, driver
    assert work.read["driver"] == 0
    assert tasks == {"head": shards + 1, "put": shards + 1}
    assert work.read["task"] == sum(shard.stored.bytes for shard in built.manifest.shards) + len(b"report")
