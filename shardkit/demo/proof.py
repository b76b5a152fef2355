"""One claim of the demo, whether it held, and the figures that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NO_TORCH", "Proof"]

NO_TORCH = "torch is missing: pip install 'shardkit[torch]' and run the demo again"


@dataclass(frozen=True, slots=True)
class Proof:
    """`passed` is None when the claim could not be tried; `evidence` then says what is missing."""

    name: str
    passed: bool | None
    evidence: str
    figures: Mapping[str, object] = field(default_factory=dict)
