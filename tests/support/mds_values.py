"""Values of every MDS column encoding that mosaicml-streaming has, and datasets of them, drawn at random."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from PIL import Image

from shardkit.formats import mds
from shardkit.formats.compression import new_compressor
from shardkit.manifest import Manifest

__all__ = ["EXAMPLES", "LOSSY", "VALUES", "Drawn", "compress", "datasets", "write_mds"]

LOSSY = frozenset({"jpeg", "jpeg_array", "jpegarray", "list[jpeg]"})
_NUMBERS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_JSON: st.SearchStrategy[Any] = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _image(mode: str, size: tuple[int, int], seed: int) -> Image.Image:
    channels = Image.new(mode, (1, 1)).getbands()
    dtype = {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(mode, np.uint8)
    shape = (size[1], size[0], len(channels)) if len(channels) > 1 else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 255, shape).astype(dtype)
    if mode == "1":
        return Image.fromarray(pixels).convert("1")
    if mode == "P":
        image = Image.fromarray(pixels % 4).convert("P")
        image.putpalette(bytes(range(12)))
        return image
    return Image.frombytes(mode, size, pixels.tobytes())


def _jpeg_file(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="JPEG")
    return stream.getvalue()


def _images(*modes: str) -> st.SearchStrategy[Image.Image]:
    sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
    return st.builds(_image, st.sampled_from(modes), sizes, st.integers(0, 1 << 16))


def _arrays(dtype: str | None = None, shape: tuple[int, ...] | None = None) -> st.SearchStrategy[Any]:
    shapes = arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
    return arrays_of.arrays(dtype or st.sampled_from(_NUMBERS), shape or shapes)


_PIL = _images("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA")
_JPEG = _images("L", "RGB", "CMYK")
_PNG = _images("1", "L", "P", "RGB", "RGBA", "LA", "I;16")
_JPEG_FILES = st.lists(_JPEG.map(_jpeg_file), min_size=1, max_size=3)

VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=40),
    "str": st.text(max_size=20),
    "int": st.integers(-(2**63), 2**63 - 1),
    **{name: arrays_of.arrays(name, ()).map(lambda array: array[()]) for name in _NUMBERS},
    "str_int": st.integers(-(10**40), 10**40),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False),
    "json": _JSON,
    "pkl": _JSON | st.frozensets(st.integers(), max_size=3),
    "ndarray": _arrays(),
    "ndarray:float16": _arrays("float16"),
    "ndarray:uint16:7": _arrays("uint16", (7,)),
    "ndarray:int64:2,1,3": _arrays("int64", (2, 1, 3)),
    "pil": _PIL,
    "jpeg": _JPEG,
    "png": _PNG,
    "jpeg_array": _JPEG_FILES,
    "jpegarray": _JPEG_FILES,
    "list[pil]": st.lists(_PIL, max_size=3),
    "list[jpeg]": st.lists(_JPEG, max_size=3),
    "list[png]": st.lists(_PNG, max_size=3),
}
"""{encoding: values that it can hold}"""


def _examples() -> dict[str, tuple[Any, Any]]:
    image = _image("RGB", (7, 5), 1)
    found: dict[str, tuple[Any, Any]] = {
        "bytes": (b"", bytes(range(256))),
        "str": ("", "naïve \u2028 \U0001f600 \0"),
        "int": (-(2**63), 2**63 - 1),
        "str_int": (0, 10**80),
        "str_float": (-0.0, 1e-300),
        "str_decimal": (Decimal(0), Decimal("-12345678901234567890.0100")),
        "json": (None, {"a": [1, None, "é", 1.5], "": {}}),
        "pkl": (None, {"a": {1, 2}}),
        "ndarray": (np.zeros(1, np.uint8), np.arange(120_000, dtype=np.float32).reshape(300, 400)),
        "ndarray:float16": (np.ones(1, np.float16), np.arange(300, dtype=np.float16)),
        "ndarray:uint16:7": (np.zeros(7, np.uint16), np.full(7, 65_535, np.uint16)),
        "ndarray:int64:2,1,3": (np.zeros((2, 1, 3), np.int64), np.full((2, 1, 3), -(2**63), np.int64)),
        "pil": (_image("1", (1, 1), 0), _image("CMYK", (8, 3), 2)),
        "jpeg": (_image("L", (1, 1), 0), image),
        "png": (_image("P", (1, 1), 0), _image("RGBA", (3, 8), 4)),
    }
    for name in _NUMBERS:
        limits = np.iinfo(name) if np.dtype(name).kind in "iu" else np.finfo(name)
        found[name] = (np.dtype(name).type(limits.min), np.dtype(name).type(limits.max))
    for name in ("jpeg_array", "jpegarray"):
        found[name] = ([_jpeg_file(image)], [_jpeg_file(_image("L", (4, 4), 5)), _jpeg_file(image)])
    for name in ("pil", "jpeg", "png"):
        found[f"list[{name}]"] = ([], [*found[name]])
    return found


EXAMPLES: Mapping[str, tuple[Any, Any]] = _examples()
"""{encoding: (a small value, empty if that can be, and a large one)}"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Columns, samples, and the settings that both writers have."""

    columns: dict[str, str]
    samples: list[dict[str, Any]]
    compression: str | None
    hashes: list[str]
    shard_bytes: int | None

    def lossless(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a sample that must come back as it was given."""
        return {name: sample[name] for name, encoding in self.columns.items() if encoding not in LOSSY}


@st.composite
def datasets(draw: st.DrawFn) -> Drawn:
    """Up to four columns and twelve samples; limits below the size of one sample among them."""
    names = st.text(min_size=1, max_size=5)
    columns = draw(st.dictionaries(names, st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    sample = st.fixed_dictionaries({name: VALUES[encoding] for name, encoding in columns.items()})
    return Drawn(
        columns,
        draw(st.lists(sample, min_size=1, max_size=12)),
        draw(st.none() | st.sampled_from(["br:4", "bz2", "gz:1", "snappy", "zstd", "zstd:7"])),
        draw(
            st.lists(st.sampled_from(["sha1", "md5", "xxh64", "xxh3_128"]), unique=True, max_size=2).map(
                sorted
            )
        ),
        draw(st.sampled_from([150, 400, 1200, 1 << 26, None])),
    )


def write_mds(
    folder: Path, columns: Mapping[str, str], samples: Iterable[Mapping[str, Any]], **settings: Any
) -> Manifest:
    """The dataset that our writer makes of `samples`, one by one."""
    with mds.MdsWriter(folder, columns=columns, **settings) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.finish()


def compress(name: str, data: bytes) -> bytes:
    """`data` compressed in one go."""
    compressor = new_compressor(name, len(data))
    return compressor.compress(data) + compressor.flush()
