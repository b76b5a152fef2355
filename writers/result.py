"""What a build made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError
from shardkit.storage.url import is_remote
from shardkit.writers.ledger import Ledger
from shardkit.writers.times import StageTime

__all__ = ["BuildResult"]


@dataclass(frozen=True)
class BuildResult:
    """What a build made. Times are this run's and stages overlap; `tasks_reused` were done before it.

    `stages` are when each began and what it read, in the order in which they began; none if `up_to_date`.
    """

    location: str
    """The folder or the URL of the dataset."""
    fingerprint: str
    format: str
    samples: int
    shards: int
    sequence_length: int
    tokens: int
    padding: int
    funnel: Ledger
    seconds: Mapping[str, float]
    total_seconds: float
    tasks: int
    tasks_reused: int
    up_to_date: bool = False
    stages: tuple[StageTime, ...] = ()

    @property
    def output(self) -> Path:
        """The folder of the dataset; BuildError if it is a URL."""
        if is_remote(self.location):
            raise BuildError(f"{self.location} is no folder of this machine; use BuildResult.location")
        return Path(self.location)

    @property
    def text_bytes_per_second(self) -> float:
        """UTF-8 text read per second of the whole build."""
        return self.funnel.read.bytes / self.total_seconds if self.total_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens written per second of the whole build."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return (
            {"output": self.location}
            | {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "location"}
            | {
                "funnel": self.funnel.to_dict(),
                "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
                "stages": [stage.to_dict() for stage in self.stages],
                "total_seconds": round(self.total_seconds, 3),
                "text_bytes_per_second": round(self.text_bytes_per_second),
                "tokens_per_second": round(self.tokens_per_second),
            }
        )
