"""Parts in sub-folders become one dataset, for shardkit and for MosaicML, without a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit as sk
from shardkit.errors import ShardError
from shardkit.manifest import BLOCKS_NAME
from shardkit.storage import open_store
from shardkit.storage.local import LocalStore
from support import peers
from support.remote_harness import fresh_url, put_folder

COLUMNS = {"text": "str", "number": "int"}
SHARD_BYTES = 400  # a few samples


def sample(number: int) -> dict[str, Any]:
    return {"text": f"document {number}", "number": number}


def write(folder: Path, numbers: Sequence[int], **settings: Any) -> None:
    with sk.MdsWriter(folder, columns=COLUMNS, shard_bytes=SHARD_BYTES, **settings) as writer:
        for number in numbers:
            writer.write(sample(number))


def numbers_in(folder: Path) -> list[int]:
    with sk.open(folder) as dataset:
        rows = list(dataset)
    assert rows == [sample(int(str(row["number"]))) for row in rows]
    return [int(str(row["number"])) for row in rows]


@pytest.fixture
def numbers() -> Iterator[int]:
    return iter(range(10**6))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=13),
    appended=st.lists(st.integers(0, 25), max_size=3),
    has_own=st.booleans(),
)
def test_merging_keeps_every_row_in_order_and_appending_adds_rows_at_the_end(
    sizes: list[int], appended: list[int], has_own: bool
) -> None:
    counter = iter(range(10**6))
    with TemporaryDirectory() as name:
        folder, expected = Path(name) / "data", 0
        own, *parts = sizes
        if has_own:
            write(folder, [next(counter) for _ in range(own)])
            expected += own
        else:
            parts = sizes
        for number, size in enumerate([*parts, *appended, 3]):
            write(folder / f"part-{number}", [next(counter) for _ in range(size)])
            expected += size
            if number >= len(parts):
                manifest = sk.merge(folder)
                assert manifest.samples == expected
                assert numbers_in(folder) == list(range(expected))
        before = (folder / "index.json").read_bytes(), (folder / BLOCKS_NAME).read_bytes()
        sk.merge(folder)
        assert ((folder / "index.json").read_bytes(), (folder / BLOCKS_NAME).read_bytes()) == before


def test_a_merged_dataset_opens_in_both_libraries(tmp_path: Path, numbers: Iterator[int]) -> None:
    parts = [[next(numbers) for _ in range(12)] for _ in range(3)]
    for number, rows in enumerate(parts):
        write(tmp_path / "data" / f"{number}", rows, hashes=["xxh64"])
    sk.merge(tmp_path / "data")
    assert numbers_in(tmp_path / "data") == list(range(36))
    theirs = peers.read_with_streaming(tmp_path / "data")
    assert [row["number"] for row in theirs] == list(range(36))
    assert sk.verify(tmp_path / "data").ok


def test_the_index_is_the_one_that_mosaicml_merges(tmp_path: Path, numbers: Iterator[int]) -> None:
    folder = tmp_path / "data"
    for name in "ab":
        samples = [sample(next(numbers)) for _ in range(12)]
        peers.write_with_streaming(folder / name, COLUMNS, samples, size_limit=SHARD_BYTES)
    ours = sk.merge(folder)
    assert ours.blocks is None, "MosaicML's writer makes no block checksums"
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").unlink()
    peers.import_streaming()
    from streaming.base.util import merge_index

    merge_index(str(folder), keep_local=True)
    theirs = json.loads((folder / "index.json").read_text())
    assert theirs["version"] == index["version"]
    by_name = [
        sorted(each["shards"], key=lambda shard: shard["raw_data"]["basename"]) for each in (theirs, index)
    ]
    assert by_name[0] == by_name[1]
    assert numbers_in(folder) == list(range(24)), "theirs is read, too"
    sk.merge(folder)
    assert json.loads((folder / "index.json").read_text()) == index


def test_rows_of_a_merged_remote_dataset_can_be_read_one_by_one(tmp_path: Path) -> None:
    for first in (0, 40):
        rows = np.arange(first, first + 40)[:, None].repeat(16, axis=1)
        columns = {"tokens": "ndarray:int64:16"}
        with sk.MdsWriter(tmp_path / "data" / f"{first}", columns=columns, shard_bytes=2000) as writer:
            writer.write_rows(rows)
    assert sk.merge(tmp_path / "data").blocks is not None
    url = fresh_url()
    put_folder(tmp_path / "data", open_store(url))
    with sk.StreamingLoader(url, batch_size=8, shuffle="global", seed=3, return_ids=True) as loader:
        shards = loader.dataset.shards
        assert shards is not None
        assert shards.reads_single_rows
        found = [(batch["sample_id"].tolist(), batch["tokens"].tolist()) for batch in loader]
    assert all(rows == [[number] * 16 for number in ids] for ids, rows in found)
    assert sorted(number for ids, _ in found for number in ids) == list(range(80))


def test_a_merged_dataset_is_uploaded_whole(tmp_path: Path, numbers: Iterator[int]) -> None:
    for name in ("a", "b"):
        write(tmp_path / "data" / name, [next(numbers) for _ in range(20)])
    sk.merge(tmp_path / "data")
    sk.upload(tmp_path / "data", str(tmp_path / "copy"), progress=False)
    assert numbers_in(tmp_path / "copy") == list(range(40))
    names = {info.key for info in LocalStore(tmp_path / "copy").list()}
    assert not {"a/index.json", "b/index.json"} & names, "parts are no datasets there"


def test_parts_come_by_number_or_as_they_are_named(tmp_path: Path) -> None:
    for number in (0, 2, 10, 9):
        write(tmp_path / f"{number}", [number])
    (tmp_path / "notes").mkdir()
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging" / "shard.00000.mds").touch()
    sk.merge(tmp_path)
    assert numbers_in(tmp_path) == [0, 2, 9, 10]
    sk.merge(str(tmp_path), parts=["10", "0"])
    assert numbers_in(tmp_path) == [10, 0]


@pytest.mark.parametrize("compression", ["zstd", "gz"])
def test_parts_may_be_compressed_or_not(tmp_path: Path, compression: str) -> None:
    write(tmp_path / "0", range(10), compression=compression, hashes=["sha1"])
    write(tmp_path / "1", range(10, 20))
    assert sk.merge(tmp_path).blocks is None
    assert numbers_in(tmp_path) == list(range(20))


def test_what_would_lose_rows_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"has no sub-folder with an index\.json: write"):
        sk.merge(tmp_path)
    write(tmp_path / "0", range(10))
    sk.merge(tmp_path)
    index = (tmp_path / "index.json").read_bytes()
    write(tmp_path / "1", range(10, 20))
    (tmp_path / "1" / "index.json").rename(tmp_path / "1" / "gone")
    with pytest.raises(ShardError, match=r"1: has shards but no index.json: its writer still runs"):
        sk.merge(tmp_path)
    shutil.rmtree(tmp_path / "1")
    with sk.MdsWriter(tmp_path / "1", columns={"text": "str"}) as writer:
        writer.write({"text": "other"})
    with pytest.raises(ShardError, match=r"1: has the columns text \(str\); .*0 has number \(int\), text"):
        sk.merge(tmp_path)
    shutil.rmtree(tmp_path / "1")
    write(tmp_path / "1", range(10, 20))
    damaged = bytearray((tmp_path / "1" / BLOCKS_NAME).read_bytes())
    damaged[3] ^= 1
    (tmp_path / "1" / BLOCKS_NAME).write_bytes(damaged)
    with pytest.raises(ShardError, match=r"blocks.bin: is damaged: the checksums of shard.00000.mds are wr"):
        sk.merge(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == index
    assert numbers_in(tmp_path) == list(range(10))
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(ShardError, match=r"has a card, dataset.json, .*: move all its files"):
        sk.merge(tmp_path)


def test_wrong_arguments_of_merge_are_answered(tmp_path: Path) -> None:
    write(tmp_path / "0", range(3))
    with pytest.raises(TypeError, match="takes the folder that holds the parts"):
        sk.merge([tmp_path / "0"])  # type: ignore[arg-type]
    for missing in (tmp_path / "gone", tmp_path / "0" / "index.json"):
        with pytest.raises(ShardError, match="there is no such folder; merge takes the folder that holds"):
            sk.merge(missing)
    with pytest.raises(ShardError, match="gone: no such index"):
        sk.merge(tmp_path, parts=["0", "gone"])
    with pytest.raises(TypeError, match=r"must be a list of names: parts=\['0'\]"):
        sk.merge(tmp_path, parts="0")
    with pytest.raises(ValueError, match="are names of sub-folders of"):
        sk.merge(tmp_path, parts=["../0"])
    with pytest.raises(ValueError, match="name a sub-folder twice: 0, 0"):
        sk.merge(tmp_path, parts=["0", "0"])


def test_the_writer_answers_the_words_of_mosaicml_and_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    for name, instead in {
        "size_limit": "`shard_bytes`",
        "out": "first argument",
        "exist_ok": "append",
    }.items():
        with pytest.raises(TypeError, match=f"argument '{name}'; in shardkit: .*{instead}"):
            sk.MdsWriter(**{"folder": tmp_path, "columns": COLUMNS, name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        sk.MdsWriter(tmp_path / "x", columns=COLUMNS, colour=1)  # type: ignore[call-arg]
    write(tmp_path / "data", range(3))
    with pytest.raises(ShardError, match=r"append to it: write .*data/part-1, then call shardkit\.merge\('"):
        sk.MdsWriter(tmp_path / "data", columns=COLUMNS)
    write(tmp_path / "data" / "part-1", range(3, 6))
    sk.merge(tmp_path / "data")
    assert numbers_in(tmp_path / "data") == list(range(6))
