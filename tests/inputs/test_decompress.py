from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import lz4.frame
import pytest
import zstandard

from shardkit.errors import MissingExtraError
from shardkit.writers.inputs.decompress import ConfirmedMembers, ContainerError, decompressed

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


def lz4_frame(data: bytes) -> bytes:
    """As the command line tool writes it: no content size, blocks that lean on each other, a checksum."""
    compressor = lz4.frame.LZ4FrameCompressor(content_checksum=True, block_linked=True)
    return bytes(compressor.begin() + compressor.compress(data) + compressor.flush())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "zstd": lambda data: zstd(data, write_checksum=True),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lz4_frame,
}


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
        (bz2.compress(TEXT[:5000]) + bz2.compress(b"") + bz2.compress(TEXT[5000:]), "bz2", TEXT),
        (bz2.compress(bytes(9_000_000)), "bz2", bytes(9_000_000)),
        (lzma.compress(TEXT[:5000]) + bytes(4096) + lzma.compress(TEXT[5000:]) + bytes(8), "xz", TEXT),
        (lzma.compress(TEXT[:5000], lzma.FORMAT_ALONE), "xz", TEXT[:5000]),
        (SKIPPABLE + lz4.frame.compress(TEXT[:5000]) + SKIPPABLE + lz4_frame(TEXT[5000:]), "lz4", TEXT),
        (TEXT, None, TEXT),
        (b"", None, b""),
    ],
)
def test_members_and_frames_are_read_to_the_end(
    data: bytes, compression: str | None, expected: bytes
) -> None:
    assert read(data, compression) == (expected, None)


def test_pieces_stay_small_when_the_content_is_enormous() -> None:
    for compression in COMPRESS:
        bomb = COMPRESS[compression](bytes(20_000_000))
        assert max(map(len, decompressed(io.BytesIO(bomb), compression, len(bomb)))) <= 1 << 20


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_truncation_is_found_and_what_came_before_is_the_start_of_the_text(compression: str) -> None:
    text = TEXT[:3000]
    whole = COMPRESS[compression](text)
    for length in range(len(whole)):
        good, error = read(whole[:length], compression)
        assert error is not None, length
        assert "truncated" in error.problem
        assert text.startswith(good)


@pytest.mark.parametrize("compression", COMPRESS)
def test_garbage_after_the_last_member_is_named_and_costs_nothing(compression: str) -> None:
    good, error = read(2 * COMPRESS[compression](TEXT) + b"trailing garbage", compression)
    assert good == 2 * TEXT
    assert error is not None
    assert error.problem.startswith(f"garbage after 2 complete {compression} ")
    assert (error.rest_bytes, error.suspect_bytes) == (16, 0)


@pytest.mark.parametrize(("compression", "at"), [("gzip", -8), ("zstd", -1)])
def test_a_bad_checksum_is_named(compression: str, at: int) -> None:
    data = bytearray(COMPRESS[compression](TEXT))
    data[at] ^= 1
    good, error = read(bytes(data), compression)
    assert TEXT.startswith(good)
    assert good == TEXT or compression != "gzip"  # every byte before the damage
    assert error is not None
    assert error.problem.startswith(f"bad checksum in {compression} ")


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_of_something_else_is_named_so(compression: str) -> None:
    good, error = read(b"plain text, really", compression)
    assert good == b""
    assert error is not None
    assert error.problem == f"not {'an' if compression in ('xz', 'lz4') else 'a'} {compression} file"
    assert error.rest_bytes == 18


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compression", COMPRESS)
def test_flipped_bytes_never_pass_unnoticed_nor_raise_anything_else(compression: str) -> None:
    text = TEXT[:50_000] if compression in ("gzip", "zstd") else TEXT[:5000]
    whole = COMPRESS[compression](text)
    rng = random.Random(5)
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        good, error = read(bytes(data), compression)
        # Flips in gzip's unused header fields (time, system) and of lz4's block size change nothing.
        assert error is not None or good == text


@pytest.mark.parametrize("compression", ["bz2", "xz", "lz4"])
def test_all_that_can_be_decoded_before_the_damage_is_handed_out(compression: str) -> None:
    members = [COMPRESS[compression](TEXT[i : i + 20_000]) for i in range(0, 100_000, 20_000)]
    data = bytearray(b"".join(members))
    at = sum(map(len, members[:3])) + len(members[3]) // 2
    data[at] ^= 0x55
    good, error = read(bytes(data), compression)
    assert TEXT[:60_000] == good[:60_000]
    assert error is not None
    assert f"{'frame' if compression == 'lz4' else 'stream'} 4" in error.problem
    assert 0 < error.rest_bytes <= len(data) - sum(map(len, members[:3]))


@pytest.mark.parametrize("compression", COMPRESS)
def test_what_the_damaged_member_gave_is_known_to_be_suspect(compression: str) -> None:
    members = [COMPRESS[compression](TEXT[i : i + 20_000]) for i in (0, 20_000)]
    sound = len(members[0])
    cut, damaged = b"".join(members)[:-3], bytearray(b"".join(members))
    damaged[sound + len(members[1]) // 2] ^= 0x55
    for data in (cut, bytes(damaged)):
        good, error = read(data, compression)
        assert error is not None
        assert len(good) - error.suspect_bytes == 20_000
        assert good[:20_000] == TEXT[:20_000]


def test_igzip_reads_whatever_zlib_reads_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("isal", reason="igzip is optional")
    header = b"\x1f\x8b\x08\x1e" + bytes(6) + b"\x04\0abcdname\0comment\0"
    header += struct.pack("<H", zlib.crc32(header) & 0xFFFF)
    whole = header + gzip.compress(TEXT[:3000], mtime=0)[10:] + gzip.compress(TEXT[3000:4000], 1, mtime=0)
    rng = random.Random(11)
    cases = [whole[:length] for length in range(0, len(whole), 3)]
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << rng.randrange(8)
        cases.append(bytes(data))
    for bit in range(8 * (len(header) + 12)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        cases.append(bytes(data))

    def found() -> list[tuple[bytes, dict[str, object]]]:
        return [
            (good, vars(error) if error else {}) for good, error in (read(case, "gzip") for case in cases)
        ]

    with_igzip = found()
    monkeypatch.setitem(sys.modules, "isal", None)
    assert found() == with_igzip


def test_without_lz4_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.delitem(sys.modules, "lz4.frame")
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[formats\]'"):
        read(b"", "lz4")


def confirmed(data: bytes) -> tuple[bytes, list[ContainerError]]:
    """What `ConfirmedMembers` hands out of members that begin with b"WARC/", and the damage it meets."""
    members = ConfirmedMembers(io.BytesIO(data), len(data), lambda line: line.startswith(b"WARC/"))
    pieces: list[bytes] = []
    damage: list[ContainerError] = []
    while True:
        try:
            pieces.append(next(members))
        except StopIteration:
            return b"".join(pieces), damage
        except ContainerError as error:
            damage.append(error)


@pytest.mark.parametrize("at", [-6, pytest.param(1000, marks=pytest.mark.extended)], ids=["checksum", "data"])
def test_a_member_too_large_to_hold_is_confirmed_before_any_of_it_is_handed_out(at: int) -> None:
    large = b"WARC/large " + random.Random(0).randbytes(1 << 20) + bytes(17 << 20)
    packed = bytearray(gzip.compress(large, 1, mtime=0))
    small = gzip.compress(b"WARC/small ", mtime=0)
    assert confirmed(small + bytes(packed) + small) == (b"WARC/small " + large + b"WARC/small ", [])
    packed[at] ^= 1
    got, (damage,) = confirmed(small + bytes(packed) + small)
    assert got == b"WARC/small WARC/small "
    assert (damage.rest_bytes, damage.resumes) == (len(packed), True)
    assert f"stored bytes {len(small):,} to {len(small) + len(packed):,} are lost" in damage.problem
    got, (damage,) = confirmed(small + gzip.compress(large, 1, mtime=0)[:-3])
    assert got == b"WARC/small "
    assert not damage.resumes


def test_a_file_of_headers_that_lead_nowhere_ends_the_search_in_reasonable_time() -> None:
    head = gzip.compress(b"WARC/1.0\n" + bytes(100), 0, mtime=0)[:40]
    data = head * 20_000
    got, damage = confirmed(data)
    assert got == b""
    assert sum(error.rest_bytes for error in damage) == len(data)
    assert not damage[-1].resumes
    assert len(damage) < 2000


def zstd_frame(data: bytes, log: int, **options: Any) -> bytes:
    """A frame with a window of 2 to this power."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log, **options)
    made = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(made, closefd=False) as file:
        for at in range(0, len(data), 100_000):
            file.write(data[at : at + 100_000])
            file.flush()
    return made.getvalue()


def undone(data: bytes, **options: int) -> bytes:
    return b"".join(decompressed(io.BytesIO(data), "zstd", len(data), **options))


NOISE = random.Random(7).randbytes(300_000)
REPEATED = NOISE * 4  # each after the first refers to the one before


@pytest.mark.parametrize("log", [10, 20, 26, 27, 28, 30, 31])
@pytest.mark.parametrize("checksum", [False, True])
def test_frames_of_any_window_are_read_while_their_content_fits_into_what_is_allowed(
    log: int, checksum: bool
) -> None:
    frames = [zstd_frame(data, log, write_checksum=checksum) for data in (REPEATED, b"", NOISE)]
    assert undone(b"".join(frames)) == REPEATED + NOISE
    assert undone(b"".join(frames), window_bytes=1 << 31) == REPEATED + NOISE


def test_a_frame_whose_content_needs_a_larger_window_is_refused_by_its_size_and_not_as_damage() -> None:
    small, large = zstd_frame(NOISE, 31), zstd_frame(REPEATED, 31)
    assert undone(small + large, window_bytes=1 << 21) == NOISE + REPEATED
    for allowed in (1 << 19, 1 << 20, (1 << 21) - 1):
        with pytest.raises(MemoryError, match=r"frame 2 needs a window of 2 GiB; raise `memory` to 2\.9GB"):
            undone(small + large, window_bytes=allowed)
    whole = zstandard.ZstdCompressor().compress(REPEATED)  # its size is in the header: its window is that
    with pytest.raises(MemoryError, match=r"zstd frame 1 needs a window of 0\.00112 GiB"):
        undone(whole, window_bytes=1 << 20)


TRAINED = zstandard.train_dictionary(
    4000, [b"%d common words of records %d" % (i, i * i) * 3 for i in range(999)]
)


def skippable(content: bytes, kind: int = 0x5D) -> bytes:
    return bytes([kind]) + b"\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


@pytest.mark.parametrize("form", ["plain", "compressed", "compressed in pieces"])
@pytest.mark.parametrize("options", [{}, {"write_checksum": True}, {"write_dict_id": False}])
def test_a_dictionary_in_the_first_frame_is_that_of_the_frames_after_it(
    form: str, options: dict[str, Any]
) -> None:
    texts = [b"%d common words of records" % i for i in range(20)]
    made = zstandard.ZstdCompressor(dict_data=TRAINED, **options)
    plain = TRAINED.as_bytes()
    held = {
        "plain": plain,
        "compressed": zstandard.compress(plain),
        "compressed in pieces": zstd_frame(plain, 17),
    }
    data = skippable(held[form]) + b"".join(map(made.compress, texts)) + skippable(b"index", 0x5E)
    assert undone(data) == b"".join(texts)
    assert undone(skippable(b"pzstd", 0x50) + data) == b"".join(texts)


def test_frames_that_lack_their_dictionary_are_refused_with_its_number() -> None:
    data = zstandard.ZstdCompressor(dict_data=TRAINED).compress(b"common words of records")
    other = zstandard.train_dictionary(
        500, [b"%d other things, and more" % i * 3 for i in range(999)], dict_id=7
    )
    words = (
        f"zstd frame 2 was compressed with dictionary {TRAINED.dict_id()}, which is not in the first frame"
    )
    for first in (skippable(other.as_bytes()), skippable(b"no dictionary"), skippable(b"")):
        with pytest.raises(ContainerError, match=words):
            undone(first + data)
    with pytest.raises(ContainerError, match="zstd frame 1 was compressed with dictionary"):
        undone(data)
    assert undone(skippable(TRAINED.as_bytes()) + zstandard.compress(b"without")) == b"without"
    damaged = data[:5] + b"\xff" + data[6:]  # its window, which then is beyond all
    with pytest.raises(ContainerError, match="zstd frame 1"):
        undone(damaged)
