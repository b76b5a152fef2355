"""The table of each row's work, by which loaders with `balance` place rows on ranks.

`make_row_costs` reads all rows of a dataset once and writes the sum of squared document lengths of each, 4 or
8 bytes a row, beside the index (`shardkit.datasets.row_costs`). A table that is there is only checked.
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
    """Write the table beside the index of `path`, or of each of `copies` of it; return the files written.

    Documents end with `eos_id`, by default the one that the card states, or begin with `bos_id`. Raises
    ShardError for a dataset without rows of tokens of one length, and for a copy with another fingerprint.
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
                    f"has the fingerprint {copy.fingerprint}, {dataset.location} {dataset.fingerprint}: it "
                    "is no copy, and has rows of its own",
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
        raise ShardError(dataset.location, "states no id that ends documents: give eos_id or bos_id")
    return eos_id
