"""`litgpt.data` of litgpt 0.5.13: the base class of its data modules."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

__all__ = ["DataModule"]


class DataModule:
    """`pretrain` calls connect, prepare_data, setup, train_dataloader and val_dataloader, in this order.

    The real one is a LightningDataModule, which gives it `prepare_data`.
    """

    @abstractmethod
    def connect(
        self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **kwargs: Any
    ) -> None: ...

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str = "") -> None:
        pass
