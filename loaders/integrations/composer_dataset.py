"""Composer (`mosaicml`) and llm-foundry: batches as a `DataSpec`, with a state that Composer saves.

    from shardkit.loaders.integrations.composer_dataset import build_data_spec

    trainer = Trainer(
        model=model,
        train_dataloader=build_data_spec("s3://bucket/data", batch_size=8, cache_dir="/nvme/cache"),
        eval_dataloader=build_data_spec("val", batch_size=8, shuffle="none", tail="pad", restart=True),
        ...
    )

Composer saves `dataset.state_dict(num_samples, from_beginning)` of the DataLoader that it trains on. A new
run loads it into its own dataset before it iterates, and then does not read and discard batches to skip them.
The state counts the batches that the DataLoader has delivered, with any number of workers; a run may continue
on another number of ranks.

A batch has the fields that models of llm-foundry and Hugging Face expect: `input_ids` and `labels` (the model
shifts them; padding is -100). With `layout=Layout(document_ids=True)` it has `sequence_id`, with which
llm-foundry's MPT keeps attention inside documents. In llm-foundry's YAML, `name: shardkit` selects
`build_dataloader`:

    train_loader:
      name: shardkit
      dataset: {path: s3://bucket/data, cache_dir: /nvme/cache, max_seq_len: 2048}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.integrations.composer_dataset"):
    from composer.core import DataSpec

from shardkit.datasets.dataset import Dataset
from shardkit.loaders.config import RunOptions, Stream, flattened, grouped
from shardkit.loaders.pytorch import StreamingDataLoader
from shardkit.loaders.streaming_dataset import State, StreamingDataset
from shardkit.order.state import OnMismatch

_SAMPLES = "sample_in_epoch"


class ComposerDataset(StreamingDataset):
    """A `StreamingDataset` whose state distinguishes the end of an epoch from the beginning of the next.

    Composer saves after an epoch's last batch, and resumes inside that epoch, which then has no more batches.
    """

    epoch_is_over = False
    """Whether a state at the end of an epoch was loaded; the next iteration then has no batches."""

    def state_dict(self, num_batches: int | None = None, from_beginning: bool | None = None) -> State:
        """Return the state. Composer passes the number of samples in this epoch, and True, as arguments."""
        if from_beginning is None:
            return super().state_dict(num_batches)
        return super().state_dict(num_batches or 0, from_beginning) | {_SAMPLES: num_batches}

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: OnMismatch = "error") -> None:
        """Continue where `state` was saved, by this class or any other loader."""
        plain = {name: value for name, value in state.items() if name != _SAMPLES}
        super().load_state_dict(plain, on_mismatch=on_mismatch)
        self.epoch_is_over = bool(state.get(_SAMPLES)) and not self.next[1]


class ComposerDataLoader(StreamingDataLoader):
    """A `StreamingDataLoader` with a `batch_size`, which Composer needs to cut batches into microbatches."""

    dataset: ComposerDataset

    @property
    def batch_size(self) -> int | None:
        return self.dataset.loader.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Ignore `value`: torch's DataLoader assigns None, because the dataset makes the batches."""

    def __iter__(self) -> Any:
        if self.dataset.epoch_is_over:
            self.dataset.epoch_is_over = False
            return iter(())
        return super().__iter__()


def build_data_spec(
    dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
    *,
    batch_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Unpack[RunOptions],
) -> DataSpec:
    """Build the DataSpec for Composer's `Trainer(train_dataloader=…)` and `Evaluator(dataloader=…)`.

    `batch_size`: sequences per rank. With 0 workers, a thread prefetches. `options`: see `StreamingLoader`.
    """
    flat = flattened(options)
    if refused := [name for name in ("flat", "cu_seqlens", "endless") if flat.get(name)]:
        raise ValueError(
            f"leave out {refused[0]}: Composer counts epochs, and cuts batches into microbatches by rows"
        )
    names = {"tokens": "input_ids"} | ({"document_ids": "sequence_id"} if flat.get("document_ids") else {})
    batches = ComposerDataset(
        dataset, batch_size=batch_size, **grouped({"labels": True, "rename": names} | flat)
    )
    return DataSpec(
        ComposerDataLoader(batches, num_workers=num_workers, pin_memory=pin_memory),
        num_samples=batches.loader.plan.samples,
        get_num_samples_in_batch=lambda batch: len(next(iter(batch.values()))),
    )


def build_dataloader(
    *,
    tokenizer: object,
    device_batch_size: int,
    dataset: Mapping[str, Any],
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool = False,
) -> DataSpec:
    """Build the `train_loader` or `eval_loader` of llm-foundry with `name: shardkit`.

    `dataset`: `path`, or `streams` ({name: {path: …, weight: …}}), and options of `StreamingLoader`, whose
    groups are mappings (`layout: {document_ids: true}`). If it has `max_seq_len`, rows of another length
    raise ValueError. `drop_last`: same as tail="drop". `tokenizer` is unused, because rows are tokenized.
    """
    options = dict(dataset)
    if drop_last and options.setdefault("tail", "drop") != "drop":
        raise ValueError(f"drop_last and tail={options['tail']!r} contradict each other: leave one out")
    length, streams = options.pop("max_seq_len", None), options.pop("streams", None)
    if (streams is None) == ("path" not in options):
        raise ValueError("dataset: give either path or streams")
    source = (
        options.pop("path") if streams is None else [Stream(name=name, **s) for name, s in streams.items()]
    )
    spec = build_data_spec(
        source, batch_size=device_batch_size, num_workers=num_workers, pin_memory=pin_memory, **options
    )
    found = {opened.sequence_length for opened in spec.dataloader.dataset.loader.datasets}
    if length is not None and found != {length}:
        raise ValueError(
            f"max_seq_len is {length}, but rows have {', '.join(map(str, found))} tokens: set max_seq_len, "
            f"or cut the dataset again with `shardkit convert --sequence-length {length}`"
        )
    return spec
