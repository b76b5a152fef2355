"""The mutation tool changes what it says, and tells a test that notices from one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mutation.mutants import mutants
from mutation.runner import ROOT, targets

MODULE = '''
"""Two functions of which only one is tested well."""

LIMIT = 10

def clamped(value: int, lowest: int = 0) -> int:
    """At least `lowest`, below LIMIT."""
    if value >= LIMIT:
        raise ValueError(f"{value} is not below {10 + 0}")
    return max(value, lowest)

def first_power(value: int) -> int:
    power = 1
    while power < value:
        power *= 2
    return power
'''

TESTS = """
import pytest
from small import clamped, first_power

def test_well():
    assert [clamped(value) for value in (-5, 0, 9)] == [0, 0, 9]
    with pytest.raises(ValueError):
        clamped(10)

def test_weakly():
    assert first_power(5) > 5
"""

RUN = """
import json, sys
from pathlib import Path
from mutation.runner import Target, score
found = score(Target("small.py", ["test_small.py"], {name: "" for name in sys.argv[2:]}, Path(sys.argv[1])))
names = [[mutant.name for mutant in each] for each in (found.survived, found.harmless)]
json.dump([found.killed, *names, found.stale], Path("found.json").open("w"))
"""


def run(folder: Path, tests: str, *harmless: str) -> subprocess.CompletedProcess[str]:
    (folder / "small.py").write_text(MODULE)
    (folder / "test_small.py").write_text(tests)
    path = f"{folder}:{ROOT}:{ROOT / 'tests'}"
    return subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *harmless],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_mutants_are_of_what_a_module_computes_and_not_of_its_texts() -> None:
    assert [mutant.name for mutant in mutants(MODULE)] == [
        "module: 10 -> 11",
        "module: 10 -> 9",
        "clamped: value >= LIMIT -> value > LIMIT",
        "clamped: return max(value, lowest) -> return None",
        "clamped: max(value, lowest) -> min(value, lowest)",
        "first_power: 1 -> 2",
        "first_power: 1 -> 0",
        "first_power: power < value -> power <= value",
        "first_power: power *= 2 -> power //= 2",
        "first_power: power *= 2 -> pass",
        "first_power: 2 -> 3",
        "first_power: 2 -> 1",
        "first_power: return power -> return None",
    ]


@pytest.mark.extended
def test_a_weak_test_leaves_survivors_and_a_good_one_none(tmp_path: Path) -> None:
    listed = ["first_power: 2 -> 3", "module: 10 -> 11", "first_power: gone -> away"]
    done = run(tmp_path, TESTS, *listed)
    assert done.returncode == 0, done.stdout + done.stderr
    found: Any = json.loads((tmp_path / "found.json").read_text())
    killed, survived, harmless, stale = found
    assert survived == ["first_power: 1 -> 2", "first_power: power < value -> power <= value"]
    assert harmless == ["first_power: 2 -> 3"]
    assert sorted(stale) == ["first_power: gone -> away", "module: 10 -> 11"]
    assert len(killed) == 10
    assert killed["clamped: value >= LIMIT -> value > LIMIT"] == "test_small.py::test_well"
    assert "too long" in killed["first_power: power *= 2 -> pass"]
    assert (tmp_path / "small.py").read_text() == MODULE


@pytest.mark.extended
def test_tests_that_fail_without_a_mutant_give_no_score(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS + "\ndef test_wrong():\n    assert first_power(5) == 5\n")
    assert done.returncode != 0
    assert "a test fails without any mutant: test_small.py::test_wrong" in done.stderr
    assert not (tmp_path / "found.json").exists()


def test_reasons_are_of_mutants_that_exist() -> None:
    for path, target in targets().items():
        names = {mutant.name for mutant in mutants((ROOT / path).read_text())}
        assert set(target.harmless) <= names, path
        assert all(target.harmless.values())
        assert all((ROOT / test).is_file() for test in target.tests)


@pytest.mark.extended
def test_a_sample_of_a_real_module_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mutation", "shardkit/order/exclusions.py", "--sample", "6", "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 killed, 0 survived" in done.stdout
