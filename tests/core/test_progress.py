"""Progress of transfers: honest counts, a line now and then, and never more than that."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from shardkit import progress as module
from shardkit.progress import FileCounter, Lines, TransferProgress, counting, make_listener, reading


def report(moved: int = 6_000_000) -> TransferProgress:
    return TransferProgress("files", 3, 10, 8_000_000, 20_000_000, moved, 2.0)


def test_files_that_were_there_count_as_done_but_not_as_moved() -> None:
    heard: list[TransferProgress] = []
    progress = FileCounter(heard.append, "files", 3, 60)
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
    progress = FileCounter(heard.append, "files", 400, 400)

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
    hear = Lines()
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
    with make_listener(False) as hear:
        hear(report())
    heard: list[TransferProgress] = []
    with make_listener(heard.append) as hear:
        hear(report())
    assert heard == [report()]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_bytes_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    with make_listener(True) as hear:
        hear(report())
    err = capsys.readouterr().err
    assert "3 of 10 files, 8 MB of 20 MB" in err


def test_counts_say_how_many_of_how_many_and_how_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for total in (2000, None):
        with counting("audit", total, "samples") as count:
            count(400)
            now += module.LINE_SECONDS
            count(600)
    assert capsys.readouterr().err.splitlines() == [
        "audit: 1,000 of 2,000 samples (50%), 200/s",
        "audit: 1,000 samples, 200/s",
    ]
    with counting("audit", 10, "samples", progress=False) as count:
        count(10)
    assert capsys.readouterr().err == ""


def test_a_read_is_shown_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with reading("scan tars", {3: 10, 4: 10, 5: 15}) as done:
        done(3)
        now += module.QUIET_SECONDS
        done(4)
        assert capsys.readouterr().err == ""
        now += module.LINE_SECONDS
        done(5)
    assert capsys.readouterr().err == "scan tars: 3 of 3 files, 35 B of 35 B, 5 B/s, 0 s left\n"


def test_rich_is_loaded_for_a_terminal_only() -> None:
    code = "import sys, shardkit.progress as p; p.make_listener(True); assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE)
