"""One driver at a time uses a work folder: a second one is told, and what one left the next one finishes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.points import Action, Moment, Point
from crash.victims import Victims, expire_quickly
from servers.bucket import RgwBucket
from servers.fault_proxy import FaultProxy, Rule
from shardkit.errors import BuildError
from shardkit.storage.resilient import connect
from shardkit.writers import BuildResult, build
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.work import COMMIT_NAME
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
    with expire_quickly():
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in tree(folder)}


def test_a_build_whose_work_folder_and_output_are_in_stores_gives_a_local_builds_bytes(
    corpus: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    work, output = fresh_memory(), fresh_memory()

    def machine(number: int) -> BuildResult:
        places = [f"work={work.url}", f"scratch={tmp_path / str(number)}", f"output.path={output.url}"]
        return build(corpus, overrides=places, workers=1, progress=False)

    made = machine(0)
    assert objects(output) == local
    assert list(work.list("lease/")) == []
    assert (
        sum(info.key.endswith(COMMIT_NAME) for info in work.list()) == made.tasks + 1
    )  # and that of the tokenizer's file
    assert machine(1).up_to_date


def test_a_second_build_in_a_local_work_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    def other(report: StageProgress) -> None:
        with pytest.raises(BuildError, match="another build uses this work folder"):
            start("b", other=None)

    def start(name: str, other: Callable[[StageProgress], None] | None) -> None:
        places = [f"work={tmp_path / 'work'}", f"output.path={tmp_path / name}"]
        build(corpus, overrides=places, workers=1, progress=other or False)

    start("a", other)


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


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    folder = tmp_path_factory.mktemp("victims")
    with Victims(folder, make_corpus(folder / "corpus", 20)) as victims:
        yield victims


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus", 80).parent


def command(**places: str) -> list[str]:
    """A build in these places."""
    settings = [word for name, place in places.items() for word in ("--set", f"{name}={place}")]
    return ["build", "recipe.yaml", "--quiet", "--workers", "1", *settings]


def point(folder: Path, moment: Moment, action: Action) -> Point:
    """At the end of the first task of `clean`, or when all is published but the index."""
    struck = folder.parent / f"{moment} {action}"
    return Point(moment=moment, folder=str(folder / "out"), struck=str(struck), stage="clean", action=action)


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
        # Of outputs; a read is tried thrice.
        Rule(fault="corrupt", method="GET", path=r"\.[0-9a-f]{16}/(?!commit)", after_bytes=20, count=2),
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
