"""Chosen rows of a dataset, as columns for NumPy, PyTorch, Arrow and pandas.

`dataset[3:9]`, `dataset[[1, 5]]` and `dataset.sample(5)` are `Rows`: numbers of rows, in the order asked for.
Nothing is read before a row or a column is, and nothing is kept: a conversion reads and holds all its rows.

A column whose values are numbers or arrays of one shape, as the index states, becomes one array [rows, …];
any other column (text, images, arrays of any length) a list with one value a row, None where a row lacks it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeGuard, cast, overload

import numpy as np
import numpy.typing as npt

from shardkit.display import counted
from shardkit.errors import ShardError, naming_extras
from shardkit.formats.mds.encodings import constant_layout

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa
    import torch

    from shardkit.datasets.opened import OpenDataset


RowChoice: TypeAlias = slice | Sequence[int] | npt.NDArray[np.integer[Any]]

_SHOWN = 6  # numbers of rows in a repr


class Rows:
    """Rows of a dataset by their numbers; a slice or list of them gives Rows again."""

    def __init__(self, dataset: OpenDataset, numbers: range | npt.NDArray[np.int64]) -> None:
        """`numbers`: of rows that are there."""
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
        """Row `index` of these as {column: value}, or some of them as Rows."""
        if is_single(index):
            return self.dataset.row(int(self.numbers[operator.index(index)]))
        if isinstance(index, slice):
            return Rows(self.dataset, self.numbers[index])
        chosen = self._chosen(index)
        if isinstance(self.numbers, range):  # which may be longer than memory
            return Rows(self.dataset, self.numbers.start + self.numbers.step * chosen)
        return Rows(self.dataset, self.numbers[chosen])

    def to_numpy(self, columns: Sequence[str] | None = None) -> dict[str, npt.NDArray[np.generic]]:
        """{column: array}; a column that is a list becomes an array of objects. Default: all columns."""
        return {
            name: values if isinstance(values, np.ndarray) else _object_array(values)
            for name, values in self._columns(columns).items()
        }

    def to_torch(self, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor | list[object]]:
        """{column: tensor or list}; unsigned integers of more than a byte become int64, as tokens do."""
        with naming_extras("Rows.to_torch"):
            import torch
        found: dict[str, torch.Tensor | list[object]] = {}
        for name, values in self._columns(columns).items():
            if isinstance(values, np.ndarray):
                is_wide = values.dtype.kind == "u" and values.dtype.itemsize > 1
                found[name] = torch.from_numpy(values.astype(np.int64) if is_wide else values)
            else:
                found[name] = values
        return found

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """A table with the rows' numbers as `row`; ShardError for a column that Arrow has no type for."""
        with naming_extras("Rows.to_arrow"):
            import pyarrow as pa
        table: dict[str, pa.Array] = {"row": pa.array(np.asarray(self.numbers, np.int64))}
        for name, values in self._columns(columns).items():
            try:
                table[name] = _arrow_array(values)
            except pa.ArrowException as error:
                problem = f"column {name!r} cannot be in an Arrow table ({error}); name others with columns="
                raise ShardError(self.dataset.location, problem) from error
        return pa.table(table)

    def to_pandas(self, columns: Sequence[str] | None = None) -> pandas.DataFrame:
        """A data frame, indexed by the rows' numbers; arrays are values of object columns."""
        with naming_extras("Rows.to_pandas"):
            import pandas
        data = {
            name: list(values) if isinstance(values, np.ndarray) and values.ndim > 1 else values
            for name, values in self._columns(columns).items()
        }
        return pandas.DataFrame(data, index=pandas.Index(self.numbers, name="row"))

    def _chosen(self, choice: object) -> npt.NDArray[np.int64]:
        """The places from 0 that a list names; negative ones count from the end."""
        places, count = np.asarray(choice), len(self)
        if not places.size:
            return np.empty(0, np.int64)
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise TypeError(f"rows are chosen by number, slice or list of numbers, not by {choice!r:.100}")
        places = places.astype(np.int64)
        if len(wrong := places[(places < -count) | (places >= count)]):
            raise IndexError(f"{self.dataset.location}: row {wrong[0]:,} of {count:,}")
        return places % count

    def _columns(self, columns: Sequence[str] | None) -> dict[str, npt.NDArray[np.generic] | list[object]]:
        """The values of each column, in the order of the rows; `columns` None: all."""
        if columns is not None:
            columns = [self.dataset.column_name(name) for name in columns]
        wanted = None if columns is None else frozenset(columns)
        samples = [self.dataset.row(int(number), wanted) for number in self.numbers]
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

    def __repr__(self) -> str:
        shown = ", ".join(f"{number:,}" for number in self.numbers[:_SHOWN])
        more = ", …" if len(self) > _SHOWN else ""
        return f"<{counted(len(self), 'row')} of {self.dataset.location}: {shown}{more}>"


def is_single(index: object) -> TypeGuard[SupportsIndex]:
    """Whether an index asks for one row."""
    return not isinstance(index, slice) and not np.ndim(cast(npt.ArrayLike, index))


def _stacked(
    values: list[object], dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[np.generic] | list[object]:
    """One array, unless a value is missing or is not as the index states."""
    arrays = [np.asarray(value) for value in values]
    if any(array.dtype.kind in "OSU" or array.shape != shape for array in arrays):
        return values
    stacked: npt.NDArray[np.generic] = np.stack(arrays) if arrays else np.empty((0, *shape), dtype)
    return stacked


def _object_array(values: list[object]) -> npt.NDArray[np.generic]:
    array = np.empty(len(values), object)
    for number, value in enumerate(values):  # at once, NumPy would unpack lists of one length
        array[number] = value
    return array


def _arrow_array(values: npt.NDArray[np.generic] | list[object]) -> pa.Array:
    """A column of an Arrow table; arrays [rows, …] become lists of constant size."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        array = pa.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    return pa.array([value.tolist() if isinstance(value, np.ndarray) else value for value in values])
