"""The golden datasets that MosaicML wrote are read as it read them, and written again as it wrote them."""

from __future__ import annotations

import hashlib
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardkit.formats import mds

GOLDENS = Path(os.environ.get("SHARDKIT_TEST_DATA", ".")) / "goldens" / "mds"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not GOLDENS.is_dir(), reason="SHARDKIT_TEST_DATA is not set"),
]


def read_here(folder: Path) -> list[dict[str, object]]:
    shards = [
        mds.open_shard(folder, info, allow_pickle=True, verify=True) for info in mds.read_index(folder).shards
    ]
    return [shard.sample(row) for shard in shards for row in range(len(shard))]


def goldens() -> list[Any]:
    """(folder, file that says what MosaicML read from it) of each."""
    files = sorted(GOLDENS.glob("**/*.expected.json"))
    folders = [Path(str(file).removesuffix(".expected.json")) for file in files]
    return [pytest.param(*pair, id=pair[0].name.split(".")[0]) for pair in zip(folders, files, strict=True)]


def described(value: object) -> object:
    """A value in the words of the golden files."""
    if isinstance(value, bytes):
        shown = value.hex() if len(value) <= 64 else None
        return {"_": "bytes", "len": len(value), "sha256": hashlib.sha256(value).hexdigest(), "hex": shown}
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return {"_": "ndarray", "dtype": value.dtype.name, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, np.generic):
        return {"_": "scalar", "dtype": value.dtype.name, "value": value.item()}
    if isinstance(value, Decimal):
        return {"_": "decimal", "value": str(value)}
    if isinstance(value, Image.Image):
        pixels = hashlib.sha256(value.tobytes()).hexdigest()
        return {"_": "image", "mode": value.mode, "size": list(value.size), "pixels_sha256": pixels}
    return value


def without_data(value: Any) -> Any:
    if isinstance(value, dict) and value.get("_") == "ndarray":
        return {key: item for key, item in value.items() if key != "data"}  # the digest covers it
    if isinstance(value, dict) and value.get("_") == "bytes" and value["len"] > 64:
        return value | {"hex": None}
    return value


@pytest.mark.parametrize(("folder", "expected_file"), goldens())
def test_golden_datasets_read_as_mosaicml_read_them(folder: Path, expected_file: Path) -> None:
    expected = json.loads(expected_file.read_text())
    manifest = mds.read_index(folder)
    assert manifest.shard_samples.tolist() == expected["samples_per_shard"]
    assert {c.name: c.encoding for c in manifest.shards[0].columns} == expected["columns"]
    found = [{name: described(value) for name, value in sample.items()} for sample in read_here(folder)]
    wanted = [{name: without_data(value) for name, value in sample.items()} for sample in expected["samples"]]
    assert found == wanted


def test_a_golden_merged_index_reads_as_its_parts_in_a_row() -> None:
    parts = sorted((GOLDENS / "multi").glob("part_??"))
    assert read_here(GOLDENS / "multi") == [sample for part in parts for sample in read_here(part)]
    merged = mds.read_index(GOLDENS / "multi")
    assert {info.raw.basename.split("/")[0] for info in merged.shards} == {part.name for part in parts}


@pytest.mark.parametrize(("folder", "expected_file"), goldens())
def test_golden_datasets_written_again_have_the_same_bytes(
    folder: Path, expected_file: Path, tmp_path: Path
) -> None:
    manifest = mds.read_index(folder)
    first = manifest.shards[0]
    columns = {column.name: column.encoding for column in first.columns}
    if set(columns.values()) & {"jpeg"}:
        pytest.skip("a JPEG decoded and encoded again is another file")
    writer = mds.MdsWriter(
        tmp_path / "d",
        columns=columns,
        compression=first.compression,
        hashes=sorted(first.stored.hashes),
        shard_bytes=first.size_limit,
    )
    for sample in read_here(folder):
        writer.write(sample)
    written = writer.finish()
    assert [info.raw for info in written.shards] == [info.raw for info in manifest.shards]
    for info in written.shards if first.compression is None else []:
        assert (tmp_path / "d" / info.raw.basename).read_bytes() == (folder / info.raw.basename).read_bytes()
