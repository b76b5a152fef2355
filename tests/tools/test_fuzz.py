"""Damaged and hostile input of every reader ends in values or in a ShardkitError, in bounded time and memory.

1,000 inputs in the default run, 20,000 more in the extended one; for a long one
`SHARDKIT_FUZZ_INPUTS=100000 pytest -m extended tests/tools/test_fuzz.py`. A failure names target and number:
`fuzz(target(name), [n], …)`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fuzz.engine import fuzz, mutate
from fuzz.targets import NAMES, target

DEFAULT_INPUTS = 1_000
EXTENDED_INPUTS = int(os.environ.get("SHARDKIT_FUZZ_INPUTS", "20000"))
every_target = pytest.mark.parametrize("name", NAMES)


def check(name: str, start: int, inputs: int, folder: Path) -> None:
    share = -(-inputs // len(NAMES))
    outcome = fuzz(target(name), range(start, start + share), folder)
    assert not outcome.failures, "\n".join(outcome.failures[:20])
    assert outcome.inputs == share
    assert (outcome.refused > 0) == target(name).refuses


@every_target
def test_hostile_input_ends_in_values_or_a_clear_error(name: str, tmp_path: Path) -> None:
    check(name, 0, DEFAULT_INPUTS, tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(3600)
@every_target
def test_much_hostile_input_ends_in_values_or_a_clear_error(name: str, tmp_path: Path) -> None:
    check(name, DEFAULT_INPUTS, EXTENDED_INPUTS, tmp_path)


@every_target
def test_what_is_not_mutated_is_read(name: str, tmp_path: Path) -> None:
    made = target(name)
    for path, data in made.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    made.read(tmp_path)


def test_inputs_are_a_function_of_their_number() -> None:
    data = bytes(range(256)) * 4
    made = [mutate(data, random.Random(number)) for number in range(300)]
    assert made == [mutate(data, random.Random(number)) for number in range(300)]
    assert len({*made, data}) > 250
