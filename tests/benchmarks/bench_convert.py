"""How fast `convert` is, against a plain copy of the same bytes, both synced to disk.

    python tests/benchmarks/bench_convert.py [--gigabytes 1] [--runs 5] [--folder PLACE]

Every run does all of them, one after the other, so that all meet the same disk; medians of the ratios
within a run are what to look at. "copy" is `shutil.copyfile` and one fsync; the source is in the page cache.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from figures import Heads, benchmark_parser, give
from shardkit.tools.convert import CutOptions, OutputOptions, convert

LENGTH = 2048
PIECE = 1 << 24
HEADS: Heads = {
    "side": ("side", ""),
    "MB_per_s": ("MB/s", ",.0f"),
    "of_copy": ("/ copy", ".2f"),
    "cpu_s_per_GB": ("CPU s / GB", ".2f"),
}


def write_source(folder: Path, tokens: int) -> Path:
    """A Megatron pair of documents of 1 to 1,400 tokens, and the same .bin alone."""
    random = np.random.default_rng(1)
    with (folder / "m.bin").open("wb") as file:
        for start in range(0, tokens, PIECE):
            piece = random.integers(0, 50_000, min(PIECE, tokens - start)).astype(np.uint16)
            file.write(piece.data)
    ends = np.unique(np.append(np.cumsum(random.integers(1, 1400, tokens // 600)).clip(max=tokens), tokens))
    starts = np.append(0, ends[:-1])
    with (folder / "m.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")
        file.write(len(ends).to_bytes(8, "little") + (len(ends) + 1).to_bytes(8, "little"))
        file.write((ends - starts).astype("<i4").data)
        file.write((2 * starts).astype("<i8").data)
        file.write(np.arange(len(ends) + 1, dtype="<i8").data)
    (folder / "stream").mkdir()
    os.link(folder / "m.bin", folder / "stream" / "train.bin")
    return folder


def copy(source: Path, target: Path) -> None:
    """A file, synced."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Wall time of one go, and the CPU time that all its threads took."""
    start, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu


def peak_megabytes(source: Path, target: Path) -> float:
    """Peak RSS of the command in a process of its own."""
    words = [
        "convert",
        str(source),
        str(target),
        "--sequence-length",
        str(LENGTH),
        "--eos",
        "50256",
        "--quiet",
    ]
    subprocess.run([sys.executable, "-m", "shardkit", *words], check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000


def main() -> None:
    """Measure, and print a table."""
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    stream, ends = CutOptions(sequence_length=LENGTH, pad=0), CutOptions(sequence_length=LENGTH, eos=50_256)
    wds = OutputOptions(format="wds")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = write_source(Path(name), int(arguments.gigabytes * 5e8))
        out = folder / "out"
        convert(folder / "stream", folder / "mds", cut=stream, progress=False)
        sides: dict[str, Callable[[], object]] = {
            "copy": lambda: copy(folder / "m.bin", out),
            "nanoGPT .bin to MDS": lambda: convert(folder / "stream", out, cut=stream, progress=False),
            "the same, not read back": lambda: convert(
                folder / "stream", out, cut=stream, verify=False, progress=False
            ),
            "Megatron to MDS, with eos": lambda: convert(folder / "m", out, cut=ends, progress=False),
            "MDS to MDS": lambda: convert(folder / "mds", out, progress=False),
            "MDS to tar": lambda: convert(folder / "mds", out, output=wds, progress=False),
        }
        taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(arguments.runs):
            for side, action in sides.items():
                os.sync()
                taken[side].append(seconds(action))
                shutil.rmtree(out) if out.is_dir() else out.unlink()
        size = (folder / "m.bin").stat().st_size
        copies = [wall for wall, _ in taken["copy"]]
        rows = [
            {
                "side": side,
                "MB_per_s": size / median(wall for wall, _ in times) / 1e6,
                "of_copy": median(copied / wall for copied, (wall, _) in zip(copies, times, strict=True)),
                "cpu_s_per_GB": median(cpu for _, cpu in times) * 1e9 / size,
            }
            for side, times in taken.items()
        ]
        peak = peak_megabytes(folder / "m", out)
    give(arguments, rows, HEADS)
    print(f"peak RSS of a conversion of {size / 1e6:,.0f} MB: {peak:,.0f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
