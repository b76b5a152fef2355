"""Members mean what webdataset says they mean; what could run code or fill the memory is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cbor  # type: ignore[import-untyped]
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import webdataset

from shardkit.errors import MissingExtraError
from shardkit.formats.tar.values import (
    IMAGE_WORDS,
    MAX_CBOR_DEPTH,
    checked_decode,
    decode_member,
    encoding_of,
)


def npy(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


def npz(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **{k: np.asarray(v) for k, v in arrays.items()})
    return stream.getvalue()


MEMBERS: dict[str, bytes] = {
    "txt": "größe".encode(),
    "caption.text": b"",
    "transcript": b"a",
    "cls": b"7",
    "index": b" 12\n",
    "id": b"-3",
    "json": b'{"a": [1, null]}',
    "meta.jsn": b'"x"',
    "npy": npy(np.arange(3)),
    "left.npy": npy(np.eye(2)),
    "mp": msgpack.packb({"a": [1, None]}),
    "meta.cbor": cbor.dumps({"a": [1.5, b"x"]}),
    "txt.gz": gzip.compress(b"packed"),
    "json.gz": gzip.compress(b"[1]"),
    "png": b"\x89PNG",
    "html": b"<p>",
    "": b"nothing",
}


@pytest.mark.parametrize("extension", MEMBERS)
def test_members_decode_as_webdataset_decodes_them(extension: str) -> None:
    from webdataset.autodecode import default_decoder

    expected = default_decoder({extension: MEMBERS[extension]})[extension]
    found = decode_member(extension, memoryview(MEMBERS[extension]))
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


def test_archives_of_arrays_and_tensors_are_read() -> None:
    from webdataset.tenbin import encode_buffer

    found = decode_member("npz", memoryview(npz(a=[1, 2], b=2.5)))
    assert isinstance(found, dict)
    assert {k: v.tolist() for k, v in found.items()} == {"a": [1, 2], "b": 2.5}
    tensors = decode_member("ten", memoryview(encode_buffer([np.arange(4, dtype="f4")])))
    assert isinstance(tensors, list)
    assert tensors[0].tolist() == [0, 1, 2, 3]


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
    assert ".meta.cbor: not usable CBOR: maximum container nesting depth (400) exceeded" in said


def test_cbor_as_deep_as_the_limit_is_read() -> None:
    value = decode_member("cbor", memoryview(b"\x81" * (MAX_CBOR_DEPTH - 1) + b"\x07"))
    for _ in range(MAX_CBOR_DEPTH - 1):
        assert isinstance(value, list)
        (value,) = value
    assert value == 7


def test_archives_that_grow_beyond_reason_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:

    from shardkit.formats.tar import values as decode

    monkeypatch.setattr(decode, "MAX_EXPANDED_BYTES", 10_000)
    zeros = np.zeros(1 << 20, dtype=np.uint8)
    for extension, data in (("npz", npz(a=zeros)), ("bin.gz", gzip.compress(zeros.tobytes()))):
        assert len(data) < 10_000
        with pytest.raises(ValueError, match="more than 10,000 bytes"):
            decode_member(extension, memoryview(data))


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
    from PIL import Image

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


@pytest.mark.parametrize("word", ["pil", "pill", "rgb8", "l", "rgba", "torchrgb8", "torchrgb"])
@pytest.mark.parametrize("extension", IMAGES)
def test_images_decode_as_webdatasets_word_says(extension: str, word: str) -> None:
    from webdataset.autodecode import Decoder, gzfilter, imagehandler

    data = IMAGES[extension]
    expected = Decoder([gzfilter, imagehandler(word)])({"__key__": "", extension: data})[extension]
    found = decode_member(extension, memoryview(data), decode=word)
    assert type(found) is type(expected)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("extension", IMAGES)
def test_images_keep_their_mode_and_their_bytes_if_nothing_else_is_asked_for(extension: str) -> None:
    from PIL import Image

    data = IMAGES[extension]
    with Image.open(io.BytesIO(gzip.decompress(data) if extension.endswith("gz") else data)) as expected:
        found: object = decode_member(extension, memoryview(data), decode=True)
        assert isinstance(found, Image.Image)
        assert (found.mode, found.size, found.tobytes()) == (expected.mode, expected.size, expected.tobytes())
    assert decode_member(extension, memoryview(data), decode=False) == data


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

    assert set(imagespecs) == IMAGE_WORDS
    words: list[bool | str] = [True, False, "basic", *IMAGE_WORDS]
    for word in words:
        assert checked_decode(word) == word
    for word in ("rgb9", "", "PIL"):
        with pytest.raises(ValueError, match="is none of True"):
            checked_decode(word)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"shardkit\[formats\]"):
        decode_member("jpg", memoryview(IMAGES["jpg"]), decode=True)
