"""What the order of a run depends on, as plain data: the head of every usage log.

It says which samples an undisturbed run delivers at which position, given the index of each dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardkit.errors import StateError
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec

__all__ = ["RunSettings", "StreamSettings"]

TAILS = ("carry", "drop", "pad")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """One dataset: `samples` that are kept; `excluded`, the digest of the exclusions ("": none)."""

    name: str
    fingerprint: str
    samples: int
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run's order, tail and data. `schedule` is None for a single stream."""

    order: OrderSpec
    tail: str
    streams: tuple[StreamSettings, ...]
    epoch_samples: int
    schedule: Schedule | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain data; `from_dict` reads it back."""
        return {
            "order": self.order.to_dict(),
            "tail": self.tail,
            "streams": [asdict(stream) for stream in self.streams],
            "epoch_samples": self.epoch_samples,
            "schedule": None if self.schedule is None else self.schedule.to_list(),
        }

    @classmethod
    def from_dict(cls, data: object) -> RunSettings:
        """StateError when `data` is not what `to_dict` gives."""
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"expected an object, not {type(data).__name__}")
            schedule = data["schedule"]
            found = cls(
                order=OrderSpec.from_dict(data["order"]),
                tail=data["tail"],
                streams=tuple(StreamSettings(**stream) for stream in data["streams"]),
                epoch_samples=int(data["epoch_samples"]),
                schedule=None if schedule is None else Schedule.from_list(schedule),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the settings of a run: {type(error).__name__}: {error}") from error
        streams = 1 if found.schedule is None else found.schedule.streams
        if found.tail not in TAILS or len(found.streams) != streams or found.epoch_samples < 1:
            raise StateError(f"not the settings of a run: {data!r:.300}")
        return found

    def differences(self, later: RunSettings, position: int) -> list[str]:
        """What differs in a run that continues this one at `position`; nothing may but the weights to come.

        Streams may have been added behind the others.
        """
        lines = []
        for name in ("seed", "shuffle", "lanes", "window"):
            before, now = getattr(self.order, name), getattr(later.order, name)
            if before != now:
                lines.append(f"{name} {before!r} became {now!r}")
        for name in ("tail", "epoch_samples"):
            before, now = getattr(self, name), getattr(later, name)
            if before != now:
                lines.append(f"{name} {before!r} became {now!r}")
        for number, stream in enumerate(self.streams):
            other = later.streams[number] if number < len(later.streams) else None
            if other is None or _data(stream) != _data(other):
                lines.append(f"dataset of stream {number} ({stream.name or stream.fingerprint}) changed")
        one, other_one = self.schedule, later.schedule
        if (one is None) != (other_one is None):
            lines.append("a mixture became a single stream, or the reverse")
        elif (
            one is not None
            and other_one is not None
            and (one.streams > other_one.streams or not other_one.agrees_before(one, position))
        ):
            lines.append(f"weights before position {position:,} changed")
        return lines


def _data(stream: StreamSettings) -> tuple[str, int, str]:
    return stream.fingerprint, stream.samples, stream.excluded
