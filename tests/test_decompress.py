from __future__ import annotations

import gzip
import io
import random
import struct
import zlib

import pytest
import zstandard

from shardkit.writers.decompress import ContainerError, decompressed

TEXT = b"".join(b'{"text": "line %d of some text"}\n' % (i * i) for i in range(20_000))
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"


def read(data: bytes, compression: str | None) -> tuple[bytes, ContainerError | None]:
    pieces = []
    try:
        for piece in decompressed(io.BytesIO(data), compression, len(data)):
            pieces.append(piece)
    except ContainerError as error:
        return b"".join(pieces), error
    return b"".join(pieces), None


def zstd(data: bytes, *, write_checksum: bool = False) -> bytes:
    compressor = zstandard.ZstdCompressor(write_checksum=write_checksum).compressobj()
    return compressor.compress(data) + compressor.flush()  # streaming: no content size in the frame


@pytest.mark.parametrize(
    ("data", "compression", "expected"),
    [
        (gzip.compress(TEXT, mtime=0), "gzip", TEXT),
        (
            b"".join(gzip.compress(TEXT[i : i + 999], mtime=0) for i in range(0, 99_900, 999)),
            "gzip",
            TEXT[:99_900],
        ),
        (
            gzip.compress(b"a\n", mtime=0) + gzip.compress(b"", mtime=0) + gzip.compress(b"b\n", mtime=0),
            "gzip",
            b"a\nb\n",
        ),
        (gzip.compress(b"padded", mtime=0) + bytes(5000), "gzip", b"padded"),
        (gzip.compress(bytes(9_000_000), mtime=0), "gzip", bytes(9_000_000)),
        (gzip.compress(b"", mtime=0), "gzip", b""),
        (zstd(TEXT), "zstd", TEXT),
        (zstd(TEXT[:5000]) + zstandard.compress(TEXT[5000:]), "zstd", TEXT),
        (SKIPPABLE + zstd(b"a") + SKIPPABLE + zstd(b"b") + SKIPPABLE, "zstd", b"ab"),
        (zstd(bytes(9_000_000), write_checksum=True), "zstd", bytes(9_000_000)),
        (zstd(b""), "zstd", b""),
        (TEXT, None, TEXT),
        (b"", None, b""),
    ],
)
def test_members_and_frames_are_read_to_the_end(
    data: bytes, compression: str | None, expected: bytes
) -> None:
    assert read(data, compression) == (expected, None)


def test_pieces_stay_small_when_the_content_is_enormous() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    assert max(map(len, decompressed(io.BytesIO(bomb), "gzip", len(bomb)))) <= 1 << 20


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_every_truncation_is_found_and_what_came_before_is_the_start_of_the_text(compression: str) -> None:
    text = TEXT[:3000]
    whole = gzip.compress(text) if compression == "gzip" else zstd(text, write_checksum=True)
    for length in range(len(whole)):
        good, error = read(whole[:length], compression)
        assert error is not None, length
        assert "truncated" in error.problem
        assert text.startswith(good)


def test_gzip_hands_out_every_byte_before_the_damage() -> None:
    data = bytearray(gzip.compress(TEXT))
    data[-8:-4] = struct.pack("<I", zlib.crc32(TEXT) ^ 1)
    good, error = read(bytes(data), "gzip")
    assert good == TEXT
    assert error is not None
    assert error.problem.startswith("bad checksum in gzip member 1")
    good, error = read(gzip.compress(TEXT) + b"trailing garbage", "gzip")
    assert good == TEXT
    assert error is not None
    assert error.problem == "garbage after 1 complete gzip members"
    assert error.rest_bytes == 16


def test_zstd_names_garbage_checksums_and_damage() -> None:
    good, error = read(zstd(TEXT) + b"trailing garbage", "zstd")
    assert good == TEXT
    assert error is not None
    assert (error.problem, error.rest_bytes) == ("garbage after 1 complete zstd frames", 16)
    frame = bytearray(zstd(TEXT, write_checksum=True))
    frame[-1] ^= 1
    good, error = read(bytes(frame), "zstd")
    assert TEXT.startswith(good)
    assert error is not None
    assert "checksum" in error.problem


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_file_of_something_else_is_named_so(compression: str) -> None:
    good, error = read(b"plain text, really", compression)
    assert good == b""
    assert error is not None
    assert error.problem == f"not a {compression} file"
    assert error.rest_bytes == 18


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_flipped_bytes_never_pass_unnoticed_nor_raise_anything_else(compression: str) -> None:
    whole = (
        gzip.compress(TEXT[:50_000]) if compression == "gzip" else zstd(TEXT[:50_000], write_checksum=True)
    )
    rng = random.Random(5)
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        good, error = read(bytes(data), compression)
        # Flips in gzip's unused header fields (time, system) change nothing.
        assert error is not None or good == TEXT[:50_000]
