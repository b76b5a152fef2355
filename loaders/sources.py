"""How wanted columns are read: gathered from maps if all have constant size, decoded otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkit.dataset import Dataset
from shardkit.index import Column
from shardkit.loaders.config import TokenDtype, output_dtype
from shardkit.loaders.rows import FixedColumn, FixedRows, Reader
from shardkit.loaders.samples import DecodedSamples, constant_layout

__all__ = ["Source", "SourceInfo", "open_source"]


PLAN_BYTES = 1 << 30
_PLANS_IN_CACHE = 16  # a plan reaches so little ahead that what it needs early does not evict what is in use


class Source(Protocol):
    """Gives readers of planned samples; `waited`: the last one needed shards that were not here yet."""

    waited: bool

    def restart(self, follow: Callable[[], None]) -> None:
        """A run on a remote dataset begins, perhaps elsewhere; `follow` starts to fetch ahead of it."""

    def advance(self, position: int) -> None:
        """Everything before `position` has been read; called before each plan."""

    def progress(self) -> str:
        """What is being waited for, as the end of a sentence; "" if nothing is."""

    def reader(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> Reader: ...


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A source and what the loader must know of it."""

    source: Source
    token_key: str | None  # the batch's name of the column that holds tokens, if it is delivered
    stored_bytes: int  # of a sample, on average
    delivered_bytes: int | None  # of a sample, if constant
    plan_bytes: int = PLAN_BYTES  # of stored samples, at most, in a plan: its shards are open together


def open_source(
    dataset: Dataset,
    columns: Sequence[str] | None,
    dtype: TokenDtype,
) -> SourceInfo:
    """The source of `columns` (None: all); tokens are converted to `dtype`. ValueError for unknown names.

    In tars, tokens lie in members called `tokens.npy`; batches call them `tokens` as for MDS.
    """
    token_column = dataset.token_column
    names = _batch_names(dataset, columns)
    token_key = next((key for key, name in names.items() if name == token_column), None)
    delivered: dict[str, np.dtype[np.generic]] = {}
    if token_key is not None and dataset.token_dtype is not None:
        delivered[token_key] = output_dtype(dtype, dataset.token_dtype)
    raw_bytes = sum(info.raw.bytes for info in dataset.manifest.shards)
    plan_bytes = PLAN_BYTES
    if dataset.shards is not None:
        plan_bytes = min(plan_bytes, dataset.shards.cache.capacity // _PLANS_IN_CACHE)
    fixed = _fixed_columns(dataset, names, delivered)
    if fixed is None:
        mean = max(1, raw_bytes // max(1, len(dataset)))
        return SourceInfo(DecodedSamples(dataset, names, delivered), token_key, mean, None, plan_bytes)
    stored_bytes = sum(prod(column.shape) * column.stored.itemsize for column in fixed.values())
    delivered_bytes = sum(prod(column.shape) * column.delivered.itemsize for column in fixed.values())
    return SourceInfo(FixedRows(dataset, fixed), token_key, stored_bytes, delivered_bytes, plan_bytes)


def _batch_names(dataset: Dataset, columns: Sequence[str] | None) -> dict[str, str]:
    """The dataset's name of each column, by the batch's."""
    token_column = dataset.token_column
    short = {"tokens": "tokens.npy"} if token_column == "tokens.npy" else {}
    known = [column.name for column in dataset.columns]
    is_tar = dataset.manifest.format == "tar"
    if columns is None:
        # A key names a sample of a foreign tar; that of a packed row is only its number again.
        chosen = known if not is_tar or known == [token_column] else ["__key__", *known]
    else:
        chosen = [short.get(name, name) for name in columns]
        unknown = [name for name in chosen if name not in known and not (is_tar and name == "__key__")]
        if unknown:
            raise ValueError(f"{dataset.location} has no column {unknown[0]!r}; it has {', '.join(known)}")
    long = {name: key for key, name in short.items()}
    return {long.get(name, name): name for name in chosen}


def _fixed_columns(
    dataset: Dataset, names: dict[str, str], delivered: dict[str, np.dtype[np.generic]]
) -> dict[str, FixedColumn] | None:
    """The columns as ones of constant size, None if one of them is not."""
    by_name = {column.name: column for column in dataset.columns}
    fixed = {}
    for key, name in names.items():
        column = by_name.get(name)
        layout = None if column is None or column.size is None else constant_layout(column)
        if column is None or layout is None:
            return None
        dtype, shape = layout
        fixed[key] = FixedColumn(name, shape, dtype, delivered.get(key, dtype.newbyteorder("=")))
    return fixed if _has_stride(dataset, [by_name[name] for name in names.values()]) else None


def _has_stride(dataset: Dataset, wanted: list[Column]) -> bool:
    """Whether every shard has these very columns, a constant distance apart from row to row."""
    seen: tuple[Column, ...] | None = None
    for number, info in enumerate(dataset.manifest.shards):
        columns = info.columns or dataset.shard(number).columns
        if columns is seen or columns == seen:
            continue
        if not set(wanted) <= set(columns):
            return False
        # In MDS, one column of varying size shifts all others; tars state sizes only of strided columns.
        if dataset.manifest.format == "mds" and any(column.size is None for column in columns):
            return False
        seen = columns
    return True
