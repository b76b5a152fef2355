"""Starting one rank of a very large run: 450,000 shards, 3.7e9 samples, in a fresh process.

    python tests/benchmarks/bench_open.py [--shards 450000] [--runs 5] [--without-table] [--json]

Writes the index only (no shard is read), then in a new process each run: opens the dataset, makes the
loader of rank 3 of 2,048, plans the first batch, resumes in mid-epoch and plans that batch. Medians; memory
is the process's peak, and that of torch's import alone. `--without-table` removes index.bin.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import benchmark_parser, print_figures
from shardkit.formats.mds.index import make_columns, write_index
from shardkit.manifest import FileInfo, ShardInfo

SAMPLES = 8200  # of a shard: 64 MiB of uint16[4096]

RANK = r"""
import json, re, sys, time
import torch
from shardkit.loaders import StreamingLoader

def peak():
    # Not ru_maxrss: that of a parent survives into a new program.
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) / 1024

imported = peak()
start = time.perf_counter()
loader = StreamingLoader(sys.argv[1], batch_size=8, rank=3, world_size=2048)
opened = time.perf_counter()
order = loader._arrangement.order
loader.plan.steps(order, 0, 1)
first = time.perf_counter()
middle = loader.plan.samples // 2 // 16384 * 16384
loader.load_state_dict(loader.state_dict() | {"position": middle})
loader.plan.steps(order, middle, 1)
resumed = time.perf_counter()
print(json.dumps({"open_s": opened - start, "first_plan_s": first - opened, "resume_s": resumed - first,
                  "torch_MB": imported, "peak_MB": peak()}))
"""


def write(folder: Path, shards: int) -> None:
    columns = make_columns({"tokens": "ndarray:uint16:4096"})
    size = SAMPLES * (8192 + 4) + 512
    infos = [
        ShardInfo(
            FileInfo(f"shard.{i:06d}.mds", size, {"xxh64": f"{i * 0x9E3779B97F4A7C15 % (1 << 64):016x}"}),
            SAMPLES,
            columns,
            size_limit=1 << 26,
        )
        for i in range(shards)
    ]
    write_index(folder, infos)


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--shards", type=int, default=450_000)
    parser.add_argument("--without-table", action="store_true")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), arguments.shards)
        if arguments.without_table:
            (Path(scratch) / "index.bin").unlink(missing_ok=True)
        for _ in range(arguments.runs):
            command = [sys.executable, "-c", RANK, scratch]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append(json.loads(answer.stdout))
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print_figures(arguments, medians)


if __name__ == "__main__":
    main()
