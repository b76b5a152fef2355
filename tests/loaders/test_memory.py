"""Output memory is used again, and only when nobody can see it any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardkit.loaders.gather import OutputMemory

SHAPE, INT64 = (4, 8192), np.dtype(np.int64)


SHOWN: list[Callable[[Any], object]] = [
    lambda a: a,
    lambda a: a[1:3, ::2],
    lambda a: a.view(np.uint8)[0].T,
    lambda a: torch.from_numpy(a),
    lambda a: torch.from_numpy(a[2]).view(torch.int32)[::2],
    lambda a: torch.from_numpy(a).reshape(2, -1).unbind(0)[1],
    lambda a: memoryview(a[1]),
]


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again_after_its_array_has_died() -> None:
    memory = OutputMemory()
    first = memory.lend(SHAPE, INT64)
    where = address(first)
    del first
    assert address(memory.lend(SHAPE, INT64)) == where


def test_whatever_shows_the_memory_keeps_it_from_being_lent_again() -> None:
    memory = OutputMemory()
    rng = np.random.default_rng(0)
    held: list[tuple[object, int]] = []
    for number in range(300):
        array = memory.lend(SHAPE, INT64)
        array[:] = number
        shown = SHOWN[number % len(SHOWN)](array)
        held.append((shown, number))
        del array, shown
        if len(held) > 12:
            del held[int(rng.integers(len(held)))]
        gc.collect(0)
        for other, value in held:
            seen = np.asarray(other).reshape(-1)[:1]
            assert int(seen[0]) == (value if seen.dtype != np.uint8 else value % 256)


def test_a_larger_piece_than_those_kept_is_new() -> None:
    memory = OutputMemory()
    del (small := [memory.lend((1, 8192), INT64)])[0]
    assert not small
    large = memory.lend(SHAPE, INT64)
    large[:] = 5
    assert large.shape == SHAPE
    other = memory.lend(SHAPE, INT64)
    other[:] = 6
    assert (large == 5).all()


def test_tiny_and_huge_arrays_are_plain_ones() -> None:
    memory = OutputMemory()
    assert memory.lend((3,), INT64).shape == (3,)
    assert memory.lend((2 << 20,), INT64).nbytes == 16 << 20
    assert memory.lend((0, 5), INT64).shape == (0, 5)
