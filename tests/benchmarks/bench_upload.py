"""Uploads to a real S3 server (Ceph RGW) against plain puts, and what a killed upload sends again.

    python tests/benchmarks/bench_upload.py speed|resume [--runs 5] [--threads 8] [--shards 16] [--json]

speed    `shardkit.publish` against boto3's put_object of the open files by as many threads; then the same
         upload once more (nothing to send), and reading all back, which `verify=True` does
resume   `shardkit upload` is killed with -9 in the middle and run again; the requests that a proxy counts

Needs radosgw (see tests/servers), which shares the cores with both sides. The sides take turns in going
first, each has a new server, and ratios are of medians. CPU is of the client's process; the server's daemons
are counted apart.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_remote import BUCKET, gateway, write_dataset
from figures import benchmark_parser, print_figures
from servers.bucket import s3_client
from servers.fault_proxy import FaultProxy, Request
from servers.rgw import RgwServer
from shardkit.publish import TransferProgress, TransferReport, upload
from shardkit.storage import StorageOptions
from shardkit.storage.s3_upload import part_bytes

_PUT = re.compile(rf"/{BUCKET}/([^?]+)(?:\?.*partNumber=(\d+))?")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step took of the clock and of this process's CPU."""

    seconds: float
    cpu_seconds: float


def measured(action: Callable[[], object]) -> Cost:
    start, cpu = time.perf_counter(), cpu_seconds()
    action()
    return Cost(time.perf_counter() - start, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def server_cpu_seconds(running: RgwServer) -> float:
    """Of all its daemons since their start."""
    ticks = 0
    for pid in running.state["pids"].values():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def plain_puts(folder: Path, endpoint: str, threads: int) -> None:
    """The fastest that boto3 has: no checksums but those that signing needs, files streamed."""
    client = s3_client(endpoint)

    def put(file: Path) -> None:
        with file.open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=file.name, Body=body)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, sorted(folder.iterdir())))
    assert len(client.list_objects_v2(Bucket=BUCKET)["Contents"]) == len(list(folder.iterdir()))


def our_upload(folder: Path, endpoint: str, threads: int, **options: Any) -> TransferReport:
    return upload(
        folder,
        f"s3://{BUCKET}",
        storage=StorageOptions(endpoint_url=endpoint),
        threads=threads,
        **{"progress": False, **options},
    )


def again(folder: Path, endpoint: str, threads: int) -> tuple[Cost, Cost]:
    """An upload of what is there, and its verification."""
    reports: list[tuple[str, float, float]] = []

    def hear(report: TransferProgress) -> None:
        reports.append((report.step, time.perf_counter(), cpu_seconds()))

    start, cpu = time.perf_counter(), cpu_seconds()
    assert our_upload(folder, endpoint, threads, progress=hear, verify=True).up_to_date
    _, there, there_cpu = next(report for report in reversed(reports) if report[0] == "files")
    _, end, end_cpu = reports[-1]
    return Cost(there - start, there_cpu - cpu), Cost(end - there, end_cpu - there_cpu)


def speed(folder: Path, runs: int, threads: int, shards: int) -> dict[str, Any]:
    size = write_dataset(folder, shards)
    ours: list[Cost] = []
    plain: list[Cost] = []
    nothing: list[Cost] = []
    verified: list[Cost] = []
    daemons: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs):
        for is_ours in (True, False) if run % 2 else (False, True):
            with gateway() as running:
                side = our_upload if is_ours else plain_puts
                before = server_cpu_seconds(running)
                action = partial(side, folder, running.endpoint_url, threads)
                (ours if is_ours else plain).append(measured(action))
                daemons[is_ours].append(server_cpu_seconds(running) - before)
                if is_ours:
                    unchanged, read_back = again(folder, running.endpoint_url, threads)
                    nothing.append(unchanged)
                    verified.append(read_back)
    result: dict[str, Any] = {"bytes": size, "threads": threads, "runs": runs}
    for name, costs in (("upload", ours), ("plain", plain), ("unchanged", nothing), ("verify", verified)):
        result[f"{name}_MB_s"] = size / 1e6 / statistics.median(cost.seconds for cost in costs)
        result[f"{name}_cpu_s_per_GB"] = statistics.median(cost.cpu_seconds for cost in costs) / size * 1e9
    result["upload_server_cpu_s_per_GB"] = statistics.median(daemons[True]) / size * 1e9
    result["plain_server_cpu_s_per_GB"] = statistics.median(daemons[False]) / size * 1e9
    result["ratio"] = result["upload_MB_s"] / result["plain_MB_s"]
    result["ratios"] = [p.seconds / o.seconds for o, p in zip(ours, plain, strict=True)]
    return result


def puts(log: list[Request], sizes: dict[str, int]) -> dict[str, int]:
    """{key: bytes of the bodies of all puts} as the proxy saw them."""
    sent: dict[str, int] = {}
    for request in log:
        found = _PUT.match(request.target) if request.method == "PUT" else None
        if found:
            key, number = found[1], int(found[2] or 1) - 1
            total = sizes.get(key, 0)  # the marker counts nothing
            step = part_bytes(total) if found[2] else total
            sent[key] = sent.get(key, 0) + min(step, total - number * step)
    return sent


def killed(folder: Path, proxy: FaultProxy, threads: int, stop_after: int) -> set[str]:
    """Kill `shardkit upload` when so many shards are there; the shards that are there at the end."""
    client = s3_client(proxy.endpoint_url)
    command = [sys.executable, "-m", "shardkit", "upload", str(folder), f"s3://{BUCKET}"]
    command += ["--quiet", "--threads", str(threads), "--endpoint-url", proxy.endpoint_url]
    process = subprocess.Popen(command)

    def there() -> set[str]:
        entries = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {entry["Key"] for entry in entries if entry["Key"].endswith(".mds")}

    while len(there()) < stop_after:
        assert process.poll() is None, "the upload ended before it was killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before: set[str] = set()
    while (now := there()) != before:  # the server finishes requests that it has in full
        before = now
        time.sleep(0.5)
    return before


def resume(folder: Path, runs: int, threads: int, shards: int) -> dict[str, Any]:
    """Kill at growing distance; every run must send what is missing and nothing else."""
    write_dataset(folder, shards)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    total = sum(size for name, size in sizes.items() if name.endswith(".mds"))
    results = []
    for run in range(runs):
        with gateway() as running, FaultProxy(running.endpoint_url) as proxy:
            before = killed(folder, proxy, threads, 1 + run * (shards - 5) // max(1, runs - 1))
            proxy.set_rules()
            report = our_upload(folder, proxy.endpoint_url, threads)
            sent = puts(proxy.log(), sizes)
            missing = {name: size for name, size in sizes.items() if name not in before}
            marker_apart = {name: size for name, size in sent.items() if name in sizes}
            results.append(
                {
                    "shards_there": len(before),
                    "missing_bytes": sum(missing.values()),
                    "sent_bytes": sum(sent.values()),
                    "only_missing": marker_apart == missing
                    and set(report.sent) == set(missing) - {"index.json"},
                    "whole": not our_upload(folder, running.endpoint_url, threads, verify=True).sent,
                    "open_uploads": open_uploads(running.endpoint_url),
                }
            )
    return {
        "bytes": total,
        "threads": threads,
        "only_missing": all(result["only_missing"] and result["whole"] for result in results),
        "runs": results,
    }


def open_uploads(endpoint: str) -> int:
    """Uploads in parts that nobody finished: of the killed process."""
    return len(s3_client(endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("what", choices=("speed", "resume"))
    parser.add_argument("--threads", type=int, default=8, help="of both sides (default: 8)")
    parser.add_argument("--shards", type=int, default=16, help="of 64 MiB (default: 16)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        action = speed if arguments.what == "speed" else resume
        result = action(Path(scratch), arguments.runs, arguments.threads, arguments.shards)
    print_figures(arguments, result)


if __name__ == "__main__":
    main()
