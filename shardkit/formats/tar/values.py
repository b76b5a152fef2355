"""Decode a member of a WebDataset sample by its extension.

| last part of the extension            | value |
|---------------------------------------|-------|
| npy                                   | NumPy array; arrays of objects are refused |
| npz                                   | {name: NumPy array} |
| json, jsn                             | the decoded JSON value |
| txt, text, transcript                 | str (UTF-8) |
| cls, cls2, index, inx, id             | int |
| gz                                    | decompressed, then decoded by the part before `.gz` |
| ten, tb, mp, msg                      | through the `webdataset` library (extra `webdataset`) |
| cbor                                  | through `cbor2` (extra `webdataset`), up to `MAX_CBOR_DEPTH` |
| pyd, pickle, pkl, pth                 | refused unless `allow_pickle`: they can run any code |
| jpg, png, webp, gif, bmp, ppm, tiff … | an image or bytes, depending on `decode` |
| anything else (audio, video, html …)  | bytes |
| any that begins with `__`             | metadata: str, or bytes if it is not UTF-8 |

With `decode=True`, images are PIL images in the mode of their file, as in MDS columns; with "basic", they are
bytes. With one of webdataset's words ("pil", "rgb8", "torchrgb", ...), they are what
`webdataset.WebDataset(...).decode(word)` gives (`formats.mds.images`). With False, every member is bytes.
Other members are decoded as by `webdataset.WebDataset(...).decode()`, but not with its decoder for CBOR, the
unmaintained `cbor` package: its stack overflows on nested data. Errors are ValueErrors; the reader adds file
and offset.

.npy members are not trusted. A header is a Python literal of at most 64 KiB. It is parsed only if it is
shallow and holds no operators, because deep literals can exhaust the parser's stack. The size of an array
must match its shape and dtype exactly, so that a header alone cannot cause a large allocation.

Memory in addition to a member's stored bytes is taken from its sample's budget before it is allocated
(formats.budget).
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
from shardkit.formats.mds.images import IMAGE_WORDS, decode_file, decode_pixels

MAX_INTEGER_BYTES = 4096  # maximum number of digits; Python itself refuses integers of over 4,300 digits
MAX_HEADER_BYTES = 1 << 16  # maximum size of a .npy header; NumPy itself accepts 10,000 characters
MAX_DIMENSIONS = 32
MAX_NESTING = 16  # maximum depth of brackets in a header; structured types nest a few levels
WRITTEN_HEADER_BYTES = 128  # fits any 1-D header; a multiple of 64, so that payloads stay 64-byte aligned

_MAGIC = b"\x93NUMPY"

_STRINGS = re.compile(rb"'[^'\\\n]*'|\"[^\"\\\n]*\"")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a .npy file; `bytes` is its size, and so the offset of the values in the file."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool
    bytes: int

    @property
    def payload_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_npy_header(head: memoryview) -> NpyHeader:
    """Parse the header at the start of a .npy file. Raises ValueError if it is malformed."""
    start = bytes(head[:12])
    if len(start) < 10 or start[:6] != _MAGIC:
        raise ValueError("not a .npy file: the magic is missing")
    if start[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"unknown .npy version {start[6]}.{start[7]}")
    prefix = 10 if start[6] == 1 else 12
    length = int.from_bytes(start[8:prefix], "little")
    if length > MAX_HEADER_BYTES or prefix + length > len(head):
        raise ValueError(
            f"a .npy header of {length:,} bytes is too long for its member of {len(head):,} bytes"
        )
    return _parse(bytes(head[prefix : prefix + length]), prefix + length, start[6])


@lru_cache(maxsize=64)
def _parse(text: bytes, header_bytes: int, version: int) -> NpyHeader:
    fields = _literal(text, "utf-8" if version == 3 else "latin-1")
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("a .npy header must have descr, fortran_order and shape")
    shape, fortran = fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or not isinstance(fortran, bool):
        raise ValueError("a .npy header has a malformed shape or fortran_order")
    if any(type(d) is not int or not 0 <= d < 1 << 62 for d in shape):
        raise ValueError("a .npy header has an impossible shape")
    try:
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(fields["descr"])
    except Exception as error:  # np.dtype raises errors of many types for hostile input, even SyntaxError
        raise ValueError(f"a .npy header has an unknown dtype: {str(fields['descr'])[:60]!r}") from error
    if dtype.hasobject:
        raise ValueError("the array holds Python objects, which only unpickling can read; store plain arrays")
    if dtype.itemsize == 0:
        raise ValueError("the array's dtype has a size of zero bytes")
    return NpyHeader(dtype, shape, fortran, header_bytes)


def _literal(text: bytes, encoding: str) -> object:
    """Evaluate `text` as a Python literal, after checking that it cannot exhaust the parser's stack."""
    bare = _STRINGS.sub(b"''", text)
    depth = deepest = 0
    for char in bare:
        if char in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in b")]}":
            depth -= 1
    if deepest > MAX_NESTING or any(char in bare for char in b"+-~*/%\\#"):
        raise ValueError("a .npy header is not a plain literal: it has operators or deep nesting")
    try:
        return ast.literal_eval(text.decode(encoding).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("a .npy header is not a Python literal") from error


def decode_npy(payload: memoryview) -> npt.NDArray[np.generic]:
    """Decode a .npy file into an array that the caller owns. Raises ValueError if the file is malformed."""
    header = parse_npy_header(payload)
    if header.payload_bytes != len(payload) - header.bytes:
        raise ValueError(
            f"a .npy of shape {header.shape} and dtype {header.dtype} needs {header.payload_bytes:,} bytes "
            f"of values, but the member has {len(payload) - header.bytes:,}"
        )
    values = np.frombuffer(payload[header.bytes :], dtype=header.dtype)
    return values.reshape(header.shape, order="F" if header.fortran_order else "C").copy(order="K")


def make_npy_header(dtype: np.dtype[np.generic], length: int) -> bytes:
    """Return the 128-byte .npy header of a 1-D array; NumPy's version does not affect it."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    text = text.ljust(WRITTEN_HEADER_BYTES - 11) + "\n"
    assert len(text) == WRITTEN_HEADER_BYTES - 10
    return _MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")


MAX_COMPRESSIONS = 4  # maximum times that one member may be compressed, as in .txt.gz.gz.gz.gz
MAX_CBOR_DEPTH = 400
_OBJECT_BYTES = 64  # memory of the largest CPython object that one byte of CBOR or MessagePack encodes

_METADATA = "__"  # prefix of an extension that marks metadata
_PICKLE = frozenset({"pyd", "pickle", "pkl", "pth"})
_IMAGES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib"}
    | {"ppm", "pgm", "pbm", "pnm", "tif", "tiff"}
)


def checked_decode(decode: bool | str) -> bool | str:
    """Return `decode` if it is a known option. Raises ValueError otherwise."""
    if isinstance(decode, bool) or decode == "basic" or decode in IMAGE_WORDS:
        return decode
    words = ", ".join(sorted(IMAGE_WORDS))
    raise ValueError(f'decode={decode!r} must be True, False, "basic" or one of webdataset\'s {words}')


def decode_member(
    extension: str,
    payload: memoryview,
    *,
    decode: bool | str = "basic",
    allow_pickle: bool = False,
    budget: SampleBudget | None = None,
) -> object:
    """Decode the payload of a member by its extension. Raises ValueError if the payload is not of that type.

    `budget` tracks the memory that the member's sample may still take; the default is a new full budget.
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
        return _decode_image(payload, decode, budget)
    if kind in _PICKLE:
        return _unpickle(kind, payload, allow_pickle=allow_pickle)
    try:
        return _DECODERS.get(kind, _ANY)[1](payload, budget)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _expanded(extension: str, payload: memoryview, budget: SampleBudget) -> tuple[str, memoryview]:
    """Decompress once per trailing `.gz`; return the extension without these suffixes, and the payload."""
    for _ in range(MAX_COMPRESSIONS + 1):
        front, _, kind = extension.rpartition(".")
        if kind != "gz":
            return extension, payload
        payload = memoryview(gunzip(payload, budget.left))
        budget.take(len(payload))
        extension = front
    raise ValueError(f"the member is compressed more than {MAX_COMPRESSIONS} times")


def encoding_of(extension: str) -> str:
    """Return the encoding name for members with this extension, in MDS's terms if MDS has the encoding."""
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
        raise ValueError(f"a number is {len(payload):,} characters long; the limit is {MAX_INTEGER_BYTES:,}")
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
            # All decoded arrays, plus the undecoded bytes of the largest: arrays are decoded one at a time.
            budget.take(sum(e.file_size for e in entries) + max((e.file_size for e in entries), default=0))
            return {e.filename.removesuffix(".npy"): decode_npy(memoryview(archive.read(e))) for e in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"the .npz cannot be read: {error}") from error


def _decode_cbor(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(_OBJECT_BYTES * len(payload))
    with naming_extras("decoding .cbor members (decode=False gives their bytes)"):
        import cbor2
    try:
        return cbor2.loads(payload, max_depth=MAX_CBOR_DEPTH)
    except Exception as error:  # constructors of tagged values raise errors of many types
        raise ValueError(f"the CBOR cannot be decoded: {error}") from error


def _decode_message(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(_OBJECT_BYTES * len(payload))
    return _through_webdataset("mp", payload)


def _decode_tensors(payload: memoryview, budget: SampleBudget) -> object:
    budget.take(2 * len(payload))
    return _through_webdataset("ten", payload)


# Maps the last part of an extension to (name of the value's encoding, decoder).
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


def _decode_image(payload: memoryview, decode: bool | str, budget: SampleBudget) -> object:
    try:
        if decode is True:
            return decode_file(payload, budget, more_formats=True)
        return decode_pixels(payload, str(decode), budget, more_formats=True)
    except ValueError as error:
        raise ValueError(f'{error}; decode="basic" returns images as bytes') from error


def _unpickle(kind: str, payload: memoryview, *, allow_pickle: bool) -> object:
    if not allow_pickle:
        raise ValueError(
            f"a .{kind} member is a pickle, which can run any code; "
            "pass allow_pickle=True if you trust its writer"
        )
    try:
        return _through_webdataset(kind, payload) if kind == "pth" else pickle.loads(payload)
    except (MissingExtraError, ValueError):
        raise
    except Exception as error:  # unpickling may raise any exception
        raise ValueError(f"the member cannot be unpickled: {type(error).__name__}: {error}") from error


def _through_webdataset(kind: str, payload: memoryview) -> object:
    try:
        with naming_extras(f"decoding .{kind} members (decode=False gives their bytes)"):
            from webdataset.autodecode import basichandlers

            return basichandlers(f".{kind}", bytes(payload))
    except ImportError:
        raise
    except Exception as error:  # the library's decoders raise errors of many types, even AssertionError
        raise ValueError(f"webdataset cannot decode it: {type(error).__name__}: {error}") from error
