"""From raw text to tokens: what part each stage keeps, forwards and backwards.

Retention is a share of the bytes of text that enter a stage. The shares multiply: what one stage keeps is
what the next one reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

__all__ = ["Funnel", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a build and the share of text that it keeps."""

    name: str
    retention: Fraction

    def __post_init__(self) -> None:
        if not 0 < self.retention <= 1:
            raise ValueError(
                f"stage {self.name!r} keeps {float(self.retention):g} of its input: a retention is above 0 "
                "(nothing could be planned from 0) and at most 1"
            )


@dataclass(frozen=True, slots=True)
class Funnel:
    """Stages in the order in which they run."""

    stages: tuple[Stage, ...]

    @property
    def retention(self) -> Fraction:
        """Of all stages together."""
        return prod((stage.retention for stage in self.stages), start=Fraction(1))

    def before(self, kept: Fraction) -> Fraction:
        """How much must be read so that `kept` remains."""
        return kept / self.retention

    def after(self, read: Fraction) -> Fraction:
        """What remains of `read`."""
        return read * self.retention

    def amounts(self, read: Fraction) -> Sequence[tuple[Stage, Fraction, Fraction]]:
        """(stage, what enters, what leaves) of each."""
        found = []
        for stage in self.stages:
            left = read * stage.retention
            found.append((stage, read, left))
            read = left
        return found
