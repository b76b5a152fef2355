"""The example with NVIDIA DALI keeps the state of the batch in use, however far DALI fetches ahead.

The example itself runs in the tests of examples where DALI is installed; DALI calls its source as here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    return importlib.import_module("dali_from_loader")


def run(example: Any, folder: Path, ahead: int, steps: int, state: Any = None) -> list[tuple[Any, Any]]:
    """The batches of a loop over something that fetches `ahead` batches before each, with the states."""
    with example.open_loader(folder, 8) as loader:
        if state is not None:
            loader.load_state_dict(state)
        feed = example.Feed(loader)
        queue: list[Any] = []
        found = []
        for _ in range(steps):
            while len(queue) <= ahead:
                queue.append(feed())
            batch = queue.pop(0)
            feed.used()
            found.append((batch, feed.state_dict()))
    return found


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_run_continues_behind_the_batch_in_use(example: Any, tmp_path: Path, ahead: int) -> None:
    example.draw_pictures(tmp_path / "pictures", 30, 10)
    expected = run(example, tmp_path / "pictures", 0, 12)
    for number in range(0, 11, 3):
        found = run(example, tmp_path / "pictures", ahead, 12 - number - 1, expected[number][1])
        for (batch, state), (wanted, its) in zip(found, expected[number + 1 :], strict=True):
            assert state == its
            for values, others in zip(batch, wanted, strict=True):
                for value, other in zip(values, others, strict=True):
                    np.testing.assert_array_equal(value, other, strict=True)
