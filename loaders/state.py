"""Where a training run is: one small plain dict, the same on every rank, to continue from in any later run.

A state holds one moving number, `position` (samples delivered to the training loop, over all ranks and
epochs), and the constants that the order depends on. Loading compares every constant and refuses a difference
with a list of what differs; batch size, world size and prefetching are no constants, so they may change.
`lanes` and `window` have defaults that depend on the first run's batch size: a loader that was not told
otherwise takes them from the state. `epoch_batches` (batches delivered in the epoch) only serves len().

A mixture's state holds its schedule of weights too, and how many samples it calls an epoch. What lies before
the position must agree; what comes after it may be changed (a schedule given to the loader wins over the
saved one), and streams may be added behind the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from shardkit.errors import StateError
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec

__all__ = ["STATE_VERSION", "LoaderState", "MixtureState", "OnMismatch", "StreamState", "Tail", "resume"]

STATE_VERSION = 2  # 1 knew no mixtures
Tail = Literal["carry", "drop", "pad"]
OnMismatch = Literal["error", "fork"]

_ORDER = ("seed", "shuffle", "lanes", "window")
_KEYS = frozenset(
    {"version", "position", "epoch_batches", "order_version", "tail", "streams", "mixture", *_ORDER}
)
_STREAM_KEYS = frozenset({"name", "fingerprint", "samples", "excluded"})
_MAX_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class StreamState:
    """Which data a stream delivers: `samples`, without those `excluded` (a digest; "": none).

    `name` is what the user called it, for messages; streams are told apart by their place in the list.
    """

    fingerprint: str
    samples: int
    name: str = ""
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class MixtureState:
    """How several streams are mixed."""

    schedule: Schedule
    epoch_samples: int


@dataclass(frozen=True, slots=True)
class LoaderState:
    """All that a run needs to continue; `to_dict` and `from_dict` are each other's inverse."""

    position: int
    epoch_batches: int
    order: OrderSpec
    tail: Tail
    streams: tuple[StreamState, ...]
    mixture: MixtureState | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.mixture.epoch_samples if self.mixture is not None else self.streams[0].samples

    def to_dict(self) -> dict[str, object]:
        """Plain data (ints, strings, lists, dicts) that shares nothing with the loader."""
        order = self.order.to_dict()
        return {
            "version": STATE_VERSION,
            "position": self.position,
            "epoch_batches": self.epoch_batches,
            "order_version": order.pop("version"),
            **order,
            "tail": self.tail,
            "streams": [_stream_dict(stream) for stream in self.streams],
            "mixture": None if self.mixture is None else _mixture_dict(self.mixture),
        }

    @classmethod
    def from_dict(cls, data: object) -> LoaderState:
        """StateError when `data` is not what `to_dict` of this version, or version 1, gives."""
        if not isinstance(data, Mapping):
            raise StateError(f"a loader's state is a dict, not {type(data).__name__}")
        data = _from_version_1(data) if data.get("version") == 1 else dict(data)
        if data.get("version") != STATE_VERSION:
            raise StateError(
                f"the state is of version {data.get('version')!r}, this shardkit reads up to "
                f"{STATE_VERSION}: continue with the shardkit that saved it"
            )
        if data.keys() != _KEYS:
            missing, unknown = sorted(_KEYS - data.keys()), sorted(map(str, data.keys() - _KEYS))
            raise StateError(f"not a loader's state: missing keys {missing}, unknown keys {unknown}")
        tail, streams = data["tail"], data["streams"]
        if tail not in get_args(Tail):
            raise StateError(f"the state's tail must be one of {', '.join(get_args(Tail))}, not {tail!r}")
        if not isinstance(streams, list) or not streams:
            raise StateError(f"the state must have a list of streams, not {streams!r:.80}")
        mixture = None if data["mixture"] is None else _mixture(data["mixture"], len(streams))
        if (mixture is None) != (len(streams) == 1):
            raise StateError("a state has a mixture if it has several streams, and only then")
        order = {"version": data["order_version"]} | {name: data[name] for name in _ORDER}
        return cls(
            position=_count(data, "position"),
            epoch_batches=_count(data, "epoch_batches"),
            order=OrderSpec.from_dict(order),
            tail=tail,
            streams=tuple(_stream(entry) for entry in streams),
            mixture=mixture,
        )


def resume(
    saved: LoaderState, current: LoaderState, *, fixed: frozenset[str], on_mismatch: OnMismatch
) -> LoaderState:
    """The state to continue in: `saved`, if its constants are those of `current`; StateError otherwise.

    `fixed` names which of "lanes", "window", "schedule" and "epoch_samples" the user has set; the others are
    taken from `saved`. "fork" takes the position on purpose and keeps the constants of `current` where they
    differ.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, not {on_mismatch!r}")
    if saved.order.shuffle == current.order.shuffle:
        kept = {name: getattr(saved.order, name) for name in ("lanes", "window") if name not in fixed}
        current = replace(current, order=replace(current.order, **kept))
    current = _with_saved_schedule(saved, current, fixed)
    differences = _differences(saved, current)
    if not differences:
        return replace(current, position=saved.position, epoch_batches=saved.epoch_batches)
    if on_mismatch == "error":
        raise StateError(
            "the state does not belong to this loader:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nuse the settings of the run that saved it, or load_state_dict(state, on_mismatch='fork') "
            "to go on from its position with another order"
        )
    return replace(current, position=saved.position, epoch_batches=0)


def _with_saved_schedule(saved: LoaderState, current: LoaderState, fixed: frozenset[str]) -> LoaderState:
    """`current` with the weights of `saved`: all, or those before its position if a schedule is given.

    Unchanged where they cannot be taken over; `_differences` says so then.
    """
    if saved.mixture is None or current.mixture is None or len(saved.streams) > len(current.streams):
        return current
    schedule = saved.mixture.schedule.padded(len(current.streams))
    given = current.mixture.schedule
    if "schedule" in fixed:
        if not given.agrees_before(schedule, saved.position):
            return current
        schedule = given
    elif schedule.weights_at(0) != given.weights_at(0):
        return current
    samples = current.mixture.epoch_samples if "epoch_samples" in fixed else saved.mixture.epoch_samples
    return replace(current, mixture=MixtureState(schedule, samples))


def _differences(saved: LoaderState, current: LoaderState) -> list[str]:
    lines = []
    for name in _ORDER:
        before, now = getattr(saved.order, name), getattr(current.order, name)
        if before != now:
            lines.append(f"{name}: saved {before!r}, loader has {now!r}")
    if saved.tail != current.tail:
        lines.append(f"tail: saved {saved.tail!r}, loader has {current.tail!r}")
    for number, (old, new) in enumerate(zip_longest(saved.streams, current.streams)):
        if old is None and saved.mixture is not None:
            continue  # a stream added behind the others, of weight 0 up to the position
        if old is None or new is None or _data(old) != _data(new):
            label = f"dataset of stream {number}" + (
                f" ({new.name})" if new and len(current.streams) > 1 else ""
            )
            lines.append(f"{label}: saved {_described(old)}, loader has {_described(new)}")
    if not lines and saved.mixture is not None and current.mixture is not None:
        lines += _mixture_differences(saved.mixture, current.mixture, saved.position)
    return lines


def _mixture_differences(saved: MixtureState, current: MixtureState, position: int) -> list[str]:
    lines = []
    if saved.epoch_samples != current.epoch_samples:
        lines.append(f"epoch_samples: saved {saved.epoch_samples:,}, loader has {current.epoch_samples:,}")
    before = saved.schedule.padded(current.schedule.streams)
    if not current.schedule.agrees_before(before, position):
        lines.append(
            f"weights before position {position:,}: saved {before.to_list()}, "
            f"loader has {current.schedule.to_list()}"
        )
    return lines


def _data(stream: StreamState) -> tuple[str, int, str]:
    return stream.fingerprint, stream.samples, stream.excluded


def _described(stream: StreamState | None) -> str:
    if stream is None:
        return "none"
    without = f", without those of exclusion list {stream.excluded}" if stream.excluded else ""
    return f"{stream.fingerprint} ({stream.samples:,} samples{without})"


def _count(data: Mapping[str, object], name: str) -> int:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_POSITION:
        raise StateError(f"the state's {name} must be a whole number from 0 to 2**62, not {value!r:.80}")
    return value


def _stream(entry: object) -> StreamState:
    if not isinstance(entry, Mapping) or entry.keys() != _STREAM_KEYS:
        keys = ", ".join(sorted(_STREAM_KEYS))
        raise StateError(f"a stream's state has {keys}; this one: {entry!r:.200}")
    for name in ("name", "fingerprint", "excluded"):
        if not isinstance(entry[name], str):
            raise StateError(f"a stream's {name} must be text, not {entry[name]!r:.80}")
    return StreamState(
        fingerprint=entry["fingerprint"],
        samples=_count(entry, "samples"),
        name=entry["name"],
        excluded=entry["excluded"],
    )


def _stream_dict(stream: StreamState) -> dict[str, object]:
    # dataclasses.asdict would take most of the time of a state, which some loops take at every step.
    return {
        "fingerprint": stream.fingerprint,
        "samples": stream.samples,
        "name": stream.name,
        "excluded": stream.excluded,
    }


def _mixture_dict(mixture: MixtureState) -> dict[str, object]:
    return {"schedule": mixture.schedule.to_list(), "epoch_samples": mixture.epoch_samples}


def _mixture(entry: object, streams: int) -> MixtureState:
    if not isinstance(entry, Mapping) or entry.keys() != {"schedule", "epoch_samples"}:
        raise StateError(f"a mixture's state has schedule and epoch_samples; this one: {entry!r:.200}")
    schedule = Schedule.from_list(entry["schedule"])
    if schedule.streams != streams:
        raise StateError(f"the state's schedule has weights of {schedule.streams} streams, not of {streams}")
    samples = _count(entry, "epoch_samples")
    if not samples:
        raise StateError("the state's epoch_samples must be at least 1")
    return MixtureState(schedule, samples)


def _from_version_1(data: Mapping[str, object]) -> dict[str, Any]:
    """What version 1 said, in the form of now: it had one stream, with a weight that meant nothing."""
    streams = data.get("streams")
    if isinstance(streams, list) and all(isinstance(entry, Mapping) for entry in streams):
        streams = [
            {"name": "", "excluded": "", **{k: v for k, v in entry.items() if k != "weight"}}
            for entry in streams
        ]
    return {**data, "version": STATE_VERSION, "streams": streams, "mixture": None}
