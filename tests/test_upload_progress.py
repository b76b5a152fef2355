"""Progress of transfers: honest counts, a line now and then, and never more than that."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from shardkit import progress as module
from shardkit.progress import Progress, TransferProgress, lines, listen


def report(moved: int = 6_000_000) -> TransferProgress:
    return TransferProgress("files", 3, 10, 8_000_000, 20_000_000, moved, 2.0)


def test_files_that_were_there_count_as_done_but_not_as_moved() -> None:
    heard: list[TransferProgress] = []
    progress = Progress(heard.append, "files", 3, 60)
    for size, moved in ((10, True), (20, False), (30, True)):
        progress.add(size, moved=moved)
    assert [(r.files_done, r.bytes_done, r.bytes_moved) for r in heard] == [
        (1, 10, 10),
        (2, 30, 10),
        (3, 60, 40),
    ]
    assert {(r.step, r.files, r.bytes) for r in heard} == {("files", 3, 60)}


def test_threads_count_together() -> None:
    heard: list[TransferProgress] = []
    progress = Progress(heard.append, "files", 400, 400)

    def work() -> None:
        for _ in range(100):
            progress.add(1, moved=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.files_done for r in heard] == list(range(1, 401))


def test_a_log_gets_lines_with_rate_and_remaining_time_but_not_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    hear = lines()
    hear(report())
    assert capsys.readouterr().err == ""
    now += module.LINE_SECONDS
    hear(report())
    hear(report())
    assert capsys.readouterr().err == "files: 3 of 10 files, 8 MB of 20 MB, 3 MB/s, 4 s left\n"
    now += module.LINE_SECONDS
    hear(report(moved=0))
    assert capsys.readouterr().err == "files: 3 of 10 files, 8 MB of 20 MB\n"


def test_silence_is_silence_and_a_callable_hears_all(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(False) as hear:
        hear(report())
    heard: list[TransferProgress] = []
    with listen(heard.append) as hear:
        hear(report())
    assert heard == [report()]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_bytes_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with listen(True) as hear:
        hear(report())
    err = capsys.readouterr().err
    assert "8.0/20.0 MB" in err
    assert "3 of 10 files" in err
