"""Encode and decode the image encodings of MDS, with Pillow.

    pil          u32 width, u32 height, u32 bytes of the mode's name, mode, raw pixels
    jpeg, png    the image file
    jpeg_array   u32 count, u32 size of each, JPEG files
    list[x]      u32 0, u32 count, u32 size of each, items in encoding x

Decoded images are loaded, so that damage raises an error here and not in user code. Only the common file
formats are opened, only up to `PIL.Image.MAX_IMAGE_PIXELS` pixels, and all images of a sample must fit in its
budget (formats.budget).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardkit.errors import MissingExtraError, naming_extras
from shardkit.formats.budget import SampleBudget

if TYPE_CHECKING:
    from PIL.Image import Image


# Formats found in jpeg and png columns. Pillow knows many more, and starts other programs for some of them.
_FILE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_MORE_FORMATS = ("PPM", "TIFF")  # additional formats in folders of images, and in tars made of them

_UNREADABLE = "image cannot be read: "
# Bytes per pixel of a `pil` value, by mode. Mode "1" is not listed: a byte packs eight pixels of a row.
_PIXEL_BYTES = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16B"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 4),
}
# Bytes per pixel of a loaded image, by mode. All other modes take four: Pillow pads three bytes to four.
_LOADED_PIXEL_BYTES = {**dict.fromkeys(("1", "L", "P"), 1), **dict.fromkeys(("I;16", "I;16B"), 2)}
_BUFFERED_FORMATS = frozenset({"WEBP", "GIF"})


def encode_raw(image: object) -> bytes:
    """Encode an image as `pil`. As in MosaicML, an image with a palette loses it."""
    image = _checked(image)
    mode = image.mode.encode()
    return _u32(image.width, image.height, len(mode)) + mode + image.tobytes()


def decode_raw(data: memoryview, budget: SampleBudget | None = None) -> Image:
    """Decode a `pil` value. Raises ValueError if pixels are missing, left over, or exceed the budget."""
    width, height, mode_bytes = _read_u32(data, 0, 3)
    pixels = 12 + mode_bytes
    if pixels > len(data):
        raise ValueError(f"an image states a mode name of {mode_bytes:,} bytes, which exceed its data")
    mode = str(data[12:pixels], "utf-8")
    if mode == "1":
        expected = (width + 7) // 8 * height
    elif mode in _PIXEL_BYTES:
        expected = width * height * _PIXEL_BYTES[mode]
    else:
        raise ValueError(f"an image has an unknown mode {mode[:20]!r}")
    if expected != len(data) - pixels:
        raise ValueError(f"{width} x {height} pixels of {mode} do not fill {len(data) - pixels:,} bytes")
    module = _pillow()
    _check_pixels(width, height)
    (budget or SampleBudget()).take(len(data) + width * height * _LOADED_PIXEL_BYTES.get(mode, 4))
    try:
        return module.frombytes(mode, (width, height), bytes(data[pixels:]))  # type: ignore[no-any-return]
    except Exception as error:  # Pillow does not document which errors it raises
        raise ValueError(f"image cannot be read: {error}") from error


def encode_jpeg(image: object) -> bytes:
    """Return the JPEG file from which an image was opened, if it still exists; otherwise encode it anew."""
    image = _checked(image)
    source = getattr(image, "filename", "")
    if image.format == "JPEG" and source and Path(source).is_file():
        with _pillow().open(source) as there:
            unchanged = there.size == image.size
        if unchanged:
            return Path(source).read_bytes()
    return _encode_file(image, "JPEG")


def encode_png(image: object) -> bytes:
    """Encode an image as a PNG file."""
    return _encode_file(_checked(image), "PNG")


def decode_file(data: memoryview, budget: SampleBudget | None = None, *, more_formats: bool = False) -> Image:
    """Decode and load an image file. Raises ValueError if it is damaged, too large or of another format.

    It is too large if it exceeds the limit of pixels, or the memory left in its sample's `budget`.
    """
    try:
        image = open_file(data, more_formats=more_formats)
        # Pillow decodes WebP and GIF images in an additional buffer of the same size.
        copies = 2 if image.format in _BUFFERED_FORMATS else 1
        pixel_bytes = copies * _LOADED_PIXEL_BYTES.get(image.mode, 4)
        (budget or SampleBudget()).take(image.width * image.height * pixel_bytes)
        image.load()
    except MissingExtraError:
        raise
    except Exception as error:  # Pillow does not document which errors its decoders raise
        problem = str(error).removeprefix(_UNREADABLE) or type(error).__name__
        raise ValueError(f"{_UNREADABLE}{problem}") from error
    return image


def open_file(data: memoryview, *, more_formats: bool = False) -> Image:
    """Open an image without loading it: only its header is read.

    Raises ValueError if the header is damaged, the format is not accepted or there are too many pixels.
    """
    module = _pillow()
    try:
        image: Image = module.open(io.BytesIO(data), formats=_installed_formats(more_formats))
        _check_pixels(*image.size)
    except Exception as error:  # Pillow does not document which errors its decoders raise
        raise ValueError(f"{_UNREADABLE}{error or type(error).__name__}") from error
    return image


def encode_jpeg_array(files: object) -> bytes:
    """Encode JPEG files (bytes) as one `jpeg_array` value."""
    if not isinstance(files, Sequence) or not all(isinstance(f, (bytes, bytearray)) for f in files):
        raise TypeError(f"jpeg_array takes a list of JPEG files as bytes, not {type(files).__name__}")
    if not files:
        raise ValueError("jpeg_array needs at least one image")
    return _u32(len(files), *(len(file) for file in files)) + b"".join(files)


def decode_jpeg_array(data: memoryview, budget: SampleBudget | None = None) -> list[Image]:
    """Decode the images of a `jpeg_array` value; all must fit in the `budget` of their sample."""
    budget = budget or SampleBudget()
    (count,) = _read_u32(data, 0, 1)
    if count == 0:
        raise ValueError("a jpeg_array has no images")
    return [decode_file(item, budget) for item in _split(data, 4, count)]


def list_functions(
    encode: Callable[[Any], bytes], decode: Callable[[memoryview, SampleBudget | None], object]
) -> tuple[Callable[[Any], bytes], Callable[[memoryview, SampleBudget | None], list[object]]]:
    """Return the functions (encode, decode) of `list[x]`, given `encode` and `decode` of encoding x."""

    def encode_list(values: object) -> bytes:
        if not isinstance(values, list):
            raise TypeError(f"a list column takes a list, not {type(values).__name__}")
        items = [encode(value) for value in values]
        return _u32(0, len(items), *(len(item) for item in items)) + b"".join(items)

    def decode_list(data: memoryview, budget: SampleBudget | None = None) -> list[object]:
        budget = budget or SampleBudget()
        reserved, count = _read_u32(data, 0, 2)
        if reserved:
            raise ValueError(f"a list has an unknown version word {reserved}")
        return [decode(item, budget) for item in _split(data, 8, count)]

    return encode_list, decode_list


def _split(data: memoryview, start: int, count: int) -> list[memoryview]:
    """Split `data` into `count` items whose u32 sizes begin at `start`.

    Raises ValueError unless the items fill `data` exactly.
    """
    sizes = _read_u32(data, start, count)
    begin = start + 4 * count
    if begin + sum(sizes) != len(data):
        raise ValueError(f"the sizes of {count:,} items do not add up to {len(data):,} bytes")
    items = []
    for size in sizes:
        items.append(data[begin : begin + size])
        begin += size
    return items


def _u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u8").astype("<u4").tobytes()


def _read_u32(data: memoryview, start: int, count: int) -> list[int]:
    if start + 4 * count > len(data):
        raise ValueError(f"{count:,} sizes do not fit into {len(data):,} bytes")
    return [int(number) for number in np.frombuffer(data[start : start + 4 * count], "<u4")]


def _checked(image: object) -> Image:
    if not isinstance(image, _pillow().Image):
        raise TypeError(f"image columns take a PIL image, not {type(image).__name__}")
    return cast("Image", image)


def _check_pixels(width: int, height: int) -> None:
    limit = _pillow().MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise ValueError(f"{width} x {height} pixels exceed PIL.Image.MAX_IMAGE_PIXELS ({limit:,})")


def _encode_file(image: Image, file_format: str) -> bytes:
    out = io.BytesIO()
    try:
        image.save(out, format=file_format)
    except OSError as error:  # such as "cannot write mode RGBA as JPEG"
        raise ValueError(str(error)) from error
    return out.getvalue()


@cache
def _installed_formats(more_formats: bool) -> tuple[str, ...]:
    """Return the accepted formats that this build of Pillow supports.

    Pillow may have been built without WebP, and naming a format that it lacks is an error.
    """
    module = _pillow()
    module.init()
    wanted = _FILE_FORMATS + (_MORE_FORMATS if more_formats else ())
    return tuple(name for name in wanted if name in module.OPEN)


def _pillow() -> Any:
    with naming_extras("an image column"):
        from PIL import Image
    return Image
