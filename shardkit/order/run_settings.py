"""The settings of a run: everything that its sample order depends on, as plain data.

They are the constants of a loader's state, the head of every usage log, and what `shardkit audit` and
`shardkit trace` recompute a run from. Batch size, world size and prefetching are no settings: they may change
within a run. With the indexes of the datasets, settings say which sample is at which position.

A run is continued by settings that have no `differences` from its own: a mixture's weights may change from
the current position on, and streams may be added behind the others; nothing else may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from shardkit.errors import StateError
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec

__all__ = ["Difference", "MixtureSettings", "RunSettings", "StreamSettings", "Tail", "checked_count"]

Tail = Literal["carry", "drop", "pad"]

_ORDER = ("seed", "shuffle", "lanes", "window")
_STREAM_KEYS = frozenset({"name", "fingerprint", "samples", "excluded"})
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Which data a stream delivers: `samples`, without those `excluded` (a digest; "": none).

    `name` is what the user called it, for messages; streams are told apart by their place in the list.
    """

    fingerprint: str
    samples: int
    name: str = ""
    excluded: str = ""

    def to_dict(self) -> dict[str, str | int]:
        """Plain data; `from_dict` reads it back."""
        # dataclasses.asdict would take most of the time of a state, which some loops take at every step.
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "samples": self.samples,
            "excluded": self.excluded,
        }

    @classmethod
    def from_dict(cls, data: object) -> StreamSettings:
        """StateError when `data` is not what `to_dict` gives."""
        if not isinstance(data, Mapping) or data.keys() != _STREAM_KEYS:
            keys = ", ".join(sorted(_STREAM_KEYS))
            raise StateError(f"a stream's settings are {keys}; these are {data!r:.200}")
        for name in ("name", "fingerprint", "excluded"):
            if not isinstance(data[name], str):
                raise StateError(f"a stream's {name} must be text, not {data[name]!r:.80}")
        return cls(data["fingerprint"], checked_count(data, "samples"), data["name"], data["excluded"])

    def __str__(self) -> str:
        without = f", without those of exclusion list {self.excluded}" if self.excluded else ""
        return f"{self.fingerprint} ({self.samples:,} samples{without})"


@dataclass(frozen=True, slots=True)
class MixtureSettings:
    """How several streams are mixed. `epoch_samples`: what the mixture calls an epoch."""

    schedule: Schedule
    epoch_samples: int

    @classmethod
    def from_data(cls, schedule: object, data: Mapping[str, object], streams: int) -> MixtureSettings:
        """From plain data, which has `epoch_samples`; StateError if it does not fit so many streams."""
        found = Schedule.from_list(schedule)
        if found.streams != streams:
            raise StateError(f"the schedule has weights of {found.streams} streams, not of {streams}")
        samples = checked_count(data, "epoch_samples")
        if not samples:
            raise StateError("epoch_samples must be at least 1")
        return cls(found, samples)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that two runs do not share, and what it is in each, as text."""

    what: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run's order, tail and data. `mixture` is None for a single stream, and only then; StateError."""

    order: OrderSpec
    tail: Tail
    streams: tuple[StreamSettings, ...]
    mixture: MixtureSettings | None = None

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise StateError(f"tail must be one of {', '.join(get_args(Tail))}, not {self.tail!r:.80}")
        if (self.mixture is None) != (len(self.streams) == 1):
            raise StateError("a run has a mixture if it has several streams, and only then")

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.streams[0].samples if self.mixture is None else self.mixture.epoch_samples

    def named(self, names: Sequence[str]) -> RunSettings:
        """The same, where streams that the user did not name have these names."""
        streams = (
            replace(stream, name=stream.name or name)
            for stream, name in zip(self.streams, names, strict=True)
        )
        return replace(self, streams=tuple(streams))

    def to_dict(self) -> dict[str, object]:
        """Plain data; `from_dict` reads it back."""
        return {
            "order": self.order.to_dict(),
            "tail": self.tail,
            "streams": [stream.to_dict() for stream in self.streams],
            "epoch_samples": self.epoch_samples,
            "schedule": None if self.mixture is None else self.mixture.schedule.to_list(),
        }

    @classmethod
    def from_dict(cls, data: object) -> RunSettings:
        """StateError when `data` is not what `to_dict` gives."""
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"expected an object, not {type(data).__name__}")
            streams = tuple(StreamSettings.from_dict(stream) for stream in data["streams"])
            mixture = None
            if data["schedule"] is not None:
                mixture = MixtureSettings.from_data(data["schedule"], data, len(streams))
            found = cls(OrderSpec.from_dict(data["order"]), data["tail"], streams, mixture)
            if not found.epoch_samples or found.epoch_samples != data["epoch_samples"]:
                raise ValueError(f"an epoch of {data['epoch_samples']!r:.80} samples")
            return found
        except (KeyError, TypeError, ValueError, StateError) as error:
            raise StateError(f"not the settings of a run: {type(error).__name__}: {error}") from error

    def differences(self, later: RunSettings, position: int) -> list[Difference]:
        """What forbids a run of settings `later` to continue this one at `position`: nothing, if empty."""
        lines = []
        for name in _ORDER:
            before, now = getattr(self.order, name), getattr(later.order, name)
            if before != now:
                lines.append(Difference(name, repr(before), repr(now)))
        if self.tail != later.tail:
            lines.append(Difference("tail", repr(self.tail), repr(later.tail)))
        for number, (old, new) in enumerate(zip_longest(self.streams, later.streams)):
            if old is None and self.mixture is not None:
                continue  # a stream added behind the others, of weight 0 up to the position
            if old is None or new is None or _data(old) != _data(new):
                name = new.name if new is not None and len(later.streams) > 1 else ""
                what = f"dataset of stream {number}" + (f" ({name})" if name else "")
                lines.append(Difference(what, str(old or "none"), str(new or "none")))
        if self.mixture is not None and later.mixture is not None:
            lines += _mixture_differences(self.mixture, later.mixture, position)
        return lines


def _mixture_differences(before: MixtureSettings, now: MixtureSettings, position: int) -> list[Difference]:
    lines = []
    if before.epoch_samples != now.epoch_samples:
        lines.append(Difference("epoch_samples", f"{before.epoch_samples:,}", f"{now.epoch_samples:,}"))
    if not now.schedule.agrees_before(before.schedule, position):
        streams = max(before.schedule.streams, now.schedule.streams)
        schedules = (str(one.schedule.padded(streams).to_list()) for one in (before, now))
        lines.append(Difference(f"weights before position {position:,}", *schedules))
    return lines


def _data(stream: StreamSettings) -> tuple[str, int, str]:
    return stream.fingerprint, stream.samples, stream.excluded


def checked_count(data: Mapping[str, Any], name: str) -> int:
    """The number of samples or batches that plain data has as `name`; StateError if it is none."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise StateError(f"{name} must be a whole number from 0 to 2**62, not {value!r:.80}")
    return value
