"""Loaders side by side on the same rows: pre-tokenized uint32 x 4,096, shuffled, batches of 8, warm files.

    python tests/benchmarks/bench_loaders.py [--runs 5] [--sides gather,shardkit,…] [--batch 8] [--venvs DIR]
                                             [--json] [--save PREFIX]

Every side has a process of its own and makes one epoch, or 4 seconds of it, when its turn comes; figures are
medians of the runs, ratios are to the hand-written gather and to shardkit. Each peer reads the same rows in
its own format: Hugging Face datasets an Arrow folder of `save_to_disk`, grain (which has no format of tokens)
the plain file by a source of ours. These and litdata pin other packages: pip makes an environment for each
under --venvs. mosaicml-streaming and webdataset are in shardkit[dev]. Peers that cannot run are left out with
the reason.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from figures import Heads, give, read_once
from loader_sides import LENGTH, SIDES, STREAMS
from peer_processes import Answers, SideError, SideProcess, environment, peer_parser, take_turns
from shardkit.formats import mds, tar
from shardkit.manifest import ShardInfo

SHARDS = 8
PEERS = ("litdata", "datasets", "grain")  # that have environments of their own
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
WRITE_DATASETS = """
import sys, numpy as np, pyarrow as pa
from datasets import Dataset
length = int(sys.argv[3])
tokens = pa.array(np.memmap(sys.argv[1], dtype=np.int32, mode="r"))
table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(tokens, length)})
Dataset(table).save_to_disk(sys.argv[2], num_shards=8)
"""
WRITERS = {"litdata": WRITE_LITDATA, "datasets": WRITE_DATASETS}
"""{side: what makes its folder of the plain file, run by its own Python}"""
HEADS: Heads = {
    "side": ("loader", ""),
    "samples_per_s": ("samples/s", ",.0f"),
    "of_gather": ("/ gather", ".2f"),
    "shardkit_x": ("shardkit x", ".1f"),
    "first_batch_s": ("first batch s", ".3f"),
    "p99_ms": ("p99 ms", ".2f"),
    "cpu_us_per_sample": ("us CPU / sample", ".1f"),
    "peak_rss_MB": ("RSS MB", ",.0f"),
}


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


def peer_of(side: str) -> str:
    """The library whose Python a side needs: "litdata_workers" that of litdata."""
    return side.partition("_")[0]


def find_pythons(peers: set[str], venvs: Path) -> dict[str, str]:
    """The Python of each peer that has one of its own; those that cannot be installed are left out."""
    found = {}
    for peer in sorted(peers & set(PEERS)):
        try:
            found[peer] = environment(peer, venvs)
        except SideError as error:
            print(f"left out: {peer}: {error}", file=sys.stderr)
    return found


def write_for_peers(folder: Path, names: list[str], pythons: dict[str, str]) -> None:
    """The folders that peers write themselves; one that cannot has none, and its side says why."""
    for peer in sorted({peer_of(name) for name in names} & WRITERS.keys()):
        (folder / peer).mkdir()
        command = [pythons[peer], "-c", WRITERS[peer], str(folder / "whole.bin"), str(folder / peer)]
        subprocess.run([*command, str(LENGTH)], capture_output=True, check=False)


def measure(
    folder: Path, names: list[str], runs: int, seconds: float, batch: int, pythons: dict[str, str]
) -> Answers:
    """Figures of every side, one a run, after one for the caches."""
    script = str(Path(__file__).with_name("loader_sides.py"))
    with ExitStack() as stack:
        sides = {}
        for name in names:
            python = pythons.get(peer_of(name), sys.executable)
            command = [python, script, name, str(folder), str(seconds), str(batch)]
            sides[name] = stack.enter_context(SideProcess(command))
        return take_turns(sides, lambda name, run: {}, runs)


def report(answers: Answers) -> list[dict[str, Any]]:
    figures = ("samples_per_s", "first_batch_s", "p99_ms", "cpu_us_per_sample", "peak_rss_MB")
    rows: list[dict[str, Any]] = [
        {
            "side": name,
            **{figure: statistics.median(run[figure] for run in runs) for figure in figures},
            "runs": [run["samples_per_s"] for run in runs],
        }
        for name, runs in answers.items()
    ]
    rates = {row["side"]: row["samples_per_s"] for row in rows}
    for row in rows:
        row["of_gather"] = row["samples_per_s"] / rates["gather"] if "gather" in rates else None
        row["shardkit_x"] = rates["shardkit"] / row["samples_per_s"] if "shardkit" in rates else None
    return rows


def main() -> None:
    parser = peer_parser(__doc__, runs=5, corpus=False)
    parser.add_argument("--seconds", type=float, default=4.0, help="longest turn of a side (default: 4)")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch (default: 8)")
    parser.add_argument("--sides", default=",".join(SIDES))
    arguments = parser.parse_args()
    names = arguments.sides.split(",")
    if unknown := set(names) - SIDES.keys():
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}; known: {', '.join(SIDES)}")
    pythons = find_pythons({peer_of(name) for name in names}, arguments.venvs)
    names = [name for name in names if peer_of(name) in pythons or peer_of(name) not in PEERS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_all(folder, arguments.megabytes)
        write_for_peers(folder, names, pythons)
        read_once(*sorted(file for file in folder.rglob("*") if file.is_file()))
        answers = measure(folder, names, arguments.runs, arguments.seconds, arguments.batch, pythons)
    title = f"Shuffled rows of {LENGTH:,} tokens, {arguments.megabytes} MB in the page cache"
    title += f", batches of {arguments.batch}"
    give(arguments, report(answers), HEADS, title=title, unit="samples/s")


if __name__ == "__main__":
    main()
