"""Rows that checksums of blocks prove: no store, however it lies, gets a wrong one delivered."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import shardkit
from shardkit.cache import CacheOptions
from shardkit.cache.memory import CacheMemory
from shardkit.card import CARD_NAME, DatasetCard, block_checksums
from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.formats.block_checksums import (
    BLOCK_BYTES,
    BlockFile,
    are_right,
    block_range,
    shard_part,
    shard_parts,
)
from shardkit.formats.mds.index import load_table
from shardkit.hashing import hash_bytes
from shardkit.manifest import BLOCKS_NAME, FileInfo, Manifest
from shardkit.publish import download, upload
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.tools.convert import OutputOptions
from support.noted_store import NotedStore, Read
from support.remote_harness import Remote, fresh_url

LENGTH, ROWS, SHARD_BYTES = 512, 600, 1 << 17  # five shards of two blocks, the last ones short
FORMATS: tuple[Literal["mds", "wds"], ...] = ("mds", "wds")


def values() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Rows that begin with their number, and are else unlike each other."""
    rows = np.random.default_rng(17).integers(0, 60_000, (ROWS, LENGTH)).astype(np.uint16)
    rows[:, 0] = np.arange(ROWS)
    return rows


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Converted datasets of both formats, with hashes and with none."""
    folder = tmp_path_factory.mktemp("datasets")
    with mds.MdsWriter(folder / "source", columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        writer.write_rows(values())
    made = {}
    for kind in FORMATS:
        for name, hashes in ((kind, ("xxh64",)), (f"{kind}_unhashed", ())):
            output = OutputOptions(format=kind, shard_bytes=SHARD_BYTES, hashes=hashes)
            shardkit.convert(folder / "source", folder / name, output=output, progress=False)
            made[name] = folder / name
    return made


class LyingStore(NotedStore):
    """Ranged reads of shards return what `lie` makes of (key, start, stop); whole shards never come."""

    def __init__(self, folder: Path, lie: Callable[[LyingStore, str, int, int], bytes] | None = None) -> None:
        super().__init__(folder, holds=lambda read: read.shard is not None and read.stop is None)
        self.lie = lie

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        body = super().open(key, start, stop, version=version)
        if self.lie is None or stop is None or Read(key, 0, 0, None).shard is None:
            return body
        return MemoryBody(body.info, memoryview(self.lie(self, key, start, min(stop, body.info.bytes))))

    @property
    def rows(self) -> list[Read]:
        """Reads of rows, or of the blocks that they are in."""
        return [read for read in self.reads if read.stop is not None and read.shard is not None]


def flipped(store: LyingStore, key: str, start: int, stop: int) -> bytes:
    data = bytearray(store.quiet(key)[start:stop])
    data[-3 if stop - start < BLOCK_BYTES else 1500] ^= 1
    return bytes(data)


def shifted(store: LyingStore, key: str, start: int, stop: int) -> bytes:
    """Each range is that of other bytes near it, as of a proxy that counts wrongly."""
    whole, by = store.quiet(key), 2 * LENGTH if start >= 2 * LENGTH else -2 * LENGTH
    return whole[start - by : stop - by]


def of_another_shard(store: LyingStore, key: str, start: int, stop: int) -> bytes:
    """As if the object had been replaced by another of equal name and size."""
    names = sorted(info.key for info in store.list() if Read(info.key, 0, 0, None).shard is not None)
    other = names[0] if key != names[0] else names[1]
    return store.quiet(other)[start:stop].ljust(stop - start, b"\0")


LIES = {"flipped": flipped, "shifted": shifted, "replaced": of_another_shard}


def without_blocks(folder: Path, target: Path) -> Path:
    """The dataset as versions before blocks.bin, and others, publish it."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name != BLOCKS_NAME:
            (target / file.name).write_bytes(file.read_bytes())
    for name, key in ((CARD_NAME, "files"), ("index.json", "blocks"), ("shards.json", "blocks")):
        if (target / name).exists():
            data = json.loads((target / name).read_bytes())
            del data[key]
            (target / name).write_text(json.dumps(data))
    return target


def delivered(store: LyingStore) -> tuple[int, int, Exception | None]:
    """(right rows, wrong rows) that a training loop got of its first batches, and how it ended."""
    expected, right, wrong = values(), 0, 0
    remote = Remote.open(store, connections=8)
    loader = remote.loader(prefetch_batches=0, shuffle="global")
    try:
        for batch in islice(loader, 4):
            for row, sample in zip(batch["tokens"].numpy(), batch["sample_id"].tolist(), strict=True):
                is_right = np.array_equal(row, expected[sample])
                right, wrong = right + is_right, wrong + (not is_right)
    except ShardError as error:
        return right, wrong, error
    finally:
        store.let_through()
        loader.close()
        remote.dataset.close()
    return right, wrong, None


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["mds", "wds", "mds_unhashed", "wds_unhashed"])
def test_of_a_lying_store_no_wrong_row_is_delivered(datasets: dict[str, Path], name: str, lie: str) -> None:
    right, wrong, error = delivered(LyingStore(datasets[name], LIES[lie]))
    assert (right, wrong) == (0, 0)
    assert "have other checksums than the dataset's" in str(error)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["mds", "wds", "mds_unhashed", "wds_unhashed"])
def test_rows_without_block_checksums_wait_for_their_whole_shards(
    datasets: dict[str, Path], tmp_path: Path, name: str, lie: str
) -> None:
    """Of older versions, MosaicML and others: ranged reads that lie reach nobody, whole shards are right."""
    store = LyingStore(without_blocks(datasets[name], tmp_path / "old"), LIES[lie])
    store.let_through()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert delivered(store) == (16, 0, None)
    assert not store.rows
    said = [each for each in warned if "rows cannot be verified" in str(each.message)]
    assert len(said) == name.endswith("_unhashed"), "once, where only sizes are stated"


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["mds", "wds", "mds_unhashed", "wds_unhashed"])
def test_a_card_that_is_not_found_takes_no_proof_away(datasets: dict[str, Path], name: str, lie: str) -> None:
    store = LyingStore(datasets[name], LIES[lie])
    store.delete(CARD_NAME)
    right, wrong, error = delivered(store)
    assert (right, wrong) == (0, 0)
    assert "have other checksums than the dataset's" in str(error)


@pytest.mark.parametrize("name", ["mds", "wds", "mds_unhashed", "wds_unhashed"])
def test_checksums_that_the_index_states_and_that_are_gone_are_an_error(
    datasets: dict[str, Path], name: str
) -> None:
    store = LyingStore(datasets[name])
    store.delete(BLOCKS_NAME)
    right, wrong, error = delivered(store)
    assert (right, wrong) == (0, 0)
    assert BLOCKS_NAME in str(error)
    assert "upload" in str(error)


@pytest.mark.parametrize("whole", [False, True])
def test_the_plain_writers_datasets_are_proved_too_rows_and_whole_shards(tmp_path: Path, whole: bool) -> None:
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    plain = tmp_path / "plain"
    with mds.MdsWriter(plain, columns=columns, hashes=(), shard_bytes=SHARD_BYTES) as writer:
        writer.write_rows(values())
    manifest = writer.finish()
    assert manifest.blocks == mds.read_index(tmp_path / "plain").blocks
    assert shardkit.verify(tmp_path / "plain").ok
    store = LyingStore(tmp_path / "plain", flipped)
    if whole:
        data = bytearray(store.quiet("shard.00001.mds"))
        data[5000] ^= 1
        store.put("shard.00001.mds", bytes(data))
        remote = Remote.open(store)
        store.let_through()
        remote.shards.load(0)
        with pytest.raises(ShardError, match=r"shard.00001.mds: its blocks have other checksums"):
            remote.shards.load(1)
        remote.dataset.close()
    else:
        assert delivered(store)[:2] == (0, 0)
    assert BLOCKS_NAME in upload(tmp_path / "plain", MemoryStore(fresh_url()).url, progress=False).sent


@pytest.mark.parametrize("name", ["mds", "wds"])
def test_a_row_takes_one_request_for_whole_blocks(datasets: dict[str, Path], name: str) -> None:
    store = LyingStore(datasets[name])
    assert delivered(store) == (16, 0, None)
    assert len(store.rows) == 16
    assert [read.key for read in store.reads].count(BLOCKS_NAME) == 1
    assert all(read.start % BLOCK_BYTES == 0 for read in store.rows)


def test_a_row_that_arrives_damaged_is_read_again(datasets: dict[str, Path]) -> None:
    reads = []

    def lie(store: LyingStore, key: str, start: int, stop: int) -> bytes:
        reads.append(key)
        return flipped(store, key, start, stop) if len(reads) % 3 == 1 else store.quiet(key)[start:stop]

    assert delivered(LyingStore(datasets["mds"], lie)) == (16, 0, None)
    assert len(reads) > 16


@pytest.mark.parametrize("lie", LIES)
def test_rows_of_a_shard_that_was_seen_whole_are_proved_by_it_whoever_made_the_dataset(
    datasets: dict[str, Path], tmp_path: Path, lie: str
) -> None:
    """So it is in a cache that has no room for the shards that a loop reads at a time."""
    store = LyingStore(without_blocks(datasets["mds"], tmp_path / "old"))
    store.let_through()
    remote = Remote.open(store, CacheMemory(1))
    numbers, wanted = range(len(remote.dataset.manifest.shards)), np.array([0, 7, 90])
    whole = {number: remote.shards.load(number).copy() for number in numbers}
    store.reads.clear()
    found = remote.shards.rows.read(dict.fromkeys(numbers, wanted))
    assert len(store.rows) == len(numbers) * len(wanted), "by one request each, for its own bytes"
    for number in numbers:
        layout = remote.shards.rows.layout(number)
        assert layout is not None
        for row, data in zip(wanted.tolist(), found[number].data, strict=True):
            start = layout.first + row * layout.stride
            np.testing.assert_array_equal(data, whole[number][start : start + layout.size])
    store.lie = LIES[lie]
    for number in numbers:
        with pytest.raises(ShardError, match="have other checksums than the dataset's"):
            remote.shards.rows.read({number: wanted})
    remote.dataset.close()


@pytest.mark.parametrize("stated", [7, [], "x", {}, {"bytes": -1}, {"bytes": True}, {"bytes": 1, "xxh64": 3}])
@pytest.mark.parametrize("name", ["mds", "wds"])
def test_an_index_whose_statement_of_checksums_is_not_sound_is_refused(
    datasets: dict[str, Path], name: str, stated: object
) -> None:
    store, index_name = LyingStore(datasets[name]), "index.json" if name == "mds" else "shards.json"
    index = json.loads(store.get(index_name))
    store.put(index_name, json.dumps(index | {"blocks": stated}).encode())
    with pytest.raises(ShardError, match=rf"{index_name}: blocks\.bin: "):
        shardkit.open_dataset(store.url, cache=CacheOptions())


def test_an_index_and_a_card_that_state_different_checksums_are_not_published(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(datasets["mds"], tmp_path / "copy")
    index = json.loads((tmp_path / "copy" / "index.json").read_bytes())
    index["blocks"]["xxh3_128"] = "0" * 32
    (tmp_path / "copy" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match=r"blocks\.bin that differs from the one in dataset\.json"):
        upload(tmp_path / "copy", MemoryStore(fresh_url()).url, progress=False)


def test_the_index_of_a_large_dataset_states_the_checksums_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.formats.mds.index.TABLE_SHARDS", 2)
    with mds.MdsWriter(tmp_path / "d", columns={"n": "ndarray:uint16:4"}, shard_bytes=300) as writer:
        writer.write_rows(values()[:200, :4])
    manifest = writer.finish()
    assert manifest.blocks is not None
    table = load_table(tmp_path / "d" / "index.bin")
    assert table is not None
    assert table.blocks == mds.read_index(tmp_path / "d").blocks == manifest.blocks
    (tmp_path / "d" / "index.bin").unlink()
    assert mds.read_index(tmp_path / "d").blocks == manifest.blocks


def damaged(parts: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in parts)


def moved(parts: bytes) -> bytes:
    """Each of the four full shards has the part of the next one."""
    size = len(shard_part(FileInfo("", SHARD_BYTES), np.zeros(SHARD_BYTES, np.uint8)))
    return parts[size : 4 * size] + parts[:size] + parts[4 * size :]


@pytest.mark.parametrize("damage", [damaged, moved])
def test_checksums_that_are_not_the_shards_own_are_refused(
    datasets: dict[str, Path], damage: Callable[[bytes], bytes]
) -> None:
    store = LyingStore(datasets["mds"])
    store.put(BLOCKS_NAME, damage(store.quiet(BLOCKS_NAME)))
    _, wrong, error = delivered(store)
    assert wrong == 0
    assert f"/{BLOCKS_NAME}: " in str(error)
    assert "shardkit verify" in str(error)


def test_an_object_of_another_size_than_the_index_states_is_refused_at_its_first_row(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    for folder in (datasets["mds"], without_blocks(datasets["mds"], tmp_path / "old")):
        store = LyingStore(folder)
        store.let_through()
        for info in list(store.list()):
            if info.key.endswith(".mds"):
                store.put(info.key, store.quiet(info.key) + b"x")
        right, wrong, error = delivered(store)
        assert (right, wrong) == (0, 0)
        assert "the index states" in str(error)


def test_blocks_of_another_dataset_are_refused_when_it_is_opened(datasets: dict[str, Path]) -> None:
    store = LyingStore(datasets["mds"])
    index = json.loads(store.get("index.json"))
    index["blocks"]["bytes"] += 8
    store.put("index.json", json.dumps(index).encode())
    with pytest.raises(ShardError, match="belongs to a different dataset"):
        shardkit.open_dataset(store.url, cache=CacheOptions())


def test_the_blocks_of_other_shards_are_none_of_the_card(datasets: dict[str, Path]) -> None:
    card = DatasetCard.read(datasets["mds"] / CARD_NAME)
    assert card is not None
    fingerprint = card.fingerprint
    manifest = replace(mds.read_index(datasets["mds"]), blocks=None)
    stated = block_checksums(manifest, card)
    assert stated is not None
    assert stated.bytes == (datasets["mds"] / BLOCKS_NAME).stat().st_size
    assert block_checksums(manifest, DatasetCard({**card.data, "fingerprint": "another"})) is None
    assert block_checksums(manifest, DatasetCard({"fingerprint": fingerprint})) is None


def test_blocks_travel_with_the_dataset_and_are_verified(datasets: dict[str, Path], tmp_path: Path) -> None:
    store = MemoryStore(fresh_url())
    assert BLOCKS_NAME in upload(datasets["wds"], store.url, progress=False).sent
    download(store.url, tmp_path / "back", progress=False)
    blocks = tmp_path / "back" / BLOCKS_NAME
    assert blocks.read_bytes() == (datasets["wds"] / BLOCKS_NAME).read_bytes()
    assert shardkit.verify(tmp_path / "back").ok
    data = bytearray(blocks.read_bytes())
    data[3] ^= 1
    blocks.write_bytes(data)
    problems = shardkit.verify(tmp_path / "back").problems
    assert {problem.file for problem in problems} == {BLOCKS_NAME, "shard-00000.tar"}


def test_verify_compares_the_checksums_with_the_shards_even_where_the_card_was_made_to_fit(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    download_of = {file.name: file.read_bytes() for file in datasets["mds"].iterdir()}
    folder.mkdir()
    for name, data in download_of.items():
        (folder / name).write_bytes(data)
    manifest = mds.read_index(folder)
    first = manifest.shards[0]
    wrong = shard_part(first.stored, np.zeros(first.stored.bytes, np.uint8))
    data = wrong + download_of[BLOCKS_NAME][len(wrong) :]
    (folder / BLOCKS_NAME).write_bytes(data)
    card = json.loads(download_of[CARD_NAME])
    card["files"][BLOCKS_NAME]["xxh3_128"] = hash_bytes(data, ["xxh3_128"])["xxh3_128"]
    (folder / CARD_NAME).write_text(json.dumps(card))
    [problem] = shardkit.verify(folder).problems
    assert problem.file == first.stored.basename
    assert "blocks.bin" in problem.problem


def test_the_file_is_what_its_format_says(datasets: dict[str, Path]) -> None:
    folder = datasets["mds"]
    manifest = mds.read_index(folder)
    data = (folder / BLOCKS_NAME).read_bytes()
    assert data == b"".join(shard_parts(folder, manifest.shards))
    blocks = BlockFile("here", manifest, FileInfo(BLOCKS_NAME, len(data)))
    for number, shard in enumerate(manifest.shards):
        start, stop = blocks.range(number)
        checksums = blocks.checksums(number, data[start:stop])
        assert checksums is not None
        raw = (folder / shard.raw.basename).read_bytes()
        assert len(checksums) == -(-len(raw) // BLOCK_BYTES)
        low, high = block_range(BLOCK_BYTES + 5, BLOCK_BYTES + 6, len(raw))
        assert are_right(checksums, low, raw[low:high])
        assert not are_right(checksums, low, raw[low : high - 1])
        assert not are_right(checksums, 0, raw[low:high])
        assert blocks.checksums((number + 1) % len(manifest.shards), data[start:stop]) is None
        assert blocks.checksums(number, data[start : stop - 1]) is None
    other = Manifest("mds", [replace(manifest.shards[0], samples=1)])
    with pytest.raises(ShardError, match="belongs to a different dataset"):
        BlockFile("here", other, FileInfo(BLOCKS_NAME, len(data)))


def test_compressed_shards_have_no_blocks(tmp_path: Path, datasets: dict[str, Path]) -> None:
    output = OutputOptions(format="mds", compression="zstd", hashes=("xxh64",))
    shardkit.convert(datasets["mds"], tmp_path / "packed", output=output, progress=False)
    assert not (tmp_path / "packed" / BLOCKS_NAME).exists()
    card = DatasetCard.read(tmp_path / "packed" / CARD_NAME)
    assert block_checksums(mds.read_index(tmp_path / "packed"), card) is None
