"""OLMo-core: a `TextDataLoaderBase` that resumes exactly, on any number of data-parallel ranks.

    from shardkit.loaders.integrations.olmo_core_loader import ShardkitDataLoader

    data_loader = ShardkitDataLoader(
        "s3://bucket/data",
        sequence_length=4096,
        global_batch_size=1024 * 4096,
        work_dir="/tmp/work",
        dp_world_size=get_world_size(train_module.dp_process_group),
        dp_rank=get_rank(train_module.dp_process_group),
    )
    trainer = trainer_config.build(train_module, data_loader)

As everywhere in OLMo-core, `global_batch_size` counts tokens. It may change between steps, also by
`BatchSizeSchedulerCallback`; the run continues with the next sample. Epochs count from 1, and a batch belongs
to the epoch that it starts in.

A batch has `input_ids` and `labels`, int64[rank's sequences, sequence_length], and `index`, the rows' numbers
in the dataset. Labels are shifted; as in OLMo-core's own loaders, they are -100 at padding and at the last
token of rows of sequence_length. With `Layout(keep_length=False)`, rows of sequence_length + 1 have all
labels. `Layout(doc_lens=True)` adds `doc_lens` and `max_doc_lens`, with which the model keeps attention
inside documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardkit.datasets.dataset import Dataset
from shardkit.errors import naming_extras
from shardkit.loaders.config import Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader

with naming_extras(__name__):
    from olmo_core.data import DataCollator, TextDataLoaderBase


_FIELDS = ("input_ids", "labels", "index", "doc_lens", "max_doc_lens")


class ShardkitDataLoader(TextDataLoaderBase):
    """Delivers the batches of a `StreamingLoader` (attribute `loader`) with OLMo-core's names."""

    batches_processed: int
    _epoch: int | None

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
        *,
        sequence_length: int,
        global_batch_size: int,
        work_dir: str | os.PathLike[str],
        collator: DataCollator | None = None,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        fs_local_rank: int | None = None,
        **options: Any,
    ) -> None:
        """Open the loader. `global_batch_size`: tokens per step over all ranks.

        `collator`: used by the trainer's evaluations. `options` are passed to `StreamingLoader`.
        """
        super().__init__(
            collator=collator or DataCollator(pad_token_id=0),
            work_dir=os.fspath(work_dir),
            global_batch_size=global_batch_size,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            fs_local_rank=fs_local_rank,
        )
        self.sequence_length = sequence_length
        defaults = {
            "labels": "shifted",
            "keep_length": True,
            "return_ids": True,
            "rename": {"tokens": "input_ids", "sample_id": "index"},
        }
        flat = {**defaults, **flattened(options)}
        self._options = grouped(flat)
        self.loader = self._open(dataset)
        stored = self.loader.dataset.sequence_length
        if stored != sequence_length + (not flat["keep_length"]):
            raise ValueError(
                f"{self.loader.dataset.location} has rows of {stored} tokens: give sequence_length={stored}, "
                f"or one less with layout=Layout(keep_length=False), not {sequence_length}"
            )

    def _open(self, dataset: str | os.PathLike[str] | Dataset | Sequence[Stream]) -> StreamingLoader:
        """Open a loader at its first sample, with the batch size that `global_batch_size` now gives."""
        rows, rest = divmod(self.global_batch_size, self.sequence_length * self.dp_world_size)
        if rest or not rows:
            raise ValueError(
                f"global_batch_size={self.global_batch_size:,} tokens must be a multiple of sequence_length="
                f"{self.sequence_length:,} times {self.dp_world_size} data-parallel ranks"
            )
        return StreamingLoader(
            dataset, batch_size=rows, rank=self.dp_rank, world_size=self.dp_world_size, **self._options
        )

    @property
    def total_batches(self) -> int:
        """The number of batches in the current epoch, if the batch size does not change."""
        has_more = self._epoch is None or self.loader.epoch == self._epoch - 1
        return self.batches_processed + (
            self.loader.plan.batches_left(self.loader.position) if has_more else 0
        )

    def batches_in_epoch(self, epoch: int) -> int:
        """Return the number of batches in an epoch, if the batch size does not change.

        With tail="carry", two epochs may differ by one batch.
        """
        if epoch == self._epoch:
            return self.total_batches
        plan = self.loader.plan
        return plan.batches_left(plan.first_batch(epoch - 1))

    def reshuffle(self, epoch: int | None = None, **kwargs: object) -> None:
        """Continue with `epoch`, counted from 1; by default, with the next epoch."""
        if epoch is None:
            epoch = 1 if self._epoch is None else self._epoch + 1
        if epoch < 1:
            raise ValueError(f"epoch must be at least 1, not {epoch}")
        has_ended = epoch == self._epoch and self.batches_processed and self.loader.epoch == epoch
        self._epoch = epoch
        if not has_ended:
            self.loader.set_epoch(epoch - 1)

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        while self.loader.epoch == self.epoch - 1:
            if not self._has_batch_size():
                former = self.loader
                self.loader = self._open(former.streams)
                self.loader.load_state_dict(former.state_dict())
            for batch in self.loader:
                yield {name: batch[name] for name in _FIELDS if name in batch}
                if not self._has_batch_size():
                    break

    def _has_batch_size(self) -> bool:
        """Return whether the loader's batch size matches the current `global_batch_size`."""
        return self.loader.batch_size * self.sequence_length == int(self.rank_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, tokens processed and the state of the `StreamingLoader`, the same on all ranks."""
        return {
            "epoch": self._epoch,
            "tokens_processed": self.tokens_processed,
            "loader": self.loader.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken; the number of ranks and the batch size may differ."""
        self.loader.load_state_dict(state_dict["loader"])
        self._epoch = state_dict["epoch"]
        self.tokens_processed = state_dict["tokens_processed"]
        self.batches_processed = self.tokens_processed // self.global_batch_size

    def get_mock_batch(self) -> dict[str, Any]:
        """Return a batch of zeros, for the trainer's dry run."""
        rows = self.rank_batch_size // self.sequence_length
        tokens = torch.zeros(rows, self.sequence_length, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens.clone(), "index": torch.zeros(rows, dtype=torch.int64)}
        if not self.loader.config.doc_lens:
            return batch
        whole = torch.full((rows, 1), self.sequence_length, dtype=torch.int32)
        return batch | {"doc_lens": whole, "max_doc_lens": [self.sequence_length] * rows}

    def close(self) -> None:
        """Stop prefetching and close the shards."""
        self.loader.close()
