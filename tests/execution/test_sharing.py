"""Several processes share a build: the same bytes, whichever of them is killed, stopped or never started."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crash.points import Action, Moment, Point
from crash.victims import Victims, share_quickly
from servers.bucket import RgwBucket
from servers.fault_proxy import FaultProxy, Rule
from shardkit import locks
from shardkit.errors import BuildError
from shardkit.publish import transports
from shardkit.publish.publication import Publication
from shardkit.storage.resilient import connect
from shardkit.writers import BuildResult, build
from shardkit.writers.execution.scheduler import TaskSlice
from shardkit.writers.progress import StageProgress
from shardkit.writers.publish import Watch
from support.small_build import make_corpus, tree
from support.stores import fresh_memory, objects

pytest_plugins = ["support.s3_rgw"]
pytestmark = pytest.mark.usefixtures("inline_builds")
LONGEST_SECONDS = 120.0  # far above what any test takes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), 80)


@pytest.fixture(scope="module")
def local(corpus: Path, inline_builds: None) -> dict[str, bytes]:
    """The files of the dataset as one build makes it."""
    folder = build(corpus, overrides=["work=work"], workers=1, progress=False).output
    return {name: (folder / name).read_bytes() for name in tree(folder)}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with share_quickly():
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in tree(folder)}


def together(*calls: Callable[[], BuildResult]) -> list[BuildResult]:
    """Results of calls that run at once, each in a thread."""
    results: dict[int, BuildResult] = {}
    errors: list[BaseException] = []

    def run(number: int, call: Callable[[], BuildResult]) -> None:
        try:
            results[number] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n, call)) for n, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    if errors:
        raise errors[0]
    return [results[n] for n in range(len(calls))]


def test_machines_with_a_work_folder_and_output_in_stores_give_a_local_builds_bytes(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    work, output = fresh_memory(), fresh_memory()

    def machine(number: int, slice: TaskSlice | None = None) -> BuildResult:
        places = [f"work={work.url}", f"scratch={tmp_path / str(number)}", f"output.path={output.url}"]
        return build(corpus, overrides=places, workers=1, task_slice=slice, progress=False)

    one, two = together(lambda: machine(0, TaskSlice(0, 2)), lambda: machine(1, TaskSlice(1, 2)))
    assert objects(output) == local
    assert one.fingerprint == two.fingerprint
    assert list(work.list("lease/")) == []
    assert len(list(work.list("commits/"))) == one.tasks + 1  # and that of the tokenizer's file
    assert machine(3).up_to_date


def test_a_second_driver_of_a_work_folder_in_a_store_is_refused(corpus: Path, tmp_path: Path) -> None:
    work, refused = fresh_memory(), list[str]()

    def other(report: StageProgress) -> None:
        if not refused:
            places = [f"work={work.url}", f"scratch={tmp_path / 'b'}", f"output.path={tmp_path / 'b-out'}"]
            with pytest.warns(RuntimeWarning, match="holds the lease"), pytest.raises(BuildError) as caught:
                build(corpus, overrides=places, workers=1, progress=False)
            refused.append(str(caught.value))

    places = [f"work={work.url}", f"scratch={tmp_path / 'a'}", f"output.path={tmp_path / 'a-out'}"]
    build(corpus, overrides=places, workers=1, progress=other)
    assert "runs a build in this work folder" in refused[0]
    assert list(work.list("lease/")) == []


def test_a_driver_whose_lease_was_taken_over_ends_and_the_other_has_its_tasks(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    work, taken = fresh_memory(), list[str]()

    def take_over(report: StageProgress) -> None:
        if report.stage == "clean" and report.tasks_done == 1 and not taken:
            taken.append("lease/00000002")
            work.put("lease/00000002", b"another-host 1 1")
            time.sleep(1.0)  # several heartbeats

    places = [f"work={work.url}", f"scratch={tmp_path / 'a'}", f"output.path={tmp_path / 'out'}"]
    with pytest.raises(BuildError, match="another driver has taken over this work folder"):
        build(corpus, overrides=places, workers=1, progress=take_over)
    work.delete("lease/00000002")
    ended = build(corpus, overrides=places, workers=1, progress=False)
    assert ended.tasks_reused
    assert files(tmp_path / "out") == local


def test_two_recipes_in_one_work_folder_do_not_meet(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    work = fresh_memory()

    def machine(name: str, *changes: str) -> BuildResult:
        places = [f"work={work.url}", f"scratch={tmp_path / name}", f"output.path={tmp_path / name}-out"]
        return build(corpus, overrides=[*places, *changes], workers=1, progress=False)

    machine("a")
    machine("b", "pack.sequence_length=32")
    assert files(tmp_path / "a-out") == local
    again = build(
        corpus,
        overrides=["work=work", f"output.path={tmp_path}/c", "pack.sequence_length=32"],
        workers=1,
        progress=False,
    )
    assert files(tmp_path / "b-out") == files(again.output)


def share(corpus: Path, tmp_path: Path, number: int, heard: Any = False, **options: Any) -> BuildResult:
    """Slice `number` of two in a local work folder."""
    places = [f"work={tmp_path / 'work'}", f"output.path={tmp_path / 'out'}"]
    slice = TaskSlice(number, 2)
    return build(corpus, overrides=places, workers=1, task_slice=slice, progress=heard, **options)


def test_slices_of_one_build_give_its_bytes_and_tell_what_others_did(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    heard: list[StageProgress] = []
    together(
        lambda: share(corpus, tmp_path, 0, heard.append), lambda: share(corpus, tmp_path, 1, heard.append)
    )
    assert files(tmp_path / "out") == local
    assert sum(report.tasks_elsewhere for report in heard if report.finished) > 0
    assert [path.name for path in (tmp_path / "work" / "unfinished").iterdir()] == []
    assert not (tmp_path / "work" / "lease").exists()


@contextmanager
def first_publisher_waits_for(patch: pytest.MonkeyPatch, event: threading.Event) -> Iterator[None]:
    """With everything but the index in place."""
    put, turn = Publication._put_index, threading.Lock()

    def wait_and_put(publication: Publication) -> None:
        if turn.acquire(blocking=False):
            assert event.wait(LONGEST_SECONDS), "nobody else came"
        put(publication)

    with patch.context() as inner:
        inner.setattr(Publication, "_put_index", wait_and_put)
        yield


def test_others_wait_for_the_one_that_publishes_and_say_so(
    corpus: Path, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()

    def hear(report: StageProgress) -> None:
        if report.stage == "publish" and report.waiting:
            assert "waiting for" in report.text()
            waiting.set()

    with first_publisher_waits_for(monkeypatch, waiting):
        together(lambda: share(corpus, tmp_path, 0, hear), lambda: share(corpus, tmp_path, 1, hear))
    assert files(tmp_path / "out") == local


def test_one_that_takes_a_publisher_for_dead_does_not_disturb_it(
    corpus: Path, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, calls = threading.Event(), []
    held_file = locks.held_file

    def held(path: Path, **options: Any) -> int | None:
        calls.append(path)
        if len(calls) > 1:
            came.set()
        return held_file(path, **options)

    monkeypatch.setattr(transports, "held_file", held)
    # Every lease has expired at once, as if its holder were dead.
    monkeypatch.setattr("shardkit.writers.execution.scheduler.DriverLease.renew", lambda self: None)
    with first_publisher_waits_for(monkeypatch, came):
        together(lambda: share(corpus, tmp_path, 0), lambda: share(corpus, tmp_path, 1))
    assert files(tmp_path / "out") == local


def test_a_publisher_that_is_alone_does_not_wait_for_a_lock(
    corpus: Path, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    refused: list[BaseException] = []

    def alone() -> BuildResult:
        places = ["work=work", f"output.path={tmp_path / 'out'}"]
        return build(corpus, overrides=places, workers=1, progress=False)

    def intrude(report: StageProgress) -> None:
        if report.stage == "provenance" and report.finished and not refused:
            thread.start()

    def other() -> None:
        while not (tmp_path / "out" / "dataset.json").exists():
            pass
        try:
            alone()
        except BuildError as error:
            refused.append(error)
        asked.set()

    thread = threading.Thread(target=other)
    with first_publisher_waits_for(monkeypatch, asked):
        share(corpus, tmp_path, 0, intrude)
    thread.join()
    assert "another process is writing a dataset into this folder" in str(refused[0])
    assert files(tmp_path / "out") == local


def test_a_work_folder_that_is_shared_is_kept_though_it_is_the_default_one(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    places = [f"output.path={tmp_path / 'out'}"]
    slices = [TaskSlice(number, 2) for number in range(2)]
    build(corpus, overrides=places, workers=1, task_slice=slices[0], progress=False)  # does all, at last
    assert build(corpus, overrides=places, workers=1, task_slice=slices[1], progress=False).up_to_date
    assert files(tmp_path / "out") == local
    assert (tmp_path / "out.work" / "pack").is_dir()


def test_one_that_does_not_share_is_kept_out(corpus: Path, tmp_path: Path) -> None:
    def hear(report: StageProgress) -> None:
        with pytest.raises(BuildError, match="another build uses this work folder"):
            build(
                corpus,
                overrides=[f"work={tmp_path / 'work'}", f"output.path={tmp_path / 'other'}"],
                workers=1,
                progress=False,
            )

    share(corpus, tmp_path, 0, hear)


def test_a_dataset_counts_as_published_when_it_came_after_the_beginning(
    local: dict[str, bytes], tmp_path: Path
) -> None:
    card = local["dataset.json"]
    fresh = Watch(tmp_path, replace=False)
    for name, data in local.items():
        if name != "index.json":
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
    assert not fresh.shows(card)
    (tmp_path / "index.json").write_bytes(local["index.json"])
    assert fresh.shows(card)
    assert not fresh.shows(card + b" ")
    replacing = Watch(tmp_path, replace=True)
    assert not replacing.shows(card), "the one that is to be replaced"
    (tmp_path / "index.json").unlink()
    (tmp_path / "index.json").write_bytes(local["index.json"])
    assert replacing.shows(card)
    (tmp_path / ".shardkit-publishing.json").touch()
    assert not replacing.shows(card), "somebody is at it"


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    folder = tmp_path_factory.mktemp("victims")
    with Victims(folder, make_corpus(folder / "corpus", 20)) as victims:
        yield victims


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus", 80).parent


def command(*options: str, **places: str) -> list[str]:
    """A build that shares its work folder, by slices or in a store."""
    settings = [word for name, place in places.items() for word in ("--set", f"{name}={place}")]
    return ["build", "recipe.yaml", "--quiet", "--workers", "1", *settings, *options]


def slice_of(number: int, count: int) -> list[str]:
    return command("--task-slice", f"{number}/{count}", work="shared")


def point(folder: Path, moment: Moment, action: Action) -> Point:
    """At the end of the first task of `clean`, or when all is published but the index."""
    where = folder / ("out" if moment == "index" else "shared")
    struck = folder.parent / f"{moment} {action}"
    return Point(moment=moment, folder=str(where), struck=str(struck), stage="clean", action=action)


@pytest.mark.extended
@pytest.mark.parametrize("moment", ["uncommitted", "index"])
def test_of_three_slices_one_is_killed_and_one_never_comes(
    victims: Victims, folder: Path, local: dict[str, bytes], moment: Moment
) -> None:
    killed = victims.run(slice_of(0, 3), cwd=folder, point=point(folder, moment, "kill"))
    assert killed.status == -signal.SIGKILL, killed
    late = victims.run(slice_of(1, 3), cwd=folder)
    assert late.status == 0, late
    assert files(folder / "out") == local
    assert list((folder / "shared" / "unfinished").iterdir()) == []


@pytest.mark.extended
def test_a_publisher_that_sleeps_past_its_lease_is_waited_for(
    victims: Victims, folder: Path, local: dict[str, bytes]
) -> None:
    asleep = victims.start(slice_of(0, 2), cwd=folder, point=point(folder, "index", "stop"))
    asleep.await_stop()
    other = victims.start(slice_of(1, 2), cwd=folder)
    time.sleep(4.0)  # the lock of the output says that the publisher is there
    assert Path(f"/proc/{other.pid}/cmdline").read_bytes(), "it did not wait"
    assert not (folder / "out" / "index.json").exists()
    asleep.go_on()
    assert (asleep.wait().status, other.wait().status) == (0, 0)
    assert files(folder / "out") == local


@pytest.mark.extended
def test_drivers_of_a_bucket_follow_each_other_though_one_is_killed_and_one_sleeps(
    victims: Victims,
    folder: Path,
    local: dict[str, bytes],
    rgw_bucket: RgwBucket,
    rgw_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_proxy.endpoint_url)
    faults = (
        Rule(fault="status", status=503, probability=0.05),
        Rule(fault="corrupt", method="GET", path="/data/", after_bytes=20, count=2),  # a read is tried thrice
    )
    rgw_proxy.set_rules(*faults)
    places = {"work": f"{rgw_bucket.url}/work", "output.path": f"{rgw_bucket.url}/out"}
    one, two, three = (command(**places, scratch=f"scratch-{number}") for number in range(3))
    asleep = victims.start(one, cwd=folder, point=point(folder, "uncommitted", "stop"))
    asleep.await_stop()
    rgw_proxy.set_rules(*faults)
    killed = victims.run(two, cwd=folder, point=point(folder, "index", "kill"))
    assert killed.status == -signal.SIGKILL, killed
    assert min(rgw_proxy.hits()) > 0
    rgw_proxy.set_rules(*faults)
    output = connect(f"{rgw_bucket.url}/out")
    assert "index.json" not in {info.key for info in output.list()}
    ended = victims.run(three, cwd=folder)
    assert ended.status == 0, ended
    rgw_proxy.set_rules()
    assert {info.key: output.get(info.key) for info in output.list()} == local
    asleep.go_on()
    ended = asleep.wait()
    # It may have been put to sleep while it renewed its lease: nobody else is there when that arrives.
    assert ended.status == 0 or "another driver has taken over" in ended.errors, ended
    assert {info.key: output.get(info.key) for info in output.list()} == local


def test_files_that_tasks_read_go_to_all_machines_under_the_names_they_have_now(
    corpus: Path, tmp_path: Path
) -> None:
    work = fresh_memory()
    for name, changes in (
        ("tokenizer.json", []),
        ("renamed.json", [f"tokenizer.path={tmp_path}/renamed.json"]),
    ):
        (tmp_path / "renamed.json").write_bytes((corpus.parent / "tokenizer.json").read_bytes())
        places = [f"work={work.url}", f"scratch={tmp_path}/s", f"output.path={tmp_path}/{name}-out", *changes]
        result = build(corpus, overrides=places, workers=1, progress=False)
        assert json.loads((result.output / "dataset.json").read_bytes())["tokenizer"]["file"] == name
