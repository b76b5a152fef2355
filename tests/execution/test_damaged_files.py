"""What a disk damaged, or what was removed after its last reader, is made again when something reads it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardkit.progress import make_listener
from shardkit.writers.execution.artifacts import Artifact, DamagedRangeError, LostFilesError
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import Work, run_task


@dataclass(frozen=True)
class Consumed:
    """Runs that no later stage reads."""

    consumed: tuple[Artifact, ...]

    @classmethod
    def of(cls, *commits: Commit) -> Consumed:
        return cls(tuple(commit.file("text.run") for commit in commits))

    def read(self) -> bytes:
        return b"".join(file.read_bytes() for file in self.consumed)


def write(folder: Path, text: str) -> None:
    (folder / "text.run").write_text(text)
    (folder / "other").write_text(text.upper())


def double(folder: Path, source: Consumed) -> None:
    (folder / "text.run").write_bytes(2 * source.read())


def join(folder: Path, source: Consumed, others: list[Artifact], ending: str) -> None:
    data = source.read() + b"".join(file.read_bytes() for file in others)
    (folder / "joined").write_bytes(data + ending.encode())


def end(folder: Path, source: Consumed, ending: str) -> None:
    (folder / "text.run").write_bytes(source.read() + ending.encode())


FIRST, SECOND, LAST = (
    Stage("first", "first", write),
    Stage("second", "second", double),
    Stage("last", "", join),
)
THIRD = Stage("third", "third", end)


class Build:
    """Three stages: two texts are doubled and joined. `ran` counts the tasks that ran."""

    def __init__(self, work: Path, *, kill_after: str = "") -> None:
        self.work, self.kill_after = Work.at(work), kill_after
        self.ran = Counter[str]()

    def run(self, ending: str) -> bytes:
        with Journal(self.work) as journal, InlineEngine(self._run_task) as engine:
            runner = Runner(journal, engine, make_listener(False))
            return runner.complete(lambda: self._steps(runner, ending))

    def _steps(self, runner: Runner, ending: str) -> bytes:
        [first] = runner.run([FIRST.task(name, 0, name) for name in "ab"])
        [second] = runner.run([SECOND.task(one.name, 0, Consumed.of(one)) for one in first])
        others = [one.file("other") for one in first]
        [[last]] = runner.run([LAST.task("ab", 0, Consumed.of(*second), others, ending)])
        runner.require([last.file("joined")])
        return last.file("joined").read_bytes()

    def _run_task(self, task: Task, digest: str, work: Work) -> Commit:
        self.ran[str(task)] += 1
        commit = run_task(task, digest, work)
        if str(task) == self.kill_after:
            raise KeyboardInterrupt
        return commit

    def names(self, pattern: str) -> set[str]:
        return {f"{path.parent.parent.name}/{path.parent.name[0]}" for path in self.files(pattern)}

    def files(self, pattern: str) -> Iterable[Path]:
        return self.work.folder.glob(pattern)


ALL = {"first/a", "first/b", "second/a", "second/b", "last/ab"}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    assert Build(tmp_path).run("!") == b"aabbAB!"
    return tmp_path


def damage(work: Path, name: str) -> None:
    [path] = work.glob(name)
    path.write_bytes(b"#" * path.stat().st_size)


def test_runs_go_when_their_readers_are_finished_and_records_stay(finished: Path) -> None:
    build = Build(finished)
    assert build.names("first/*/*.run") == set()
    assert build.names("first/*/other") == {"first/a", "first/b"}
    assert build.run("!") == b"aabbAB!"
    assert build.ran == {}


@pytest.mark.parametrize("killed", sorted(ALL))
def test_a_build_killed_after_any_commit_continues_and_leaves_no_run(tmp_path: Path, killed: str) -> None:
    first = Build(tmp_path, kill_after=killed)
    with pytest.raises(KeyboardInterrupt):
        first.run("!")
    again = Build(tmp_path)
    assert again.run("!") == b"aabbAB!"
    assert first.ran + again.ran == Counter(ALL)
    assert [*again.files("*/*/*.run")] == []


def test_a_changed_last_stage_has_what_it_reads_made_again(finished: Path) -> None:
    build = Build(finished)
    assert build.run("?") == b"aabbAB?"
    assert build.ran == Counter(ALL)
    assert [*build.files("*/*/*.run")] == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_or_damaged_file_has_only_its_own_task_run_again(finished: Path, is_lost: bool) -> None:
    build = Build(finished)
    for path in build.files("first/a*/other"):
        path.unlink() if is_lost else path.write_bytes(b"#")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert build.run("!") == b"aabbAB!"
    assert build.ran == ({"first/a": 1} if is_lost else {})  # damage is found where it is read
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert build.run("?") == b"aabbAB?"
    assert build.ran["first/a"] == 1 + is_lost
    assert [str(one.message).partition(": ")[2] for one in caught] == (
        [] if is_lost else ["other was damaged after it was written; its task runs again"]
    )


def test_a_damaged_result_is_made_again(finished: Path) -> None:
    damage(finished, "last/*/joined")
    build = Build(finished)
    with pytest.warns(RuntimeWarning, match=r"last/.*: joined was damaged") as caught:
        assert build.run("!") == b"aabbAB!"
    assert caught[0].filename == __file__
    assert build.ran == Counter(ALL)


def test_files_of_earlier_builds_are_compared_once_and_only_if_they_are_read(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    real = Work.damaged_output

    def damaged_output(work: Work, commit: Commit, names: Iterable[str] | None = None) -> str | None:
        compared.extend(f"{commit.stage}/{commit.name}/{name}" for name in names or commit.outputs)
        return real(work, commit, names)

    monkeypatch.setattr(Work, "damaged_output", damaged_output)
    assert Build(finished).run("!") == b"aabbAB!"
    assert compared == ["last/ab/joined"]
    compared.clear()
    assert Build(finished).run("?") == b"aabbAB?"
    assert sorted(compared) == ["first/a/other", "first/b/other"]


def test_a_file_that_is_damaged_again_ends_the_build_and_the_next_one_makes_it_again(finished: Path) -> None:
    [other] = finished.glob("first/a*/other")
    error, passes = DamagedRangeError("bytes 1 to 2 differ from their hash", other), []

    def steps() -> None:
        passes.append(other.exists())
        raise error

    with (
        pytest.raises(DamagedRangeError, match="bytes 1 to 2"),
        pytest.warns(RuntimeWarning, match="other was damaged after it was written; its task runs again"),
        Journal(Work.at(finished)) as journal,
        InlineEngine() as engine,
    ):
        Runner(journal, engine, make_listener(False)).complete(steps)
    assert passes == [True, False]
    assert Build(finished).run("!") == b"aabbAB!"


def test_a_file_that_is_lost_again_ends_the_build(finished: Path) -> None:
    with Journal(Work.at(finished)) as journal, InlineEngine() as engine:
        runner, passes = Runner(journal, engine, make_listener(False)), []

        def steps() -> None:
            passes.append(1)
            raise LostFilesError(frozenset({f"first/{len(passes) % 2}"}))

        with pytest.raises(LostFilesError, match=r"files of 1 finished tasks, such as first/1, are needed"):
            runner.complete(steps)
    assert len(passes) == 3


def test_a_run_that_a_later_pass_needs_again_is_there(tmp_path: Path) -> None:
    """A changed reader of a run has it made again; then what the other reader wrote is needed, too."""

    def build(ending: str) -> bytes:
        def steps() -> bytes:
            [[first]] = runner.run([FIRST.task("a", 0, "a")])
            shared = Consumed.of(first)
            parts = [SECOND.task("a", 0, shared), THIRD.task("b", 0, shared, ending)]
            read = [commit for [commit] in runner.run([parts[0]], [parts[1]])]
            [[last]] = runner.run([LAST.task("ab", 0, Consumed.of(*read), [], "")])
            return last.file("joined").read_bytes()

        with Journal(Work.at(tmp_path)) as journal, InlineEngine() as engine:
            runner = Runner(journal, engine, make_listener(False))
            return runner.complete(steps)

    assert build("!") == b"aaa!"
    assert build("?") == b"aaa?"
    assert [*tmp_path.glob("*/*/*.run")] == []
