"""Kill, starve or damage a build anywhere, run the same command again: the same bytes, and no false index.

This holds a part of the matrix; `python tests/benchmarks/crash_matrix.py` runs the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crashes import Cell, Crashes


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashes]:
    with Crashes(tmp_path_factory.mktemp("crashes")) as crashes:
        yield crashes


def check(crashes: Crashes, cell: Cell) -> None:
    outcome = crashes.run(cell)
    assert outcome.problems == []
    assert outcome.struck
    assert outcome.looks > 10


@pytest.mark.parametrize(
    "cell",
    [
        Cell(fault="kill", stage="near", moment="uncommitted"),
        Cell(fault="kill", stage="tokenize", moment="committed", skip=1),
        Cell(fault="kill", step=30, replace=True),
        Cell(fault="interrupt", action="interrupt_builder", step=12, replace=True),
    ],
    ids=str,
)
def test_the_same_command_after_a_kill_brings_the_same_bytes(crashes: Crashes, cell: Cell) -> None:
    check(crashes, cell)
