"""`MapDataset`: single samples by number, for samplers, DistributedSampler and the Hugging Face Trainer.

Any dataset, local or remote, in its own order: what comes when is the sampler's affair, and so is resuming.
A DataLoader asks for a batch at a time (`__getitems__`), which is read by one gather.
Samples at random touch as many shards as there are samples, so a remote dataset needs a cache with room for
all of it, where `StreamingLoader` needs a small part of that.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, Unpack

import numpy as np

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.map_dataset"):
    import torch
    from torch.utils.data import Dataset as TorchDataset

from shardkit.dataset import Dataset
from shardkit.loaders.batch import BatchMaker
from shardkit.loaders.config import LoaderConfig, LoaderOptions, TokenDtype
from shardkit.loaders.opening import open_streams
from shardkit.loaders.setup import find_eos_id
from shardkit.loaders.sources import SourceInfo, open_source
from shardkit.loaders.streams import Streams

__all__ = ["MapDataset"]

Sample = dict[str, Any]

_OPTIONS = {"labels", "mask_document_starts", "position_ids", "document_ids", "eos_id", "columns"}
_REMOTE_OPTIONS = {"cache_dir", "cache_bytes", "connections", "storage"}


class MapDataset(TorchDataset[Sample]):
    """Sample i as {"tokens": int64[length], …}; numbers and arrays of constant shape are tensors.

    `dtype`: of the tokens; None means as stored. `return_ids` adds `sample_id`. `rename`: other names for
    some of these, {"tokens": "input_ids"}. Options, as of `StreamingLoader`: labels,
    mask_document_starts, position_ids, document_ids, eos_id, columns; of remote datasets cache_dir,
    cache_bytes, connections, storage.
    Pickles, and works in forked processes.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset,
        *,
        dtype: TokenDtype = torch.int64,
        return_ids: bool = False,
        rename: Mapping[str, str] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        known = _OPTIONS | _REMOTE_OPTIONS
        if unknown := sorted(options.keys() - known):
            raise TypeError(
                f"MapDataset() takes no option {unknown[0]!r}; known options: {', '.join(sorted(known))}"
            )
        self._config = LoaderConfig.of(options)
        self._dtype = dtype
        streams = open_streams(dataset, self._config, processes=1).streams
        self._dataset = streams.datasets[0]
        source = open_source(streams, self._config.columns, dtype)
        self._source: SourceInfo | None = source
        self._process: int | None = os.getpid()
        self._maker = BatchMaker(
            batch_size=1,  # so that a sample has memory of its own, and drags no others along
            config=self._config,
            token_key=source.token_key,
            eos_id=find_eos_id(streams, self._config, source.token_key),
            return_ids=return_ids,
        )
        self._names: dict[str, str] = {}
        if rename:
            self._names = _checked(rename, self[0])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Sample `index`; negative numbers count from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Sample]:
        """The samples of a batch, in the order asked for: how torch's DataLoader asks."""
        numbers = np.array([self._number(index) for index in indices], dtype=np.int64)
        if not len(numbers):
            return []
        starts = self._dataset.manifest.shard_starts
        shard = (np.searchsorted(starts, numbers, side="right") - 1).astype(np.int32)
        read, _ = self._own_source().source.reader(shard, numbers - starts[shard])
        columns = read(0, len(numbers))
        batches, _ = self._maker.make(columns, numbers)
        names = self._names
        return [{names.get(name, name): value[0] for name, value in batch.items()} for batch in batches]

    def _number(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self._dataset.location}: sample {number} of {len(self)}")
        return number % len(self)

    def _own_source(self) -> SourceInfo:
        """This process's: a child needs locks, threads and connections of its own."""
        if self._source is None or self._process != os.getpid():
            self._dataset = copy.copy(self._dataset)
            self._source = open_source(Streams([self._dataset], ["0"]), self._config.columns, self._dtype)
            self._process = os.getpid()
        return self._source

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_process": None}


def _checked(rename: Mapping[str, str], sample: Sample) -> dict[str, str]:
    """`rename`; ValueError if a sample has no such name, or would have one name twice."""
    if unknown := [name for name in rename if name not in sample]:
        raise ValueError(f"rename has {unknown[0]!r}, but a sample has {', '.join(sample)}")
    if len({rename.get(name, name) for name in sample}) < len(sample):
        raise ValueError(f"rename would give two of {', '.join(sample)} one name: {dict(rename)}")
    return dict(rename)
