"""The settings of a run: everything that its sample order depends on, as plain data.

They are the constant part of a loader's state and the head of every usage log; `shardkit audit` and
`shardkit trace` recompute a run from them. Batch size, world size and prefetching are not settings: they may
change within a run. Settings and the indexes of the datasets together determine the sample at each position.

A run can be continued only by settings without `differences` from its own: a mixture's weights may change
from the current position on, and streams may be added at the end of the list; nothing else may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from shardkit.errors import StateError
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec
from shardkit.order.streams import stream_seed

Tail = Literal["carry", "drop", "pad"]

_STREAM_KEYS = frozenset({"name", "fingerprint", "samples", "excluded"})
_SHUFFLE_KEYS = frozenset({"lanes", "window"})  # keys that streams have since state version 4
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The data that a stream delivers: `samples` is the number of samples without the excluded ones.

    `excluded`: the digest of the exclusion list, "" without one. `name`: the user's name for the stream, for
    messages only; streams are identified by their index in the list. `lanes` and `window`: the values of
    this stream in a mixture; 0 means the value of the run's order.
    """

    fingerprint: str
    samples: int
    name: str = ""
    excluded: str = ""
    lanes: int = 0
    window: int = 0

    @property
    def data(self) -> tuple[str, int, str]:
        """The values that must not change when a run is continued: fingerprint, samples and excluded."""
        return self.fingerprint, self.samples, self.excluded

    def to_dict(self) -> dict[str, str | int]:
        """Return the settings as plain data; `from_dict` reads it back."""
        # Not dataclasses.asdict: it is slow, and some training loops save a state at every step.
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "samples": self.samples,
            "excluded": self.excluded,
            "lanes": self.lanes,
            "window": self.window,
        }

    @classmethod
    def from_dict(cls, data: object) -> StreamSettings:
        """Build settings from what `to_dict` returns; raises StateError for any other data."""
        if not isinstance(data, Mapping) or data.keys() - _SHUFFLE_KEYS != _STREAM_KEYS:
            keys = ", ".join(sorted(_STREAM_KEYS | _SHUFFLE_KEYS))
            raise StateError(f"a stream's settings must be {keys}; got {data!r:.200}")
        for name in ("name", "fingerprint", "excluded"):
            if not isinstance(data[name], str):
                raise StateError(f"a stream's {name} must be text, not {data[name]!r:.80}")
        shuffled = {name: checked_count(data, name) for name in sorted(_SHUFFLE_KEYS & data.keys())}
        return cls(
            data["fingerprint"], checked_count(data, "samples"), data["name"], data["excluded"], **shuffled
        )

    def __str__(self) -> str:
        without = f", without the rows of exclusion list {self.excluded}" if self.excluded else ""
        return f"fingerprint {self.fingerprint} ({self.samples:,} samples{without})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs between two runs, and its two values as text."""

    what: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run's order, tail and data. Raises StateError for settings that contradict each other.

    `schedule`: the weights of a mixture; None for a single stream. `epoch_samples`: the number of samples in
    an epoch of the run; by default, all samples of the single stream.
    """

    order: OrderSpec
    tail: Tail
    streams: tuple[StreamSettings, ...]
    schedule: Schedule | None = None
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise StateError(f"tail must be one of {', '.join(get_args(Tail))}, not {self.tail!r:.80}")
        if (self.schedule is None) != (len(self.streams) == 1):
            raise StateError("a run must have a schedule of weights if it has several streams, and only then")
        if self.schedule is not None and self.schedule.streams != len(self.streams):
            raise StateError(
                f"the schedule has weights of {self.schedule.streams} streams, but the run has "
                f"{len(self.streams)}"
            )
        try:
            for number, stream in enumerate(self.streams):
                if stream.lanes or stream.window:
                    self.order_of(number)
        except ValueError as error:
            raise StateError(f"stream {number}: {error}") from error
        if not self.epoch_samples and self.schedule is None:
            object.__setattr__(self, "epoch_samples", self.streams[0].samples)

    def order_of(self, stream: int) -> OrderSpec:
        """Return the spec of a stream's own order. Raises ValueError for invalid lanes or windows."""
        own, seed = self.streams[stream], self.order.seed
        return replace(
            self.order,
            seed=seed if self.schedule is None else stream_seed(seed, stream),
            lanes=own.lanes or self.order.lanes,
            window=own.window or self.order.window,
        )

    def named(self, names: Sequence[str]) -> RunSettings:
        """Return the same settings, with these names for the streams that the user did not name."""
        streams = (
            replace(stream, name=stream.name or name)
            for stream, name in zip(self.streams, names, strict=True)
        )
        return replace(self, streams=tuple(streams))

    def to_dict(self) -> dict[str, object]:
        """Return the settings as plain data; `from_dict` reads it back."""
        return {
            "order": self.order.to_dict(),
            "tail": self.tail,
            "streams": [stream.to_dict() for stream in self.streams],
            "epoch_samples": self.epoch_samples,
            "schedule": None if self.schedule is None else self.schedule.to_list(),
        }

    @classmethod
    def from_dict(cls, data: object) -> RunSettings:
        """Build settings from what `to_dict` returns; raises StateError for any other data."""
        try:
            if not isinstance(data, Mapping):
                raise TypeError(f"expected an object, not {type(data).__name__}")
            streams = tuple(StreamSettings.from_dict(stream) for stream in data["streams"])
            schedule = None if data["schedule"] is None else Schedule.from_list(data["schedule"])
            samples = checked_count(data, "epoch_samples")
            if not samples:
                raise ValueError("epoch_samples must be at least 1, not 0")
            return cls(OrderSpec.from_dict(data["order"]), data["tail"], streams, schedule, samples)
        except (KeyError, TypeError, ValueError, StateError) as error:
            raise StateError(f"not valid settings of a run: {type(error).__name__}: {error}") from error

    def differences(self, later: RunSettings, position: int) -> list[Difference]:
        """List the differences that forbid a run with settings `later` to continue this one at `position`."""
        lines = []
        for name in ("version", "seed", "shuffle"):
            before, now = getattr(self.order, name), getattr(later.order, name)
            if before != now:
                what = "version of the order" if name == "version" else name
                lines.append(Difference(what, repr(before), repr(now)))
        if self.tail != later.tail:
            lines.append(Difference("tail", repr(self.tail), repr(later.tail)))
        for number, (old, new) in enumerate(zip_longest(self.streams, later.streams)):
            if old is None and self.schedule is not None:
                continue  # a stream that was added at the end, with weight 0 up to the position
            if old is None or new is None or old.data != new.data:
                name = new.name if new is not None and len(later.streams) > 1 else ""
                what = f"dataset of stream {number}" + (f" ({name})" if name else "")
                lines.append(Difference(what, str(old or "none"), str(new or "none")))
        lines += self._shuffle_differences(later)
        if self.epoch_samples != later.epoch_samples:
            lines.append(Difference("epoch_samples", f"{self.epoch_samples:,}", f"{later.epoch_samples:,}"))
        before, after = self.schedule, later.schedule
        if before is not None and after is not None and not after.agrees_before(before, position):
            streams = max(before.streams, after.streams)
            schedules = (str(one.padded(streams).to_list()) for one in (before, after))
            lines.append(Difference(f"weights before position {position:,}", *schedules))
        return lines

    def _shuffle_differences(self, later: RunSettings) -> list[Difference]:
        """List differing lanes and windows of the streams in both; equal differences are listed once."""
        lines: list[Difference] = []
        for number in range(min(len(self.streams), len(later.streams))):
            old, new = self.order_of(number), later.order_of(number)
            for name in ("lanes", "window"):
                before, now = getattr(old, name), getattr(new, name)
                line = Difference(name, repr(before), repr(now))
                if before != now and line not in lines:
                    lines.append(line)
        return lines


def checked_count(data: Mapping[str, Any], name: str) -> int:
    """Return `data[name]`, a number of samples or batches; raises StateError for any other value."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise StateError(f"{name} must be a whole number from 0 to 2**62, not {value!r:.80}")
    return value
