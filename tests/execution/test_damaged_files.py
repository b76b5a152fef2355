"""What a disk damaged after it was written is made again before anything reads it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from shardkit.progress import make_listener
from shardkit.writers.execution.artifacts import Artifact, DamagedRangeError
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage
from shardkit.writers.execution.work import Work


def write(folder: Path, text: str) -> None:
    (folder / "text").write_text(text)
    (folder / "other").write_text(text.upper())


def copy(folder: Path, source: Artifact, suffix: str) -> None:
    (folder / "text").write_bytes(b"copy of " + source.read_bytes())


FIRST, SECOND = Stage("first", "first", write), Stage("second", "second", copy)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were compared."""
    names: list[str] = []
    real = Work.damaged_output

    def damaged_output(work: Work, commit: Commit, *, runs: bool = True) -> str | None:
        names.extend(f"{commit.stage}/{name}" for name in commit.outputs)
        return real(work, commit, runs=runs)

    monkeypatch.setattr(Work, "damaged_output", damaged_output)
    return names


def run(work: Path, suffix: str) -> bytes:
    """A build of two stages; the second one's result."""
    with Journal(Work.at(work)) as journal, InlineEngine() as engine:
        runner = Runner(journal, engine, make_listener(False))
        [[first]] = runner.run([FIRST.task("a", 0, "hello")])
        [[second]] = runner.run([SECOND.task("a", 0, first.file("text"), suffix)])
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


def test_a_file_that_stays_damaged_ends_the_build_and_the_next_one_makes_it_again(tmp_path: Path) -> None:
    run(tmp_path, "x")
    [text] = tmp_path.glob("first/*/text")
    error = DamagedRangeError("bytes 1 to 2 differ from their hash", text)
    with (  # noqa: PT012
        pytest.raises(DamagedRangeError, match="bytes 1 to 2"),
        Journal(Work.at(tmp_path)) as journal,
        InlineEngine() as engine,
    ):
        runner = Runner(journal, engine, make_listener(False))
        runner.repair(error)
        runner.repair(error)
    assert not text.exists()
    assert run(tmp_path, "x") == b"copy of hello"
