"""Where workers keep compiled kernels: one folder for each version of all kernels.

Numba's own cache looks at the file of a function only, so a kernel that calls one of another file would be
taken from the cache although the other was changed. Here the folder's name is a digest of every source file
with kernels. It lies below $XDG_CACHE_HOME (~/.cache), holds some megabytes and may be deleted at any time;
versions that nobody used for a month are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import time
from pathlib import Path

__all__ = ["kernel_cache"]

_VARIABLE = "NUMBA_CACHE_DIR"
_UNUSED_SECONDS = 30 * 24 * 3600


def kernel_cache() -> dict[str, str]:
    """Environment for workers: {} if there is no place for the cache, or if the environment names one."""
    if _VARIABLE in os.environ:
        return {}
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "shardkit" / f"kernels-{_kernel_version()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.glob("kernels-*"):
            if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return {}
    return {_VARIABLE: str(folder)} if os.access(folder, os.W_OK) else {}


def _kernel_version() -> str:
    state = hashlib.blake2b(importlib.metadata.version("numba").encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        data = source.read_bytes()
        if b"numba" in data:
            state.update(data)
    return state.hexdigest()
