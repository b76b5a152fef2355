"""What a training loop calls back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Callback", "CallbackContext"]


@dataclass
class CallbackContext:
    state: Any
    model: list[Any]
    user_state: dict[str, Any] = field(default_factory=dict)


class Callback:
    def on_train_start(self, context: CallbackContext) -> None: ...
