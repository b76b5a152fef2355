"""What usage logs cost a loader, and how fast plans and logs are audited.

    python tests/benchmarks/bench_audit.py [--rows 20000] [--samples 10000000] [--runs 7] [--json]

Rows of 4,096 uint16 tokens in batches of 8, as int64 and as stored, from a memory map: the loop does nothing,
so that the cost of a log is at its largest. Seconds are those of CPU, of all threads, so that other work on
the machine shows little; runs with and without a log take turns, and figures are of the best of each.
The plan is of a dataset that exists as an index only. Memory is the peak of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import benchmark_parser, peak_rss_bytes, print_figures, write_tokens
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo

LENGTH, BATCH, SHARD_ROWS = 4096, 8, 2000


def epoch_cpu_seconds(dataset: Dataset, logs: Path | None, dtype: str | None) -> float:
    from shardkit.loaders import StreamingLoader

    options = {"batch_size": BATCH, "rank": 0, "world_size": 1, "dtype": dtype, "usage_log": logs}
    with StreamingLoader(dataset, **options) as loader:  # type: ignore[arg-type]
        start = time.process_time()
        for _ in loader:
            pass
        return time.process_time() - start


def logging_costs(rows: int, runs: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        write_tokens(path, shards=-(-rows // SHARD_ROWS), rows=SHARD_ROWS, length=LENGTH)
        for dtype in ("int64", None):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(2 * runs):
                logs = path / "logs" / f"{dtype}-{turn}" if turn % 2 else None
                seconds[logs is not None].append(epoch_cpu_seconds(open_dataset(path), logs, dtype))
            off, on = (min(seconds[logged]) for logged in (False, True))
            steps = rows / BATCH
            name = dtype or "stored"
            found[f"{name}: tokens per CPU second without a log"] = rows * LENGTH / off
            found[f"{name}: tokens per CPU second with a log"] = rows * LENGTH / on
            found[f"{name}: CPU microseconds a step for the log"] = (on - off) / steps * 1e6
        logs = path / "logs" / "int64-1"
        found["log bytes a sample"] = sum(file.stat().st_size for file in logs.iterdir()) / rows
        found["log audit, samples per CPU second"] = log_rate(path, logs)
    return found


def log_rate(path: Path, logs: Path) -> float:
    from shardkit.tools.audit.logs import audit_logs

    start = time.process_time()
    report = audit_logs(logs, [open_dataset(path)], [None], progress=False)
    assert report.ok
    return report.walks[0].samples / (time.process_time() - start)


def plan_rate(samples: int) -> dict[str, float]:
    """In a process of its own: samples/s and peak bytes of auditing a plan of 8 ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from support.audit_runs import plan_report

    column = Column("tokens", "ndarray:uint16:4096", 8192)
    infos = [
        ShardInfo(FileInfo(f"shard.{number:05d}.mds", SHARD_ROWS * 8192), SHARD_ROWS, (column,))
        for number in range(samples // SHARD_ROWS)
    ]
    manifest = Manifest("mds", infos)
    dataset = Dataset(LocalFiles(Found(Path("/nowhere"), manifest)), manifest)
    start = time.process_time()
    report = plan_report(dataset, batch_sizes=[8], world_sizes=[8], epochs=1, lanes=64, window=8192)
    seconds = time.process_time() - start
    assert report.ok
    rate = samples / seconds
    return {"plan audit, samples per CPU second": rate, "plan audit, peak bytes": peak_rss_bytes()}


def main() -> None:
    parser = benchmark_parser(__doc__, runs=7)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan:
        print(json.dumps(plan_rate(arguments.samples)))
        return
    found = logging_costs(arguments.rows, arguments.runs)
    command = [sys.executable, __file__, "--plan", "--samples", str(arguments.samples)]
    found |= json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print_figures(arguments, found)


if __name__ == "__main__":
    main()
