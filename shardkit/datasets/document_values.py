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

from shardkit.arrays import Ints
from shardkit.files import load_json
from shardkit.hashing import value_hash

ValueType = Literal["float32", "float64", "int64", "hash"]
VALUE_TYPES: tuple[str, ...] = get_args(ValueType)
MISSING = -1  # of int64 and hash; NaN for floats
_MAX_EXACT = float(1 << 63)

_Values = npt.NDArray[Any]


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
    values, wrong = _of_floats(array.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(), kind)
    return values, int(wrong.sum())


def _of_floats(numbers: npt.NDArray[np.float64], kind: ValueType) -> tuple[_Values, npt.NDArray[np.bool_]]:
    """Return float64 numbers, NaN where missing, as values, and which of them are of another kind."""
    good = np.isfinite(numbers)
    if kind == "int64":
        good &= (numbers == np.floor(numbers)) & (np.abs(numbers) < _MAX_EXACT)
    values = missing(len(numbers), kind)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
        values[good] = numbers[good]
    if values.dtype.kind == "f" and (beyond := np.isinf(values)).any():
        values[beyond], good[beyond] = np.nan, False
    return values, ~good & ~np.isnan(numbers)


def json_values(
    objects: pa.Array, types: Mapping[str, tuple[str, ValueType]]
) -> dict[str, tuple[_Values, int]]:
    """Return the values in JSON objects, which may be null: for each field in `types` of (key, type).

    Raises ValueError if a text is not JSON.
    """
    encoded = objects.dictionary_encode()  # documents in several rows, or alike, are parsed once
    parsed = [load_json(text) for text in encoded.dictionary.to_pylist()]
    numbers = encoded.indices.fill_null(len(parsed)).to_numpy()
    counts = np.bincount(numbers, minlength=len(parsed) + 1)
    made = {}
    for name, (key, kind) in types.items():
        found = [one.get(key) if isinstance(one, dict) else None for one in parsed]
        found = [None if one != one else one for one in found]  # NaN
        values, wrong = _of_objects([*found, None], kind)
        made[name] = values[numbers], int(counts[wrong].sum())
    return made


def _of_objects(found: Sequence[object], kind: ValueType) -> tuple[_Values, npt.NDArray[np.bool_]]:
    """Return Python objects as values, and which of them are of another kind."""
    if kind.startswith("float"):
        numbers = [one if type(one) is float else _float(one) for one in found]
        return _of_floats(np.array(numbers, np.float64), kind)
    made = [None if one is None else _hash(one) if kind == "hash" else _whole(one) for one in found]
    wrong = [one is not None and value is None for one, value in zip(found, made, strict=True)]
    values = [MISSING if value is None else value for value in made]
    return np.array(values, np.int64), np.array(wrong, np.bool_)


def _float(one: object) -> float:
    """Return a number; NaN for None, and infinity, which is no value either, for what is of another kind."""
    if one is None:
        return math.nan
    try:
        return float(one) if isinstance(one, int) else math.inf
    except OverflowError:  # an integer of more than 1,024 bits
        return math.inf


def _hash(one: object) -> int | None:
    is_text = isinstance(one, (str, int)) and not isinstance(one, bool)
    return value_hash(str(one)) if is_text else None


def _whole(one: object) -> int | None:
    if not isinstance(one, (int, float)) or not -_MAX_EXACT < one < _MAX_EXACT:
        return None
    return int(one) if one == math.floor(one) else None
