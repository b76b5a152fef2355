"""Validation: a data loader is built for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import Configurable

__all__ = ["Validator"]


class Validator(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        freq: int = 10
        steps: int = -1
        dataloader: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)

    def __init__(self, config: Config, **runtime: Any) -> None:
        self.config, self._runtime = config, runtime
        self.dl_config = replace(config.dataloader, infinite=config.steps != -1)

    def should_validate(self, step: int) -> bool:
        return step == 1 or step % self.config.freq == 0

    def validate(self, see: Callable[[dict[str, Tensor], Tensor], None]) -> None:
        for number, (inputs, labels) in enumerate(self.dl_config.build(**self._runtime)):
            if number == self.config.steps:
                break
            see(inputs, labels)
