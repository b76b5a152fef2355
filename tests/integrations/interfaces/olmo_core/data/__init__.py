"""The base class of data loaders for text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DataCollator", "TextDataLoaderBase"]


@dataclass
class DataCollator:
    pad_token_id: int


class DataLoaderBase(ABC):
    """Counts batches of an epoch, and follows changes of the batch size by whole factors."""

    def __init__(
        self,
        *,
        work_dir: Path | str,
        global_batch_size: int,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        fs_local_rank: int | None = None,
    ) -> None:
        self.work_dir, self._global_batch_size = Path(work_dir), global_batch_size
        assert dp_rank < dp_world_size
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.fs_local_rank = dp_rank if fs_local_rank is None else fs_local_rank
        self.batches_processed = 0
        self._epoch: int | None = None

    @property
    def global_batch_size(self) -> int:
        return self._global_batch_size

    @global_batch_size.setter
    def global_batch_size(self, new_global_batch_size: int) -> None:
        if new_global_batch_size > self.global_batch_size:
            ratio, rest = divmod(new_global_batch_size, self.global_batch_size)
            if rest or self.batches_processed % ratio:
                raise RuntimeError("only by an integer factor, after a multiple of it")
            self.batches_processed //= ratio
        elif new_global_batch_size < self.global_batch_size:
            ratio, rest = divmod(self.global_batch_size, new_global_batch_size)
            if rest:
                raise RuntimeError("only by an integer factor")
            self.batches_processed *= ratio
        self._global_batch_size = new_global_batch_size

    @property
    def epoch(self) -> int:
        if self._epoch is None:
            raise RuntimeError("did you forget to call 'reshuffle()'?")
        return self._epoch

    @property
    def rank_batch_size(self) -> int:
        return self.global_batch_size // self.dp_world_size

    @property
    @abstractmethod
    def total_batches(self) -> int | None: ...

    def batches_in_epoch(self, epoch: int) -> int | None:
        return self.total_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._iter_batches():
            self.batches_processed += 1
            yield batch

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...
    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    @abstractmethod
    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None: ...
    @abstractmethod
    def _iter_batches(self) -> Iterable[dict[str, Any]]: ...
    @abstractmethod
    def get_mock_batch(self) -> dict[str, Any]: ...

    def reset(self) -> None:
        self.batches_processed = 0


class TextDataLoaderBase(DataLoaderBase):
    """Counts tokens, and checks how many a batch has."""

    def __init__(
        self,
        *,
        collator: DataCollator,
        work_dir: Path | str,
        global_batch_size: int,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        fs_local_rank: int | None = None,
    ) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=global_batch_size,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            fs_local_rank=fs_local_rank,
        )
        self.collator = collator
        self.tokens_processed = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            if batch["input_ids"].numel() != self.rank_batch_size:
                raise RuntimeError(f"expected {self.rank_batch_size} tokens, got {batch['input_ids'].shape}")
            self.tokens_processed += self.global_batch_size
            yield batch

    def reset(self) -> None:
        super().reset()
        self.tokens_processed = 0

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int | None:
        return self.global_batch_size
