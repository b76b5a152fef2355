"""How MaxText (e591f30c) takes batches from an iterable, without forming global arrays of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["MultiHostDataLoadIterator"]


class MultiHostDataLoadIterator:
    def __init__(
        self,
        dataloader: Iterable[Any],
        global_mesh: Any,
        generate_padding_batch: bool = False,
        expansion_loading_factor_for_grain: int = -1,
    ) -> None:
        self.dataloader, self.global_mesh = dataloader, global_mesh
        self.local_iterator = iter(dataloader)

    def reset(self) -> None:
        self.local_iterator = iter(self.dataloader)

    def __iter__(self) -> MultiHostDataLoadIterator:
        self.reset()
        return self

    def __next__(self) -> Any:
        return next(self.local_iterator)
