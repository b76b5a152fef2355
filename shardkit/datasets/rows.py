"""Select rows of a dataset and convert them to columns for NumPy, PyTorch, Arrow and pandas.

`dataset[3:9]`, `dataset[[1, 5]]` and `dataset.sample(5)` are `Rows`: row numbers in the requested order. Data
is read only when a row or a column is accessed, and not cached: a conversion reads and holds all its rows.
So its memory is limited. After the first `_PROBED` rows it ends with an error if all rows would take more
than twice the limit, and otherwise when those read so far exceed it.

A column of numbers, or of arrays whose shape the index fixes, becomes one array [rows, ...]. Any other column
(text, images, arrays of any length) becomes a list with one value per row, None if a row lacks it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeGuard, cast, overload

import numpy as np
import numpy.typing as npt

from shardkit.display import counted
from shardkit.errors import ShardError, ShardkitError, naming_extras
from shardkit.formats.mds.encodings import constant_layout
from shardkit.limits import available_bytes
from shardkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa
    import torch

    from shardkit.datasets.opened import OpenDataset


RowChoice: TypeAlias = slice | Sequence[int] | npt.NDArray[np.integer[Any]]

_SHOWN = 6  # maximum number of row numbers in a repr
_PROBED = 100  # number of rows from which the memory of all rows is estimated
_STRIDE = 16  # of later rows, each 16th is measured, because measuring takes a third as long as reading
_FREE_PARTS = 4  # a conversion may read a quarter of the free memory: it holds rows and columns at a time


class Rows:
    """Selected rows of a dataset; indexing with a slice or a list gives Rows again.

    Conversions take `columns` (default: all) and `max_bytes`, the maximum size of the rows in memory, such as
    "20GB" (default: a quarter of the free memory). Larger selections raise ShardkitError.
    """

    def __init__(self, dataset: OpenDataset, numbers: range | npt.NDArray[np.int64]) -> None:
        """Select the rows with these valid `numbers`."""
        self.dataset = dataset
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[dict[str, object]]:
        return (self.dataset.row(int(number)) for number in self.numbers)

    @overload
    def __getitem__(self, index: RowChoice) -> Rows: ...  # type: ignore[overload-overlap]  # arrays
    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, object]: ...
    def __getitem__(self, index: SupportsIndex | RowChoice) -> dict[str, object] | Rows:
        """Return the selection's row `index` as {column: value}, or Rows for a slice or a list."""
        if isinstance(index, str):
            raise no_rows([index])
        if is_single(index):
            return self.dataset.row(int(self.numbers[operator.index(index)]))
        if isinstance(index, slice):
            return Rows(self.dataset, self.numbers[index])
        chosen = self._chosen(index)
        if isinstance(self.numbers, range):  # not converted, because it may be too long for an array
            return Rows(self.dataset, self.numbers.start + self.numbers.step * chosen)
        return Rows(self.dataset, self.numbers[chosen])

    def to_numpy(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Return {column: array} of `columns` (default: all), of objects if shape or dtype are not fixed."""
        return {
            name: values if isinstance(values, np.ndarray) else _object_array(values)
            for name, values in self._columns(columns, max_bytes).items()
        }

    def to_torch(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> dict[str, torch.Tensor | list[object]]:
        """Return {column: tensor or list}; unsigned integers of over 8 bits, such as tokens, become int64."""
        with naming_extras("Rows.to_torch"):
            import torch
        found: dict[str, torch.Tensor | list[object]] = {}
        for name, values in self._columns(columns, max_bytes).items():
            if isinstance(values, np.ndarray):
                is_wide = values.dtype.kind == "u" and values.dtype.itemsize > 1
                found[name] = torch.from_numpy(values.astype(np.int64) if is_wide else values)
            else:
                found[name] = values
        return found

    def to_arrow(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> pa.Table:
        """Return an Arrow table with the row numbers as column `row`. Raises ShardError for other columns."""
        with naming_extras("Rows.to_arrow", pyarrow="parquet"):
            import pyarrow as pa
        table: dict[str, pa.Array] = {"row": pa.array(np.asarray(self.numbers, np.int64))}
        for name, values in self._columns(columns, max_bytes).items():
            try:
                table[name] = _arrow_array(values)
            except pa.ArrowException as error:
                problem = f"column {name!r} cannot be in an Arrow table ({error}); name others with columns="
                raise ShardError(self.dataset.location, problem) from error
        return pa.table(table)

    def to_pandas(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> pandas.DataFrame:
        """Return a data frame whose index is the row numbers; arrays become values of object columns."""
        with naming_extras("Rows.to_pandas"):
            import pandas
        data = {
            name: list(values) if isinstance(values, np.ndarray) and values.ndim > 1 else values
            for name, values in self._columns(columns, max_bytes).items()
        }
        return pandas.DataFrame(data, index=pandas.Index(self.numbers, name="row"))

    def _chosen(self, choice: object) -> npt.NDArray[np.int64]:
        """Convert indices into this selection, which may be negative, to int64 indices from 0."""
        places, count = np.asarray(choice), len(self)
        if not places.size:
            return np.empty(0, np.int64)
        if places.dtype.kind in "UO" and places.ndim == 1 and all(isinstance(one, str) for one in places):
            raise no_rows([*map(str, places)])
        if places.ndim != 1 or places.dtype.kind not in "iu":
            hint = "; for a mask, give numpy.flatnonzero(mask)" if places.dtype.kind == "b" else ""
            raise TypeError(f"select rows by number, slice or list of numbers, not by {choice!r:.100}{hint}")
        places = places.astype(np.int64)
        if len(wrong := places[(places < -count) | (places >= count)]):
            raise IndexError(f"{self.dataset.location}: no row {wrong[0]:,}; there are {count:,}")
        return places % count

    def _columns(
        self, columns: Sequence[str] | None, max_bytes: int | str | None
    ) -> dict[str, npt.NDArray[np.generic] | list[object]]:
        """Return the values of each column in the order of the rows.

        None selects all columns, or those that the dataset was opened with. Raises ShardkitError if the rows
        take more than `max_bytes`.
        """
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names: columns=[{columns!r}]")
        columns = self.dataset.selected if columns is None else columns
        if columns is not None:
            columns = [self.dataset.column_name(name) for name in columns]
        wanted = None if columns is None else frozenset(columns)
        samples = self._read(wanted, max_bytes)
        known = {column.name: column for column in self.dataset.columns}
        there = dict.fromkeys([*known, *(name for sample in samples for name in sample)])
        names = list(there if columns is None else columns)
        if unknown := [name for name in names if name not in there]:
            problem = f"has no column {unknown[0]!r}; it has {', '.join(there)}"
            raise ShardError(self.dataset.location, problem)
        found: dict[str, npt.NDArray[np.generic] | list[object]] = {}
        for name in names:
            values = [sample.get(name) for sample in samples]
            layout = constant_layout(known[name].encoding) if name in known else None
            found[name] = values if layout is None else _stacked(values, *layout)
        return found

    def _read(self, wanted: frozenset[str] | None, max_bytes: int | str | None) -> list[dict[str, object]]:
        """Return all rows; raise ShardkitError when they take more memory than they may."""
        limit = available_bytes() // _FREE_PARTS if max_bytes is None else parse_bytes(max_bytes)
        samples: list[dict[str, object]] = []
        held = 0
        for place, number in enumerate(self.numbers):
            sample = self.dataset.row(int(number), wanted)
            samples.append(sample)
            if place >= _PROBED and place % _STRIDE:
                continue
            held += _memory_of(sample) * (1 if place < _PROBED else _STRIDE)
            projected = held * len(self) // len(samples)
            if held > limit or (len(samples) == _PROBED and projected > 2 * limit):
                may = "a quarter of the free memory" if max_bytes is None else "max_bytes"
                raise ShardkitError(
                    f"{self.dataset.location}: {counted(len(self), 'row')} would take about "
                    f"{format_bytes(projected)}, more than {format_bytes(limit)} ({may}); convert fewer "
                    'rows, such as dataset[:1000], or fewer columns (columns=["…"]), or give '
                    'max_bytes="…GB" if there is room; sk.StreamingLoader reads all rows in bounded memory'
                )
        return samples

    def __repr__(self) -> str:
        shown = ", ".join(f"{number:,}" for number in self.numbers[:_SHOWN])
        more = ", …" if len(self) > _SHOWN else ""
        return f"<{counted(len(self), 'row')} of {self.dataset.location}: {shown}{more}>"


def is_single(index: object) -> TypeGuard[SupportsIndex]:
    """Return whether an index selects a single row."""
    return not isinstance(index, slice) and not np.ndim(cast(npt.ArrayLike, index))


def no_rows(names: Sequence[str]) -> TypeError:
    """Return the error for names of columns where rows are selected."""
    name, listed = names[0], ", ".join(map(repr, names))
    return TypeError(
        f"select rows by number, slice or list of numbers, not by {listed}: dataset[0][{name!r}] is the "
        f"value of one row, dataset[:100].to_numpy([{listed}]) has the values of 100 rows, and sk.open(path, "
        f"columns=[{listed}]) reads no other columns"
    )


def _memory_of(value: object) -> int:
    """Return about how many bytes a value takes in memory; an image counts with all its pixels."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_memory_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sys.getsizeof(value) + sum(map(_memory_of, value))
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * len(value.getbands()))  # type: ignore[attr-defined]
    return sys.getsizeof(value)


def _stacked(
    values: list[object], dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[np.generic] | list[object]:
    """Stack the values into an array; return them as they are if one is missing or has another shape."""
    arrays = [np.asarray(value) for value in values]
    if any(array.dtype.kind in "OSU" or array.shape != shape for array in arrays):
        return values
    stacked: npt.NDArray[np.generic] = np.stack(arrays) if arrays else np.empty((0, *shape), dtype)
    return stacked


def _object_array(values: list[object]) -> npt.NDArray[np.generic]:
    array = np.empty(len(values), object)
    for number, value in enumerate(values):  # one by one, because NumPy would unpack lists of equal length
        array[number] = value
    return array


def _arrow_array(values: npt.NDArray[np.generic] | list[object]) -> pa.Array:
    """Convert values to a column of an Arrow table; arrays [rows, ...] become fixed-size lists."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        array = pa.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    return pa.array([value.tolist() if isinstance(value, np.ndarray) else value for value in values])
