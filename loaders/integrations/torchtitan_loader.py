"""torchtitan: a `BaseDataLoader` that resumes exactly, at any data-parallel degree.

    from shardkit.loaders.integrations.torchtitan_loader import ShardkitDataLoader

    config.dataloader = ShardkitDataLoader.Config(dataset_path="s3://bucket/data")

`Trainer` builds it with its data-parallel rank and degree (tensor, context and pipeline peers get the same
batches), stores its state in each checkpoint as "dataloader", and resumes with the next sample. The state is
the same on all ranks and its position counts all ranks, so a checkpoint can be loaded at another degree.

Rows of seq_len + 1 tokens become inputs and labels of seq_len; so do rows of seq_len with
`options={"layout": Layout(keep_length=True)}`. A batch is `{"input", "positions"}, labels`:
int64[local_batch_size, seq_len] in release 0.3, and int64[num_tokens_per_batch] in later versions, in which
`max_context_length` takes the place of seq_len. `positions` begin at 0 in each document, which keeps
attention inside documents. Labels are shifted, and -100 where a token would be predicted from another
document, unless the layout has `mask_document_starts=False`.

A `Validator` builds a loader for each validation, so every validation has the same batches. With `steps=-1`
it reads each sample once, in the same number of batches on all ranks; padding of the last is labeled -100.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from torch import Tensor

from shardkit.errors import naming_extras
from shardkit.loaders.config import RunOptions, Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader

with naming_extras(__name__):
    import tyro

    try:
        from torchtitan.components.dataloader import BaseDataLoader
    except ModuleNotFoundError:  # this module has another name after release 0.3
        from torchtitan.components.data.loader import BaseDataLoader


TrainerBatch: TypeAlias = tuple[dict[str, Tensor], Tensor]


class ShardkitDataLoader(BaseDataLoader):
    """Delivers the batches of a `StreamingLoader` (attribute `loader`) in torchtitan's layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The data to read; also options of torchtitan's command line: `--dataloader.dataset_path`."""

        dataset_path: str | None = None
        """Folder or URL of the dataset."""
        streams: Annotated[Sequence[Stream], tyro.conf.Suppress] = ()
        """The streams of a mixture, instead of `dataset_path`."""
        options: Annotated[RunOptions, tyro.conf.Suppress] = field(default_factory=RunOptions)
        """Further arguments of `StreamingLoader`: seed, shuffle, cache_dir, usage_log, …"""
        infinite: bool = True
        """Whether the loader never ends; `Validator` sets it."""
        repeat: bool = True
        """Same as `infinite`, which has this name after release 0.3; the loader ends if either is false."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        **kwargs: object,
    ) -> None:
        """Open the loader for a `Trainer` or `Validator`. `kwargs`, such as the tokenizer, are ignored."""
        source = config.streams or config.dataset_path
        if not source or (config.streams and config.dataset_path):
            raise ValueError("ShardkitDataLoader.Config needs either dataset_path or streams")
        is_flat = local_batch_size is None
        length = max_context_length if is_flat else seq_len
        assert length is not None
        batch_size = local_batch_size or _rows(num_tokens_per_batch, length)
        is_endless = config.infinite and config.repeat
        given = flattened(config.options)
        layout = {
            "labels": "shifted",
            "position_ids": True,
            "flat": is_flat,
            "endless": is_endless,
        }
        if clash := sorted(layout.keys() & given.keys()):
            raise ValueError(f"torchtitan determines {', '.join(clash)}: leave it out of options")
        tail = {"tail": "carry" if is_endless else "pad"}
        self.loader = StreamingLoader(
            source,
            batch_size=batch_size,
            rank=dp_rank,
            world_size=dp_world_size,
            **grouped(tail | given | layout),
        )
        stored = self.loader.dataset.sequence_length
        wanted = length if given.get("keep_length") else length + 1
        if stored != wanted:
            self.close()
            raise ValueError(
                f"{self.loader.dataset.location} has rows of {stored} tokens, but sequences of {length} need "
                f"{wanted}: change the sequence length; rows as long as sequences, whose last label is -100, "
                'need options={"layout": Layout(keep_length=True)}'
            )

    def __iter__(self) -> Iterator[TrainerBatch]:
        for batch in self.loader:
            yield {"input": batch["tokens"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self) -> dict[str, object]:
        """Return the loader's state, the same on all ranks."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue where the state was saved, with any number of ranks; does nothing if it is empty."""
        if state_dict:
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop prefetching and close the shards."""
        self.loader.close()


def _rows(num_tokens_per_batch: int | None, length: int) -> int:
    """Return the number of rows of `length` tokens in a flat batch; raises ValueError if it is not whole."""
    assert num_tokens_per_batch is not None
    rows, rest = divmod(num_tokens_per_batch, length)
    if rest or not rows:
        raise ValueError(
            f"a batch of {num_tokens_per_batch:,} tokens does not divide into rows of max_context_length="
            f"{length:,}: make num_tokens_per_microbatch_per_dp_rank a multiple of it"
        )
    return rows
