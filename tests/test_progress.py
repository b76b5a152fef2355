"""Progress: silent, heard by a callable, lines in a log now and then, bars on a terminal; on stderr."""

from __future__ import annotations

import sys
import time

import pytest

from shardkit.writers.progress import StageProgress, make_listener


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


def test_a_log_file_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with make_listener(True) as listener:
        for done in range(5):
            now += 2.0
            listener(report(done))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "clean: 2 of 4 tasks, 250 documents/s, 250 KB/s\n"


def test_a_terminal_gets_a_bar_a_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with make_listener(True) as listener:
        listener(report(4))
        listener(report(2, "pack", documents=0))
    out, err = capsys.readouterr()
    assert out == ""
    assert "clean" in err
    assert "4/4" in err
    assert "2/4" in err
    assert "1 reused  250 documents/s" in err
