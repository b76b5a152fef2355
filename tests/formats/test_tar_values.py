"""Members mean what webdataset says they mean; what could run code or fill the memory is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import cbor  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardkit.errors import MissingExtraError
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds import images
from shardkit.formats.mds.images import IMAGE_WORDS
from shardkit.formats.tar.values import (
    MAX_CBOR_DEPTH,
    checked_decode,
    decode_member,
    decode_npy,
    encoding_of,
    make_npy_header,
    parse_npy_header,
)
from support.foreign_tars import npy


def npz(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **{k: np.asarray(v) for k, v in arrays.items()})  # type: ignore[arg-type]
    return stream.getvalue()


# What no encoder of webdataset's writes; what they do write is in test_conformance_webdataset.
MEMBERS: dict[str, bytes] = {
    "caption.text": b"",
    "index": b" 12\n",
    "meta.cbor": cbor.dumps({"a": [1.5, b"x"]}),
    "png": b"\x89PNG",
    "": b"nothing",
}


@pytest.mark.parametrize("extension", MEMBERS)
def test_members_decode_as_webdataset_decodes_them(extension: str) -> None:
    from webdataset.autodecode import default_decoder

    expected = default_decoder({extension: MEMBERS[extension]})[extension]
    found = decode_member(extension, memoryview(MEMBERS[extension]))
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("/dev/null/never",))


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "a.PYD".lower(), "pth", "pkl.gz"])
def test_pickles_are_refused_unless_allowed(extension: str) -> None:
    data = pickle.dumps(Bomb())
    with pytest.raises(ValueError, match="allow_pickle=True"):
        decode_member(extension, memoryview(gzip.compress(data) if extension.endswith("gz") else data))
    if extension == "pkl":
        assert decode_member(extension, memoryview(pickle.dumps({"a": 1})), allow_pickle=True) == {"a": 1}
        with pytest.raises(ValueError, match="cannot be unpickled: NotADirectoryError"):
            decode_member(extension, memoryview(data), allow_pickle=True)


BAD = {
    "txt": b"\xff\xfe",
    "cls": b"seven",
    "id": b"9" * 5000,
    "json": b"{",
    "x.json": b"[" * 200_000,
    "jsn": json.dumps("ok").encode()[:-1] + b"\xff",
    "npy": b"\x93NUMPY",
    "npz": b"PK\x03\x04 no archive",
    "a.npz": npz(a=[1, 2])[:-30],
    "txt.gz": b"no gzip",
    "ten": b"~TenBin~" + b"\xff" * 40,
    "mp": b"\x91" * 1_000_000,
    "cbor": b"\x82\x01",
    "empty.cbor": b"",
    "a.cbor": b"\x81" * 1_000_000 + b"\x01",
    "b.cbor": b"\x9f" * 1_000_000,
    "tags.cbor": b"\xc1" * 1_000_000 + b"\x01",
    "bytes.cbor": b"\x5b" + b"\x7f" * 8,
    "array.cbor": b"\x9b" + b"\x7f" * 8,
    "map.cbor": b"\xbb" + b"\x7f" * 8,
    "pattern.cbor": b"\xd8\x23\x62((",
}


@pytest.mark.parametrize("extension", BAD)
def test_members_that_are_not_what_they_say_are_refused(extension: str) -> None:
    with pytest.raises(ValueError):
        decode_member(extension, memoryview(BAD[extension]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head", [b"\x81", b"\x9f", b"\xc1", b"\xa1\x00"])
def test_deeply_nested_cbor_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, head: bytes) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        writer.write({"__key__": "one", "meta.cbor": head * 1_000_000 + b"\x01"})
    read = "import sys; from shardkit import open_dataset; open_dataset(sys.argv[1])[0]"
    command = [sys.executable, "-c", read, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, "ended by a signal"
    said = done.stderr.splitlines()[-1]
    assert "ShardError" in said
    assert "a.tar: byte" in said
    assert ".meta.cbor: the CBOR cannot be decoded: maximum container nesting depth (400) exceeded" in said


def test_cbor_as_deep_as_the_limit_is_read() -> None:
    value = decode_member("cbor", memoryview(b"\x81" * (MAX_CBOR_DEPTH - 1) + b"\x07"))
    for _ in range(MAX_CBOR_DEPTH - 1):
        assert isinstance(value, list)
        (value,) = value
    assert value == 7


def test_archives_that_grow_beyond_reason_are_refused() -> None:
    zeros = np.zeros(1 << 20, dtype=np.uint8)
    for extension, data in (
        ("npz", npz(a=zeros)),
        ("bin.gz", gzip.compress(zeros.tobytes())),
        ("json.gz", gzip.compress(b"[" + b"[]," * (1 << 20) + b"0]")),
        ("txt.gz.gz.gz", gzip.compress(gzip.compress(gzip.compress(bytes(1 << 20))))),
        ("cbor.gz", gzip.compress(b"\x9f" + b"\x80" * 100_000 + b"\xff")),
    ):
        assert len(data) < 10_000
        with pytest.raises(ValueError, match=r"holds more than \d|the limit is 10,000"):
            decode_member(extension, memoryview(data), budget=SampleBudget(limit=10_000))


def test_all_members_of_a_sample_share_one_budget() -> None:
    budget = SampleBudget(limit=100_000)
    member = memoryview(gzip.compress(bytes(30_000)))
    decode_member("a.bin.gz", member, budget=budget)  # with the copy that is handed out, 60,000 bytes
    with pytest.raises(ValueError, match="the limit is 100,000"):
        decode_member("b.bin.gz", member, budget=budget)
    with pytest.raises(ValueError, match="holds more than 10,000"):
        decode_member("c.bin.gz", member, budget=budget)


@pytest.mark.parametrize("times", [5, 300, 20_000])
def test_members_compressed_again_and_again_are_refused(times: int) -> None:
    payload = b"x"
    for _ in range(5):
        payload = gzip.compress(payload)
    with pytest.raises(ValueError, match="compressed more than 4 times"):
        decode_member("txt" + ".gz" * times, memoryview(payload))


def test_members_compressed_four_times_are_read() -> None:
    payload = b"text"
    for _ in range(4):
        payload = gzip.compress(payload)
    assert decode_member("txt" + ".gz" * 4, memoryview(payload)) == "text"


def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(MissingExtraError, match="decode=False") as caught:
        decode_member("mp", memoryview(b"\x01"))
    assert caught.value.package == "msgpack"
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(MissingExtraError, match=r"shardkit\[webdataset\]"):
        decode_member("cbor", memoryview(b"\x01"))
    monkeypatch.setitem(sys.modules, "webdataset.autodecode", None)
    with pytest.raises(MissingExtraError, match=r"shardkit\[webdataset\]"):
        decode_member("ten", memoryview(b""))


def test_encodings_are_named_in_the_words_of_mds() -> None:
    found = [encoding_of(e) for e in ("txt", "a.cls", "json.gz", "x.npy", "jpg", "pkl", "npz", "")]
    assert found == ["str", "int", "json", "ndarray", "bytes", "pkl", "npz", "bytes"]


def image_file(name: str, mode: str = "RGB", size: tuple[int, int] = (5, 3)) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format=name)
    return stream.getvalue()


IMAGES = {
    "jpg": image_file("JPEG"),
    "left.jpeg": image_file("JPEG", "L"),
    "seg.png": image_file("PNG", "P"),
    "webp": image_file("WEBP"),
    "ppm": image_file("PPM"),
    "tif": image_file("TIFF", "RGBA"),
    "png.gz": gzip.compress(image_file("PNG")),
}


@pytest.mark.parametrize("extension", IMAGES)
def test_images_keep_their_mode_and_their_bytes_if_nothing_else_is_asked_for(extension: str) -> None:
    data = IMAGES[extension]
    with Image.open(io.BytesIO(gzip.decompress(data) if extension.endswith("gz") else data)) as expected:
        found: object = decode_member(extension, memoryview(data), decode=True)
        assert isinstance(found, Image.Image)
        assert (found.mode, found.size, found.tobytes()) == (expected.mode, expected.size, expected.tobytes())
    assert decode_member(extension, memoryview(data), decode=False) == data


@pytest.mark.parametrize("word", IMAGE_WORDS)
def test_words_of_webdataset_give_what_it_gives(word: str) -> None:
    from webdataset.autodecode import imagehandler

    for extension, data in IMAGES.items():
        file = gzip.decompress(data) if extension.endswith("gz") else data
        expected = imagehandler(word)(".png", file)
        found = decode_member(extension, memoryview(data), decode=word)
        assert type(found) is type(expected)
        if isinstance(expected, Image.Image):
            assert isinstance(found, Image.Image)
            assert (found.mode, found.tobytes()) == (expected.mode, expected.tobytes())
        elif isinstance(expected, torch.Tensor):
            assert isinstance(found, torch.Tensor)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        else:
            assert isinstance(found, np.ndarray)
            np.testing.assert_array_equal(found, expected, strict=True)
            assert found.flags.writeable


@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from(["RGB", "L", "CMYK"]),
    st.integers(1, 100),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_both_decoders_of_jpeg_files_give_the_same_pixels(
    size: tuple[int, int], mode: str, quality: int, subsampling: str, progressive: bool, seed: int
) -> None:
    """So that it does not matter which one a machine has."""
    pytest.importorskip("simplejpeg")
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    corner = (0.0, 0.0, max(1.0, size[0] / 3), max(1.0, size[1] / 3))
    smooth = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC, corner)
    stream = io.BytesIO()
    options: dict[str, Any] = {} if mode == "L" else {"subsampling": subsampling}
    smooth.convert(mode).save(stream, "JPEG", quality=quality, progressive=progressive, **options)
    with Image.open(stream) as image:
        expected = np.array(image.convert("RGB"))
    data = memoryview(stream.getvalue())
    form, budget = IMAGE_WORDS["rgb8"], SampleBudget()
    assert (images._decode_rgb(data, form, budget) is None) == (mode == "CMYK"), "left to Pillow"
    np.testing.assert_array_equal(images.decode_pixels(data, "rgb8"), expected)


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow warns of what is refused here
@pytest.mark.parametrize("decode", [True, "pil", "rgb8"])
@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG",
        IMAGES["jpg"][:100],
        image_file("EPS"),  # Pillow would start Ghostscript
        image_file("PNG", size=(300, 300)),
    ],
    ids=["cut", "half", "another format", "too large"],
)
def test_images_that_should_not_be_opened_are_refused(
    decode: bool | str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 80_000)
    with pytest.raises(ValueError, match=r"image cannot be read.*decode=\"basic\"|cannot decode"):
        decode_member("jpg", memoryview(data), decode=decode)


def test_every_word_of_webdatasets_is_known_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from webdataset.autodecode import imagespecs

    assert set(imagespecs) == set(IMAGE_WORDS)
    words: list[bool | str] = [True, False, "basic", *IMAGE_WORDS]
    for word in words:
        assert checked_decode(word) == word
    for word in ("rgb9", "", "PIL"):
        with pytest.raises(ValueError, match="must be True"):
            checked_decode(word)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"shardkit\[formats\]"):
        decode_member("jpg", memoryview(IMAGES["jpg"]), decode=True)


# Arrays.


def raw(header: bytes, values: bytes = b"", version: bytes = b"\x01\x00") -> memoryview:
    width = 2 if version[0] == 1 else 4
    return memoryview(b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header + values)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5, dtype="<u2"),
        np.arange(6, dtype=">i8").reshape(2, 3),
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.float32(1.5),
        np.zeros((0, 7), dtype=np.int32),
        np.array(["ab", "c"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([True, False]),
    ],
    ids=str,
)
def test_arrays_come_back_as_saved(array: np.ndarray) -> None:
    found = decode_npy(memoryview(npy(array)))
    assert found.dtype == np.asarray(array).dtype
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable
    assert found.flags.owndata or found.base is not None


def test_newer_header_versions_are_read() -> None:
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }\n"
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        assert decode_npy(raw(header, b"\x01\x00\x02\x00", version)).tolist() == [1, 2]


def form(descr: str = "'<u2'", order: str = "False", shape: str = "(2,)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}".encode()


HOSTILE_ARRAYS = {
    "no magic": memoryview(b"not an array"),
    "nothing": memoryview(b""),
    "cut in the header": memoryview(npy(np.arange(5))[:40]),
    "version 9": raw(form(), b"1234", b"\x09\x00"),
    "header length beyond the member": memoryview(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + form()),
    "header beyond its limit": raw(form().ljust(70_000), b"1234", b"\x02\x00"),
    "objects": memoryview(npy(np.array([{}, 1], dtype=object), allow_pickle=True)),
    "objects in a record": raw(form("[('a', '|O')]"), b"1234"),
    "values missing": raw(form(), b"123"),
    "values too many": raw(form(), b"12345"),
    "absurd shape": raw(form(shape="(99999999999999, 99999999999999)"), b"1234"),
    "shape beyond an index": raw(form(shape=f"({1 << 70},)"), b"1234"),
    "absurd shape of nothing": raw(form(shape=f"(0, {1 << 61}, {1 << 61})")),
    "negative shape": raw(form(shape="(-1,)"), b"1234"),
    "bool in the shape": raw(form(shape="(True,)"), b"12"),
    "shape of floats": raw(form(shape="(2.0,)"), b"1234"),
    "shape of 40 dimensions": raw(form(shape="(" + "1," * 40 + ")"), b"12"),
    "unknown type": raw(form("'<q9'"), b"1234"),
    "type of no bytes": raw(form("'<U0'"), b""),
    "type by code": raw(form("__import__('os')"), b"1234"),
    "huge type": raw(form("'|V99999999999999'"), b"1234"),
    "deep literal": raw(form(shape="(" * 9000 + ")" * 9000), b"1234"),
    "deep unary": raw(form(shape="-" * 9000 + "1"), b"1234"),
    "long sum": raw(form(shape="1" + "+1" * 9000), b"1234"),
    "huge number": raw(form(shape="(" + "9" * 9000 + ",)"), b"1234"),
    "no dictionary": raw(b"[1, 2, 3]", b"1234"),
    "keys missing": raw(b"{'descr': '<u2'}", b"1234"),
    "not hashable": raw(b"{[]: 1}", b"1234"),
    "NUL": raw(b"{'descr': '<u2\0'}", b"1234"),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_hostile_arrays_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        decode_npy(HOSTILE_ARRAYS[name])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bytes_give_an_array_or_an_error(data: st.DataObject) -> None:
    payload = bytearray(npy(np.arange(8, dtype=np.uint16).reshape(2, 4)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        assert decode_npy(memoryview(payload)).nbytes < len(payload)


@pytest.mark.parametrize(("dtype", "length"), [("<u2", 1), ("<u4", 131_072), ("<u2", 10**15)])
def test_written_headers_are_constant_and_aligned_and_right(dtype: str, length: int) -> None:
    header = make_npy_header(np.dtype(dtype), length)
    assert len(header) == 128
    parsed = parse_npy_header(memoryview(header))
    assert (parsed.dtype.str, parsed.shape, parsed.bytes) == (dtype, (length,), 128)
    stream = io.BytesIO(header)
    assert np.lib.format.read_magic(stream) == (1, 0)
    found = np.lib.format.read_array_header_1_0(stream)
    assert found == ((length,), False, np.dtype(dtype))
