"""Where a training run is: one small plain dict, the same on every rank, to continue from in any later run.

A state holds one moving number, `position` (samples delivered to the training loop, over all ranks and
epochs), and the constants that the order depends on. Loading compares every constant and refuses a difference
with a list of what differs; batch size, world size and prefetching are no constants, so they may change.
`lanes` and `window` have defaults that depend on the first run's batch size: a loader that was not told
otherwise takes them from the state. `epoch_batches` (batches delivered in the epoch) only serves len().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from shardkit.errors import StateError
from shardkit.order import OrderSpec

__all__ = ["STATE_VERSION", "LoaderState", "OnMismatch", "StreamState", "Tail", "resume"]

STATE_VERSION = 1
Tail = Literal["carry", "drop", "pad"]
OnMismatch = Literal["error", "fork"]

_ORDER = ("seed", "shuffle", "lanes", "window")
_KEYS = frozenset({"version", "position", "epoch_batches", "order_version", "tail", "streams", *_ORDER})
_MAX_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class StreamState:
    """Which data a stream delivers."""

    fingerprint: str
    samples: int
    weight: int = 1


@dataclass(frozen=True, slots=True)
class LoaderState:
    """All that a run needs to continue; `to_dict` and `from_dict` are each other's inverse."""

    position: int
    epoch_batches: int
    order: OrderSpec
    tail: Tail
    streams: tuple[StreamState, ...]

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
            "streams": [asdict(stream) for stream in self.streams],
        }

    @classmethod
    def from_dict(cls, data: object) -> LoaderState:
        """StateError when `data` is not what `to_dict` of this version gives."""
        if not isinstance(data, Mapping):
            raise StateError(f"a loader's state is a dict, not {type(data).__name__}")
        if data.get("version") != STATE_VERSION:
            raise StateError(
                f"the state is of version {data.get('version')!r}, this shardkit reads {STATE_VERSION}: "
                f"continue with the shardkit that saved it"
            )
        if data.keys() != _KEYS:
            missing, unknown = sorted(_KEYS - data.keys()), sorted(map(str, data.keys() - _KEYS))
            raise StateError(f"not a loader's state: missing keys {missing}, unknown keys {unknown}")
        tail, streams = data["tail"], data["streams"]
        if tail not in get_args(Tail):
            raise StateError(f"the state's tail must be one of {', '.join(get_args(Tail))}, not {tail!r}")
        if not isinstance(streams, list) or len(streams) != 1:
            raise StateError("the state must have a list of one stream: mixtures are not supported yet")
        order = {"version": data["order_version"]} | {name: data[name] for name in _ORDER}
        return cls(
            position=_count(data, "position"),
            epoch_batches=_count(data, "epoch_batches"),
            order=OrderSpec.from_dict(order),
            tail=tail,
            streams=tuple(_stream(entry) for entry in streams),
        )


def resume(
    saved: LoaderState, current: LoaderState, *, fixed: frozenset[str], on_mismatch: OnMismatch
) -> LoaderState:
    """The state to continue in: `saved`, if its constants are those of `current`; StateError otherwise.

    `fixed` names which of "lanes" and "window" the user has set; the others are taken from `saved`.
    "fork" takes the position on purpose and keeps the constants of `current` where they differ.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, not {on_mismatch!r}")
    if saved.order.shuffle == current.order.shuffle:
        kept = {name: getattr(saved.order, name) for name in ("lanes", "window") if name not in fixed}
        current = replace(current, order=replace(current.order, **kept))
    differences = _differences(saved, current)
    if not differences:
        return saved
    if on_mismatch == "error":
        raise StateError(
            "the state does not belong to this loader:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nuse the settings of the run that saved it, or load_state_dict(state, on_mismatch='fork') "
            "to go on from its position with another order"
        )
    return replace(current, position=saved.position, epoch_batches=0)


def _differences(saved: LoaderState, current: LoaderState) -> list[str]:
    lines = []
    for name in _ORDER:
        before, now = getattr(saved.order, name), getattr(current.order, name)
        if before != now:
            lines.append(f"{name}: saved {before!r}, loader has {now!r}")
    if saved.tail != current.tail:
        lines.append(f"tail: saved {saved.tail!r}, loader has {current.tail!r}")
    for number, (old, new) in enumerate(zip(saved.streams, current.streams, strict=True)):
        if old != new:
            lines.append(
                f"dataset of stream {number}: saved {old.fingerprint} ({old.samples:,} samples, weight "
                f"{old.weight}), loader has {new.fingerprint} ({new.samples:,} samples, weight {new.weight})"
            )
    return lines


def _count(data: Mapping[str, object], name: str) -> int:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_POSITION:
        raise StateError(f"the state's {name} must be a whole number from 0 to 2**62, not {value!r:.80}")
    return value


def _stream(entry: object) -> StreamState:
    if not isinstance(entry, Mapping) or entry.keys() != {"fingerprint", "samples", "weight"}:
        raise StateError(f"a stream's state has fingerprint, samples and weight; this one: {entry!r:.200}")
    if not isinstance(entry["fingerprint"], str):
        raise StateError(f"a stream's fingerprint must be text, not {entry['fingerprint']!r:.80}")
    return StreamState(entry["fingerprint"], _count(entry, "samples"), _count(entry, "weight"))
