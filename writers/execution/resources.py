"""What a task needs: resources of a machine, and services such as an endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.errors import BuildError


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


class UnavailableError(BuildError):
    """Ends the build, even if the recipe allows some tasks to fail: what tasks need cannot be had."""


USUAL = Resources()
