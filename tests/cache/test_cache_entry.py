"""Seals prove an entry; names say what its content is, and never lead out of the cache's folder."""

from __future__ import annotations

import random
import string
import time
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.cache.entry import SEAL_BYTES, EntryNames, entry_name, is_sealed, make_seal, name_digests
from shardkit.hashing import HASH_NAMES, hash_bytes
from shardkit.manifest import FileInfo, Files, ShardInfo, ShardTable, table_of

SETTINGS = settings(deadline=None, derandomize=True)
URL = "s3://bucket/dataset"
RAW = st.binary(max_size=200)
NAMES = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=60)


def sealed(raw: bytes, name: str) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(raw, dtype=np.uint8)
    return np.frombuffer(bytearray(raw + make_seal(data, name)), dtype=np.uint8)


@SETTINGS
@given(RAW, NAMES)
@example(b"", "0-xxh64-ef46db3751d8e999")
def test_a_sealed_entry_passes_and_keeps_its_bytes(raw: bytes, name: str) -> None:
    entry = sealed(raw, name)
    assert is_sealed(entry, name)
    assert entry[:-SEAL_BYTES].tobytes() == raw
    assert len(entry) == len(raw) + SEAL_BYTES


@pytest.mark.parametrize("size", [0, 1, 17])
def test_no_flipped_bit_of_raw_bytes_or_seal_passes(size: int) -> None:
    entry = sealed(bytes(range(size)), "name")
    for bit in range(8 * len(entry)):
        entry[bit // 8] ^= 1 << bit % 8
        assert not is_sealed(entry, "name"), f"bit {bit}"
        entry[bit // 8] ^= 1 << bit % 8
    assert is_sealed(entry, "name")


@SETTINGS
@given(RAW, NAMES, st.data())
def test_no_cut_entry_passes(raw: bytes, name: str, data: st.DataObject) -> None:
    entry = sealed(raw, name)
    size = data.draw(st.integers(0, len(entry) - 1))
    assert not is_sealed(entry[:size], name)
    assert not is_sealed(entry[len(entry) - size :], name)


@SETTINGS
@given(RAW, NAMES, st.binary(min_size=1, max_size=2 * SEAL_BYTES))
@example(b"", "a", bytes(1))
def test_no_extended_entry_passes(raw: bytes, name: str, more: bytes) -> None:
    entry, extra = sealed(raw, name), np.frombuffer(more, dtype=np.uint8)
    assert not is_sealed(np.concatenate([entry, extra]), name)
    assert not is_sealed(np.concatenate([extra, entry]), name)


@SETTINGS
@given(RAW, NAMES, NAMES)
def test_no_entry_passes_for_another(raw: bytes, name: str, other: str) -> None:
    assert is_sealed(sealed(raw, name), other) == (name == other)


@SETTINGS
@given(RAW, RAW, NAMES)
def test_no_swapped_content_passes_with_the_seal_of_another(first: bytes, second: bytes, name: str) -> None:
    entry = np.concatenate([sealed(first, name)[:-SEAL_BYTES], sealed(second, name)[-SEAL_BYTES:]])
    assert is_sealed(entry, name) == (first == second)


@SETTINGS
@given(st.binary(max_size=3 * SEAL_BYTES))
def test_nothing_passes_by_chance(data: bytes) -> None:
    assert not is_sealed(np.frombuffer(data, dtype=np.uint8), "name")


def shard(raw: FileInfo, compressed: FileInfo | None = None, compression: str | None = None) -> ShardInfo:
    return ShardInfo(raw, samples=1, zip=compressed, compression=compression)


def test_the_same_content_has_the_same_name_wherever_it_lies() -> None:
    hashes = hash_bytes(b"content", ["sha256", "xxh64"])
    names = {
        entry_name(shard(FileInfo(basename, 7, hashes)), url, version)
        for basename in ("shard.00000.mds", "other/shard.00017.mds")
        for url in (URL, "gs://copy")
        for version in (None, "v1")
    }
    assert names == {f"7-sha256-{hashes['sha256']}"}


def test_a_compressed_shard_has_the_name_of_its_raw_bytes_if_their_hash_is_stated() -> None:
    raw = FileInfo("shard.mds", 7, hash_bytes(b"content", ["xxh64"]))
    stored = FileInfo("shard.mds.zstd", 5, hash_bytes(b"zzzzz", ["sha256"]))
    assert entry_name(shard(raw, stored, "zstd"), URL) == entry_name(shard(raw), URL)


def test_a_compressed_shard_without_hash_of_its_raw_bytes_is_named_after_the_stored_ones() -> None:
    stored = FileInfo("shard.mds.zstd", 5, hash_bytes(b"zzzzz", ["xxh64"]))
    info = shard(FileInfo("shard.mds", 7), stored, "zstd")
    name = entry_name(info, URL)
    assert name == f"5-zstd-xxh64-{stored.hashes['xxh64']}"
    assert name != entry_name(shard(replace(stored, basename="shard.mds")), URL)
    assert name != entry_name(replace(info, compression="gz"), URL)


def test_the_strongest_hash_names_the_entry_and_case_does_not_matter() -> None:
    hashes = hash_bytes(b"content", ["xxh32", "md5", "sha512", "sha1"])
    name = entry_name(shard(FileInfo("a", 7, hashes)), URL)
    assert name == f"7-sha512-{hashes['sha512']}"
    upper = {key: digest.upper() for key, digest in hashes.items()}
    assert entry_name(shard(FileInfo("a", 7, upper)), URL) == name


def test_shards_without_hash_are_named_after_their_object_and_its_version() -> None:
    info = shard(FileInfo("shard.mds", 7))
    assert entry_name(info, URL) is None
    names = [
        entry_name(info, URL, "v1"),
        entry_name(info, URL, "v2"),
        entry_name(info, f"{URL}2", "v1"),
        entry_name(shard(FileInfo("other.mds", 7)), URL, "v1"),
        entry_name(shard(FileInfo("shard.mds", 8)), URL, "v1"),
        entry_name(shard(FileInfo("shard.mds", -1)), URL, "v1"),
    ]
    assert None not in names
    assert len(set(names)) == len(names)
    assert names[0] == entry_name(info, URL, "v1")


def test_hashes_that_nobody_can_check_name_nothing() -> None:
    # The content would be whatever came first, for every dataset that states the same.
    for hashes in ({"crc99": "ab" * 8}, {"xxh64": ""}, {"xxh64": "../../etc/passwd"}, {"xxh64": "ａｂ"}):
        assert entry_name(shard(FileInfo("a", 7, hashes)), URL) is None
        name = entry_name(shard(FileInfo("a", 7, {**hashes, "md5": "0" * 32})), URL)
        assert name == f"7-md5-{'0' * 32}"


@SETTINGS
@given(
    hashes=st.dictionaries(
        st.sampled_from(sorted(HASH_NAMES)) | st.text(max_size=300), st.text(max_size=300), max_size=4
    ),
    basename=st.text(st.characters(exclude_categories=()), min_size=1, max_size=100),
    size=st.integers(-1, 1 << 53),
    is_compressed=st.booleans(),
    version=st.text(max_size=300),
)
@example({"../../x": "abcd"}, "a", 7, False, "v1")
@example({"xxh64": "../.."}, "a", 7, False, "v1")
@example({"sha512": "f" * 129}, "\ud800", 7, True, "")
@example({"md5/": "ab"}, "../../a", -1, True, "/")
def test_no_index_can_name_an_entry_that_leaves_the_folder(
    hashes: dict[str, str], basename: str, size: int, is_compressed: bool, version: str
) -> None:
    file = FileInfo(basename, size, hashes)
    info = shard(FileInfo("raw", size), file, "zstd") if is_compressed else shard(file)
    name = entry_name(info, URL, version)
    assert name is not None
    assert PurePosixPath(name).parts == (name,)
    assert set(name) <= {*string.ascii_lowercase, *string.digits, "-", "_"}  # so no "~", which folders add
    assert len(name) <= 200


@pytest.mark.parametrize("algorithm", ["xxh32", "xxh64", "xxh3_128", "sha1", "sha256"])
def test_an_entry_named_by_a_hash_must_have_it_whoever_made_its_seal(algorithm: str) -> None:
    raw = b"content" * 30
    name = entry_name(shard(FileInfo("a", len(raw), hash_bytes(raw, [algorithm]))), URL)
    assert name is not None
    assert is_sealed(sealed(raw, name), name)
    assert not is_sealed(sealed(bytes(len(raw)), name), name)
    damaged = sealed(raw, name)
    damaged[7] ^= 1
    assert not is_sealed(damaged, name)


@pytest.mark.parametrize("algorithm", ["xxh32", "xxh64", "sha256"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_are_found_by_name_in_a_large_dataset_as_in_a_small_one(
    algorithm: str, compression: str | None
) -> None:
    draw, width = random.Random(3), len(hash_bytes(b"", [algorithm])[algorithm])
    digests = [f"{draw.getrandbits(4 * width):0{width}x}" for _ in range(300)]
    digests[7] = digests[250] = digests[3]  # the same content, but 250 states another size
    digests[9] = digests[8][:16].ljust(width, "0")  # alike in all that is sorted
    shards = []
    for number, digest in enumerate(digests):
        file = FileInfo(f"shard.{number:05}.mds", 40 + (number == 250), {algorithm: digest})
        plain = FileInfo(file.basename, 40)
        shards.append(shard(file) if compression is None else shard(plain, file, compression))
    table = table_of(shards, "fingerprint")
    assert table is not None
    names = [entry_name(info, URL) or "" for info in shards]
    small = EntryNames.of(["first", "", *names])
    found = name_digests(table)
    assert found is not None
    large = EntryNames([(2, ["first", ""].__getitem__, None), (300, names.__getitem__, found)])
    asked = ["first", "second", "", "28-xxh64-", "not-hex", names[0][:-2], f"{names[0]}00", *names]
    for each in (small, large):
        each.set_name(1, "second")
        assert [each.name(number) for number in range(302)] == ["first", "second", *names]
    for name in asked * 2:
        expected = [number for number, known in enumerate(["first", "second", *names]) if name == known]
        assert [list(small.numbers(name)), list(large.numbers(name))] == [expected, expected], name
    assert list(large.numbers(names[3])) == [5, 9]


def test_the_names_of_many_shards_are_no_strings() -> None:
    count = 100_000
    names = np.char.mod("shard.%07d.mds\n", np.arange(count)).astype("S18").view(np.uint8)
    digests = np.random.default_rng(1).integers(0, 256, (count, 8), dtype=np.uint8)
    sizes = np.full(count, 1 << 26, dtype=np.int64)
    example = shard(FileInfo("shard.mds", 1 << 26, {"xxh64": "0" * 16}))
    files = Files(names, sizes, ("xxh64",), (digests,))
    table = ShardTable([example], np.zeros(count, np.int32), np.ones(count, np.int64), files, None, "")
    began = time.process_time()
    found = EntryNames([(count, lambda number: entry_name(table[number], URL) or "", name_digests(table))])
    numbers = range(0, count, 1_007)
    assert [found.numbers(found.name(number)) for number in numbers] == [[number] for number in numbers]
    assert time.process_time() - began < 1.0  # 0.05 s; a string for each takes 2.6 s
