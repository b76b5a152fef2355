"""Targets of `fuzzing` beyond a dataset's own files: what is converted, and usage logs.

Parquet files are none: on some damaged footers pyarrow 26 ends the process, whatever its caller does.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from audit_runs import log_report, logged_run
from fuzzing import Target

from shardkit import mds
from shardkit.convert import CutOptions, convert
from shardkit.dataset import open_dataset
from shardkit.errors import ShardError

__all__ = ["SOURCES"]

_GOLDEN = Path(__file__).resolve().parent / "golden" / "convert"
_SAMPLES, _LENGTH = 12, 8


def _files(source: Path) -> dict[str, bytes]:
    """Those of a folder, or those that share a name but for the ending."""
    found = sorted(source.iterdir()) if source.is_dir() else sorted(source.parent.glob(f"{source.name}.*"))
    return {path.name: path.read_bytes() for path in found}


def _converted(name: str, files: dict[str, bytes], cut: CutOptions, entry: str = "") -> Target:
    def read(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as out:
            convert(folder / entry, Path(out) / "out", cut=cut, progress=False)

    return Target(name, files, read)


def _megatron() -> Target:
    cut = CutOptions(sequence_length=7, eos=60_001)
    return _converted("megatron", _files(_GOLDEN / "megatron"), cut, "megatron")


def _litdata(kind: str) -> Target:
    cut = CutOptions(keep_lengths=True, drop_empty=True) if kind == "tokens" else CutOptions()
    return _converted(f"litdata={kind}", _files(_GOLDEN / f"litdata_{kind}"), cut)


def _llm_c() -> Target:
    tokens = np.arange(101, dtype=np.uint16)
    head = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    cut = CutOptions(sequence_length=10, drop_tail=True)
    return _converted("llm-c", {"fine_train_0.bin": head + tokens.tobytes()}, cut, "fine_train_0.bin")


def _saved() -> Target:
    return _converted("saved", _files(_GOLDEN / "saved"), CutOptions())


@cache
def _dataset() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        rows = np.arange(_SAMPLES * _LENGTH, dtype=np.uint16).reshape(2, -1, _LENGTH)
        infos = [mds.write_rows_shard(Path(name), f"shard.{n:05d}.mds", part) for n, part in enumerate(rows)]
        mds.write_index(Path(name), infos)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def _usage_log() -> Target:
    with tempfile.TemporaryDirectory() as name:
        for file, data in _dataset().items():
            (Path(name) / file).write_bytes(data)
        logged_run(name, Path(name) / "logs", world_size=2, batch_size=2, steps=5)
        logs = {f"logs/{path.name}": path.read_bytes() for path in (Path(name) / "logs").iterdir()}

    def read(folder: Path) -> None:
        with open_dataset(folder) as dataset:
            report = log_report(folder / "logs", dataset)
        if not report.ok:
            raise ShardError(folder, "the audit says what is wrong")

    return Target("usage-log", _dataset() | logs, read, tuple(logs))


SOURCES: dict[str, Callable[..., Target]] = {
    "megatron": _megatron,
    "litdata": _litdata,
    "llm-c": _llm_c,
    "saved": _saved,
    "usage-log": _usage_log,
}
"""Makers of targets by name; "litdata" takes a kind."""
