"""The resources of a machine that a task needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """CPU cores, GPUs (a fraction shares one), and bytes of memory, 0 for a build's usual amount."""

    cpus: int = 1
    gpus: float = 0.0
    memory: int = 0

    def __or__(self, other: Resources) -> Resources:
        """Return the least resources that suffice for both."""
        most = max(self.cpus, other.cpus), max(self.gpus, other.gpus), max(self.memory, other.memory)
        return Resources(*most)


USUAL = Resources()
