"""Emulated accelerators: the share of the time that a training loop trains, with data cold in an S3 bucket.

    python tests/benchmarks/bench_utilization.py [--runs 3] [--sides shardkit,streaming,webdataset,litdata]
                                                 [--step-ms 20] [--steps 300] [--venvs DIR] [--json]

A step sleeps instead of training, as in MLPerf Storage, so one machine without GPUs shows what a loader lets
an accelerator do. The bucket (Ceph RGW) is behind a proxy with 50 ms latency and 80 MB/s a connection; rows
are packed tokens, uint32 x 4,096, in shards of 32 MiB; a batch is 32 rows, 0.5 MiB a step. Every run is a
process of its own with an empty disk.

    text        one dataset of rows
    mixture     three of them, 5:3:2 (streaming mixes, too)
    raw text    zstd Parquet files that the loader tokenizes and packs; batches of 16 (shardkit alone)
    images      squares of 256 pixels of photos of 500 x 375, in tars and MDS; batches of 4

    utilization    from the first batch on; `with_start`: from its request on
    reported       shardkit's own `Accelerators.report`, with the start

Peers run with two DataLoader workers. litdata has an environment of its own under --venvs. Sides that cannot
run are left out with the reason. Needs radosgw (tests/servers).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_images import cut_photos
from bench_loaders import WRITE_LITDATA
from bench_remote import BUCKET, BYTES_PER_SECOND, LATENCY_SECONDS, servers
from figures import Heads, give, in_turns
from peer_processes import SideError, environment, peer_parser, site_folder
from servers.bucket import s3_client
from servers.faults import Rule
from shardkit.formats import mds, tar
from shardkit.formats.mds import MdsWriter
from texts import EOS, documents, put_tokenizer

LENGTH, BATCH, SHARD_ROWS = 4096, 32, 2048
RAW_MEGABYTES, RAW_BATCH, PHOTOS, PHOTO_BATCH = 120, 16, 1600, 4
SCRIPT = Path(__file__).with_name("utilization_sides.py")
STREAMS = {"web": 5, "code": 3, "books": 2}
SIDE_SECONDS = 120.0  # longest run of a side
HEADS: Heads = {
    "case": ("", ""),
    "side": ("", ""),
    "utilization": ("utilization %", ".2f"),
    "with_start": ("with start %", ".2f"),
    "reported": ("reported %", ".2f"),
    "first_batch_s": ("first batch s", ".2f"),
}


def write_all(folder: Path, shards: int, python: str | None) -> None:
    """The same rows as MDS and as tars, streams of other rows, and litdata's chunks by its own `python`."""
    generator = np.random.default_rng(0)
    for name in ("text", *STREAMS):
        (folder / name).mkdir(parents=True)
        infos, tars = [], []
        if name == "text":
            (folder / "tar").mkdir()
        with (folder / "whole.bin").open("ab") as whole:
            for number in range(shards if name == "text" else shards // 2):
                rows = generator.integers(0, 50_000, (SHARD_ROWS, LENGTH), dtype=np.uint32)
                shard = f"shard.{number:05d}.mds"
                infos.append(mds.write_rows_shard(folder / name, shard, rows, hashes=["xxh64"]))
                if name == "text":
                    whole.write(rows.tobytes())
                    at = number * SHARD_ROWS
                    tars.append(
                        tar.write_rows_shard(folder / "tar", f"s-{number:05d}.tar", rows, key_start=at)
                    )
        mds.write_index(folder / name, infos)
    if python is not None:
        (folder / "litdata").mkdir()
        words = [str(folder / "whole.bin"), str(folder / "litdata"), str(LENGTH)]
        subprocess.run([python, "-c", WRITE_LITDATA, *words], check=True)
    (folder / "whole.bin").unlink()


def write_raw_text(folder: Path) -> dict[str, str]:
    """Documents in zstd Parquet files below "raw"; returns options of a tokenizer."""
    (folder / "raw").mkdir()
    put_tokenizer(folder, None)
    texts = documents(None, RAW_MEGABYTES)
    for number in range(8):
        table = pa.table({"text": texts[number::8]})
        file = folder / "raw" / f"part-{number}.parquet"
        pq.write_table(table, file, row_group_size=500, compression="zstd")
    return {"path": str(folder / "tokenizer.json"), "eos": EOS}


def write_photos(folder: Path, site: Path) -> None:
    """The photos of bench_images in MDS shards below "photos", and in tars below "phototars"."""
    import webdataset

    (folder / "phototars").mkdir()
    tars = webdataset.ShardWriter(str(folder / "phototars" / "photos-%04d.tar"), maxcount=200, verbose=0)
    columns = {"jpg": "jpeg", "cls": "int"}
    with tars, MdsWriter(folder / "photos", columns=columns, shard_bytes=8 << 20, hashes=["xxh64"]) as rows:
        for number, data in enumerate(cut_photos(site / "skimage" / "data", PHOTOS)):
            tars.write({"__key__": f"{number:06d}", "jpg": data, "cls": number % 10})
            rows.write({"jpg": data, "cls": number % 10})


def put_tree(folder: Path, endpoint: str) -> None:
    client = s3_client(endpoint)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=file.relative_to(folder).as_posix(), Body=body)


def run_side(side: str, python: str, settings: dict[str, Any]) -> dict[str, float]:
    """The figures of one run; SideError with the last line of its output if it fails or takes too long."""
    command = [python, str(SCRIPT), side, json.dumps(settings)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SIDE_SECONDS)
    except subprocess.TimeoutExpired:
        raise SideError(f"no end within {SIDE_SECONDS:g} s") from None
    if done.returncode or not done.stdout.strip():
        raise SideError((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(
    cases: dict[tuple[str, str], dict[str, Any]], pythons: dict[str, str], runs: int
) -> list[dict[str, Any]]:
    taken: dict[str, list[dict[str, float]]] = {}
    by_name = {f"{case} {side}": (case, side) for case, side in cases}
    left_out: set[str] = set()
    for run in range(runs):
        for name in in_turns(list(by_name), run):
            case, side = by_name[name]
            if name in left_out:
                continue
            try:
                given = cases[case, side] | {"case": case}
                taken.setdefault(name, []).append(run_side(side, pythons[side], given))
            except SideError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
                left_out.add(name)
    return [
        {"case": by_name[name][0], "side": by_name[name][1], "reported": None}
        | {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in taken.items()
        if name not in left_out
    ]


def all_cases(
    folder: Path, endpoint: str, tokenizer: dict[str, str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (case, its sides, their settings)."""

    def urls(prefix: str) -> list[str]:
        names = sorted(file.name for file in (folder / prefix).glob("*.tar"))
        keys = [{"Bucket": BUCKET, "Key": f"{prefix}/{name}"} for name in names]
        return [client.generate_presigned_url("get_object", key) for key in keys]

    client = s3_client(endpoint)
    base = {"endpoint": endpoint, "length": LENGTH, "batch": BATCH}
    text = {"mds": {f"s3://{BUCKET}/text": 1}, "tars": urls("tar"), "litdata": f"s3://{BUCKET}/litdata"}
    yield "text", "shardkit,streaming,webdataset,litdata", base | text
    mixed = {f"s3://{BUCKET}/{name}": weight for name, weight in STREAMS.items()}
    yield "mixture", "shardkit,streaming", base | {"mds": mixed}
    raw = {"mds": {f"s3://{BUCKET}/raw/*.parquet": 1}, "batch": RAW_BATCH, "tokenizer": tokenizer}
    yield "raw text", "shardkit", base | raw
    if (folder / "photos").exists():
        photos = {"mds": {f"s3://{BUCKET}/photos": 1}, "tars": urls("phototars"), "batch": PHOTO_BATCH}
        yield "images", "shardkit,streaming,webdataset", base | photos


def main() -> None:
    parser = peer_parser(__doc__, runs=3, corpus=False)
    parser.add_argument("--sides", default="shardkit,streaming,webdataset,litdata")
    parser.add_argument("--step-ms", type=float, default=20.0, help="default: %(default)g")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--shards", type=int, default=6, help="of each dataset; default: %(default)s")
    arguments = parser.parse_args()
    pythons = dict.fromkeys(arguments.sides.split(","), sys.executable)
    if "litdata" in pythons:
        try:
            pythons["litdata"] = environment("litdata", arguments.venvs)
        except SideError as error:
            print(f"left out: litdata: {error}", file=sys.stderr)
            del pythons["litdata"]
    slow = Rule(fault="throttle", bytes_per_second=BYTES_PER_SECOND, delay_seconds=LATENCY_SECONDS)
    with tempfile.TemporaryDirectory() as scratch, servers(slow) as (direct, proxy):
        folder = Path(scratch)
        write_all(folder, arguments.shards, pythons.get("litdata"))
        tokenizer = write_raw_text(folder)
        try:
            write_photos(folder, site_folder("images", arguments.venvs))
        except SideError as error:
            print(f"left out: images: {error}", file=sys.stderr)
        put_tree(folder, direct)
        cases = {
            (case, side): settings | {"steps": arguments.steps, "step_seconds": arguments.step_ms / 1000}
            for case, sides, settings in all_cases(folder, proxy, tokenizer)
            for side in sides.split(",")
            if side in pythons
        }
        rows = measure(cases, pythons, arguments.runs)
    give(arguments, rows, HEADS, title="utilization")


if __name__ == "__main__":
    main()
