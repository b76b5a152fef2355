"""Gathering by one core and by several: the same rows; and which of them is used."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from shardkit.loaders import gather
from shardkit.loaders.gather import Gather, _Choice


def source(stored: str) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.generic]], int]:
    """(rows at an odd address, that address)."""
    memory = np.zeros(300 * 100 * np.dtype(stored).itemsize + 1, dtype=np.uint8)
    rows = memory[1:].view(stored).reshape(300, 100)
    rows[:] = np.random.default_rng(0).integers(0, 60_000, rows.shape)
    return rows, int(rows.__array_interface__["data"][0])


@pytest.mark.parametrize("delivered", ["stored", "int64"])
@pytest.mark.parametrize("stored", ["uint16", "uint32"])
def test_one_core_and_several_give_the_same_rows(
    stored: str, delivered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, address = source(stored)
    to = np.dtype(stored if delivered == "stored" else delivered)
    row_bytes = rows.strides[0]
    numbers = np.random.default_rng(1).integers(0, 300, 500)
    for way in (0, 1):
        monkeypatch.setattr(gather, "_SHARED_BYTES", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(_Choice, "next", lambda _, way=way: way)
        bound = Gather((100,), np.dtype(stored), to).bind(address, rows.nbytes, [rows])
        for part in (slice(0, 500), slice(3, 4), slice(100, 460)):
            found = bound(numbers[part] * row_bytes)
            assert found.dtype == to
            assert np.array_equal(found, rows[numbers[part]])


def test_threads_and_forked_children_leave_torchs_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    one = Gather((100,), np.dtype("uint16"), np.dtype("int64"))
    assert one._may_share(10_000)
    assert not one._may_share(100), "a small gather ends before a second thread has begun"
    found = []
    thread = threading.Thread(target=lambda: found.append(one._may_share(10_000)))
    thread.start()
    thread.join()
    assert found == [False]
    child = os.fork()
    if child == 0:
        os._exit(int(one._may_share(10_000)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def spend(choice: _Choice, gathers: int, one: float, several: float) -> list[int]:
    ways = []
    for _ in range(gathers):
        ways.append(choice.next())
        choice.took(ways[-1], (one, several)[ways[-1]])
    return ways


def test_the_quicker_way_is_found_and_kept() -> None:
    assert spend(_Choice(), 400, one=2.0, several=1.0)[-300:].count(1) > 290
    assert spend(_Choice(), 400, one=1.0, several=2.0)[-300:].count(0) > 290


def test_a_hopeless_way_costs_one_gather_and_ever_fewer() -> None:
    ways = spend(_Choice(), 10_000, one=1.0, several=100.0)
    assert ways.count(1) <= 12


def test_a_change_is_noticed_at_once_when_the_way_in_use_becomes_slow() -> None:
    choice = _Choice()
    spend(choice, 100, one=2.0, several=1.0)
    assert spend(choice, 40, one=2.0, several=200.0)[-20:].count(0) == 20


def test_a_way_that_has_become_quicker_is_found_again() -> None:
    choice = _Choice()
    spend(choice, 100, one=1.0, several=100.0)
    assert spend(choice, 2000, one=1.0, several=0.5)[-100:].count(1) > 90
