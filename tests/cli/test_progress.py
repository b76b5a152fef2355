"""Progress: silent, heard by a callable, lines in a log now and then, bars on a terminal; on stderr."""

from __future__ import annotations

import sys
import time

import pytest

from shardkit.progress import make_listener
from shardkit.writers.progress import StageProgress


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
    assert going.text() == "1 of 4 tasks, 500 documents/s, 500 KB/s, 25.0 % kept, 1:06:40 left"


def test_compiling_is_said_at_once_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    with make_listener(True) as listener:
        for _ in range(3):
            listener(StageProgress("clean", 0, 2, 0, 0, 0, 1.0, compiling=1))
            listener(StageProgress("clean", 0, 2, 0, 0, 0, 2.0, compile_seconds=1.5))
        listener(StageProgress("clean", 2, 2, 0, 0, 0, 3.0, compile_seconds=1.5))
    assert capsys.readouterr().err.splitlines() == [
        "clean: 0 of 2 tasks, compiling kernels …",
        "clean: 2 of 2 tasks, 0:00:03 in all, 1.5 s of it compiling kernels, which are kept",
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
