"""Writes the table of row costs, which loaders with `balance` use to assign rows to ranks.

`make_row_costs` reads all rows of a dataset once. For each row it writes the sum of squared document lengths,
4 or 8 bytes per row, next to the index (`shardkit.datasets.row_costs`). An existing table is only checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.row_costs import count_row_costs, find_row_costs, write_row_costs
from shardkit.errors import ShardError
from shardkit.order.balance import DocumentIds
from shardkit.storage.store import StorageOptions


def make_row_costs(
    path: str | os.PathLike[str],
    *,
    copies: Sequence[str | os.PathLike[str]] = (),
    eos_id: int | None = None,
    bos_id: int | None = None,
    pad_id: int | None = None,
    storage: StorageOptions | None = None,
    progress: bool = True,
) -> list[str]:
    """Write the row costs of the dataset `path` next to its index, or next to the indexes of its `copies`.

    Return the files written. Documents end with `eos_id` (default: the card's id) or begin with `bos_id`.
    Raises ShardError if the dataset has no token rows of one length, or if a copy has another fingerprint.
    """
    if eos_id is not None and bos_id is not None:
        raise ValueError("documents are found by eos_id or by bos_id: give one of the two")
    with ExitStack() as opened:
        dataset, *others = (
            opened.enter_context(open_dataset(place, storage=storage)) for place in (path, *copies)
        )
        for copy in others:
            if copy.fingerprint != dataset.fingerprint:
                raise ShardError(
                    copy.location,
                    f"has the fingerprint {copy.fingerprint}, but {dataset.location} has "
                    f"{dataset.fingerprint}: it is not a copy, so its rows need a table of their own",
                )
        ids = DocumentIds(_eos_id(dataset) if eos_id is bos_id is None else eos_id, bos_id, pad_id)
        costs = find_row_costs(dataset, ids)
        if costs is None:
            costs = count_row_costs(dataset, ids, progress=progress)
        missing = [place for place in others or [dataset] if find_row_costs(place, ids) is None]
        return [f"{place.location}/{write_row_costs(place, ids, costs)}" for place in missing]


def _eos_id(dataset: Dataset) -> int:
    eos_id = None if dataset.card is None else dataset.card.tokenizer.eos_id
    if eos_id is None:
        raise ShardError(dataset.location, "has no eos_id in its card: give eos_id or bos_id")
    return eos_id
