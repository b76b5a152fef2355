"""Megatron-LM: micro-batches for `--dataloader-type external`, or a map dataset for its own samplers.

    from shardkit.loaders.integrations.megatron import external_iterators

    def train_valid_test_datasets_provider(train_val_test_num_samples):
        return external_iterators("s3://bucket/data", valid="s3://bucket/held-out", cache_dir="/nvme/cache")

    pretrain(..., train_valid_test_datasets_provider, ...)  # with --dataloader-type external

Megatron's checkpoints hold `consumed_train_samples`, and that number is the position of a shardkit loader: a
run continues with the next sample at any data-parallel size and batch size. The order is a function of data
and seed, which must therefore not change.

A micro-batch has the fields of Megatron's GPTDataset: `tokens`, `labels` (shifted), `position_ids` (int64)
and `loss_mask` (float32), of shape [micro_batch_size, seq_length]. Rows of seq_length + 1 tokens have all
labels; rows of seq_length tokens need `Layout(keep_length=True)`. Ignored labels are 0, and so is their
`loss_mask`. With `--dataloader-inter-document-masking` there are also `cu_seqlens`
(int32[micro_batch_size, seq_length + 1]) and `max_seqlen`; then, as with `--reset-position-ids`, positions
begin at 0 in each document.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeAlias, Unpack

import numpy as np
import torch
from torch import Tensor

from shardkit.datasets.dataset import Dataset
from shardkit.datasets.segments import IGNORED_LABEL
from shardkit.errors import naming_extras
from shardkit.loaders.config import LoaderOptions, RunOptions, Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.pytorch import MapDataset
from shardkit.order.order import Order, OrderSpec

with naming_extras(__name__):
    from megatron.core import mpu


Data: TypeAlias = str | os.PathLike[str] | Dataset | Sequence[Stream]


class MegatronDataIterator:
    """An endless iterator of micro-batches, which Megatron accepts as an external dataloader.

    `loader` is the `StreamingLoader`. It prefetches from the first `next` on, so it costs
    nothing in a pipeline stage that never calls `next`.
    """

    def __init__(
        self,
        dataset: Data,
        *,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        reset_position_ids: bool = False,
        inter_document_masking: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Begin at `consumed_samples`, counted over all ranks; `options` are passed to `StreamingLoader`."""
        has_documents = reset_position_ids or inter_document_masking
        given = flattened(options)
        layout = {
            "labels": "shifted",
            "endless": True,
            "position_ids": has_documents,
            "doc_lens": inter_document_masking,
        }
        if clash := sorted(layout.keys() & given.keys()):
            raise ValueError(f"Megatron's arguments determine {', '.join(clash)}: leave it out of options")
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise ValueError(
                f"a global batch of {global_batch_size:,} does not divide into micro-batches of "
                f"{micro_batch_size:,} on {data_parallel_size:,} ranks"
            )
        self._seq_length = seq_length
        self.loader = StreamingLoader(
            dataset,
            batch_size=micro_batch_size,
            rank=data_parallel_rank,
            world_size=data_parallel_size,
            **grouped(given | layout),
        )
        _check_rows(self.loader.dataset, seq_length, self.loader.config.keep_length)
        self.seek(consumed_samples)

    def seek(self, consumed_samples: int) -> None:
        """Move to position `consumed_samples`: the next micro-batch begins there."""
        self.loader.seek(consumed_samples)
        self._batches: Iterator[dict[str, Tensor]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._batches is None:
            self._batches = iter(self.loader)
        return _megatron_batch(next(self._batches), self._seq_length)

    def save_state(self) -> dict[str, object]:
        """Return the loader's state, the same on all ranks, for `--dataloader-save`."""
        return self.loader.state_dict()

    def restore_state(self, state: Mapping[str, object]) -> None:
        """Continue where `save_state` was called, on any rank of any data-parallel size."""
        self.loader.load_state_dict(state)
        self._batches = None

    def close(self) -> None:
        """Stop prefetching and close the shards."""
        self.loader.close()


class MegatronDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The first `num_samples` samples of the training stream by number, for `--dataloader-type single`.

    Number i is position i. Megatron's samplers begin at `consumed_train_samples`, so the samples of a run
    depend on neither ranks nor batch sizes. Each epoch has a new shuffle of the whole dataset. Megatron's
    workers read samples one at a time; `external_iterators` is faster, and plans which shards a cache keeps.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset,
        num_samples: int,
        *,
        seq_length: int,
        seed: int = 17,
        reset_position_ids: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        """Open the dataset; `options` are passed to `MapDataset`."""
        flat = {"labels": "shifted", "position_ids": reset_position_ids} | flattened(options)
        self._samples = MapDataset(dataset, **grouped(flat))
        _check_rows(self._samples.dataset, seq_length, bool(flat.get("keep_length")))
        self._order = Order(self._samples.dataset.manifest.shard_samples, OrderSpec(seed, 1, 0, "global"))
        self._num_samples, self._seq_length = num_samples, seq_length

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        row = int(self._order.locate(np.array([position])).sample_id[0])
        sample = {name: value[None] for name, value in self._samples[row].items()}
        return {name: value[0] for name, value in _megatron_batch(sample, self._seq_length).items()}


def external_iterators(
    train: Data,
    *,
    valid: Data | None = None,
    test: Data | None = None,
    **options: Unpack[RunOptions],
) -> tuple[MegatronDataIterator | None, MegatronDataIterator | None, MegatronDataIterator | None]:
    """Make the train, valid and test iterators for this process's arguments and data-parallel rank.

    They are None on tensor-parallel ranks above 0, to which Megatron broadcasts. As with Megatron's own data,
    each validation continues where the last one ended, and resumes at `consumed_valid_samples`.
    """
    with naming_extras("external_iterators"):
        from megatron.training import get_args

    if mpu.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    args = get_args()

    def iterator(data: Data, prefix: str, consumed_samples: int) -> MegatronDataIterator:
        return MegatronDataIterator(
            data,
            seq_length=args.seq_length,
            micro_batch_size=getattr(args, f"{prefix}micro_batch_size", args.micro_batch_size),
            global_batch_size=getattr(args, f"{prefix}global_batch_size", args.global_batch_size),
            data_parallel_rank=mpu.get_data_parallel_rank(),
            data_parallel_size=mpu.get_data_parallel_world_size(),
            consumed_samples=consumed_samples,
            reset_position_ids=args.reset_position_ids,
            inter_document_masking=getattr(args, "dataloader_inter_document_masking", False),
            **options,
        )

    return (
        iterator(train, "", args.consumed_train_samples),
        None if valid is None else iterator(valid, "eval_", args.consumed_valid_samples),
        None if test is None else iterator(test, "eval_", 0),
    )


def _megatron_batch(batch: Mapping[str, Tensor], seq_length: int) -> dict[str, Tensor]:
    """Convert a batch with shifted labels to Megatron's names and loss mask."""
    labels = batch["labels"]
    counts = labels != IGNORED_LABEL
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(seq_length).expand_as(labels)
    made = {
        "tokens": batch["tokens"],
        "labels": labels.clamp(min=0),  # masked labels must be valid ids: Megatron looks up their logits, too
        "loss_mask": counts.float(),
        "position_ids": positions,
    }
    if (lengths := batch.get("doc_lens")) is not None:
        bounds = torch.full((len(lengths), seq_length + 1), seq_length, dtype=torch.int32)
        bounds[:, 0] = 0
        bounds[:, 1 : lengths.shape[1] + 1] = lengths.cumsum(1)
        made |= {"cu_seqlens": bounds, "max_seqlen": lengths.amax(1)}
    return made


def _check_rows(dataset: Dataset, seq_length: int, keep_length: bool) -> None:
    """Raise ValueError unless the dataset's rows are as long as sequences of `seq_length` tokens need."""
    wanted = seq_length if keep_length else seq_length + 1
    if dataset.sequence_length != wanted:
        raise ValueError(
            f"{dataset.location} has rows of {dataset.sequence_length} tokens, but sequences of {seq_length} "
            f"need {wanted}: change --seq-length; rows of {seq_length} tokens, whose last label is ignored, "
            "need layout=Layout(keep_length=True)"
        )
