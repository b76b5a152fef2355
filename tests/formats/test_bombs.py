"""Datasets of others whose samples become enormous: a clear error, in no more memory than one budget allows.

Each is read in a process of its own, whose peak is measured. Budgets are those of shardkit.formats.budget.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardkit.formats.budget import MAX_SAMPLE_BYTES
from shardkit.formats.mds.index import config_bytes, make_columns
from support.bombs import gzip_of, measure, png, tar_header, tar_of, zstd_of

SLACK = 300 << 20
GIB = 1 << 30


def _zstd_tar() -> bytes:
    """98 KB with a member of 3 GiB."""
    return zstd_of([tar_header("a.bin", 3 * GIB), (b"\0", 3 * GIB), bytes(1024)])


def _six_gzip_members() -> bytes:
    member = gzip_of(bytes(1 << 20), 900 << 20)
    return tar_of({f"a.{number}.bin.gz": member for number in range(6)})


def _nested() -> bytes:
    return tar_of({"a.txt.gz.gz": gzip.compress(gzip_of(bytes(1 << 20), 4 * GIB), mtime=0)})


def _json() -> bytes:
    return tar_of({"a.json.gz": gzip_of(b"[],[],[],[],", 600 << 20)})


def _text_of_wide_characters() -> bytes:
    return tar_of({"a.txt.gz": gzip_of(b"a" * 1020 + "\U0001f600".encode(), 500 << 20)})


def _images() -> bytes:
    one = png(6000, 6000)
    return tar_of({f"a.{number}.png": one for number in range(16)})


TARS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a member of 3 GiB in a .tar.zst of 98 KB": ("a.tar.zst", _zstd_tar),
    "six members of 900 MB": ("a.tar", _six_gzip_members),
    "a bomb in a bomb": ("a.tar", _nested),
    "lists of JSON": ("a.tar", _json),
    "text whose characters take four bytes": ("a.tar", _text_of_wide_characters),
    "sixteen images": ("a.tar", _images),
}


FIRST, *OTHERS = TARS


EACH = [FIRST, *(pytest.param(name, marks=pytest.mark.extended) for name in OTHERS)]


@pytest.mark.parametrize("name", EACH)
def test_tars_that_grow_are_refused_within_the_budget(tmp_path: Path, name: str) -> None:
    file, make = TARS[name]
    data = make()
    assert len(data) < 10 << 20
    (tmp_path / file).write_bytes(data)
    found = measure("dataset", tmp_path / file)
    assert found.outcome.startswith(str(tmp_path))
    assert "holds more than" in found.outcome or "the limit is" in found.outcome
    assert found.peak <= MAX_SAMPLE_BYTES + SLACK


@pytest.mark.extended
@pytest.mark.parametrize("column", ["list[png]", "jpeg_array"])
def test_lists_of_images_are_refused_within_the_budget(tmp_path: Path, column: str) -> None:
    one, count = png(6000, 6000), 16
    words = [0, count] if column == "list[png]" else [count]
    value = np.array([*words, *[len(one)] * count], "<u4").tobytes() + one * count
    sample = np.array([len(value)], "<u4").tobytes() + value
    config = config_bytes(make_columns({"a": column}), None, [], None)
    head = 4 * 3 + len(config)
    raw = np.array([1, head, head + len(sample)], "<u4").tobytes() + config + sample
    (tmp_path / "shard.00000.mds").write_bytes(raw)
    entry = {
        **json.loads(config),
        "samples": 1,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}},
        "zip_data": None,
    }
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    found = measure("dataset", tmp_path)
    assert "the limit is 1,073,741,824" in found.outcome
    assert found.peak <= MAX_SAMPLE_BYTES + SLACK
