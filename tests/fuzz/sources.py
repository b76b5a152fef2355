"""Targets of `fuzzing` that are other formats: what `shardkit convert` reads.

Parquet files are none: on some damaged footers pyarrow 26 ends the process, whatever its caller does.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fuzz.engine import Target
from shardkit.tools.convert import CutOptions, convert

__all__ = ["SOURCES"]

_GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "convert"


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


SOURCES: dict[str, Callable[..., Target]] = {
    "megatron": _megatron,
    "litdata": _litdata,
    "llm-c": _llm_c,
    "saved": _saved,
}
"""Makers of targets by name; "litdata" takes a kind."""
