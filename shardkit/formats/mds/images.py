"""Encode and decode images: the encodings of MDS, and image files anywhere as pixels.

    pil          u32 width, u32 height, u32 bytes of the mode's name, mode, raw pixels
    jpeg, png    the image file
    jpeg_array   u32 count, u32 size of each, JPEG files
    list[x]      u32 0, u32 count, u32 size of each, items in encoding x

Decoded images are loaded, so that damage raises an error here and not in user code. Only the common file
formats are opened, only up to `PIL.Image.MAX_IMAGE_PIXELS` pixels, and all images of a sample must fit in its
budget (formats.budget).

`decode_pixels` gives arrays, tensors and images of one mode, by the words of webdataset ("rgb8", "torchrgb").
Pillow decodes them, except JPEG files to RGB, which `simplejpeg` decodes in two thirds of the time if it is
installed. Both use libjpeg-turbo with the same settings, and their pixels are equal (a test compares them).
Files that simplejpeg refuses (CMYK, or damage that Pillow repairs) are left to Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class PixelForm:
    """Describes decoded images: NumPy arrays, tensors or images of Pillow, in one mode."""

    kind: str
    """"numpy" (height, width, channels), "torch" (channels, height, width) or "pil"."""
    mode: str
    is_float: bool = False
    """Whether values are float32 from 0 to 1 instead of uint8."""


IMAGE_WORDS: Mapping[str, PixelForm] = {
    **{
        f"{library}{mode}{size}": PixelForm(library or "numpy", mode.upper(), is_float=not size)
        for library in ("", "torch")
        for mode in ("l", "rgb", "rgba")
        for size in ("", "8")
    },
    "torch": PixelForm("torch", "RGB", is_float=True),
    **{word: PixelForm("pil", "RGB") for word in ("pil", "pilrgb")},
    "pill": PixelForm("pil", "L"),
    "pilrgba": PixelForm("pil", "RGBA"),
}
"""The words with which webdataset selects how images are decoded."""

# Bytes per pixel that decoding takes at most: the file in Pillow's memory, its conversion, and the result.
_WORD_BYTES = {False: 12, True: 32}
_JPEG_START = b"\xff\xd8\xff"
FILE_ENCODINGS = frozenset({"jpeg", "png"})
"""The encodings of columns whose values are image files, which the option `decode` applies to."""
_SIMPLE_COLORS = ("YCbCr", "RGB", "Gray")  # of JPEG files, as simplejpeg calls them


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


def decode_pixels(
    data: memoryview, word: str, budget: SampleBudget | None = None, *, more_formats: bool = False
) -> object:
    """Decode an image file as one of `IMAGE_WORDS` says. Raises ValueError as `decode_file` does."""
    form, budget = IMAGE_WORDS[word], budget or SampleBudget()
    if (pixels := _decode_rgb(data, form, budget)) is None:
        image = open_file(data, more_formats=more_formats)
        budget.take(_WORD_BYTES[form.is_float] * image.width * image.height)
        try:
            image = image.convert(form.mode)
        except Exception as error:  # Pillow does not document which errors its decoders raise
            raise ValueError(f"{_UNREADABLE}{error or type(error).__name__}") from error
        if form.kind == "pil":
            return image
        pixels = np.array(image)
    values: npt.NDArray[Any] = pixels.astype(np.float32) / 255.0 if form.is_float else pixels
    if form.kind == "numpy":
        return values
    with naming_extras(f"decode={word!r}"):
        import torch
    tensor = torch.from_numpy(values)
    # A view, whose channels are last in memory: torchvision resizes such images fastest.
    return tensor.permute(2, 0, 1) if tensor.ndim > 2 else tensor


def _decode_rgb(data: memoryview, form: PixelForm, budget: SampleBudget) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG file to RGB by simplejpeg; None if that is not wanted, not installed or not possible."""
    is_rgb = form.mode == "RGB" and form.kind != "pil"
    if not is_rgb or data[:3] != _JPEG_START or (codec := _simplejpeg()) is None:
        return None
    with suppress(ValueError):
        height, width, colors, _ = codec.decode_jpeg_header(data)
        if colors in _SIMPLE_COLORS:
            _check_pixels(width, height)
            budget.take(_WORD_BYTES[form.is_float] * height * width)
            pixels: npt.NDArray[np.uint8] = codec.decode_jpeg(data)
            return pixels
    return None


def decode_as(
    data: memoryview, decode: bool | str, budget: SampleBudget, *, more_formats: bool = False
) -> object:
    """Return an image file as the option `decode` says: its bytes for False and "basic", else its pixels."""
    if decode is True:
        return decode_file(data, budget, more_formats=more_formats)
    if decode is False or decode == "basic":
        budget.take(len(data))
        return bytes(data)
    return decode_pixels(data, decode, budget, more_formats=more_formats)


def pixel_decoder() -> str:
    """Return name and version of the library that decodes JPEG files to RGB pixels."""
    name = "Pillow" if _simplejpeg() is None else "simplejpeg"
    return f"{name} {version(name)}"


@cache
def _simplejpeg() -> Any:
    """Return the module `simplejpeg` if it is installed; else None, because Pillow decodes JPEG files too."""
    with suppress(ImportError):
        import simplejpeg

        return simplejpeg
    return None


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
