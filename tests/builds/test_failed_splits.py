"""`max_failed_splits`: a split whose task fails in every attempt is quarantined, and the build goes on."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shardkit.card import Count
from shardkit.errors import BuildError
from shardkit.writers import BuildResult, build
from shardkit.writers.execution import engine_ray
from shardkit.writers.explain import explain_build
from shardkit.writers.inputs import readers
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.stages import clean
from support.ray_cluster import RayCluster
from support.small_build import make_corpus, tree

# What workers do as they read records of a file named poison-…, as a bug in a parser written in C may.
SITE = """
import ctypes, os, pathlib, sys
place, way = pathlib.Path(os.environ["POISON_PLACE"]), os.environ["POISON_WAY"]

def watch(event, arguments):
    if event != "open" or "poison-" not in str(arguments[0]):
        return
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("readers.py"):
        frame = frame.f_back
    if frame is not None:
        (place / f"attempt-{os.getpid()}").touch()
        if way == "die":
            os.kill(os.getpid(), 9)
        ctypes.PyDLL(None).sleep(600)

sys.addaudithook(watch)
"""
ONE = "max_failed_splits=1"


def make_poisoned(folder: Path, poisoned: int = 1) -> Path:
    """A corpus, some files of which are read like others unless something is done to their readers."""
    recipe = make_corpus(folder, 80)
    for number in range(poisoned):
        lines = [json.dumps({"text": f"poison {number} {n} " + "bad words " * n}) for n in range(5)]
        (folder / f"poison-{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    recipe.write_text(recipe.read_text().replace("filters:", '  - {path: "poison-*.gz"}\nfilters:'))
    return recipe


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Poison worker processes that start from now on; returns where each attempt leaves a file."""

    def start(way: str) -> Path:
        place = tmp_path / f"site-{way}"
        place.mkdir()
        (place / "sitecustomize.py").write_text(SITE)
        monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        monkeypatch.setenv("POISON_PLACE", str(place))
        monkeypatch.setenv("POISON_WAY", way)
        return place

    return start


@pytest.fixture
def failing_readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Readers in this process raise at files named poison-…; their names."""
    attempts = []

    def read(split: Any, *args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        if "poison-" in split.file:
            attempts.append(split.file)
            raise ValueError("cannot parse")
        return read_split(split, *args, **options)

    monkeypatch.setattr(readers, "read_split", read)
    return attempts


def make(recipe: Path, *overrides: str, **options: Any) -> BuildResult:
    return build(recipe, overrides=["work=work", *overrides], progress=False, **options)


def attempts(place: Path) -> int:
    return len(list(place.glob("attempt-*")))


@pytest.mark.extended
def test_a_split_that_kills_its_worker_twice_is_quarantined_and_not_tried_again(
    tmp_path: Path, poison: Callable[[str], Path]
) -> None:
    recipe = make_poisoned(tmp_path / "corpus")
    place = poison("die")
    with pytest.warns(RuntimeWarning) as told:
        made = make(recipe, ONE, workers=1)
    assert attempts(place) == 2
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 3
    assert "killed by SIGKILL" in texts[0]
    assert texts[0].endswith("; it runs again")
    assert texts[1].endswith("in 2 attempts")
    assert texts[2].endswith("the build continues without it (1 of 1 failures that max_failed_splits allows)")

    size = (recipe.parent / "poison-0.jsonl.gz").stat().st_size
    assert made.funnel.quarantined == {"failed_split": Count(1, size)}
    made.funnel.check("the build")
    [entry] = map(json.loads, (made.output / "quarantine.jsonl").read_text().splitlines())
    assert (entry["file"], entry["reason"]) == ("poison-0.jsonl.gz", "failed_split")
    assert entry["error"].startswith(f"bytes 0 to {size:,} were not read: task clean/poison-0.jsonl.gz-")
    assert "in every attempt its process died or ran past --task-seconds" in entry["error"]

    published = tree(made.output)
    assert make(recipe, ONE, workers=1).up_to_date
    shutil.rmtree(made.output)
    assert tree(make(recipe, ONE, workers=1).output) == published
    assert attempts(place) == 2  # it was not read again


@pytest.mark.extended
def test_hanging_and_dying_give_the_same_bytes_with_any_number_of_workers(
    tmp_path: Path, poison: Callable[[str], Path]
) -> None:
    recipe = make_poisoned(tmp_path / "corpus", 2)
    place = poison("die")
    with pytest.warns(RuntimeWarning):
        died = make(recipe, "max_failed_splits=3", workers=2)
    assert attempts(place) == 4
    published = tree(died.output)
    shutil.rmtree(died.output)
    shutil.rmtree(tmp_path / "corpus" / "work")
    place = poison("hang")
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match="did not finish within 5 s"):
        hung = make(recipe, "max_failed_splits=2", workers=1, task_seconds=5.0)
    assert time.monotonic() - begin < 120
    assert attempts(place) == 4
    assert tree(hung.output) == published


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_ray_loses_a_worker_and_a_node_and_gives_up_the_split_that_processes_here_give_up(
    tmp_path: Path, poison: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    recipe = make_poisoned(tmp_path / "corpus")
    near = recipe.read_text().replace("dedup: {exact: {}}", "dedup: {exact: {}, near: {}}")
    recipe.write_text(near + "memory: 512MB\n")
    poison("die")
    with pytest.warns(RuntimeWarning, match="the build continues without it"):
        expected = make(recipe, ONE, workers=1)
    expected_bytes = tree(expected.output)
    monkeypatch.setattr(engine_ray, "FIRST_PAUSE_SECONDS", 0.1)

    def kill(stage: str, act: Callable[[list[int]], bool], node: int) -> threading.Thread:
        """Try `act` with the processes that are at a task of the stage until it says that it has struck."""

        def watch() -> None:
            deadline = time.monotonic() + 200
            while time.monotonic() < deadline:
                if (processes := cluster.running(node, f"{stage}/")) and act(processes):
                    return
                time.sleep(0.005)

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def kill_node(_: list[int]) -> bool:
        cluster.kill(0)
        return True

    def kill_worker(processes: list[int]) -> bool:
        [pid] = processes
        os.kill(pid, signal.SIGSTOP)
        at_it = pid in cluster.running(1, "tokenize/")  # else its task ended just before
        os.kill(pid, signal.SIGKILL if at_it else signal.SIGCONT)
        return at_it

    with RayCluster(nodes=2) as cluster:
        threads = [kill("clean", kill_node, 0), kill("tokenize", kill_worker, 1)]
        on_ray = {"engine": "ray", "ray_address": cluster.address, "output": tmp_path / "by-ray"}
        with pytest.warns(RuntimeWarning) as told:
            made = make(recipe, ONE, "work=ray-work", **on_ray)
        for thread in threads:
            thread.join()
    texts = [str(warning.message) for warning in told]
    assert any(re.match(r"task clean/.*: its node \S+ died", text) for text in texts)
    assert any(re.match(r"task tokenize/.*: its process( on node \S+)? died", text) for text in texts)
    assert texts.count(next(text for text in texts if text.endswith("max_failed_splits allows)"))) == 1
    assert made.funnel.quarantined == expected.funnel.quarantined
    assert tree(made.output) == expected_bytes


@pytest.mark.usefixtures("inline_builds")
def test_one_failed_split_more_than_allowed_ends_the_build_and_gives_none_up(
    tmp_path: Path, failing_readers: list[str]
) -> None:
    recipe = make_poisoned(tmp_path / "corpus", 2)
    message = r"2 tasks failed, but max_failed_splits allows 1; .*\n.*poison-0.*cannot parse\n.*poison-1"
    for attempt in (1, 2):
        with pytest.warns(RuntimeWarning, match="1 of 1"), pytest.raises(BuildError, match=message):
            make(recipe, ONE)
        assert len(failing_readers) == 2 * attempt
    with pytest.raises(ValueError, match="cannot parse"):  # as it is, without the setting
        make(recipe)


@pytest.mark.usefixtures("inline_builds")
@pytest.mark.filterwarnings("ignore:task clean/poison")
def test_a_mended_split_is_read_when_asked_for_or_without_the_setting(
    tmp_path: Path, failing_readers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_poisoned(tmp_path / "corpus")
    lacking = make(recipe, ONE)
    assert failing_readers == ["poison-0.jsonl.gz"]
    explained = explain_build(recipe, overrides=["work=work", ONE])
    assert all(plan.finished == plan.tasks for plan in explained.stages)
    assert (explained.later, explained.stale) == ((), ())
    monkeypatch.setattr(readers, "read_split", read_split)  # as after a repair of the reader or the machine
    for overrides, retry in (([], False), ([ONE], True)):
        with pytest.raises(BuildError, match="made without 1 splits that failed; choose another output"):
            make(recipe, *overrides, retry_failed=retry)
    again = make(recipe, ONE, replace=True, output=tmp_path / "again")
    assert tree(again.output) == tree(lacking.output)
    for number, overrides in enumerate(([ONE], list[str]())):
        place = tmp_path / f"whole-{number}"
        whole = make(recipe, *overrides, output=place, retry_failed=bool(overrides))
        assert whole.funnel.read.documents == lacking.funnel.read.documents + 4
        assert not whole.funnel.quarantined
        assert tree(whole.output) == tree(tmp_path / "whole-0")


@pytest.mark.usefixtures("inline_builds")
def test_errors_of_the_machine_are_not_failures_of_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_poisoned(tmp_path / "corpus")

    def read(*args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(readers, "read_split", read)
    with pytest.raises(BuildError, match="No space left on device"):
        make(recipe, "max_failed_splits=100")
    assert not (tmp_path / "corpus" / "work" / clean.FAILED_SPLITS.name).exists()
