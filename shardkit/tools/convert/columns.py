"""Maps columns of MDS to members of tars and back: names, encodings, payloads.

| MDS encoding                       | extension (if the name has no fitting one)               | payload |
|------------------------------------|----------------|-----------------------------------------------|
| str                                | `name.txt`     | the same bytes                                |
| json                               | `name.json`    | the same bytes                                |
| jpeg, png                          | `name.jpg`, `name.png` | the same bytes                        |
| bytes                              | `name.bin`     | the same bytes                                |
| int, str_int                       | `name.cls`     | decimal digits                                |
| int8 … uint64, float16 … float64   | `name.npy`     | an array without axes                         |
| ndarray…                           | `name.npy`     | the array                                     |
| str_float                          | `name.json`    | a JSON number                                 |
| str_decimal                        | `name.txt`     | its digits, which other readers see as text   |
| pil                                | `name.png`     | a PNG of the same pixels (modes PNG can hold) |
| pkl, jpeg_array, list[…]           | refused        |                                               |

A column `__key__` (str) contains the keys of samples; without it, samples are numbered. The card records each
column's name and encoding, so that converting back restores both. For tars without such a card, `txt`, `text`
and `transcript` become str; `cls`, `id` and `index` become int; `npy` becomes ndarray; `json`, `jpg` and
`png` keep their kind; all other members (also `.gz`) become bytes, unchanged. The column is named after the
extension (`tokens.npy` gives `tokens`). The card records the extension, so that converting back restores it.
Pickles are refused.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardkit.formats.mds.encodings import ARRAY_DTYPES, encoding_of
from shardkit.formats.mds.images import decode_file, decode_raw, encode_raw
from shardkit.formats.tar import values as members
from shardkit.formats.tar.members import split_name
from shardkit.formats.tar.values import decode_npy
from shardkit.manifest import Column

KEY = "__key__"

Payload = bytes | memoryview

Convert = Callable[[memoryview], Payload]

_NUMBERS = frozenset(ARRAY_DTYPES.values())

_SUFFIX = {
    "str": "txt",
    "str_decimal": "txt",
    "json": "json",
    "str_float": "json",
    "jpeg": "jpg",
    "png": "png",
    "pil": "png",
    "bytes": "bin",
    "int": "cls",
    "str_int": "cls",
    "ndarray": "npy",
    **dict.fromkeys(_NUMBERS, "npy"),
}

_PNG_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA", "I;16"})

_NAME = re.compile(r"[a-z0-9_.+-]{1,200}")

_NPY_MAGIC = b"\x93NUMPY\x01\x00"


@dataclass(frozen=True, slots=True)
class Mapped:
    """How one column is converted: its names in source and target, MDS encoding, and function for values.

    The function `convert` raises ValueError if a value does not match the encoding.
    """

    source: str
    target: str
    encoding: str
    convert: Convert


def unchanged(columns: Iterable[Column]) -> list[Mapped]:
    """Return mappings of columns to themselves that copy each value's bytes without checking them."""
    return [Mapped(c.name, c.name, c.encoding, lambda data: data) for c in columns]


def keep_columns(columns: Sequence[Column]) -> list[Mapped]:
    """Return mappings of MDS columns to themselves that check values; raises ValueError for pickles."""
    return [Mapped(c.name, c.name, c.encoding, _checked(c.encoding)) for c in columns]


def to_members(columns: Sequence[Column], noted: Mapping[str, str] | None = None) -> list[Mapped]:
    """Return mappings of MDS columns to extensions of tar members.

    `noted` is {column: extension} from the card, to restore the extensions of MDS that was converted from
    tars. Raises ValueError for encodings that a member cannot hold, and if two extensions would be equal.
    """
    mapped = []
    for column in columns:
        if column.name == KEY:
            if column.encoding != "str":
                raise ValueError(f"column {KEY!r} is {column.encoding}; keys of a tar must be str")
            mapped.append(Mapped(KEY, KEY, "str", _checked("str")))
            continue
        kind = column.encoding.partition(":")[0]
        if kind not in _SUFFIX:
            raise ValueError(
                f"column {column.name!r} is {column.encoding}, which a member of a tar cannot hold; "
                "choose other columns with --columns"
            )
        known = (noted or {}).get(column.name)
        extension = _extension(column.name, kind) if known is None else _sound(column.name, known)
        mapped.append(Mapped(column.name, extension, column.encoding, _to_member(kind, column.encoding)))
    _refuse_clashes(mapped)
    return mapped


def to_values(columns: Sequence[Column], noted: Mapping[str, Mapping[str, str]]) -> list[Mapped]:
    """Return mappings of tar columns, each named by a member's extension, to MDS columns.

    `noted` is {extension: {"column", "encoding"}} from the card, to restore MDS that was converted to tars.
    """
    mapped = []
    for column in columns:
        note = noted.get(column.name)
        if note is not None:
            name, encoding = note["column"], note["encoding"]
        else:
            name, encoding = _name(column.name), _encoding(column)
        kind = encoding.partition(":")[0]
        if kind not in _SUFFIX:
            raise ValueError(
                f"members .{column.name} are {encoding}, which cannot be converted; choose others with "
                "--columns"
            )
        mapped.append(Mapped(column.name, name, encoding, _to_value(kind, encoding)))
    _refuse_clashes(mapped)
    return mapped


def _refuse_clashes(mapped: Sequence[Mapped]) -> None:
    seen: dict[str, str] = {}
    for column in mapped:
        if column.target in seen:
            first = seen[column.target]
            raise ValueError(
                f"{first!r} and {column.source!r} would both be named {column.target!r}; leave one out"
            )
        seen[column.target] = column.source


def _extension(name: str, kind: str) -> str:
    """Return a column's extension: its name, plus a suffix such as .npy unless the name implies the kind."""
    suffix = _SUFFIX[kind]
    last = name.rpartition(".")[2]
    same = {"txt": "str", "json": "json", "cls": "int", "npy": "ndarray", "bin": "bytes"}.get(suffix)
    if suffix in ("jpg", "png"):
        fits = last in (("jpg", "jpeg") if suffix == "jpg" else ("png",))
    else:
        fits = members.encoding_of(name) == same and (suffix != "bin" or last == "bin")
    return _sound(name, name if fits else f"{name}.{suffix}")


def _sound(name: str, extension: str) -> str:
    """Return `extension`; raises ValueError if readers of a tar would split it from the key differently."""
    if _NAME.fullmatch(extension) is None or split_name(f"0.{extension}") != ("0", extension):
        raise ValueError(
            f"column {name!r} cannot be an extension; use only lower-case letters, digits, '_', '-' and '.'"
        )
    return extension


def _name(extension: str) -> str:
    front, _, last = extension.rpartition(".")
    return front if front and last == "npy" else extension


def _encoding(column: Column) -> str:
    """Return the MDS encoding for a column of tar members; raises ValueError for pickles."""
    last = column.name.removesuffix(".gz").rpartition(".")[2]
    if last in ("pyd", "pickle", "pkl", "pth"):
        raise ValueError(f"members .{column.name} are pickles, which can run any code; leave them out")
    if column.name.endswith(".gz"):
        return "bytes"
    if last in ("jpg", "jpeg"):
        return "jpeg"
    if last == "png":
        return "png"
    kind = column.encoding.partition(":")[0]
    if kind == "ndarray":
        return _array_encoding(column.encoding)
    return kind if kind in ("str", "int", "json") else "bytes"


def _array_encoding(encoding: str) -> str:
    """Return the MDS encoding for arrays: a number such as "float32" if they have no axes, else ndarray."""
    kind, _, details = encoding.partition(":")
    dtype, colon, shape = details.partition(":")
    if colon and not shape:
        return dtype
    try:
        encoding_of(encoding)
    except ValueError:
        return kind  # MDS does not support this dtype: the error comes when a value is encoded, and names it
    return encoding


def _checked(encoding: str) -> Convert:
    """Return a function that checks that bytes (except images) can be decoded, and returns them unchanged.

    Raises ValueError if `encoding` is a pickle.
    """
    found = encoding_of(encoding)
    if not found.safe:
        raise ValueError(f"{encoding} columns hold pickles, which can run any code; leave them out")

    def convert(data: memoryview) -> Payload:
        found.decode(data)
        return data

    return (lambda data: data) if encoding in ("jpeg", "png", "bytes", "list[jpeg]", "list[png]") else convert


def _to_member(kind: str, encoding: str) -> Convert:
    decode = encoding_of(encoding).decode
    if kind == "int":
        return lambda data: str(decode(data)).encode()
    if kind == "ndarray" or kind in _NUMBERS:
        return lambda data: npy_bytes(np.asarray(decode(data)))
    if kind == "str_float":
        return lambda data: json.dumps(decode(data)).encode()
    if kind == "pil":
        return _png_of_raw
    return _checked(encoding)


def _to_value(kind: str, encoding: str) -> Convert:
    encode = encoding_of(encoding).encode
    if kind == "int":
        return lambda data: encode(int(bytes(data)))
    if kind == "ndarray":
        return lambda data: encode(decode_npy(data))
    if kind in _NUMBERS:
        return lambda data: _number(data, encoding)
    if kind == "str_float":
        return lambda data: encode(float(json.loads(bytes(data))))
    if kind == "pil":
        return lambda data: encode_raw(decode_file(data))
    return _checked(encoding)


def _number(data: memoryview, encoding: str) -> bytes:
    array = decode_npy(data)
    if array.shape != () or array.dtype.name != encoding:
        raise ValueError(f"has dtype {array.dtype.name} and shape {array.shape}, but must be one {encoding}")
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def npy_bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    """Return `array` as the bytes of a .npy file; the header is the same with every NumPy version."""
    little = array.dtype.newbyteorder("<")
    text = f"{{'descr': '{little.str}', 'fortran_order': False, 'shape': {array.shape!r}, }}"
    header_bytes = -(-(len(_NPY_MAGIC) + 2 + len(text) + 1) // 64) * 64
    text = text.ljust(header_bytes - len(_NPY_MAGIC) - 3) + "\n"
    values = np.ascontiguousarray(array, dtype=little).tobytes()
    return _NPY_MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii") + values


def _png_of_raw(data: memoryview) -> bytes:
    image = decode_raw(data)
    if image.mode not in _PNG_MODES:
        raise ValueError(f"is an image of mode {image.mode}, which PNG cannot hold")
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
