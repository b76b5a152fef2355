"""What is used of Grain 0.2.18."""

from __future__ import annotations

from typing import Any

__all__ = ["IterDataset"]


class IterDataset:
    def __init__(self, parents: Any = ()) -> None:
        self.parents = parents
