"""A build with its work folder and output in a bucket (Ceph RGW) against the same build on the local disk.

    python tests/benchmarks/bench_store.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 80] [--times 12]
                                           [--file-megabytes 64] [--runs 3] [--workers 2] [--json]

The corpus (without --corpus that of $SHARDKIT_TEST_DATA, else made-up text) is replicated with mutations
(texts.py); the recipe has a filter, exact and near duplicates, and rows of 2,048 tokens. Each build is a
process of its own, the sides take turns in going first, and a small build before them compiles the kernels.
Ratios are of medians. The server's daemons share the cores with the build; their CPU is counted apart. All
files of both outputs are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_growth import Clock
from bench_remote import BUCKET, gateway
from bench_upload import server_cpu_seconds
from figures import Heads, benchmark_parser, give, in_turns
from servers.bucket import s3_client
from shardkit.writers import build
from support.rss_meter import RssMeter
from texts import EOS, documents, put_tokenizer, write_corpus

RECIPE = f"""\
inputs: [{{path: "TEXTS/*.jsonl", source: texts}}]
filters: [{{length: {{min_words: 20}}}}]
dedup: {{exact: {{}}, near: {{}}, max_removed_fraction: 1}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 2048}}
output: {{path: PLACE/out}}
work: PLACE/work
"""
STORE_GIB = 12  # what the server may hold in memory: about 8 times the text
SIDES = ("local", "bucket")
HEADS: Heads = {
    "side": ("side", ""),
    "seconds": ("seconds", ".1f"),
    "x": ("x local's time", ".2f"),
    "cpu_s": ("CPU s", ".1f"),
    "x_cpu": ("x local's CPU", ".2f"),
    "server_cpu_s": ("server's CPU s", ".1f"),
    "slowest": ("stages with the largest differences, s", ""),
}


def run_build(recipe: Path, workers: int) -> dict[str, Any]:
    """Build in this process; what it took."""
    began = time.perf_counter()
    with RssMeter() as meter:
        clock = Clock(meter)
        result = build(recipe, workers=workers, progress=clock)
    seconds = time.perf_counter() - began
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "text_bytes": result.funnel.read.bytes,
        "tokens": result.tokens,
        "seconds": seconds,
        "cpu_s": sum(use.ru_utime + use.ru_stime for use in usage),
        "stages": clock.seconds,
    }


def one_side(folder: Path, side: str, workers: int) -> dict[str, Any]:
    """Build at a new place; what it took, and a digest of each file of the dataset."""
    with gateway(STORE_GIB) as server, tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = scratch if side == "local" else f"s3://{BUCKET}"
        recipe = folder / f"{side}.yaml"
        recipe.write_text(RECIPE.replace("PLACE", place))
        command = [sys.executable, __file__, "--one", str(recipe), "--workers", str(workers)]
        command += ["--endpoint", server.endpoint_url]
        taken = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        taken["server_cpu_s"] = server_cpu_seconds(server)
        taken["files"] = digests(Path(scratch), server.endpoint_url, side)
    return dict(taken)


def digests(scratch: Path, endpoint: str, side: str) -> dict[str, str]:
    """{name: digest} of the shards and their index: the card names the place and the time."""
    found = {}
    if side == "local":
        for file in (scratch / "out").rglob("*"):
            if file.is_file():
                found[str(file.relative_to(scratch / "out"))] = hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        client = s3_client(endpoint)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="out/"):
            for item in page["Contents"]:
                body = client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
                found[item["Key"].removeprefix("out/")] = hashlib.sha256(body).hexdigest()
    return {name: digest for name, digest in found.items() if name.endswith((".mds", "index.json"))}


def row(side: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    def median(name: str, of: list[dict[str, Any]]) -> float:
        return float(statistics.median(one[name] for one in of))

    more = {
        stage: statistics.median(one["stages"][stage] for one in runs)
        - statistics.median(one["stages"].get(stage, 0.0) for one in base)
        for stage in runs[0]["stages"]
    }
    most = sorted(more, key=more.__getitem__, reverse=True)[:6] if runs is not base else []
    return {
        "side": side,
        "seconds": median("seconds", runs),
        "x": median("seconds", runs) / median("seconds", base),
        "cpu_s": median("cpu_s", runs),
        "x_cpu": median("cpu_s", runs) / median("cpu_s", base),
        "server_cpu_s": median("server_cpu_s", runs),
        "slowest": ", ".join(f"{stage} +{more[stage]:.1f}" for stage in most),
        "stages": {stage: [one["stages"].get(stage) for one in runs] for stage in runs[0]["stages"]},
    }


def main() -> None:
    parser = benchmark_parser(__doc__, runs=3)
    parser.add_argument("--corpus", type=Path, help="folder of documents")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with <|endoftext|>")
    parser.add_argument("--megabytes", type=float, default=80, help="of text (default: %(default)s)")
    parser.add_argument("--times", type=int, default=12, help="of that text (default: %(default)s)")
    parser.add_argument("--file-megabytes", type=float, default=64, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.environ["AWS_ENDPOINT_URL"] = options.endpoint
        print(json.dumps(run_build(options.one, options.workers)))
        return
    originals = documents(options.corpus, options.megabytes)
    file_bytes = int(options.file_megabytes * 1e6)
    taken: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"warm": Path(scratch) / "warm", "all": Path(scratch) / "all"}
        for name, folder in folders.items():
            folder.mkdir()
            put_tokenizer(folder, options.tokenizer)
            some = originals[: len(originals) // 20 + 50] if name == "warm" else originals
            write_corpus(
                folder / "TEXTS", some, 1 if name == "warm" else options.times, file_bytes=file_bytes
            )
        one_side(folders["warm"], "bucket", options.workers)
        for run in range(options.runs):
            for side in in_turns(SIDES, run):
                taken[side].append(one_side(folders["all"], side, options.workers))
    files = [one["files"] for side in SIDES for one in taken[side]]
    assert all(found == files[0] for found in files), "the builds differ"
    rows = [row(side, taken[side], taken["local"]) for side in SIDES]
    size = taken["local"][0]["text_bytes"]
    title = f"{size / 1e6:.0f} MB of text; {len(files[0])} files of {len(files)} builds are identical"
    give(options, rows, HEADS, title=title)


if __name__ == "__main__":
    main()
