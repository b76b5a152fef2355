"""nanotron: micro-batches that resume exactly at any data-parallel size, for its run_train.py.

    from shardkit.loaders.integrations.nanotron import stage_batches

    def get_dataloader_from_data_stage(trainer, data, consumed_train_samples_stage, **others):
        return stage_batches(trainer, "s3://bucket/data", consumed_train_samples_stage, seed=data.seed)

nanotron's checkpoints hold the number of samples that each data stage has consumed, and that number is the
position of a shardkit loader: a run continues with the next sample at any data-parallel size and micro-batch
size. The order is a function of data and seed, which must therefore not change within a stage.

A micro-batch has the fields of nanotron's collators: `input_ids`, `label_ids` (int64) and `label_mask` (bool)
of shape [micro_batch_size, sequence_length / context-parallel size], and `input_mask` of ones. In place of
`input_mask`, models of a `Qwen2Config` get `position_ids` of the whole sequence; with `_use_doc_masking` they
begin at 0 in each document. A pipeline stage has a `TensorPointer` for what another stage needs. Padding and
tokens without a loss are masked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias, Unpack

import torch
from torch import Tensor

from shardkit.datasets.dataset import Dataset
from shardkit.datasets.segments import IGNORED_LABEL
from shardkit.errors import naming_extras
from shardkit.loaders.config import RunOptions, Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader

with naming_extras(__name__):
    from nanotron.config import Qwen2Config
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
    from nanotron.parallel.pipeline_parallel.utils import get_input_output_pp_ranks

if TYPE_CHECKING:
    from nanotron.trainer import DistributedTrainer


Data: TypeAlias = str | os.PathLike[str] | Dataset | Sequence[Stream]
MicroBatch: TypeAlias = dict[str, Tensor | TensorPointer]


def stage_batches(
    trainer: DistributedTrainer, data: Data, consumed_train_samples: int, **options: Unpack[RunOptions]
) -> Iterator[MicroBatch]:
    """Open the endless micro-batches of a data stage for this rank of the trainer.

    They begin at `consumed_train_samples`, counted over all ranks. `options` are passed to `StreamingLoader`.
    """
    context = trainer.parallel_context
    first, last = get_input_output_pp_ranks(trainer.model)
    has_positions = isinstance(trainer.model_config, Qwen2Config)
    holders = {"input_ids": first, "position_ids" if has_positions else "input_mask": first}
    holders |= {"label_ids": last, "label_mask": last}
    stage = context.pp_pg.rank()
    pointers = {name: TensorPointer(group_rank=rank) for name, rank in holders.items() if rank != stage}
    if len(pointers) == len(holders):
        return repeat(pointers)
    given = flattened(options)
    layout = {
        "labels": "shifted",
        "endless": True,
        "position_ids": has_positions and trainer.model_config._use_doc_masking,
    }
    if clash := sorted(layout.keys() & given.keys()):
        raise ValueError(f"nanotron's configuration determines {', '.join(clash)}: leave it out of options")
    loader = StreamingLoader(
        data,
        batch_size=trainer.micro_batch_size,
        rank=context.dp_pg.rank(),
        world_size=context.dp_pg.size(),
        **grouped(given | layout),
    )
    length, stored = trainer.sequence_length, loader.dataset.sequence_length
    wanted = length if loader.config.keep_length else length + 1
    if stored != wanted:
        loader.close()
        raise ValueError(
            f"{loader.dataset.location} has rows of {stored} tokens, but sequences of {length} need "
            f"{wanted}: change tokens.sequence_length; rows of {length} tokens, whose last label is masked, "
            "need layout=Layout(keep_length=True)"
        )
    loader.seek(consumed_train_samples)
    part = length // context.cp_pg.size()
    begin = context.cp_pg.rank() * part
    return _micro_batches(loader, slice(begin, begin + part), holders, pointers)


def _micro_batches(
    loader: StreamingLoader, part: slice, fields: Collection[str], pointers: MicroBatch
) -> Iterator[MicroBatch]:
    """Yield batches with these fields, cut to this rank's part of each sequence."""
    with loader:
        for batch in loader:
            labels, positions = batch["labels"], batch.get("position_ids")
            if positions is None:
                positions = torch.arange(labels.shape[1]).expand_as(labels)
            made = {
                "input_ids": batch["tokens"][:, part],
                "input_mask": torch.ones_like(labels[:, part], dtype=torch.bool),
                "position_ids": positions,
                "label_ids": labels[:, part].clamp(min=0),  # masked labels must be valid ids, too
                "label_mask": labels[:, part] != IGNORED_LABEL,
            }
            yield {name: made[name] for name in fields} | pointers
