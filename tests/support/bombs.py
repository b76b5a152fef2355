"""Small files that become enormous, and the memory that a fresh process takes to read one.

    python -m support.bombs READER FILE [MEMORY_BYTES]

prints {"peak": bytes above what the imports take, "outcome": …} as JSON.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Reading", "gzip_of", "measure", "png", "tar_header", "tar_of", "zstd_of"]

_TESTS = Path(__file__).resolve().parents[1]
_MODULES = ("datasets.dataset", "writers.inputs.readers", "writers.inputs.read_warc")
_ZSTD_BLOCK_BYTES = 1 << 17
_ROUND_BYTES = 1 << 26


@dataclass(frozen=True)
class Reading:
    """What came of reading a bomb: bytes of memory beyond those of the imports, and the error or values."""

    peak: int
    outcome: str


def measure(
    reader: str, file: Path, memory_bytes: int = 0, *, seconds: float = 60.0, **settings: object
) -> Reading:
    """Have a process of its own read a file, as `reader` says; `settings` are those of an input."""
    environment = os.environ | {"PYTHONPATH": f"{_TESTS}{os.pathsep}{_TESTS.parent}"}
    environment["BOMB_INPUT"] = json.dumps(settings)
    command = [sys.executable, "-m", "support.bombs", reader, str(file), str(memory_bytes)]
    made = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return Reading(**json.loads(made.stdout.splitlines()[-1]))


def zstd_of(parts: Iterable[bytes | tuple[bytes, int]]) -> bytes:
    """A zstd frame of `parts`; (byte, count) is 4 bytes for each 128 KiB."""
    frame = [b"\x28\xb5\x2f\xfd", b"\x00", bytes([7 << 3])]  # a window of 128 KiB, no size, no checksum
    for part in parts:
        if isinstance(part, bytes):
            starts = range(0, len(part), _ZSTD_BLOCK_BYTES)
            pieces = [part[at : at + _ZSTD_BLOCK_BYTES] for at in starts]
            frame += [(len(piece) << 3).to_bytes(3, "little") + piece for piece in pieces]
            continue
        byte, count = part
        whole, rest = divmod(count, _ZSTD_BLOCK_BYTES)
        frame.append(((_ZSTD_BLOCK_BYTES << 3 | 1 << 1).to_bytes(3, "little") + byte) * whole)
        frame.append((rest << 3 | 1 << 1).to_bytes(3, "little") + byte if rest else b"")
    frame.append((1).to_bytes(3, "little"))
    return b"".join(frame)


def gzip_of(unit: bytes, count: int) -> bytes:
    """Members of gzip with at least `count` bytes of `unit`, repeated."""
    round_of = unit * (_ROUND_BYTES // len(unit))
    return gzip.compress(round_of, 6, mtime=0) * -(-count // len(round_of))


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_header(name: str, size: int) -> bytes:
    """The header of a member of any size."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def png(width: int, height: int) -> bytes:
    """A PNG of black pixels with four channels."""
    packer = zlib.compressobj(6)
    row = bytes(1 + 4 * width)
    pixels = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)),
        (b"IDAT", pixels),
        (b"IEND", b""),
    ]
    packed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(key)


def read_dataset(file: Path, memory_bytes: int) -> str:
    """Every sample of a tar, or of the MDS dataset in a folder, by its number."""
    from shardkit.datasets.dataset import open_dataset
    from shardkit.errors import ShardkitError

    try:
        with open_dataset(file) as dataset:
            for number in range(len(dataset)):
                dataset[number]
    except ShardkitError as error:
        return str(error)
    return "values"


def read_input(file: Path, memory_bytes: int) -> str:
    """A file as a build reads it: reasons and errors of what is quarantined, or the error that ends it."""
    from shardkit.errors import ShardkitError
    from shardkit.writers.inputs.fields import NamedFields
    from shardkit.writers.inputs.readers import read_parts
    from shardkit.writers.inputs.scan import scan_inputs
    from shardkit.writers.rows.ledger import Ledger, Quarantine
    from support.read_inputs import recipe

    settings = json.loads(os.environ.get("BOMB_INPUT", "{}"))
    made = recipe(file.parent, {"path": file.name, **settings}, memory=memory_bytes, max_bad_fraction=1.0)
    ledger, quarantine = Ledger(), Quarantine(max_bad_fraction=1.0)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    documents = 0
    try:
        for split in scan_inputs(made):
            batches = read_parts(
                split,
                made.inputs[0],
                ledger,
                quarantine,
                max_record_bytes=made.max_record_bytes,
                max_bad_fraction=1.0,
                fields=[NamedFields(made.inputs[0])],
                suspects={},
                memory_bytes=made.memory,
            )
            documents += sum(batch.num_rows for batch in batches)
    except ShardkitError as error:
        return str(error)
    finally:
        assert resource.getrlimit(resource.RLIMIT_DATA) == limits, "memory is limited while a batch is read"
    return f"{documents} documents; {quarantine.first or 'nothing'} quarantined"


def _main(reader: str, file: str, memory_bytes: str) -> None:
    read: Callable[[Path, int], str] = {"dataset": read_dataset, "input": read_input}[reader]
    for module in _MODULES:
        importlib.import_module(f"shardkit.{module}")
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    outcome = read(Path(file), int(memory_bytes))
    sys.stdout.write(json.dumps({"peak": _status("VmHWM") - before, "outcome": outcome}) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
