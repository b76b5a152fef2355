"""What a member of a WebDataset sample means, by its extension.

| last part of the extension            | value |
|---------------------------------------|-------|
| npy                                   | NumPy array; arrays of objects are refused |
| npz                                   | {name: NumPy array} |
| json, jsn                             | what the JSON says |
| txt, text, transcript                 | str (UTF-8) |
| cls, cls2, index, inx, id             | int |
| gz                                    | decompressed, then by the part before it |
| ten, tb, mp, msg                      | through the `webdataset` library (extra `webdataset`) |
| cbor                                  | through `cbor2` (extra `webdataset`), `MAX_CBOR_DEPTH` at most |
| pyd, pickle, pkl, pth                 | refused unless `allow_pickle`: they can run any code |
| jpg, png, webp, gif, bmp, ppm, tiff … | an image, as `decode` says |
| anything else (audio, video, html …)  | bytes |
| any that begins with `__`             | metadata: str, or bytes if it is not UTF-8 |

`decode` is True: images are PIL images in the mode of their file, as in MDS columns. "basic": their bytes.
One of webdataset's words ("pil", "rgb8", "torchrgb", …): what `webdataset.WebDataset(…).decode(word)` makes
of them. False: every member is its bytes. All else has the meaning of `webdataset.WebDataset(…).decode()`;
webdataset's own decoder of CBOR, the unmaintained `cbor`, is not used: nested data overflow its stack.
Errors are ValueErrors; the reader adds file and offset.

.npy members are read without trust. A header is at most 64 KiB of a Python literal; it is parsed only when it
is shallow and holds no operators, because deep literals can exhaust the parser's stack. An array's bytes must
be exactly those that its shape and type ask for, so nothing is allocated on a header's word alone.

Whatever takes more memory than a member's bytes is taken from the sample's budget first (formats.budget).
"""

from __future__ import annotations

import ast
import io
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardkit.errors import MissingExtraError, naming_extras
from shardkit.files import load_json
from shardkit.formats.budget import SampleBudget, json_bytes, text_bytes
from shardkit.formats.compression import gunzip
from shardkit.formats.mds.images import decode_file, open_file

MAX_INTEGER_BYTES = 4096  # Python refuses to read 4,300 digits
MAX_HEADER_BYTES = 1 << 16  # NumPy itself stops at 10,000 characters
MAX_DIMENSIONS = 32
MAX_NESTING = 16  # brackets; structured types nest a few levels
WRITTEN_HEADER_BYTES = 128  # a multiple of 64 that holds any 1-D header: payloads stay 64-aligned

_MAGIC = b"\x93NUMPY"

_STRINGS = re.compile(rb"'[^'\\\n]*'|\"[^\"\\\n]*\"")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a .npy says of its array; the values start `bytes` after the start of the file."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool
    bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(head: memoryview) -> NpyHeader:
    """The header at the start of a .npy file; ValueError says what is wrong with it."""
    start = bytes(head[:12])
    if len(start) < 10 or start[:6] != _MAGIC:
        raise ValueError("not a .npy file: the magic is missing")
    if start[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"unknown .npy version {start[6]}.{start[7]}")
    prefix = 10 if start[6] == 1 else 12
    length = int.from_bytes(start[8:prefix], "little")
    if length > MAX_HEADER_BYTES or prefix + length > len(head):
        raise ValueError(f"a .npy header of {length:,} bytes in a member of {len(head):,}")
    return _parse(bytes(head[prefix : prefix + length]), prefix + length, start[6])


@lru_cache(maxsize=64)
def _parse(text: bytes, header_bytes: int, version: int) -> NpyHeader:
    fields = _literal(text, "utf-8" if version == 3 else "latin-1")
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("a .npy header must have descr, fortran_order and shape")
    shape, fortran = fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or not isinstance(fortran, bool):
        raise ValueError("a .npy header whose shape or order is malformed")
    if any(type(d) is not int or not 0 <= d < 1 << 62 for d in shape):
        raise ValueError("a .npy header with an impossible shape")
    try:
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(fields["descr"])
    except Exception as error:  # np.dtype raises many types on hostile descriptions, SyntaxError among them
        raise ValueError(f"a .npy header with an unknown type: {str(fields['descr'])[:60]!r}") from error
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled; store plain arrays")
    if dtype.itemsize == 0:
        raise ValueError("an array type of zero bytes")
    return NpyHeader(dtype, shape, fortran, header_bytes)


def _literal(text: bytes, encoding: str) -> object:
    """ast.literal_eval of text that cannot exhaust the parser."""
    bare = _STRINGS.sub(b"''", text)
    depth = deepest = 0
    for char in bare:
        if char in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in b")]}":
            depth -= 1
    if deepest > MAX_NESTING or any(char in bare for char in b"+-~*/%\\#"):
        raise ValueError("a .npy header that is no plain literal")
    try:
        return ast.literal_eval(text.decode(encoding).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("a .npy header that is no literal") from error


def decode_npy(payload: memoryview) -> npt.NDArray[np.generic]:
    """A .npy file's array, as a copy that the caller owns; ValueError says what is wrong."""
    header = parse_npy_header(payload)
    if header.payload_bytes != len(payload) - header.bytes:
        raise ValueError(
            f"a .npy of shape {header.shape} and type {header.dtype} needs {header.payload_bytes:,} bytes "
            f"of values, the member has {len(payload) - header.bytes:,}"
        )
    values = np.frombuffer(payload[header.bytes :], dtype=header.dtype)
    return values.reshape(header.shape, order="F" if header.fortran_order else "C").copy(order="K")


def make_npy_header(dtype: np.dtype[np.generic], length: int) -> bytes:
    """The header of a 1-D array, always 128 bytes, the same from every NumPy version."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    text = text.ljust(WRITTEN_HEADER_BYTES - 11) + "\n"
    assert len(text) == WRITTEN_HEADER_BYTES - 10
    return _MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")


IMAGE_WORDS = frozenset(
    f"{library}{mode}{size}"
    for library in ("", "torch")
    for mode in ("l", "rgb", "rgba")
    for size in ("", "8")
) | {"pil", "pill", "pilrgb", "pilrgba", "torch"}  # fmt: skip

MAX_COMPRESSIONS = 4  # of one member, .txt.gz.gz.gz.gz; once is what people do
MAX_CBOR_DEPTH = 400
_WORD_BYTES = 32  # of a pixel: four channels of float32, and the image that they are made from
_OBJECT_BYTES = 64  # of CPython, that one byte of CBOR or MessagePack can stand for

_METADATA = "__"  # of an extension
_PICKLE = frozenset({"pyd", "pickle", "pkl", "pth"})
_IMAGES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib"}
    | {"ppm", "pgm", "pbm", "pnm", "tif", "tiff"}
)


def checked_decode(decode: bool | str) -> bool | str:
    """`decode` if it means something; ValueError otherwise."""
    if isinstance(decode, bool) or decode == "basic" or decode in IMAGE_WORDS:
        return decode
    words = ", ".join(sorted(IMAGE_WORDS))
    raise ValueError(f'decode={decode!r} is none of True, False, "basic" and webdataset\'s {words}')


def decode_member(
    extension: str,
    payload: memoryview,
    *,
    decode: bool | str = "basic",
    allow_pickle: bool = False,
    budget: SampleBudget | None = None,
) -> object:
    """The value of a member; ValueError if its bytes are not what the extension says.

    `budget` is what its sample may still take; default: that of a sample of its own.
    """
    budget = SampleBudget() if budget is None else budget
    if decode is False:
        return _decode_bytes(payload, budget)
    if extension.startswith(_METADATA):
        return _decode_metadata(payload, budget)
    kind = extension.rpartition(".")[2]
    if kind == "gz":
        extension, payload = _expanded(extension, payload, budget)
        kind = extension.rpartition(".")[2]
    if kind in _IMAGES and decode != "basic":
        return _decode_image(kind, payload, decode, budget)
    if kind in _PICKLE:
        return _unpickle(kind, payload, allow_pickle=allow_pickle)
    try:
        return _DECODERS.get(kind, _ANY)[1](payload, budget)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _expanded(extension: str, payload: memoryview, budget: SampleBudget) -> tuple[str, memoryview]:
    """Undo all compressions at the end of an extension and return what is left of it, with the payload."""
    for _ in range(MAX_COMPRESSIONS + 1):
        front, _, kind = extension.rpartition(".")
        if kind != "gz":
            return extension, payload
        payload = memoryview(gunzip(payload, budget.left))
        budget.take(len(payload))
        extension = front
    raise ValueError(f"it is compressed more than {MAX_COMPRESSIONS} times")


def encoding_of(extension: str) -> str:
    """The name, in the words of MDS where there is one, of what a member decodes to."""
    if extension.startswith(_METADATA):
        return "str"
    kind = extension.removesuffix(".gz").rpartition(".")[2]
    return kind if kind in _PICKLE else _DECODERS.get(kind, _ANY)[0]


def _decode_bytes(payload: memoryview, budget: SampleBudget) -> bytes:
    budget.take(len(payload))
    return bytes(payload)


def _decode_text(payload: memoryview, budget: SampleBudget) -> str:
    budget.take(text_bytes(payload))
    return str(payload, "utf-8")


def _decode_metadata(payload: memoryview, budget: SampleBudget) -> str | bytes:
    try:
        return _decode_text(payload, budget)
    except UnicodeDecodeError:
        return bytes(payload)


def _decode_json(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(json_bytes(payload))
    return load_json(bytes(payload))


def _decode_int(payload: memoryview, budget: SampleBudget) -> int:
    if len(payload) > MAX_INTEGER_BYTES:
        raise ValueError(f"a number of {len(payload):,} characters")
    return int(bytes(payload))


def _decode_array(payload: memoryview, budget: SampleBudget) -> npt.NDArray[np.generic]:
    budget.take(len(payload))
    return decode_npy(payload)


def _decode_npz(
    payload: memoryview, budget: SampleBudget
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            entries = archive.infolist()
            # All arrays, and of each in turn the bytes that it is made from.
            budget.take(sum(e.file_size for e in entries) + max((e.file_size for e in entries), default=0))
            return {e.filename.removesuffix(".npy"): decode_npy(memoryview(archive.read(e))) for e in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"not a usable .npz: {error}") from error


def _decode_cbor(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(_OBJECT_BYTES * len(payload))
    with naming_extras("decoding .cbor members (decode=False gives their bytes)"):
        import cbor2
    try:
        return cbor2.loads(payload, max_depth=MAX_CBOR_DEPTH)
    except Exception as error:  # what tagged values become may raise many types
        raise ValueError(f"not usable CBOR: {error}") from error


def _decode_message(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(_OBJECT_BYTES * len(payload))
    return _through_webdataset("mp", payload)


def _decode_tensors(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(2 * len(payload))
    return _through_webdataset("ten", payload)


# Kind -> (name of the values' encoding, decoder).
_DECODERS: dict[str, tuple[str, Callable[[memoryview, SampleBudget], object]]] = {
    "npy": ("ndarray", _decode_array),
    "npz": ("npz", _decode_npz),
    "cbor": ("cbor", _decode_cbor),
    **dict.fromkeys(("json", "jsn"), ("json", _decode_json)),
    **dict.fromkeys(("txt", "text", "transcript"), ("str", _decode_text)),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), ("int", _decode_int)),
    **{kind: (kind, _decode_message) for kind in ("mp", "msg")},
    **{kind: (kind, _decode_tensors) for kind in ("ten", "tb")},
}
_ANY = ("bytes", _decode_bytes)


def _decode_image(kind: str, payload: memoryview, decode: bool | str, budget: SampleBudget) -> object:
    try:
        if decode is True:
            return decode_file(payload, budget, more_formats=True)
        # Pillow knows formats that start other programs; webdataset opens whatever Pillow opens.
        image = open_file(payload, more_formats=True)
        budget.take(_WORD_BYTES * image.width * image.height)
    except ValueError as error:
        raise ValueError(f'{error}; decode="basic" leaves images as bytes') from error
    return _through_webdataset(kind, payload, str(decode))


def _unpickle(kind: str, payload: memoryview, *, allow_pickle: bool) -> object:
    if not allow_pickle:
        raise ValueError(
            f"a .{kind} member is a pickle, which can run any code; "
            "pass allow_pickle=True if you trust who wrote it"
        )
    try:
        return _through_webdataset(kind, payload) if kind == "pth" else pickle.loads(payload)
    except (MissingExtraError, ValueError):
        raise
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"cannot be unpickled: {type(error).__name__}: {error}") from error


def _through_webdataset(kind: str, payload: memoryview, image_word: str | None = None) -> object:
    try:
        with naming_extras(f"decoding .{kind} members (decode=False gives their bytes)"):
            from webdataset.autodecode import basichandlers, imagehandler

            handler = imagehandler(image_word) if image_word else basichandlers
            return handler(f".{kind}", bytes(payload))
    except ImportError:
        raise
    except Exception as error:  # the library's decoders raise many types, AssertionError among them
        raise ValueError(f"webdataset cannot decode it: {type(error).__name__}: {error}") from error
