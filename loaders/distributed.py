"""Which of how many processes this is.

The arguments say it, or torch.distributed, or torchrun's environment, in this order; otherwise it is 0 of 1.
Both numbers come from the same place, because a rank from one source and a world size from another would
silently train on wrong parts. torch is asked only if something else has imported it already.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

__all__ = ["Place", "find_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `world_size` processes, `local_world_size` of them on each machine.

    Ranks of a machine are consecutive, as torchrun numbers them.
    """

    rank: int
    world_size: int
    local_world_size: int = 1

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.world_size // self.local_world_size

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be between 0 and {self.world_size - 1}, not {self.rank}")


def find_place(rank: int | None, world_size: int | None) -> Place:
    """The place of this process; ValueError when only one of the two is given or a number is out of range."""
    if (rank is None) != (world_size is None):
        missing = "world_size" if world_size is None else "rank"
        raise ValueError(f"give rank and world_size together, or neither: {missing} is missing")
    if rank is None or world_size is None:
        rank, world_size = _from_torch() or _from_environment() or (0, 1)
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an int, not {value!r}")
    return Place(rank, world_size, _local_world_size(world_size))


def _from_torch() -> tuple[int, int] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return int(torch.distributed.get_rank()), int(torch.distributed.get_world_size())


def _from_environment() -> tuple[int, int] | None:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ValueError(f"the environment has only one of RANK and WORLD_SIZE: {missing} is missing")
    return rank, world_size


def _local_world_size(world_size: int) -> int:
    """As torchrun, Open MPI or Slurm say, if it divides the world size; else all are on one machine."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        local = _number(name)
        if local and local > 0 and world_size % local == 0:
            return local
    return world_size


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a whole number, not {text!r}") from None
