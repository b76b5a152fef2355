"""Loaders side by side on the same rows: pre-tokenized uint32 x 4,096, shuffled, batches of 8, warm files.

    python tests/benchmarks/bench_loaders.py [--runs 5] [--sides gather,shardkit,…] [--litdata-python PATH]

Every side has a process of its own and makes one epoch, or 4 seconds of it, when its turn comes; figures are
medians of the runs, ratios are to the hand-written gather and to shardkit. Peers that cannot be imported are
left out with the reason. litdata wants an environment of its own (it pins other packages):

    python -m venv lit && lit/bin/pip install torch==2.13.0 litdata
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from loader_sides import LENGTH, SIDES, STREAMS

from shardkit import mds, tar
from shardkit.index import ShardInfo

SHARDS = 8
WRITE_LITDATA = """
import sys, numpy as np, torch
from litdata import TokensLoader
from litdata.streaming.writer import BinaryWriter
rows = np.memmap(sys.argv[1], dtype=np.int32, mode="r").reshape(-1, int(sys.argv[3]))
writer = BinaryWriter(sys.argv[2], chunk_bytes="64MB", item_loader=TokensLoader(block_size=int(sys.argv[3])))
for number, row in enumerate(rows):
    writer[number] = torch.from_numpy(np.array(row))
writer.done()
writer.merge(1)
"""


def write_all(folder: Path, megabytes: int) -> None:
    """The same rows as MDS, tars, one plain file and five MDS streams."""
    count = (megabytes << 20) // (4 * LENGTH) // SHARDS
    generator = np.random.default_rng(0)
    infos: dict[str, list[ShardInfo]] = {}
    for name in ("mds", "tar", *(f"streams/{i}" for i in range(STREAMS))):
        (folder / name).mkdir(parents=True)
        infos[name] = []
    with (folder / "whole.bin").open("wb") as whole:
        for number in range(SHARDS):
            rows = generator.integers(0, 50_000, (count, LENGTH), dtype=np.uint32)
            whole.write(rows.tobytes())
            infos["mds"].append(
                mds.write_rows_shard(folder / "mds", f"shard.{number:05d}.mds", rows, size_limit=None)
            )
            infos["tar"].append(
                tar.write_rows_shard(folder / "tar", f"s-{number:05d}.tar", rows, key_start=number * count)
            )
            for stream in range(STREAMS):
                name = f"streams/{stream}"
                part = rows[stream * count // STREAMS : (stream + 1) * count // STREAMS]
                infos[name].append(
                    mds.write_rows_shard(folder / name, f"shard.{number:05d}.mds", part, size_limit=None)
                )
    for name, shards in infos.items():
        write_index = tar.write_shard_list if name == "tar" else mds.write_index
        write_index(folder / name, shards)


def warm(folder: Path) -> None:
    """Evict every file from the page cache, then read it once in order: how pages came in shows for long."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb", buffering=0) as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while handle.read(1 << 20):
                pass


class Side:
    """A loader's process."""

    def __init__(self, name: str, folder: Path, python: str, most_seconds: float) -> None:
        self.name, self.runs = name, list[dict[str, float]]()
        script = Path(__file__).with_name("loader_sides.py")
        self._process = subprocess.Popen(
            [python, str(script), name, str(folder), str(most_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self) -> str:
        """One epoch; "" or why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            _, errors = self._process.communicate(timeout=60)
            return (errors.strip().splitlines() or ["it ended without a word"])[-1]
        self.runs.append(json.loads(answer))
        return ""

    def median(self, figure: str) -> float:
        return statistics.median(run[figure] for run in self.runs)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(folder: Path, names: list[str], runs: int, seconds: float, litdata_python: str) -> list[Side]:
    sides = []
    for name in names:
        python = litdata_python if name.startswith("litdata") else sys.executable
        side = Side(name, folder, python, seconds)
        if why := side.run():  # the first run is for the caches
            print(f"left out: {name}: {why}", file=sys.stderr)
            side.close()
            continue
        side.runs.clear()
        sides.append(side)
    for _ in range(runs):
        for side in sides:
            side.run()
    for side in sides:
        side.close()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="longest turn of a side (default: 4)")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--litdata-python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_all(folder, arguments.megabytes)
        names = arguments.sides.split(",")
        if any(name.startswith("litdata") for name in names):
            command = [arguments.litdata_python, "-c", WRITE_LITDATA]
            command += [str(folder / "whole.bin"), str(folder / "litdata"), str(LENGTH)]
            (folder / "litdata").mkdir()
            subprocess.run(command, capture_output=True, check=False)
        warm(folder)
        sides = measure(folder, names, arguments.runs, arguments.seconds, arguments.litdata_python)
    figures = ("samples_per_s", "first_batch_s", "p99_ms", "cpu_us_per_sample", "peak_rss_MB")
    table = {side.name: {figure: side.median(figure) for figure in figures} for side in sides}
    if arguments.json:
        print(json.dumps(table))
        return
    best = {name: table[name]["samples_per_s"] for name in ("gather", "shardkit") if name in table}
    heads = ("samples/s", "/ gather", "shardkit x", "first s", "p99 ms", "us CPU")
    print(" " * 18 + "".join(f"{head:>11}" for head in heads))
    for name, row in table.items():
        rate = row["samples_per_s"]
        ratios = f"{rate / best.get('gather', rate):>11.2f}{best.get('shardkit', rate) / rate:>11.1f}"
        rest = f"{row['first_batch_s']:>11.3f}{row['p99_ms']:>11.2f}{row['cpu_us_per_sample']:>11.1f}"
        print(f"{name:18}{rate:>11,.0f}{ratios}{rest}")


if __name__ == "__main__":
    main()
