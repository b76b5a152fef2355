"""Compressed files come back whole or not at all, in bounded memory, and common tools read them too."""

from __future__ import annotations

import bz2
import gzip
import tracemalloc
from contextlib import suppress

import brotli
import numpy as np
import pytest
import snappy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats.compression import (
    COMPRESSIONS,
    decompress,
    decompress_streams,
    gunzip,
    new_compressor,
    parse_compression,
)
from support.mds_values import compress

NAMES = ["br:2", "bz2", "bz2:1", "gz", "gz:0", "snappy", "zstd", "zstd:7"]
TEXT = b"the same words again and again, " * 9_000 + bytes(range(256)) * 40
ORACLES = {
    "br": brotli.decompress,
    "bz2": bz2.decompress,
    "gz": gzip.decompress,
    "snappy": snappy.decompress,
    "zstd": zstandard.decompress,
}
STREAMS = ["bz2", "gz", "zstd"]  # of compressed tars


def all_streams(algorithm: str, data: bytes, limit: int = 1 << 24) -> bytes:
    return decompress_streams(algorithm, memoryview(data), limit=limit, file="f").tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"x", TEXT], ids=["empty", "byte", "text"])
def test_what_is_compressed_comes_back(name: str, data: bytes) -> None:
    packed = compress(name, data)
    assert decompress(name, packed, raw_bytes=len(data), file="f").tobytes() == data


@pytest.mark.parametrize("name", NAMES)
def test_files_are_the_ones_that_the_common_tools_read(name: str) -> None:
    assert ORACLES[parse_compression(name)[0]](compress(name, TEXT)) == TEXT


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_do_not_depend_on_the_pieces_they_came_in(name: str) -> None:
    compressor = new_compressor(name, len(TEXT))
    pieces = [compressor.compress(memoryview(TEXT)[i : i + 7_001]) for i in range(0, len(TEXT), 7_001)]
    assert b"".join(pieces) + compressor.flush() == compress(name, TEXT)


def test_gzip_carries_no_time() -> None:
    assert compress("gz", b"x")[4:8] == bytes(4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [-1, 1, -len(TEXT), 1 << 20])
def test_output_of_another_size_than_the_index_states_is_refused(name: str, change: int) -> None:
    packed = compress(name, TEXT)
    with pytest.raises(ShardError, match=r"shard\.7"):
        decompress(name, packed, raw_bytes=len(TEXT) + change, file="shard.7")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["br:2", "bz2", "gz", "snappy", "zstd"])
def test_a_bomb_costs_no_more_than_the_limit(name: str) -> None:
    bomb = compress(name, bytes(200_000_000))
    tracemalloc.start()
    with pytest.raises(ShardError, match=r"states|more than"):
        decompress(name, bomb, raw_bytes=100_000, file="bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32_000_000
    if name in STREAMS:
        with pytest.raises(ShardError, match="more than 100,000 bytes"):
            all_streams(name, bomb, limit=100_000)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused_or_harmless(name: str) -> None:
    packed = compress(name, TEXT)
    for keep in sorted({0, 1, 2, 5, 11, len(packed) // 2, len(packed) - 9, len(packed) - 1}):
        try:
            out = decompress(name, packed[:keep], raw_bytes=len(TEXT), file="f")
        except ShardError:
            continue
        assert out.tobytes() == TEXT  # only an end mark was cut


@pytest.mark.parametrize("name", NAMES)
def test_data_behind_the_end_is_refused(name: str) -> None:
    for junk in (b"\0", b"junk", compress(name, b"more")):
        with pytest.raises(ShardError):
            decompress(name, compress(name, TEXT) + junk, raw_bytes=len(TEXT), file="f")


def test_output_that_waits_behind_the_last_input_byte_is_read() -> None:
    data = bytes(3 << 20)  # a multiple of the step: the end mark falls behind a full step
    packed = compress("gz", data)
    assert decompress("gz", packed, raw_bytes=len(data), file="f").tobytes() == data
    assert all_streams("gz", packed, limit=len(data)) == data


@pytest.mark.parametrize("algorithm", STREAMS)
def test_of_a_compressed_tar_all_streams_are_read(algorithm: str) -> None:
    one, tail = compress(algorithm, TEXT), compress(algorithm, TEXT[:7])
    assert all_streams(algorithm, one, limit=len(TEXT)) == TEXT
    assert all_streams(algorithm, one + compress(algorithm, b"") + tail) == TEXT + TEXT[:7]
    assert all_streams(algorithm, one + bytes(1000)) == TEXT


@pytest.mark.parametrize("algorithm", STREAMS)
@pytest.mark.parametrize("keep", [0, 1, 20, -1, -4])
def test_of_a_compressed_tar_cut_streams_are_refused(algorithm: str, keep: int) -> None:
    packed = compress(algorithm, TEXT)
    for data in (packed[:keep], packed + packed[:keep] + b"?"):
        with pytest.raises(ShardError, match=r"^f: "):
            all_streams(algorithm, data)


def test_members_are_gunzipped_within_a_limit() -> None:
    packed = compress("gz", TEXT)
    assert gunzip(memoryview(packed), len(TEXT)) == TEXT
    for data, limit in ((packed, 1000), (b"no gzip", 1000), (packed[:50], 1 << 20)):
        with pytest.raises(ValueError):
            gunzip(memoryview(data), limit)


def test_zstd_frames_without_a_size_and_in_a_row_are_read() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
    packed = unsized + zstandard.compress(b"tail")
    assert decompress("zstd", packed, raw_bytes=len(TEXT) + 4, file="f").tobytes() == TEXT + b"tail"


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), position=st.integers(0, 10**6), value=st.integers(1, 255))
def test_a_flipped_byte_gives_the_stated_size_or_a_shard_error(name: str, position: int, value: int) -> None:
    packed = bytearray(compress(name, TEXT[:5_000]))
    packed[position % len(packed)] ^= value
    if name in STREAMS:
        with suppress(ShardError):
            assert len(all_streams(name, bytes(packed), limit=10_000)) <= 10_000
    try:
        out = decompress(name, bytes(packed), raw_bytes=5_000, file="f")
    except ShardError:
        return
    assert out.dtype == np.uint8
    assert out.shape == (5_000,)


def test_suffixes_carry_no_level_and_levels_have_defaults() -> None:
    assert [parse_compression(name) for name in COMPRESSIONS] == [
        ("br", 11),
        ("bz2", 9),
        ("gz", 9),
        ("snappy", 0),
        ("zstd", 3),
    ]
    assert parse_compression("zstd:19") == ("zstd", 19)


@pytest.mark.parametrize(
    "name", ["", "zip", "zstd:0", "zstd:23", "zstd:x", "snappy:1", "br:", "gz:-1", "ZSTD", "bz2: 9"]
)
def test_unknown_names_and_levels_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="compression"):
        parse_compression(name)
