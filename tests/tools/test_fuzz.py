"""Damaged and hostile input of every reader ends in values or in a ShardkitError, in bounded time and memory.

1,000 inputs by number in the default run, 20,000 more in the extended one, which also mutates by coverage for
20 seconds. For long ones

    SHARDKIT_FUZZ_INPUTS=100000 pytest -m extended tests/tools/test_fuzz.py
    cd tests && PYTHONPATH=.. python -m fuzz.guided all --seconds 36000 --keep found
    cd tests && PYTHONPATH=.. python -m fuzz.with_atheris recipe corpus -max_total_time=36000

A failure names target and number: `fuzz(target(name), [n], …)`, or target, seed and number of a guided run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.engine import fuzz, mutate, written
from fuzz.guided import explore, explore_apart
from fuzz.targets import APART, NAMES, target
from shardkit.writers.execution.commit import parse_record

DEFAULT_INPUTS = 1_000
EXTENDED_INPUTS = int(os.environ.get("SHARDKIT_FUZZ_INPUTS", "20000"))
GUIDED_SECONDS = 20.0
APART_INPUTS = 60
TOGETHER = tuple(name for name in NAMES if name not in APART)
every_target = pytest.mark.parametrize("name", TOGETHER)


def check(name: str, start: int, inputs: int, folder: Path) -> None:
    share = -(-inputs // len(TOGETHER))
    outcome = fuzz(target(name), range(start, start + share), folder)
    assert not outcome.failures, "\n".join(outcome.failures[:20])
    assert outcome.inputs == share
    assert outcome.refused > 0 or not target(name).refuses


@pytest.mark.sampled(5)
@every_target
def test_hostile_input_ends_in_values_or_a_clear_error(name: str, tmp_path: Path) -> None:
    check(name, 0, DEFAULT_INPUTS, tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(3600)
@every_target
def test_much_hostile_input_ends_in_values_or_a_clear_error(name: str, tmp_path: Path) -> None:
    check(name, DEFAULT_INPUTS, EXTENDED_INPUTS, tmp_path)


@pytest.mark.extended
@every_target
def test_input_that_reaches_new_code_ends_in_values_or_a_clear_error(name: str, tmp_path: Path) -> None:
    found = explore(target(name), tmp_path, seconds=GUIDED_SECONDS / len(TOGETHER))
    assert not found.failures, "\n".join(found.failures)
    assert found.inputs > 0


@pytest.mark.extended
@pytest.mark.parametrize("name", APART)
def test_hostile_tables_end_no_process(name: str, tmp_path: Path) -> None:
    found = explore_apart(name, tmp_path, seed=0, inputs=APART_INPUTS)
    assert not found.failures, "\n".join(found.failures)
    assert (found.inputs, found.refused > 0) == (APART_INPUTS, True)


@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_not_mutated_is_read(name: str, tmp_path: Path) -> None:
    made = target(name)
    written(made.files, tmp_path)
    made.read(tmp_path)


def test_inputs_are_a_function_of_their_number() -> None:
    data = bytes(range(256)) * 4
    made = [mutate(data, random.Random(number)) for number in range(300)]
    assert made == [mutate(data, random.Random(number)) for number in range(300)]
    assert len({*made, data}) > 250


def test_a_fault_behind_a_checksum_is_found_by_coverage_and_again_from_its_seed(tmp_path: Path) -> None:
    facts = ("pack", "a", "0")

    def read(folder: Path) -> None:
        record = parse_record((folder / "commit.json").read_bytes(), folder)
        if record is not None and (record.commit.stage, record.commit.name, record.commit.digest) != facts:
            raise KeyError("planted")

    planted = replace(target("commit"), read=read)
    found = explore(planted, tmp_path, inputs=300, keep=tmp_path / "kept")
    assert found.failures
    assert "KeyError: \"'planted'\"" in found.failures[0]
    assert found.population > 1
    assert explore(planted, tmp_path, inputs=300).failures == found.failures
    again = list((tmp_path / "kept").iterdir())
    assert len(again) == len(found.failures)
    with pytest.raises(KeyError, match="planted"):
        read(again[0])
    without = explore(replace(planted, repair=None), tmp_path, inputs=300)
    assert not without.failures
    assert without.pairs < found.pairs
