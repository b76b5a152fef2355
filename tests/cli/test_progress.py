"""Progress: silent, heard by a callable, lines in a log now and then, bars on a terminal; on stderr."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardkit.progress import Report, make_listener
from shardkit.writers import build
from shardkit.writers.execution.progress import BuildProgress, StageProgress, StepProgress, WholeBuild
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages.graph import stages_of
from support.small_build import make_corpus

RECIPE = Recipe.model_validate(
    {"inputs": "a.jsonl", "output": "out", "tokenizer": {"path": "t.json", "eos": "x"}}
)


def report(done: int, stage: str = "clean", documents: int = 500) -> StageProgress:
    return StageProgress(stage, done, 4, 1, documents, documents * 1000, 2.0)


def test_rates_are_documents_and_text_per_second() -> None:
    assert report(2).rates() == "250 documents/s, 250 KB/s"
    assert report(2, documents=0).rates() == ""
    assert [report(done).finished for done in (3, 4)] == [False, True]


def test_a_callable_hears_every_report(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[StageProgress] = []
    with make_listener(heard.append) as listener:
        for done in range(5):
            listener(report(done))
    assert heard == [report(done) for done in range(5)]
    assert capsys.readouterr() == ("", "")


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_listener(False) as listener:
        listener(report(1))
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_a_line_now_and_then_and_at_the_end_of_each_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with make_listener(True) as listener:
        for done in range(5):
            now += 2.0
            listener(report(done))
        listener(report(4))
        listener(report(4, "pack", documents=0))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "clean: 2 of 4 tasks (1 reused), 250 documents/s, 250 KB/s",
        "clean: 4 of 4 tasks (1 reused), 250 documents/s, 250 KB/s, 0:00:02 in all",
        "pack: 4 of 4 tasks (1 reused), 0:00:02 in all",
    ]


def test_a_line_tells_what_is_kept_and_what_is_left() -> None:
    going = StageProgress("clean", 1, 4, 0, 1000, 10**6, 2.0, documents_kept=250, seconds_left=4000.4)
    assert going.text() == "1 of 4 tasks, 500 documents/s, 500 KB/s, 25.0% kept, 1:06:40 left"


def test_compiling_is_said_at_once_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    with make_listener(True) as listener:
        for _ in range(3):
            listener(StageProgress("clean", 0, 2, 0, 0, 0, 1.0, compiling=1))
            listener(StageProgress("clean", 0, 2, 0, 0, 0, 2.0, compile_seconds=1.5))
        listener(StageProgress("clean", 2, 2, 0, 0, 0, 3.0, compile_seconds=1.5))
    assert capsys.readouterr().err.splitlines() == [
        "clean: 0 of 2 tasks, compiling kernels …",
        "clean: 2 of 2 tasks, 0:00:03 in all, 1.5 s of it compiling kernels, which are cached",
    ]


def test_a_terminal_gets_a_bar_a_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    with make_listener(True) as listener:
        listener(report(4))
        listener(report(2, "pack", documents=0))
    out, err = capsys.readouterr()
    assert out == ""
    assert "clean" in err
    assert "4 of 4 tasks (1 reused), 250 documents/s" in err
    assert "2 of 4 tasks" in err


def as_a_whole(reports: Iterable[StageProgress], recipe: Recipe, folder: Path) -> list[Report]:
    shown: list[Report] = []
    with WholeBuild(make_listener(shown.append), stages_of(recipe), folder) as whole:
        for each in reports:
            whole(each)
    return shown


def test_a_build_goes_from_nothing_to_all_by_the_steps_of_its_recipe(
    tmp_path: Path, inline_builds: None
) -> None:
    heard: list[StageProgress] = []
    recipe = load_recipe(make_corpus(tmp_path, 80))
    build(recipe, workers=1, progress=heard.append)
    shown = as_a_whole(heard, recipe, tmp_path)
    builds = [each for each in shown if isinstance(each, BuildProgress)]
    shares = [each.share for each in builds]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert 0.95 < shares[-1] <= 1
    steps = list(dict.fromkeys(each.name for each in shown if isinstance(each, StepProgress)))
    assert steps == ["read and filter", "exact duplicates", "tokenize", "shuffle and pack", "write"]
    # Cores are counted between two looks at the machine; on systems without /proc only the disk is known.
    assert re.search(r"( of memory, )?[0-9.]+ [KMGT]?B of disk free$", builds[-1].text())


def test_time_left_is_told_once_a_twentieth_was_done_in_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    whole: list[Report] = []
    meter = WholeBuild(
        make_listener(whole.append),
        stages_of(RECIPE),
        tmp_path,
    )
    told = []
    for done in range(5):
        # Half of the tasks were reused: they took no time, and say nothing of the time that is left.
        meter(StageProgress("clean", 50 + 10 * done, 100, 50, 0, 0, 1.0, step="read and filter"))
        progress = whole[-2]
        assert isinstance(progress, BuildProgress)
        told.append(progress.seconds_left)
        now += 10
    assert told[0] is None
    # 10 s for a tenth of reading, which is 150 of 195 seconds of such a build: 15 in 10 s.
    assert told[1] == pytest.approx((195.2 - 0.6 * 150) * 10 / 15, rel=0.02)


def test_the_time_left_does_not_rise_while_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    whole: list[Report] = []
    meter = WholeBuild(make_listener(whole.append), stages_of(RECIPE), tmp_path)

    def told(
        stage: str, done: int, seconds: float, *, compiling: int = 0, compiled: float = 0.0
    ) -> BuildProgress:
        nonlocal now
        now += seconds
        step = {"clean": "read and filter", "tokenize": "tokenize"}[stage]
        meter(
            StageProgress(
                stage, done, 4, 0, 0, 0, 1.0, compiling=compiling, compile_seconds=compiled, step=step
            )
        )
        progress = whole[-2]
        assert isinstance(progress, BuildProgress)
        return progress

    warm = told("clean", 2, 10.0).seconds_left
    assert warm is not None
    compiling = told("clean", 2, 50.0, compiling=2)
    assert compiling.seconds_left is None
    assert "compiling kernels …" in compiling.text()
    after = told("clean", 2, 0.0, compiled=50.0)
    assert after.seconds_left == pytest.approx(warm)
    assert "left without compiling kernels" in after.text()
    left = told("clean", 4, 10.0, compiled=50.0).seconds_left
    assert left is not None
    assert told("tokenize", 0, 30.0, compiling=1).seconds_left is None
    later = told("tokenize", 0, 0.0, compiled=30.0).seconds_left
    assert later is not None
    assert later <= left


@pytest.mark.extended
def test_a_task_tells_what_it_has_read_before_it_ends(tmp_path: Path) -> None:
    heard: list[StageProgress] = []
    recipe = make_corpus(tmp_path, 20)
    texts = [
        json.dumps({"number": number, "text": f"{number} more words " * 100}) for number in range(24_000)
    ]
    (tmp_path / "plain-0.jsonl").write_text("\n".join(texts))
    build(recipe, workers=1, progress=heard.append)
    running = [each for each in heard if each.stage == "clean" and not each.finished and each.documents]
    assert any(each.tasks_done == each.tasks_reused == 0 for each in running)
    assert all(each.documents_kept is not None for each in running)
    assert heard[-1].finished
