"""Kill ranks that share a cache folder, with -9, at random, many times; print what became of it.

    python tests/benchmarks/soak_cache.py --kills 50 [--seed SEED] [--compressed]

The same as tests/cache/test_cache_kill.py for as long as one likes: two jobs of two ranks over a dataset on
an S3 server in this process, a cache for half of it. Ends with status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from shardkit.units import format_bytes
from support.killed_jobs import KilledJobs, Outcome, Sizes
from support.s3_moto import s3_server


def soak(kills: int, seed: int, sizes: Sizes) -> Outcome:
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server() as server,
        KilledJobs(Path(folder), f"s3://{server.new_bucket()}/data", seed=seed, sizes=sizes) as jobs,
    ):
        return jobs.run(kills)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill ranks that share a cache folder.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--compressed", action="store_true", help="shards packed with zstd")
    options = parser.parse_args()
    sizes = Sizes(compressed=options.compressed)
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    outcome = soak(options.kills, options.seed, sizes)
    budget = f"{format_bytes(outcome.most_cache_bytes)} of {format_bytes(sizes.cache_bytes)}"
    for name, value in {
        "kills": f"{outcome.kills:,}",
        "batches checked": f"{outcome.batches:,}",
        "things wrong": f"{len(outcome.wrong):,}",
        "longest wait for a batch": f"{outcome.longest_wait_seconds:.2f} s",
        "longest from a kill to the next batch": f"{outcome.slowest_restart_seconds:.2f} s",
        "most bytes in the cache": budget,
        "files left by the killed": f"{outcome.abandoned_files:,}",
        "of them after the next start": f"{outcome.leftover_files:,}",
        "seconds": f"{time.monotonic() - began:.0f}",
    }.items():
        print(f"{name:<38} {value:>24}")
    for problem in outcome.wrong:
        print(f"WRONG: {problem}")
    is_held = outcome.most_cache_bytes <= sizes.cache_bytes
    if outcome.wrong or outcome.leftover_files or not is_held:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
