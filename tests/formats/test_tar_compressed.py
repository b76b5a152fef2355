"""Compressed tars come out whole or not at all, and never larger than allowed."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats.tar.compressed import decompress_tar, gunzip, is_tar_name, tar_compression

TEXT = bytes(range(256)) * 2000
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zstd": zstandard.compress,
}
parametrize_algorithms = pytest.mark.parametrize("algorithm", COMPRESS)


def expand(algorithm: str, data: bytes, limit: int = 1 << 24) -> bytes:
    return bytes(decompress_tar(algorithm, memoryview(data), limit, "x.tar.z"))


@parametrize_algorithms
def test_one_stream_or_several_are_read_to_the_end(algorithm: str) -> None:
    compress = COMPRESS[algorithm]
    assert expand(algorithm, compress(TEXT)) == TEXT
    assert expand(algorithm, compress(TEXT) + compress(b"") + compress(TEXT[:7])) == TEXT + TEXT[:7]
    assert expand(algorithm, compress(TEXT) + bytes(1000)) == TEXT
    assert expand(algorithm, compress(bytes(5_000_000))) == bytes(5_000_000)


@parametrize_algorithms
@pytest.mark.parametrize("keep", [0, 1, 20, -1, -4])
def test_cut_streams_are_refused(algorithm: str, keep: int) -> None:
    data = COMPRESS[algorithm](TEXT)
    with pytest.raises(ShardError, match=r"x\.tar\.z"):
        expand(algorithm, data[:keep])
    with pytest.raises(ShardError, match=r"x\.tar\.z"):
        expand(algorithm, data + data[:keep] + b"?")


@parametrize_algorithms
def test_bombs_stop_at_the_limit(algorithm: str) -> None:
    bomb = COMPRESS[algorithm](bytes(1 << 26))
    assert len(bomb) < 100_000
    with pytest.raises(ShardError, match="more than 1,000,000 bytes"):
        expand(algorithm, bomb, limit=1_000_000)
    assert len(expand(algorithm, COMPRESS[algorithm](bytes(1000)), limit=1000)) == 1000


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(COMPRESS)), st.data())
def test_flipped_bytes_give_bytes_or_an_error(algorithm: str, data: st.DataObject) -> None:
    raw = bytearray(COMPRESS[algorithm](TEXT[:5000]))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ShardError):
        assert len(expand(algorithm, bytes(raw), limit=10_000)) <= 10_000


def test_members_are_gunzipped_within_a_limit() -> None:
    assert gunzip(memoryview(gzip.compress(TEXT)), len(TEXT)) == TEXT
    for data, limit in ((gzip.compress(TEXT), 1000), (b"no gzip", 1000), (gzip.compress(TEXT)[:50], 1 << 20)):
        with pytest.raises(ValueError):
            gunzip(memoryview(data), limit)


def test_names_say_how_a_tar_is_stored() -> None:
    assert tar_compression("a/b-000.tar") == ("", "a/b-000.tar")
    assert tar_compression("a/b.TGZ") == ("gz", "a/b.tar")
    assert tar_compression("b.tar.gz") == ("gz", "b.tar")
    assert tar_compression("b.tar.zst") == ("zstd", "b.tar")
    assert tar_compression("b.tbz2") == ("bz2", "b.tar")
    assert not any(
        map(is_tar_name, ["b.zip", "tar", ".tar", "a/.tar.gz", "b.tar.gz.tmp", "b.tar.tmp", "b.gz"])
    )
