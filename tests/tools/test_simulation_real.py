"""A simulated run against the real loader on the same small dataset, network and cache.

A busy machine makes the real run slower, never faster: waits are bounded from below only.
tests/benchmarks/bench_simulate.py shows both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.simulated_runs import CASES, Case, compare, write_dataset

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "data"
    write_dataset(folder)
    return folder


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_a_simulated_run_fetches_and_waits_as_the_real_one(case: Case, dataset: Path, tmp_path: Path) -> None:
    found = compare(case, dataset, tmp_path)
    assert found.fetched_ratio == pytest.approx(1, abs=0.1)
    assert abs(found.row_reads[0] - found.row_reads[1]) <= 32
    assert found.first_seconds[0] >= 0.9 * found.first_seconds[1]
    assert found.seconds[0] >= 0.9 * found.seconds[1]
