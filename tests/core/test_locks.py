"""Locks between processes: one holder, freed by death, given up in time, never kept by a child."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit import locks
from shardkit.locks import FileLock
from support.ended_threads import ended_threads
from support.other_process import SECONDS, OtherProcess

HOLD = """
import pathlib, sys
from shardkit.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]), keep=sys.argv[2] == "True")
assert lock.acquire(60)
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""

PASS_ON = """
import os, pathlib, sys
from shardkit.locks import FileLock
folder, keep, rounds = pathlib.Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    lock = FileLock(folder / "lock", keep=keep)
    assert lock.acquire(60)
    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))  # an error if someone else is inside
    count = int((folder / "count").read_text())
    (folder / "count").write_text(str(count + 1))
    (folder / "inside").unlink()
    lock.release()
"""

HOLD_WITH_CHILD = """
import pathlib, subprocess, sys
from shardkit.locks import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
assert lock.acquire()
child = subprocess.Popen(["sleep", "300"], close_fds=False)
print(child.pid, flush=True)
sys.stdin.readline()
"""

KEEP = pytest.mark.parametrize("keep", [False, True], ids=["removed", "kept"])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with ended_threads():
        yield


def waiters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-lock"]


def can_be_had(file: Path) -> bool:
    lock = FileLock(file, keep=True)
    taken = lock.acquire()
    lock.release()
    return taken


@KEEP
def test_a_lock_has_one_holder_until_it_is_released(tmp_path: Path, keep: bool) -> None:
    first, second = (FileLock(tmp_path / "lock", keep=keep) for _ in range(2))
    assert [first.held, first.acquire(), first.held] == [False, True, True]
    assert not second.acquire()
    assert not second.acquire(0.01)
    first.release()
    assert [first.held, second.held] == [False, False]
    assert (tmp_path / "lock").exists() == keep
    first.release()  # nothing happens
    assert second.acquire(SECONDS)
    first.release()
    assert not can_be_had(tmp_path / "lock")
    second.release()


def test_a_lock_granted_to_a_wait_that_was_given_up_goes_to_whoever_asks_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "others hold it": the thread that waited in vain is slow to give it back on a busy machine."""
    flock, granted, may_run = fcntl.flock, threading.Event(), threading.Event()

    def slow_to_run(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if operation == fcntl.LOCK_EX:
            granted.set()
            assert may_run.wait(SECONDS)

    monkeypatch.setattr(fcntl, "flock", slow_to_run)
    first, second = (FileLock(tmp_path / "lock", keep=True) for _ in range(2))
    assert first.acquire()
    assert not second.acquire(0.01)
    first.release()
    assert granted.wait(SECONDS)
    threading.Timer(0.05, may_run.set).start()
    assert second.acquire(SECONDS)
    assert not can_be_had(tmp_path / "lock")
    second.release()
    assert can_be_had(tmp_path / "lock")


@KEEP
def test_a_killed_process_frees_its_lock(tmp_path: Path, keep: bool) -> None:
    lock = FileLock(tmp_path / "lock", keep=keep)
    with OtherProcess(HOLD, tmp_path / "lock", keep) as other:
        assert other.line() == "held"
        assert not lock.acquire()
        threading.Timer(0.05, other.kill).start()
        assert lock.acquire(SECONDS)
        lock.release()


@KEEP
def test_who_waits_gets_the_lock_when_another_process_releases_it(tmp_path: Path, keep: bool) -> None:
    lock = FileLock(tmp_path / "lock", keep=keep)
    with OtherProcess(HOLD, tmp_path / "lock", keep) as other:
        assert other.line() == "held"
        threading.Timer(0.05, other.tell).start()
        assert lock.acquire(SECONDS)
        assert other.line() == "released"
        assert not can_be_had(tmp_path / "lock")
        lock.release()


def test_a_stopped_holder_is_given_up_in_time_once_and_the_late_lock_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with OtherProcess(HOLD, file, True) as other:
        assert other.line() == "held"
        other.stop()
        lock = FileLock(file, keep=True)
        assert not lock.acquire(0.05)
        assert not lock.held
        began = time.monotonic()
        for _ in range(20):  # neither waits again nor leaves a thread behind each time
            assert not lock.acquire(SECONDS)
        assert time.monotonic() - began < SECONDS
        (waiter,) = waiters()

        other.go_on()
        other.tell()
        assert other.line() == "released"
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        assert can_be_had(file)

        # From now on it is waited for as before.
        assert lock.acquire(SECONDS)
        second = FileLock(file, keep=True)
        threading.Timer(0.05, lock.release).start()
        assert second.acquire(SECONDS)
        second.release()


def test_time_spent_on_a_lock_that_its_holder_removed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lock"
    first, second, third = (FileLock(file, keep=True) for _ in range(3))
    assert first.acquire()
    timeouts: list[float] = []
    wait = locks._Waiter.wait

    def pass_on(waiter: locks._Waiter, timeout_seconds: float) -> bool:
        timeouts.append(timeout_seconds)
        if len(timeouts) == 1:  # the file is replaced while `third` waits
            file.unlink()
            assert second.acquire()
            first.release()
        else:
            second.release()
        return wait(waiter, timeout_seconds)

    monkeypatch.setattr(locks._Waiter, "wait", pass_on)
    assert third.acquire(SECONDS)
    assert len(timeouts) == 2
    assert 0 < timeouts[1] < timeouts[0] <= SECONDS
    third.release()


@pytest.mark.sampled(1)
@KEEP
def test_processes_that_pass_a_lock_on_are_never_inside_together(tmp_path: Path, keep: bool) -> None:
    rounds = 150
    (tmp_path / "count").write_text("0")
    others = [OtherProcess(PASS_ON, tmp_path, keep, rounds) for _ in range(4)]
    try:
        for other in others:
            assert other.line() == "ready"
        for other in others:
            other.tell()
        assert [other.wait() for other in others] == [0] * 4
    finally:
        for other in others:
            with other:
                pass
    assert (tmp_path / "count").read_text() == str(4 * rounds)
    assert (tmp_path / "lock").exists() == keep


def test_a_program_started_by_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    with OtherProcess(HOLD_WITH_CHILD, tmp_path / "lock") as other:
        child = int(other.line())
        try:
            other.kill()
            assert FileLock(tmp_path / "lock").acquire(SECONDS)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_no_program_inherits_a_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    listed = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True, timeout=SECONDS
    )
    lock.release()
    assert str(tmp_path).encode() not in listed.stdout


@KEEP
def test_a_forked_child_does_not_keep_what_its_parent_releases(tmp_path: Path, keep: bool) -> None:
    lock = FileLock(tmp_path / "lock", keep=keep)
    assert lock.acquire()
    end, go_on = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        os.close(go_on)
        os.read(end, 1)  # until the parent closes it, or dies
        os._exit(0)
    os.close(end)
    try:
        lock.release()
        assert can_be_had(tmp_path / "lock")
    finally:
        os.close(go_on)
        os.waitpid(child, 0)


def test_a_lock_is_released_though_a_failing_disk_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*call: object, **more: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        lock.release()
    assert (tmp_path / "lock").exists()
    assert other.acquire()
    other.release()
    assert not (tmp_path / "lock").exists()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing" / "lock").acquire()
