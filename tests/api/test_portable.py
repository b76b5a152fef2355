"""Loaders need nothing that only Linux has: they are imported and read without it, also through a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.files import allocate
from support.loader_data import KINDS, make_dataset

# What Python on macOS lacks, and what procfs would say. Set after the imports of other packages.
MACOS = """
import mmap, os, pathlib, pkgutil, sys
import numpy, pydantic.main, torch, torch.utils.data, yaml, zstandard
for name in ("posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity", "fdatasync",
             "memfd_create", "eventfd", "copy_file_range", "pipe2", "O_DIRECT", "O_TMPFILE", "O_PATH"):
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(mmap) if name in ("MADV_HUGEPAGE", "MAP_POPULATE", "MAP_ANONYMOUS")]:
    delattr(mmap, name)
opened = pathlib.Path.open
def refuse(path, *arguments, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "no such file", str(path))
    return opened(path, *arguments, **options)
pathlib.Path.open = refuse
sys.platform = "darwin"
"""
LOAD = """
import shardkit as sk
from shardkit import loaders, cache, order, formats, storage, datasets
for package in (loaders, cache, order, formats, storage, datasets):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("lightning_module", "integrations", "provenance", "removed")):
            __import__(module.name)
for kind in sys.argv[2:]:
    local, remote = pathlib.Path(sys.argv[1]) / kind, f"memory://{kind}"
    if kind != "foreign_tar":
        sk.upload(local, remote, progress=False)
    for place in (local, *([] if kind == "foreign_tar" else [remote])):
        options = {"cache_dir": pathlib.Path(sys.argv[1]) / "cache"} if place is remote else {}
        with sk.StreamingLoader(place, batch_size=4, return_ids=True, **options) as loader:
            ids = [number for batch in loader for number in batch["sample_id"].tolist()]
        assert sorted(set(ids)) == list(range(23)), (place, ids)
from shardkit.writers.execution.engine import default_workers
assert default_workers(1 << 28) >= 1
print("read")
"""


def test_loaders_need_nothing_that_only_linux_has(tmp_path: Path) -> None:
    for kind in KINDS:
        make_dataset(tmp_path / kind, kind, samples=23)
    command = [sys.executable, "-c", MACOS + LOAD, str(tmp_path), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "read\n", done.stderr


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 3])
def test_a_file_gets_its_room_where_no_call_allocates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with (tmp_path / "file").open("wb") as file:
        allocate(file.fileno(), size)
    assert (tmp_path / "file").read_bytes() == bytes(size)
