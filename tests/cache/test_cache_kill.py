"""Two jobs of two ranks on one cache folder, one of them killed with -9 at random, again and again.

A few kills, so that the suite stays quick; tests/benchmarks/soak_cache.py does many more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.killed_jobs import KilledJobs, Sizes
from support.s3_moto import s3_server

SEED = 20


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressed", "kills"),
    [
        pytest.param(False, 2, id="raw"),
        pytest.param(False, 5, id="raw-longer", marks=pytest.mark.extended),
        pytest.param(True, 3, id="zstd", marks=pytest.mark.extended),
    ],
)
def test_killed_ranks_leave_no_wrong_byte_no_hang_and_no_file_behind(
    tmp_path: Path, compressed: bool, kills: int
) -> None:
    sizes = Sizes(compressed=compressed)
    with s3_server() as server:
        url = f"s3://{server.new_bucket()}/data"
        with KilledJobs(tmp_path, url, seed=SEED, sizes=sizes) as jobs:
            outcome = jobs.run(kills)
    assert outcome.wrong == [], f"seed {SEED}"
    assert outcome.kills == kills
    assert outcome.leftover_files == 0
    assert 0 < outcome.most_cache_bytes <= sizes.cache_bytes
    assert outcome.batches >= 4 * kills
