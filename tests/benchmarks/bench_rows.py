"""Rows/s of files that loaders read in place, shuffled, local and from an S3 server, beside other loaders.

    python tests/benchmarks/bench_rows.py [--rows 64000] [--runs 5] [--places local,s3] [--venvs DIR]
                                          [--json] [--save PREFIX]

Writes eight zstd Parquet files with row groups of 1,000 rows: `input_ids` (512 uint16), `text` (300 words)
and two numbers; and the same rows as Arrow streams and JSON lines. Each side has a process of its own and
reads all rows once in batches of 64, in turns: litdata's Parquet loader and streaming `datasets` (a shuffle
buffer of 1,000 rows) in environments that pip makes under --venvs, and pyarrow's `iter_batches` in the order
of the files. Local files are in the page cache. From S3 (radosgw on this machine), each run has an empty
cache, and litdata is left out, because its client takes no endpoint without TLS. The seconds to the first
batch include those to open the files, not imports.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from bench_remote import BUCKET, gateway, put_all
from figures import Heads, give
from peer_processes import SCRIPTS, SideError, SideProcess, environment, median_ratio, peer_parser, take_turns

FILES, BATCH, LENGTH = 8, 64, 512
TASKS = {"tokens": ["input_ids"], "text and numbers": ["text", "score", "id"]}
SIDES = {  # name: (side of rows_side.py, folder of files, where its Python is from)
    "shardkit": ("shardkit", "parquet", None),
    "shardkit, Arrow": ("shardkit", "arrow", None),
    "shardkit, JSON lines": ("shardkit", "jsonl", None),
    "litdata": ("litdata", "litdata", "litdata"),
    "datasets": ("datasets", "parquet", "datasets"),
    "pyarrow, in order": ("pyarrow", "parquet", None),
}
ONLY_LOCAL = ("pyarrow, in order", "litdata")
HEADS: Heads = {
    "place": ("files", ""),
    "task": ("columns", ""),
    "side": ("side", ""),
    "rate": ("rows/s", ",.0f"),
    "shardkit_x": ("shardkit x", ".2f"),
    "cpu_us": ("us CPU / row", ".1f"),
    "first_s": ("first batch s", ".3f"),
}


def write(folder: Path, rows: int) -> None:
    """Write the same rows in each format; litdata writes an index next to its files."""
    for name in ("parquet", "arrow", "jsonl", "litdata"):
        (folder / name).mkdir()
    noise = np.random.default_rng(1)
    for number in range(FILES):
        ids = noise.integers(0, 50_000, (rows // FILES, LENGTH)).astype(np.uint16)
        table = pa.table(
            {
                "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), LENGTH),
                "text": [" ".join(f"w{word}" for word in row) for row in (ids[:, :300] % 5000).tolist()],
                "score": noise.random(len(ids)),
                "id": np.arange(len(ids)) + number * len(ids),
            }
        )
        file = folder / "parquet" / f"part-{number}.parquet"
        pq.write_table(table, file, row_group_size=1000, compression="zstd")
        os.link(file, folder / "litdata" / file.name)
        with pa.ipc.new_stream(str(folder / "arrow" / f"part-{number}.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)
        lines = b"\n".join(map(orjson.dumps, table.to_pylist()))
        (folder / "jsonl" / f"part-{number}.jsonl").write_bytes(lines)


@contextmanager
def places(folder: Path, names: list[str]) -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """Yield {name: (folder or URL, what requests say about it)}."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    with ExitStack() as stack:
        if "local" in names:
            found["local"] = str(folder), {}
        if "s3" in names:
            endpoint = stack.enter_context(gateway()).endpoint_url
            for name in ("parquet", "arrow", "jsonl", "litdata"):
                put_all(folder / name, endpoint, name)
            variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            variables["AWS_ENDPOINT_URL"] = endpoint
            request = {"environment": variables, "storage": {"endpoint_url": endpoint}}
            found["s3"] = f"s3://{BUCKET}", request
        yield found


@contextmanager
def running(names: list[str], venvs: Path) -> Iterator[dict[str, SideProcess]]:
    """A process for each side; those that cannot be installed are left out, with the reason on stderr."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            side, _, peer = SIDES[name]
            try:
                python = sys.executable if peer is None else environment(peer, venvs)
            except SideError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
                continue
            command = [python, str(SCRIPTS / "rows_side.py"), side]
            found[name] = stack.enter_context(SideProcess(command))
        yield found


def report(
    place: str, task: str, rows: int, answers: Mapping[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    rates = {name: [rows / run["seconds"] for run in runs] for name, runs in answers.items()}
    for name, found in rates.items():
        first = statistics.median(run["first_s"] for run in answers[name])
        yield {
            "place": place,
            "task": task,
            "side": name,
            "rate": statistics.median(found),
            "shardkit_x": median_ratio(rates["shardkit"], found),
            "cpu_us": statistics.median(1e6 * run["cpu_s"] / rows for run in answers[name]),
            "first_s": first,
            "runs": found,
        }


def main() -> None:
    parser = peer_parser(__doc__, runs=5, corpus=False)
    parser.add_argument("--rows", type=int, default=64_000)
    parser.add_argument("--places", default="local,s3")
    parser.add_argument("--sides", default=",".join(SIDES).replace(", ", ";"))
    arguments = parser.parse_args()
    chosen = [name.replace(";", ", ") for name in arguments.sides.split(",")]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "rows"
        folder.mkdir()
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/home"  # of indexes of JSON lines
        write(folder, arguments.rows)
        opened = stack.enter_context(places(folder, arguments.places.split(",")))
        for place, (base, facts) in opened.items():
            names = [name for name in chosen if place == "local" or name not in ONLY_LOCAL]
            for task, columns in TASKS.items():
                number = 0

                def request(
                    name: str, run: int, base: str = base, columns: list[str] = columns, place: str = place,
                    facts: dict[str, Any] = facts,
                ) -> dict[str, Any]:  # fmt: skip
                    nonlocal number
                    number += 1
                    kind = SIDES[name][1]
                    cache = f"{scratch}/cache-{number}" if place == "s3" else None
                    files = sorted(file.name for file in (folder / kind).iterdir() if file.suffix != ".json")
                    given = {"place": f"{base}/{kind}", "columns": columns, "cache": cache, "files": files}
                    return given | facts | {"batch": BATCH}

                with running(names, arguments.venvs) as sides:
                    answers = take_turns(sides, request, arguments.runs)
                found += report(place, task, arguments.rows, answers)
    give(arguments, found, HEADS, title="Files read in place, shuffled", unit="rows/s")


if __name__ == "__main__":
    main()
