"""The libraries whose files ours must agree with, imported so that they work everywhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "STAND_INS",
    "comparable",
    "import_streaming",
    "read_with_streaming",
    "streaming_datasets",
    "write_with_streaming",
]

STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def import_streaming() -> Any:
    """Import mosaicml-streaming, with a stand-in for torchvision where that is not installed.

    The stand-in is forgotten afterwards: other libraries look for torchvision too.
    """
    if find_spec("torchvision") is not None or "streaming" in sys.modules:
        import streaming

        return streaming
    sys.path.append(str(STAND_INS))
    try:
        import streaming
    finally:
        sys.path.remove(str(STAND_INS))
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    return streaming


@contextlib.contextmanager
def streaming_datasets() -> Iterator[Any]:
    """mosaicml-streaming, for whoever makes its datasets: one process at a time, because each cleans up the
    shared memory that is named alike in all; none stays behind."""
    streaming = import_streaming()
    with (Path(tempfile.gettempdir()) / f"shardkit-tests-streaming-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        streaming.base.util.clean_stale_shared_memory()
        try:
            yield streaming
        finally:
            streaming.base.util.clean_stale_shared_memory()


def write_with_streaming(
    folder: Path,
    columns: Mapping[str, str],
    samples: Iterator[Mapping[str, Any]] | list[Any],
    **settings: Any,
) -> Path:
    """`samples` as the real MDSWriter writes them."""
    with import_streaming().MDSWriter(out=str(folder), columns=dict(columns), **settings) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return folder


def read_with_streaming(folder: Path, *, allow_pickle: bool = False) -> list[dict[str, Any]]:
    """All samples, in order, as the real StreamingDataset reads them; no shared memory stays behind."""
    with streaming_datasets() as streaming:
        dataset = streaming.StreamingDataset(
            local=str(folder), batch_size=1, shuffle=False, allow_unsafe_types=allow_pickle
        )
        found = [dataset[i] for i in range(len(dataset))]
        del dataset
    return found


def comparable(value: object) -> object:
    """A value that `==` compares by type, type of number, shape and content."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return ("number", value.dtype.name, value.tobytes())
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if hasattr(value, "getpixel"):  # a PIL image, of any class
        return ("image", value.mode, value.size, value.tobytes())  # type: ignore[attr-defined]
    return (type(value).__name__, value)
