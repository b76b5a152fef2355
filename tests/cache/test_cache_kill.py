"""Two jobs of two ranks on one cache folder, one of them killed with -9 at random, again and again.

A few kills, so that the suite stays quick; tests/benchmarks/soak_cache.py does many more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.bucket import s3_client
from servers.fault_proxy import FaultProxy, Rule
from servers.rgw import RgwServer
from support.killed_jobs import KilledJobs, Sizes
from support.s3_moto import s3_server
from support.s3_rgw import rgw_environment

pytest_plugins = ["support.s3_rgw"]

SEED = 20
SLOW_BYTES_PER_SECOND = 2e5  # of a connection: a shard takes as long as some batches


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


@pytest.mark.extended
@pytest.mark.slow
def test_killed_ranks_behind_slow_connections_of_a_real_server_neither_hang_nor_exceed_a_small_cache(
    tmp_path: Path, rgw: RgwServer, rgw_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two lanes' windows do not fit: ready shards, urgent ones and rows all compete for the room.
    sizes = Sizes(cache_share=0.25)
    rgw_proxy.set_rules(Rule(fault="throttle", bytes_per_second=SLOW_BYTES_PER_SECOND, delay_seconds=0.005))
    with rgw_environment(rgw):
        monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_proxy.endpoint_url)
        bucket = "killed-ranks"
        s3_client(rgw.endpoint_url).create_bucket(Bucket=bucket)
        with KilledJobs(tmp_path, f"s3://{bucket}/data", seed=SEED, sizes=sizes) as jobs:
            outcome = jobs.run(4)
    assert outcome.wrong == [], f"seed {SEED}"
    assert outcome.kills == 4
    assert outcome.leftover_files == 0
    assert 0 < outcome.most_cache_bytes <= sizes.cache_bytes
