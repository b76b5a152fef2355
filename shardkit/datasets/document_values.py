"""Values of the documents in rows (scores, sources, hashes of URLs), as arrays that loaders put into batches.

A row holds pieces of documents. For each shard, a reader gives where the pieces begin and a value of each:

    built datasets          `provenance.values`: the provenance tables, with any field of `metadata`
    texts read in place     `text_values`: other columns of the same files

Types. "float32" and "float64" hold numbers, true as 1; a value that is missing is NaN. "int64" holds whole
numbers, and "hash" a hash of texts or whole numbers that is never negative (`value_hash`); missing is -1. A
value of another kind (a text among numbers, an infinite number) counts as missing; readers count these. Types
that the user does not give follow from the first values: float32 for numbers, hash for texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import xxhash

from shardkit.arrays import Ints
from shardkit.files import load_json

ValueType = Literal["float32", "float64", "int64", "hash"]
VALUE_TYPES: tuple[str, ...] = get_args(ValueType)
MISSING = -1  # of int64 and hash; NaN for floats
_MAX_EXACT = float(1 << 63)

_Values = npt.NDArray[Any]


def value_hash(text: str) -> int:
    """Return the hash that batches have in place of a text: 63 bits of its xxh3_64, never negative."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) >> 1


def value_dtype(kind: ValueType) -> np.dtype[Any]:
    """Return the dtype of values in batches."""
    return np.dtype(np.int64 if kind == "hash" else kind)


def missing(count: int, kind: ValueType) -> _Values:
    """Return `count` missing values."""
    return np.full(count, np.nan if kind.startswith("float") else MISSING, value_dtype(kind))


def type_of(value: object) -> ValueType | None:
    """Return the default type for documents with this value; None if it is neither number nor text."""
    if isinstance(value, str):
        return "hash"
    return "float32" if isinstance(value, (bool, int, float)) else None


@dataclass(frozen=True, slots=True)
class ShardValues:
    """The values of a shard's documents.

    Row r has the entries `firsts[r]` to `firsts[r + 1]` (exclusive): one for each piece in it, in order, and
    one for what follows the last piece. An entry counts from token `starts` of its row.
    """

    firsts: Ints
    starts: npt.NDArray[np.int32]
    values: Mapping[str, _Values]
    wrong: Mapping[str, int] = field(default_factory=dict)
    """Number of values by field that are missing because they are of another kind."""

    @classmethod
    def of(
        cls,
        rows: int,
        row: Ints,
        end: Ints,
        values: Mapping[str, tuple[_Values, int]],
        types: Mapping[str, ValueType],
    ) -> ShardValues:
        """Return the values of `rows` rows, of pieces in order: their row, and one past their last token.

        `values` has a value of each piece and the count of `wrong` values, for some of the fields in `types`.
        """
        counts = np.bincount(row, minlength=rows)
        firsts = np.zeros(rows + 1, np.int64)
        np.cumsum(counts + 1, out=firsts[1:])
        place = np.arange(len(row)) + row  # each row before has an entry more than pieces
        starts = np.zeros(len(row) + rows, np.int32)
        starts[place + 1] = end  # so what stands between two pieces, such as a repeated bos, is of the second
        made = {}
        for name, kind in types.items():
            made[name] = missing(len(starts), kind)
            if name in values:
                made[name][place] = values[name][0]
        return cls(firsts, starts, made, {name: wrong for name, (_, wrong) in values.items() if wrong})


class ValueReader(Protocol):
    """Reads the values of the documents of one dataset."""

    def types(self, names: Sequence[str]) -> dict[str, ValueType]:
        """Return the default type of each field among `names` that documents were found to have.

        Raises ValueError for a field whose values are neither numbers nor texts.
        """

    def read(self, shards: Sequence[int], types: Mapping[str, ValueType]) -> Iterator[ShardValues]:
        """Yield the values of sorted shards, with all fields of `types`. Raises ShardError or StoreError."""


def arrow_values(array: pa.Array, kind: ValueType) -> tuple[_Values, int]:
    """Convert an Arrow array to values; return them and how many are missing because of their kind."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    there = len(array) - array.null_count
    found, is_bool = array.type, pa.types.is_boolean(array.type)
    if kind == "hash":
        if pa.types.is_integer(found):
            array = array.cast(pa.string())
        elif not (
            pa.types.is_string(found) or pa.types.is_large_string(found) or str(found) == "string_view"
        ):
            return missing(len(array), kind), there
        encoded = array.dictionary_encode()
        hashes = np.array([*map(value_hash, encoded.dictionary.to_pylist()), MISSING], np.int64)
        return hashes[encoded.indices.fill_null(-1).to_numpy()], 0
    if not (is_bool or pa.types.is_integer(found) or pa.types.is_floating(found)):
        return missing(len(array), kind), there
    if kind == "int64" and not pa.types.is_floating(found) and found != pa.uint64():
        return array.cast(pa.int64()).fill_null(MISSING).to_numpy(), 0
    numbers = array.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()
    return float_values(numbers, kind)


def float_values(numbers: npt.NDArray[np.float64], kind: ValueType) -> tuple[_Values, int]:
    """Convert float64 numbers, NaN where missing, to values as `arrow_values` does."""
    good = np.isfinite(numbers)
    if kind == "int64":
        good &= (numbers == np.floor(numbers)) & (np.abs(numbers) < _MAX_EXACT)
    wrong = int((~good & ~np.isnan(numbers)).sum())
    dtype = value_dtype(kind)
    filled = np.where(good, numbers, np.nan if dtype.kind == "f" else MISSING)
    with np.errstate(over="ignore"):  # beyond float32: infinite, and then missing, too
        values = filled.astype(dtype)
    if dtype.kind == "f" and (beyond := np.isinf(values)).any():
        values[beyond] = np.nan
        wrong += int(beyond.sum())
    return values, wrong


def json_values(
    objects: pa.Array, types: Mapping[str, tuple[str, ValueType]]
) -> dict[str, tuple[_Values, int]]:
    """Return the values in JSON objects, which may be null: for each field in `types` of (key, type).

    Raises ValueError if a text is not JSON.
    """
    columns = {
        key: {"hash": pa.string(), "int64": pa.int64()}.get(kind, pa.float64())
        for key, kind in types.values()
    }
    try:
        if len(columns) < len({*types.values()}):
            raise pa.ArrowInvalid("a key is wanted in two types")
        table = _parsed(objects, columns)
        return {
            name: arrow_values(table.column(key).combine_chunks(), kind)
            for name, (key, kind) in types.items()
        }
    except pa.ArrowInvalid:  # a value is of another kind, or the text is not JSON
        parsed = [{} if text is None else load_json(text) for text in objects.to_pylist()]
    made = {}
    for name, (key, kind) in types.items():
        found = [one.get(key) if isinstance(one, dict) else None for one in parsed]
        made[name] = _plain_values(found, kind)
    return made


def _parsed(objects: pa.Array, columns: Mapping[str, pa.DataType]) -> pa.Table:
    """Parse JSON objects with Arrow, which is fast. Raises ArrowInvalid for values of other types."""
    if not len(objects):
        return pa.table({name: pa.array([], kind) for name, kind in columns.items()})
    lines = pa.ListArray.from_arrays([0, len(objects)], objects.fill_null("{}"))
    text = pc.binary_join(lines, "\n")[0].as_buffer()
    table = pyarrow.json.read_json(
        pa.BufferReader(text),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema([*columns.items()]), unexpected_field_behavior="ignore"
        ),
    )
    if table.num_rows != len(objects):
        raise pa.ArrowInvalid("a line is not one object")
    return table


def _plain_values(found: Sequence[object], kind: ValueType) -> tuple[_Values, int]:
    """Return the values of Python objects, each of any kind."""
    values, wrong = missing(len(found), kind), 0
    for number, one in enumerate(found):
        if one is None:
            continue
        good: float | None = None
        if kind == "hash" and isinstance(one, (str, int)) and not isinstance(one, bool):
            good = value_hash(str(one))
        elif kind == "int64" and isinstance(one, (bool, int, float)) and _is_whole(one):
            good = int(one)
        elif kind.startswith("float") and isinstance(one, (bool, int, float)):
            good = _finite(one, value_dtype(kind))
        if good is None:
            wrong += not (isinstance(one, float) and math.isnan(one))
        else:
            values[number] = good
    return values, wrong


def _is_whole(number: float) -> bool:
    return -_MAX_EXACT < number < _MAX_EXACT and number == math.floor(number)


def _finite(number: float, dtype: np.dtype[Any]) -> float | None:
    """Return the number as `dtype` has it; None if it is not finite there."""
    try:
        with np.errstate(over="ignore"):
            made = float(dtype.type(float(number)))
    except OverflowError:
        return None
    return made if math.isfinite(made) else None
