"""The data loaders of the training scripts nanoGPT, nanochat and modded-nanogpt.

    NanoGPTData               nanoGPT: get_batch("train"), a state for ckpt.pt, batches for estimate_loss
    data_loader_with_state    nanochat: a generator of (inputs, targets, state_dict)
    data_loader               nanochat: the same without states, for validation
    DistributedDataGenerator  modded-nanogpt: flat batches with document bounds; .send() changes their size

All of them need rows with one token more than the model takes, and return inputs and targets of the model's
length.

nanoGPT and nanochat fetch a batch while they train on the one before, and save a checkpoint while they hold
a batch that is not trained on yet. A resumed run must begin with that batch, so their states are taken before
the last delivered batch. modded-nanogpt does not fetch ahead, so its state is taken after it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, Unpack

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.integrations.nanogpt"):
    import torch
    from torch import Tensor

from shardkit.datasets.dataset import Dataset
from shardkit.datasets.segments import IGNORED_LABEL
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import RunOptions, Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader

_IGNORED_TARGET = -1  # the target value that the loss of nanoGPT and nanochat ignores

_OF_THE_DATA = ("cache_dir", "cache_bytes", "connections", "storage", "eos_id", "bos_id", "timeout_seconds")

Data: TypeAlias = str | os.PathLike[str] | Dataset | Sequence[Stream]
Pair: TypeAlias = tuple[Tensor, Tensor]
"""(inputs, targets), int64[rows, length]; targets of padding are -1."""


class NanoGPTData:
    """The data of nanoGPT's `train.py`.

    `batch_size` and `block_size` are nanoGPT's: sequences per micro-batch and rank, and tokens per sequence.
    `options` are passed to `StreamingLoader`; evaluations use only those for the data and its cache.
    """

    def __init__(
        self,
        train: Data,
        val: Data,
        *,
        batch_size: int,
        block_size: int,
        device: str | torch.device = "cpu",
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        self._sets = {"train": train, "val": val}
        flat = flattened(options)
        self._evaluation = {name: flat[name] for name in _OF_THE_DATA if name in flat}
        self._batch_size, self._block_size, self._device = batch_size, block_size, torch.device(device)
        self._loader = _endless(train, batch_size, rank=rank, world_size=world_size, **options)
        self._state = self._loader.state_dict()
        self._batches: Iterator[Batch] | None = None

    def get_batch(self, split: str = "train") -> Pair:
        """Return this rank's next training batch. All ranks must take the same number of batches."""
        if split != "train":
            raise ValueError(
                f"get_batch({split!r}): get_batch returns training batches only; use `evaluation` for the "
                "batches of an evaluation, on either split"
            )
        if self._batches is None:
            self._batches = iter(self._loader)
        self._state = self._loader.state_dict()
        return _pair(next(self._batches), self._block_size, self._device)

    def evaluation(self, split: str, eval_iters: int) -> Iterator[Pair]:
        """Yield the first `eval_iters` batches of a split, the same in each evaluation and on each rank."""
        options = grouped({**self._evaluation, "shuffle": "none", "stop_together": False})
        with _endless(self._sets[split], self._batch_size, rank=0, world_size=1, **options) as loader:
            for batch in itertools.islice(loader, eval_iters):
                yield _pair(batch, self._block_size, self._device)

    def state_dict(self) -> dict[str, object]:
        """Return the state of the loader before the last delivered batch."""
        return self._state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the batch that was delivered last when `state` was saved."""
        self._loader.load_state_dict(state)
        self._state, self._batches = self._loader.state_dict(), None


def data_loader_with_state(
    dataset: Data,
    B: int,  # noqa: N803 (nanochat's names)
    T: int,  # noqa: N803
    *,
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Yield nanochat's training batches, endlessly: (inputs, targets, state_dict), int64[B, T].

    The state has `epoch`, counted from 1, and the loader's own state, taken before the batch.
    """
    with _endless(dataset, B, **options) as loader:
        if resume_state_dict is not None:
            loader.load_state_dict(resume_state_dict["loader"])
        state = {"epoch": loader.epoch + 1, "loader": loader.state_dict()}
        for batch in loader:
            yield *_pair(batch, T, torch.device(device)), state
            state = {"epoch": loader.epoch + 1, "loader": loader.state_dict()}


def data_loader(
    dataset: Data,
    B: int,  # noqa: N803
    T: int,  # noqa: N803
    *,
    device: str | torch.device = "cuda",
    **options: Unpack[RunOptions],
) -> Iterator[Pair]:
    """Yield nanochat's validation batches, (inputs, targets), endlessly, beginning at the first sample."""
    for inputs, targets, _ in data_loader_with_state(dataset, B, T, device=device, **options):
        yield inputs, targets


class DistributedDataGenerator:
    """modded-nanogpt's `distributed_data_generator`: endless (inputs, targets, cum_lengths) of this rank.

    inputs      int32[n]: concatenated rows; n = num_tokens / grad_accum_steps / world size
    targets     int64[n]: the token after each input
    cum_lengths int32[max_num_docs]: 0 and the end of each sequence, filled up with n

    A sequence is the span within which tokens attend to each other: a document inside a row, cut every
    `max_seq_len` tokens (-1: never). `num_tokens`: per optimizer step over all ranks; n must be a number of
    whole rows. `max_num_docs`: limit of sequences in a batch; default: a multiple of 128, for sequences of
    300 tokens on average.

    `send((num_tokens, max_seq_len, grad_accum_steps))` returns the next batch with new values, `send(None)`
    with the current ones. `options` are passed to `StreamingLoader`, such as bos_id=50256 for documents that
    begin with it.
    """

    def __init__(
        self,
        dataset: Data,
        num_tokens: int,
        max_seq_len: int,
        grad_accum_steps: int = 1,
        *,
        max_num_docs: int | None = None,
        device: str | torch.device = "cuda",
        **options: Unpack[RunOptions],
    ) -> None:
        self._max_num_docs, self._device = max_num_docs, torch.device(device)
        flat: dict[str, Any] = {
            **flattened(options),
            "dtype": torch.int32,
            "labels": "shifted",
            "mask_document_starts": False,
            "position_ids": True,
            "flat": True,
            "endless": True,
        }
        self._options = grouped(flat)
        unlogged = {**self._options, "usage_log": None}
        self._opened = StreamingLoader(
            dataset, batch_size=1, **unlogged
        )  # keeps the dataset open for all batch sizes
        self._loader = self._resized(num_tokens, max_seq_len, grad_accum_steps)
        self._batches: Iterator[Batch] | None = None

    def _resized(self, num_tokens: int, max_seq_len: int, grad_accum_steps: int) -> StreamingLoader:
        """Open a loader whose batches have these sizes; also stores `max_seq_len`."""
        if max_seq_len != -1 and max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, or -1 for no cut, not {max_seq_len}")
        row = _row_tokens(self._opened) - 1
        unit = row * self._opened.world_size * grad_accum_steps
        if num_tokens < 1 or num_tokens % unit:
            raise ValueError(
                f"num_tokens must be a multiple of {unit:,} ({row:,} tokens per row * "
                f"{self._opened.world_size} ranks * {grad_accum_steps} micro-batches), not {num_tokens:,}"
            )
        self._max_seq_len = max_seq_len
        return StreamingLoader(self._opened.streams, batch_size=num_tokens // unit, **self._options)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.send(None)

    def send(self, new_params: tuple[int, int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next batch, with `new_params` if given; all ranks must send the same values."""
        if new_params is not None:
            before = self._loader
            self._loader = self._resized(*new_params)
            self._loader.load_state_dict(before.state_dict())
            before.close()
            self._batches = None
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        tokens, labels = batch["tokens"], batch["labels"]
        # modded-nanogpt's loss counts every target: ignored targets repeat their input, an end of document.
        targets = torch.where(labels == IGNORED_LABEL, tokens.long(), labels)
        bounds = self._cum_lengths(batch["position_ids"])
        device = self._device
        return _on(device, tokens.contiguous()), _on(device, targets), _on(device, bounds)

    def _cum_lengths(self, position_ids: Tensor) -> Tensor:
        count = len(position_ids)
        begins = position_ids if self._max_seq_len == -1 else position_ids % self._max_seq_len
        starts = torch.nonzero(begins == 0).flatten()
        most = self._max_num_docs or -(-(count // 300 or 1) // 128) * 128
        if len(starts) >= most:
            raise ValueError(
                f"a batch has {len(starts)} sequences, but cum_lengths has room for {most - 1} only: raise "
                "max_num_docs"
            )
        bounds = torch.full((most,), count, dtype=torch.int32)
        bounds[: len(starts)] = starts
        return bounds

    def state_dict(self) -> dict[str, object]:
        """Return the state of the loader after the last delivered batch."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state` was saved; batch sizes may differ."""
        self._loader.load_state_dict(state)
        self._batches = None

    def close(self) -> None:
        """Stop prefetching and close the shards."""
        self._loader.close()
        self._opened.close()


def _endless(
    dataset: Data,
    batch_size: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Unpack[RunOptions],
) -> StreamingLoader:
    """Open an endless loader with shifted labels."""
    shifted: RunOptions = {**options, "labels": "shifted", "endless": True}
    return StreamingLoader(dataset, batch_size=batch_size, rank=rank, world_size=world_size, **shifted)


def _row_tokens(loader: StreamingLoader) -> int:
    length = loader.dataset.sequence_length
    if length is None:
        raise ValueError(f"{loader.dataset.location}: is not a dataset of token rows of one length")
    return length


def _pair(batch: Batch, length: int, device: torch.device) -> Pair:
    """Return (inputs, targets) on the device; raises ValueError if the model takes rows of another length."""
    inputs, targets = batch["tokens"], batch["labels"]
    if inputs.shape[1] != length:
        raise ValueError(
            f"the model takes {length} tokens, so rows must have {length + 1}, but the dataset has rows of "
            f"{inputs.shape[1] + 1}"
        )
    targets = targets.masked_fill(targets == IGNORED_LABEL, _IGNORED_TARGET)
    return _on(device, inputs.contiguous()), _on(device, targets.contiguous())


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """Return the tensor on `device`. A copy to a GPU is asynchronous, from pinned memory."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
