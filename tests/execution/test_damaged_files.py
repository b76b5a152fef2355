"""What a disk damaged after it was written is made again before anything reads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from shardkit.progress import make_listener
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work_local import LocalWork


def write(folder: Path, text: str) -> dict[str, Any]:
    (folder / "text").write_text(text)
    (folder / "other").write_text(text.upper())
    return {}


def copy(folder: Path, source: Artifact) -> dict[str, Any]:
    (folder / "text").write_bytes(b"copy of " + source.read_bytes())
    return {}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were compared."""
    names: list[str] = []
    real = LocalWork.damaged_output

    def damaged_output(work: LocalWork, commit: Commit) -> str | None:
        names.extend(f"{commit.stage}/{name}" for name in commit.outputs)
        return real(work, commit)

    monkeypatch.setattr(LocalWork, "damaged_output", damaged_output)
    return names


def run(work: Path, suffix: str) -> bytes:
    """A build of two stages; the second one's result."""
    with Journal(work) as journal, InlineEngine() as engine:
        runner = Runner(journal, engine, make_listener(False))
        [[first]] = runner.run([Task("first", "a", {}, write, ("hello",))])
        [[second]] = runner.run([Task("second", "a", {"suffix": suffix}, copy, (first.files / "text",))])
        return (second.files / "text").read_bytes()


def damage(work: Path, name: str) -> None:
    [path] = work.glob(name)
    path.write_bytes(b"#" * path.stat().st_size)


def test_a_damaged_input_of_a_task_is_made_again(tmp_path: Path, compared: list[str]) -> None:
    run(tmp_path, "x")
    assert compared == []
    damage(tmp_path, "first/*/text")
    with pytest.warns(
        RuntimeWarning, match=r"first/.*: text was damaged after it .* its task runs again"
    ) as caught:
        assert run(tmp_path, "y") == b"copy of hello"
    assert caught[0].filename == __file__
    assert compared == ["first/other", "first/text"]


def test_what_a_damaged_files_task_reads_is_made_good_first(tmp_path: Path) -> None:
    run(tmp_path, "x")
    damage(tmp_path, "first/*/text")
    damage(tmp_path, "second/*/text")
    with pytest.warns(RuntimeWarning, match="runs again"):
        assert run(tmp_path, "x") == b"copy of hello"


def test_right_files_are_compared_once(tmp_path: Path, compared: list[str]) -> None:
    run(tmp_path, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(tmp_path, "x") == b"copy of hello"
    assert compared == ["first/other", "first/text", "second/text"]
