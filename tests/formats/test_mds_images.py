from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardkit.datasets.dataset import open_dataset
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds import MdsWriter, images
from shardkit.formats.mds.encodings import Encoding, encoding_of
from support import peers

MODES = ["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "P", "PA", "LAB"]


def picture(mode: str = "RGB", width: int = 9, height: int = 5) -> Image.Image:
    noise = np.random.default_rng(3).integers(0, 255, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    return (
        image if mode == "RGB" else Image.frombytes(mode, image.size, Image.new(mode, image.size).tobytes())
    )


def file_bytes(image: Image.Image, file_format: str) -> bytes:
    out = io.BytesIO()
    image.save(out, format=file_format)
    return out.getvalue()


def decode(encoding: Encoding, data: bytes) -> Any:
    return encoding.decode(memoryview(data))


@pytest.mark.parametrize("mode", MODES)
def test_raw_images_of_every_mode_come_back(mode: str) -> None:
    encoding, image = encoding_of("pil"), picture(mode)
    assert peers.comparable(decode(encoding, encoding.encode(image))) == peers.comparable(image)


def test_a_jpeg_comes_back_as_its_file_says() -> None:
    jpeg = encoding_of("jpeg")
    expected = Image.open(io.BytesIO(file_bytes(picture(), "JPEG")))
    assert peers.comparable(decode(jpeg, jpeg.encode(picture()))) == peers.comparable(expected)


def test_a_jpeg_opened_from_a_file_keeps_the_bytes_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(file_bytes(picture(), "JPEG"))
    image = Image.open(file)
    peers.import_streaming()
    from streaming.base.format.mds.encodings import mds_encode

    assert encoding_of("jpeg").encode(image) == file.read_bytes() == mds_encode("jpeg", image)
    image.thumbnail((4, 4))  # in place: the file is no longer this image
    assert decode(encoding_of("jpeg"), encoding_of("jpeg").encode(image)).size == image.size


@pytest.mark.parametrize("kind", ["list[jpeg]", "jpeg_array"])
def test_lists_of_jpegs_come_back_in_order(kind: str) -> None:
    images = [picture("L", width, 4) for width in (3, 9, 6)]
    values = [file_bytes(image, "JPEG") for image in images] if kind == "jpeg_array" else images
    back = decode(encoding_of(kind), encoding_of(kind).encode(values))
    assert [image.size for image in back] == [image.size for image in images]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("pil", b""),
        ("pil", struct.pack("<III", 1, 1, 2**32 - 1)),
        ("pil", struct.pack("<III", 2**32 - 1, 2**32 - 1, 1) + b"L"),
        ("pil", struct.pack("<III", 2, 2, 1) + b"L" + bytes(3)),
        ("pil", struct.pack("<III", 2, 2, 1) + b"L" + bytes(5)),
        ("pil", struct.pack("<III", 2, 2, 3) + b"XYZ" + bytes(12)),
        ("pil", struct.pack("<III", 1, 1, 1) + b"\xff" + bytes(1)),
        ("jpeg", b""),
        ("jpeg", b"\xff\xd8\xff"),
        ("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),  # would start Ghostscript
        ("jpeg_array", b""),
        ("jpeg_array", struct.pack("<I", 0)),
        ("jpeg_array", struct.pack("<I", 2**32 - 1)),
        ("jpeg_array", struct.pack("<II", 1, 2**32 - 1)),
        ("list[png]", struct.pack("<I", 0)),
        ("list[png]", struct.pack("<II", 1, 0)),
        ("list[png]", struct.pack("<II", 0, 2**30)),
        ("list[png]", struct.pack("<II", 0, 0) + b"x"),
    ],
)
def test_damaged_images_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(encoding_of(name), data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_beyond_pillows_pixel_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    png, raw = encoding_of("png").encode(picture("L")), encoding_of("pil").encode(picture("L"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    for name, data in [("png", png), ("pil", raw)]:
        with pytest.raises(ValueError, match=r"pixels|bomb"):
            decode(encoding_of(name), data)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["png", "jpeg", "pil", "list[png]"]),
    position=st.integers(0, 10**6),
    value=st.integers(1, 255),
)
def test_a_flipped_byte_gives_an_image_or_a_value_error(name: str, position: int, value: int) -> None:
    encoding = encoding_of(name)
    data = bytearray(encoding.encode([picture()] if name.startswith("list") else picture()))
    data[position % len(data)] ^= value
    try:
        image = decode(encoding, bytes(data))
    except ValueError:
        return
    images = image if isinstance(image, list) else [image]
    assert all(isinstance(i, Image.Image) for i in images)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pil", "x"),
        ("jpeg", np.zeros((2, 2))),
        ("jpeg", Image.new("RGBA", (2, 2))),
        ("jpeg_array", []),
        ("jpeg_array", [picture()]),
        ("list[png]", (1,)),
        ("list[png]", [1]),
    ],
)
def test_values_that_are_no_such_images_are_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        encoding_of(name).encode(value)


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
def test_image_files_are_decoded_as_the_dataset_is_asked_to(tmp_path: Path, encoding: str) -> None:
    files = [io.BytesIO() for _ in range(3)]
    for number, file in enumerate(files):
        Image.new("RGB", (4 + number, 3), (9 * number, 100, 200)).save(file, encoding.upper())
    with MdsWriter(tmp_path, columns={"image": encoding, "raw": "pil", "label": "int"}) as writer:
        for number, file in enumerate(files):
            writer.write({"image": file.getvalue(), "raw": Image.new("L", (2, 2)), "label": number})
    for decode in ("basic", False):
        found = open_dataset(tmp_path, decode=decode)
        assert [row["image"] for row in found] == [file.getvalue() for file in files]
        assert [row["label"] for row in found] == [0, 1, 2]
        assert all(isinstance(row["raw"], Image.Image) for row in found)
    for row, file in zip(open_dataset(tmp_path, decode="rgb8"), files, strict=True):
        with Image.open(file) as image:
            np.testing.assert_array_equal(row["image"], np.asarray(image), strict=True)
    assert open_dataset(tmp_path, decode="torchrgb")[2]["image"].shape == (3, 3, 6)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow warns of what is refused here
def test_damage_and_bombs_are_refused_whatever_decodes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    good = io.BytesIO()
    Image.new("RGB", (300, 300)).save(good, "JPEG")
    for data, why in (
        (good.getvalue()[:400], "cannot be read"),
        (b"\xff\xd8\xff", "cannot be read"),
        (b"", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=why):
            images.decode_pixels(memoryview(data), "rgb8")
    with pytest.raises(ValueError, match=r"would take [\d,]+ bytes"):
        images.decode_pixels(memoryview(good.getvalue()), "rgb8", SampleBudget(limit=100_000))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 80_000)
    with pytest.raises(ValueError, match="MAX_IMAGE_PIXELS"):
        images.decode_pixels(memoryview(good.getvalue()), "rgb8")
