"""Balanced sampling: divides a labeled dataset into streams, one per class or weight, to be mixed.

    loader = StreamingLoader(balanced_streams("photos", "label"), batch_size=32, return_ids=True)

A class is a `Stream` over the whole dataset that excludes the rows of all other classes. So classes have all
properties of mixtures: shares are exact in every block, a schedule may change them, resuming is arithmetic,
and every sample of a class is delivered, in a new order on each pass, before any is repeated. (torch's
WeightedRandomSampler samples with replacement: n samplings from n samples miss 1/e (37 %) of the samples,
and its state contains neither its position nor the upcoming samples.)

All streams share one open dataset. If its shards are remote, one fetch plan serves all classes. But each
class visits the shards in a different order, so the cache should have room for the whole dataset (otherwise
rows of constant size are read one by one).

Costs: one pass over the column (one array copy per shard if all columns have constant size); 32 bytes of
memory per sample while the streams exist; about 150 bytes per stream in a state.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import gcd, lcm
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.cache import CacheOptions
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.errors import ShardError
from shardkit.formats.tar.shard import TarShard
from shardkit.loaders.config import Stream
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import MAX_STREAMS, MAX_WEIGHT
from shardkit.progress import reading
from shardkit.storage.store import StorageOptions

__all__ = ["Label", "balanced_streams", "weighted_streams"]

Label: TypeAlias = int | str | bytes
_Codes = npt.NDArray[np.int16]

_READERS = 8  # number of remote shards fetched in parallel while a column is read
# Weights are scaled to this sum before rounding; half the limit, because rounding may raise each weight by 1.
_ROUNDED = MAX_WEIGHT // 2


def balanced_streams(
    dataset: str | os.PathLike[str] | Dataset,
    column: str,
    *,
    weights: Mapping[Label, float] | None = None,
    storage: StorageOptions | None = None,
    cache: CacheOptions | None = None,
) -> list[Stream]:
    """Return one stream per class, which is a value of `column`, for a `StreamingLoader`.

    Streams are named by their value, in ascending order. Classes are delivered equally often: a global batch
    whose size is a multiple of the number of classes has the same number of samples of each. `weights` sets
    other shares; a class that it does not name gets 0.
    Values are whole numbers, strings or bytes, at most 4,096 different ones. This function reads the column
    once; the streams may be used any number of times. With `return_ids`, a batch's `stream_id` is the index
    of the class in the returned list, and `sample_id` is the row in the dataset.

    A path is opened with `storage` and `cache`, which then replace the loader's own options; an open dataset
    is read as it was opened. Raises ValueError for an unknown column, for values that cannot be classes, and
    for weights of classes that do not occur.
    """
    opened = _open(dataset, storage, cache)
    labels, codes = _read_classes(opened, column)
    if opened is not dataset:
        opened.close()  # closes the shards opened to read the column; the dataset reopens when it is used
    shares = [Fraction(1)] * len(labels)
    if weights is not None:
        if unknown := [label for label in weights if label not in labels]:
            listed = ", ".join(map(repr, labels[:20])) + (", …" if len(labels) > 20 else "")
            raise ValueError(
                f"{opened.location} has no {unknown[0]!r} in column {column!r}; its classes are {listed}"
            )
        shares = [_exact(weights.get(label, 0)) for label in labels]
    return _streams(opened, codes, list(map(_name, labels)), shares)


def weighted_streams(
    dataset: str | os.PathLike[str] | Dataset,
    weights: npt.ArrayLike,
    *,
    levels: int = 256,
    storage: StorageOptions | None = None,
    cache: CacheOptions | None = None,
) -> list[Stream]:
    """Return streams that deliver each sample in proportion to its weight, for a `StreamingLoader`.

    `weights`: float64[samples], the same as for WeightedRandomSampler. Among n delivered samples, a sample
    comes n * weight / sum(weights) times on average; weight 0 means never. Samples of equal weight form one
    stream; each of them comes once before any is repeated. Streams are in order of ascending weight.

    Up to `levels` different weights are used unchanged. If there are more, they are grouped into `levels`
    geometric steps, and each sample gets the mean weight of its step: the total of each step stays exact, and
    a sample's weight changes by less than the factor (largest / smallest weight above 0) ** (1 / levels),
    which is 2.8 % for weights that differ a thousandfold. If the total weights of the streams are not in the
    proportion of small whole numbers, they are rounded to 2**-30 of their sum.
    """
    opened = _open(dataset, storage, cache)
    each = np.asarray(weights, dtype=np.float64)
    if each.shape != (len(opened),):
        raise ValueError(
            f"{opened.location} has {len(opened):,} samples, but weights has shape {list(each.shape)}: "
            "give one number per sample"
        )
    if not (np.isfinite(each) & (each >= 0)).all() or not each.any():
        raise ValueError("weights must be finite numbers of at least 0, and at least one must be above 0")
    if not 1 <= levels <= MAX_STREAMS:
        raise ValueError(f"levels must be from 1 to {MAX_STREAMS:,}, not {levels}")
    is_wanted = each > 0
    values, which, counts = np.unique(each[is_wanted], return_inverse=True, return_counts=True)
    codes = np.full(len(each), -1, dtype=np.int16)
    if len(values) <= levels:
        codes[is_wanted] = which
        names = [repr(value) for value in values.tolist()]
        shares = [_exact(v) * n for v, n in zip(values.tolist(), counts.tolist(), strict=True)]
        return _streams(opened, codes, names, shares)
    steps = _geometric_steps(values, levels)
    codes[is_wanted] = steps[which]
    totals = np.bincount(steps, values * counts).tolist()
    sizes = np.bincount(steps, counts).tolist()
    names = [repr(total / size) for total, size in zip(totals, sizes, strict=True)]
    return _streams(opened, codes, names, [Fraction(total) for total in totals])


def _open(
    dataset: str | os.PathLike[str] | Dataset, storage: StorageOptions | None, cache: CacheOptions | None
) -> Dataset:
    if isinstance(dataset, Dataset):
        return dataset
    return open_dataset(os.fspath(dataset), storage=storage, cache=cache)


def _geometric_steps(values: npt.NDArray[np.float64], levels: int) -> npt.NDArray[np.int16]:
    """Return the number of each ascending value's geometric step: at most `levels` steps, none is empty."""
    logs = np.log(values)
    steps = np.floor((logs - logs[0]) * (levels / (logs[-1] - logs[0])))
    _, found = np.unique(np.minimum(steps, levels - 1), return_inverse=True)
    return np.asarray(found, dtype=np.int16)


def _streams(
    dataset: Dataset, codes: _Codes, names: Sequence[str], shares: Sequence[Fraction]
) -> list[Stream]:
    """Return one stream per code 0, 1, … with the rows of that code; rows with code -1 are in no stream."""
    by_code = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[by_code], np.arange(len(names) + 1))
    rows_of = (by_code[low:high] for low, high in pairwise(edges.tolist()))
    return [
        Stream(dataset, weight=weight, name=name, exclude=_all_but(rows, len(codes)))
        for name, weight, rows in zip(names, _whole(shares), rows_of, strict=True)
    ]


def _all_but(rows: npt.NDArray[np.intp], samples: int) -> Exclusions:
    """Return exclusions of all rows of a dataset of `samples` except these ascending `rows`."""
    begins, ends = np.append(0, rows + 1), np.append(rows, samples)
    gaps = begins < ends
    return Exclusions(np.stack([begins[gaps], ends[gaps]], axis=1))


def _exact(weight: float) -> Fraction:
    """Return a weight as the exact value of its decimal form; raise ValueError unless it is at least 0."""
    if not isinstance(weight, (int, float, np.integer, np.floating)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weights must be numbers of at least 0, not {weight!r}")
    return Fraction(str(float(weight))) if isinstance(weight, (float, np.floating)) else Fraction(int(weight))


def _whole(shares: Sequence[Fraction]) -> list[int]:
    """Return whole numbers in the proportions of `shares`, rounded if their sum would exceed MAX_WEIGHT.

    A share above 0 stays above 0.
    """
    if not any(shares):
        raise ValueError("at least one weight must be above 0")
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    divisor = gcd(*whole)
    if sum(whole) // divisor <= MAX_WEIGHT:
        return [weight // divisor for weight in whole]
    total = sum(whole)
    return [max(1, (weight * _ROUNDED + total // 2) // total) if weight else 0 for weight in whole]


def _name(label: Label) -> str:
    """Return the name of a class's stream: the label as a string that is unique and not empty."""
    if isinstance(label, bytes):
        return repr(label)[2:-1] or "b''"
    return str(label) or "''"


def _read_classes(dataset: Dataset, column: str) -> tuple[list[Label], _Codes]:
    """Return a column's distinct values, ascending, and int16[samples]: the index of each sample's value."""
    column, known = dataset.column_name(column), [each.name for each in dataset.columns]
    if column not in known and f"{column}.npy" not in known:
        raise ValueError(f"{dataset.location} has no column {column!r}; it has {', '.join(known)}")
    numbers: dict[Label, int] = {}
    codes = np.empty(len(dataset), dtype=np.int16)
    starts = dataset.manifest.shard_starts
    for shard, (labels, which) in enumerate(_read_shards(dataset, column)):
        own = [numbers.setdefault(label, len(numbers)) for label in labels]
        if len(numbers) > MAX_STREAMS:
            raise ValueError(
                f"column {column!r} of {dataset.location} has more than {MAX_STREAMS:,} different values: "
                "group them into fewer classes, or give each sample a weight (weighted_streams)"
            )
        codes[starts[shard] : starts[shard + 1]] = np.array(own, dtype=np.int16)[which]
    kinds = sorted({type(label).__name__ for label in numbers})
    if len(kinds) > 1:
        raise ValueError(
            f"column {column!r} of {dataset.location} has values of types {', '.join(kinds)}; classes must "
            "have one type"
        )
    if not numbers:
        raise ValueError(f"{dataset.location} has no samples")
    ascending = sorted(numbers)
    rank = np.empty(len(numbers), dtype=np.int16)
    rank[[numbers[label] for label in ascending]] = np.arange(len(numbers))
    return ascending, rank[codes]


_Labels = tuple[list[Label], npt.NDArray[np.intp]]


def _read_shards(dataset: Dataset, column: str) -> Iterator[_Labels]:
    """Yield for each shard its distinct values and the index of each row's value; read shards ahead."""
    infos = dataset.manifest.shards
    sizes = {number: max(info.stored.bytes, 0) for number, info in enumerate(infos)}
    readers = 1 if dataset.shards is None else _READERS
    waiting: deque[tuple[int, Future[_Labels]]] = deque()
    with ThreadPoolExecutor(readers) as pool, reading(f"read {column}", sizes) as report:
        numbers = iter(range(len(infos)))
        while True:
            while len(waiting) < 2 * readers and (number := next(numbers, None)) is not None:
                waiting.append((number, pool.submit(_read_shard, dataset, column, number)))
            if not waiting:
                return
            number, future = waiting.popleft()
            yield future.result()
            report(number)
            if dataset.shards is not None:  # close read shards: open ones keep disk space even if evicted
                dataset.keep_only({number for number, _ in waiting})


def _read_shard(dataset: Dataset, column: str, number: int) -> _Labels:
    if not dataset.manifest.shards[number].samples:
        return [], np.empty(0, dtype=np.intp)
    shard = dataset.shard(number)
    name = column if any(each.name == column for each in shard.columns) else f"{column}.npy"
    if all(each.name != name for each in shard.columns):
        raise ShardError(dataset.where(number), f"has no column {column!r}")
    rows = shard.fixed_rows(name)
    if rows is None and isinstance(shard, TarShard) and (found := shard.offset_rows(name)) is not None:
        rows = found[0][found[1]]
    if rows is not None:
        if rows.dtype.kind not in "biuSU" or rows.size != len(rows):
            raise _no_class(dataset.where(number), column, f"{rows.dtype}{list(rows.shape[1:])}")
        values, which = np.unique(rows.reshape(len(rows)), return_inverse=True)
        return values.tolist(), which
    own: dict[Label, int] = {}
    label = partial(_label, dataset.where(number), column)
    samples: Iterable[dict[str, object]] = (shard.sample(row, (name,)) for row in range(len(shard)))
    codes = [own.setdefault(label(row, sample.get(name)), len(own)) for row, sample in enumerate(samples)]
    return list(own), np.array(codes, dtype=np.intp)


def _label(where: str, column: str, row: int, value: object) -> Label:
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        value = value.item()
    if value is None:
        raise ShardError(where, f"sample {row:,} has no {column!r}")
    if not isinstance(value, (int, str, bytes)):
        raise _no_class(where, column, f"{type(value).__name__} (sample {row:,})")
    return value


def _no_class(where: str, column: str, found: str) -> ValueError:
    return ValueError(
        f"{where}: values of column {column!r} are {found}: classes must be whole numbers, strings or bytes"
    )
