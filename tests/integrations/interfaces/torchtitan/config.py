"""Configurations that build what they configure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

__all__ = ["Configurable", "TrainingConfig"]


class Configurable:
    """A class whose nested Config builds it; a Config is a dataclass with slots."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type[Any] | None] = None

        def build(self, **kwargs: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__, "torchtitan refuses a Config without slots"
            cls.Config._owner = cls


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    steps: int = 10000
