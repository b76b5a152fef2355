"""Builds that ask a failing server are killed at random: no answer is lost, and none is paid for twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from shardkit.writers import build
from support.model_server import ModelServer, score_of
from support.remote_harness import wait_until

CONCURRENCY = 8
_SERVER = multiprocessing.get_context("forkserver")


def _build(recipe: dict[str, Any], errors: str) -> None:
    """Run a build in this process; what it prints goes to the file `errors`."""
    from shardkit.writers import executors
    from shardkit.writers.execution.engine import InlineEngine

    with Path(errors).open("a") as file:
        os.dup2(file.fileno(), 2)
    executors.LocalEngine = lambda workers, **options: InlineEngine()  # type: ignore
    build(recipe, workers=1, progress=False)


def started(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    _SERVER.set_forkserver_preload(["shardkit.writers.pipeline", "shardkit.writers.filters.ask"])
    process = _SERVER.Process(target=target, args=args)
    process.start()
    return process


def recipe_in(folder: Path, server: ModelServer, name: str = "out") -> dict[str, Any]:
    ask: dict[str, Any] = {
        "url": server.url,
        "model": "m",
        "prompt": "Judge: {text}",
        "answers": str(folder / "answers"),
    }
    ask |= {"concurrency": CONCURRENCY, "retries": 50, "timeout_seconds": 20}
    ask |= {"score": {"pattern": r"score: *(\d)", "min": 3}}
    return {
        "inputs": [{"path": str(folder / "*.jsonl"), "base": str(folder)}],
        "steps": [{"ask": ask}],
        "output": {"path": str(folder / name), "format": "jsonl"},
    }


def kept_answers(folder: Path) -> Counter[str]:
    """The number of lines of each answer; torn lines, of which a killed process leaves one, are none."""
    found: Counter[str] = Counter()
    for file in (folder / "answers").glob("*.jsonl"):
        found.update(json.loads(line)["key"] for line in file.open() if line.endswith("\n"))
    return found


def wait_for_answers(folder: Path, process: ForkServerProcess) -> None:
    """Wait until a process has kept an answer."""
    before, deadline = kept_answers(folder).total(), time.monotonic() + 60
    while process.is_alive() and kept_answers(folder).total() == before and time.monotonic() < deadline:
        time.sleep(0.01)


KILLS = int(os.environ.get("SHARDKIT_KILLS", "15"))  # a kill takes two seconds, mostly of waiting


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(KILLS, marks=pytest.mark.extended)])
@pytest.mark.timeout(1200)
def test_a_killed_build_loses_no_answer_and_pays_for_none_twice(
    tmp_path: Path, kills: int, inline_builds: None
) -> None:
    texts = [f"Document {number} is about water." for number in range(60 * kills)]
    for part in range(2):
        rows = [json.dumps({"text": text}) + "\n" for text in texts[part::2]]
        (tmp_path / f"{part}.jsonl").write_text("".join(rows))
    draw = random.Random(7)
    answers: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    during = 0
    with ModelServer(faults=0.3 if kills > 10 else 0.15, seconds=0.02) as server:
        recipe = recipe_in(tmp_path, server)
        for _ in range(kills):
            before = kept_answers(tmp_path)
            process = started(_build, recipe, str(tmp_path / "errors"))
            if draw.random() < 0.9:
                wait_for_answers(tmp_path, process)
            time.sleep(draw.uniform(0.0, 0.3))
            assert process.exitcode is None, (tmp_path / "errors").read_text()
            process.kill()
            process.join(30)
            seen = server.counts()
            during += bool(seen["requests"])
            assert not before.keys() & seen["requests"].keys(), "asked again for an answer that was kept"
            answers.update(seen["answers"])
            faults.update(seen["faults"])
        before = kept_answers(tmp_path)
        made = build(recipe, workers=1, progress=False)
        seen = server.counts()
        assert not before.keys() & seen["requests"].keys()
        assert build(recipe, workers=1, progress=False, output=str(tmp_path / "again"))
        assert not server.counts()["requests"]
    answers.update(seen["answers"])
    faults.update(seen["faults"])
    kept = kept_answers(tmp_path)
    assert {*kept.values()} == {1}
    assert kept.keys() == answers.keys()
    assert len(kept) == len(texts)
    assert before.keys() <= kept.keys()
    unreceived = answers.total() - len(kept)  # answered when the client was already dead
    assert unreceived <= CONCURRENCY * during
    assert made.funnel.kept.documents == sum(score_of(f"Judge: {text}") >= 3 for text in texts)
    assert during >= kills // 2
    print(  # noqa: T201
        f"{kills} kills, {during} of them while it asked; {len(texts):,} answers kept before and after, "
        f"{unreceived} answered to a dead client; faults: {dict(faults)}"
    )


def _ask_alone(folder: str, recipe: dict[str, Any], number: int, together: int) -> None:
    from shardkit.writers.filters.chain import FilterChain
    from shardkit.writers.filters.config import FilterEntry
    from support.filter_runs import documents

    [step] = FilterEntry.model_validate({"ask": recipe["steps"][0]["ask"]}).filters()
    (Path(folder) / f"ready-{number}").touch()
    wait_until(lambda: len([*Path(folder).glob("ready-*")]) == together)
    FilterChain([step], Path(folder)).apply(documents([f"Text {number}." for number in range(150)]))


def test_processes_that_run_at_the_same_time_send_no_request_twice(tmp_path: Path) -> None:
    with ModelServer(faults=0.1, seconds=0.1) as server:  # so slow that none finds nothing left to ask
        recipe = recipe_in(tmp_path, server)
        processes = [started(_ask_alone, str(tmp_path), recipe, number, 3) for number in range(3)]
        for process in processes:
            process.join(180)
            assert process.exitcode == 0
        seen = server.counts()
    assert {*seen["answers"].values()} == {1}
    assert len(seen["answers"]) == 150
    assert {*kept_answers(tmp_path).values()} == {1}
    assert len([*(tmp_path / "answers").glob("*.jsonl")]) == 3
