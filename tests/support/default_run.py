"""What the default run leaves to the extended one: cases of large grids and most random examples.

`@pytest.mark.sampled(3)` above a parametrized test keeps three of its cases in the default run, in which as
many values of all parameters occur; the others are marked `extended`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import pytest

__all__ = ["draw_fewer_examples", "leave_cases", "sample"]

_SETTINGS = "_hypothesis_internal_use_settings"  # where `settings(...)` leaves what a test asks for


def sample(cases: Sequence[dict[str, str]], count: int) -> list[int]:
    """Choose `count` cases, each given by what its parameters' values look like; returns their indices."""
    chosen: list[int] = []
    seen: set[tuple[str, str]] = set()
    while len(chosen) < min(count, len(cases)):
        left = [index for index in range(len(cases)) if index not in chosen]
        best = max(left, key=lambda index: len(cases[index].items() - seen))
        chosen.append(best)
        seen |= cases[best].items()
    return sorted(chosen)


def leave_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of sampled tests `extended`, except for as many as each test's mark says."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("extended"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        mark = grid[0].get_closest_marker("sampled")
        assert mark is not None
        cases = [
            {name: repr(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            for item in grid
        ]
        kept = sample(cases, *mark.args)
        for index, item in enumerate(grid):
            if index not in kept:
                item.add_marker(pytest.mark.extended)


def draw_fewer_examples(items: Iterable[pytest.Item]) -> None:
    """Have the tests of hypothesis draw a quarter of their examples, but at least ten."""
    if "hypothesis" not in sys.modules:  # no test imported it
        return
    from hypothesis import is_hypothesis_test, settings

    for test in {test for item in items if is_hypothesis_test(test := getattr(item, "obj", None))}:
        asked = getattr(test, _SETTINGS)
        fewer = min(asked.max_examples, max(10, asked.max_examples // 4))
        setattr(test, _SETTINGS, settings(asked, max_examples=fewer))
