"""Datasets cross the border to MosaicML and back, and the golden datasets it wrote read as it read them."""

from __future__ import annotations

import hashlib
import io
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardkit.formats import mds
from support import peers

GOLDENS = Path(os.environ.get("SHARDKIT_TEST_DATA", ".")) / "goldens" / "mds"
EVERYTHING = {
    "b": "bytes",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "fixed": "ndarray:int32:2,3",
    "half": "ndarray:uint8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "i8": "int8",
    "img": "pil",
    "int": "int",
    "jpegs": "jpeg_array",
    "json": "json",
    "list": "list[png]",
    "open": "ndarray",
    "p": "pkl",
    "png": "png",
    "s": "str",
    "sd": "str_decimal",
    "sf": "str_float",
    "si": "str_int",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "u8": "uint8",
}


def everything(count: int) -> list[dict[str, Any]]:
    """Samples of every encoding."""
    samples = []
    for i in range(count):
        image = Image.frombytes("RGB", (4, 2 + i), bytes(range(3 * 4 * (2 + i))))
        jpeg = io.BytesIO()
        image.save(jpeg, format="JPEG")
        sample: dict[str, Any] = {
            "b": bytes(i),
            "fixed": np.full((2, 3), -i, np.int32),
            "half": np.full((1 + i, 2), i, np.uint8),
            "img": image,
            "int": -i,
            "jpegs": [jpeg.getvalue()] * (1 + i % 2),
            "json": {"i": [i, None, "é"]},
            "list": [image] * i,
            "open": np.full((1, 300 + i), i / 2, np.float64),
            "p": {i},
            "png": image.convert("L"),
            "s": "ü" * i,
            "sd": Decimal(i) / 4,
            "sf": i / 3,
            "si": -(10**i),
        }
        for name in ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"):
            sample[name] = np.dtype(name.replace("i", "int").replace("u", "uint").replace("f", "float")).type(
                i
            )
        samples.append(sample)
    return samples


def read_here(folder: Path) -> list[dict[str, object]]:
    shards = [
        mds.open_shard(folder, info, allow_pickle=True, verify=True) for info in mds.read_index(folder).shards
    ]
    return [shard.sample(row) for shard in shards for row in range(len(shard))]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_is_written_here_is_read_by_mosaicml(tmp_path: Path, compression: str | None) -> None:
    with mds.MdsWriter(
        tmp_path / "d",
        columns=EVERYTHING,
        compression=compression,
        hashes=["sha1", "xxh64"],
        shard_bytes=12_000,
    ) as writer:
        for sample in everything(7):
            writer.write(sample)
    assert len(writer.finish().shards) > 1
    ours = peers.comparable(list(read_here(tmp_path / "d")))
    assert peers.comparable(peers.read_with_streaming(tmp_path / "d", allow_pickle=True)) == ours


def test_packed_rows_written_here_are_read_by_mosaicml(tmp_path: Path) -> None:
    rows = np.arange(20 * 64, dtype=np.uint16).reshape(20, 64)
    shards = [
        mds.write_rows_shard(tmp_path, f"shard.{k:05}.mds", part, hashes=["xxh64"])
        for k, part in enumerate([rows[:8], rows[8:]])
    ]
    mds.write_index(tmp_path, shards)
    theirs = peers.read_with_streaming(tmp_path)
    assert np.array_equal(np.stack([sample["tokens"] for sample in theirs]), rows)


@pytest.mark.parametrize("compression", [None, "zstd:5", "br:2", "bz2", "gz", "snappy"])
def test_what_mosaicml_writes_is_read_here(tmp_path: Path, compression: str | None) -> None:
    samples = everything(7)
    columns = {name: EVERYTHING[name] for name in sorted(EVERYTHING, reverse=True)}
    peers.write_with_streaming(
        tmp_path / "d",
        columns,
        samples,
        compression=compression,
        hashes=["blake2b", "xxh128"],
        size_limit=9_000,
    )
    lossy = {"jpegs"}  # goes in as files, comes back as images
    expected = [{k: v for k, v in sample.items() if k not in lossy} for sample in samples]
    found = [{k: v for k, v in sample.items() if k not in lossy} for sample in read_here(tmp_path / "d")]
    assert peers.comparable(found) == peers.comparable(expected)


def golden(name: str, folder: Path, expected: Path) -> Any:
    return pytest.param(folder, expected, id=name)


def goldens() -> list[Any]:
    found = sorted(GOLDENS.glob("**/*.expected.json"))
    return [
        golden(file.name.split(".")[0], Path(str(file).removesuffix(".expected.json")), file)
        for file in found
    ]


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


@pytest.mark.data
@pytest.mark.skipif(not goldens(), reason="SHARDKIT_TEST_DATA is not set")
@pytest.mark.parametrize(("folder", "expected_file"), goldens())
def test_golden_datasets_read_as_mosaicml_read_them(folder: Path, expected_file: Path) -> None:
    expected = json.loads(expected_file.read_text())
    manifest = mds.read_index(folder)
    assert manifest.shard_samples.tolist() == expected["samples_per_shard"]
    assert {c.name: c.encoding for c in manifest.shards[0].columns} == expected["columns"]
    found = [{name: described(value) for name, value in sample.items()} for sample in read_here(folder)]
    wanted = [{name: without_data(value) for name, value in sample.items()} for sample in expected["samples"]]
    assert found == wanted


@pytest.mark.data
@pytest.mark.skipif(not goldens(), reason="SHARDKIT_TEST_DATA is not set")
def test_a_golden_merged_index_reads_as_its_parts_in_a_row() -> None:
    parts = sorted((GOLDENS / "multi").glob("part_??"))
    assert read_here(GOLDENS / "multi") == [sample for part in parts for sample in read_here(part)]
    merged = mds.read_index(GOLDENS / "multi")
    assert {info.raw.basename.split("/")[0] for info in merged.shards} == {part.name for part in parts}


@pytest.mark.data
@pytest.mark.skipif(not goldens(), reason="SHARDKIT_TEST_DATA is not set")
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
