"""Where a training run is: one small plain dict, the same on every rank, to continue from in any later run.

A state holds one moving number, `position` (samples delivered to the training loop, over all ranks and
epochs), and the run's settings (`shardkit.order.run_settings`). Loading compares every setting and refuses a
difference with a list of what differs; batch size, world size and prefetching are no settings, so they may
change. The defaults of `lanes` and `window` depend on the first run's batch size: a loader that was not given
any takes them from the state. `epoch_batches` (batches delivered in the epoch) only serves len().

A mixture's state holds its schedule of weights too, and how many samples it calls an epoch. What lies before
the position must agree; what comes after it may be changed (a schedule given to the loader wins over the
saved one), and streams may be added behind the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shardkit.errors import StateError
from shardkit.order.order import OrderSpec
from shardkit.order.run_settings import MixtureSettings, RunSettings, StreamSettings, checked_count

__all__ = ["STATE_VERSION", "LoaderState", "OnMismatch", "resume"]

STATE_VERSION = 2  # 1 knew no mixtures
OnMismatch = Literal["error", "fork"]

_ORDER = ("seed", "shuffle", "lanes", "window")
_KEYS = frozenset(
    {"version", "position", "epoch_batches", "order_version", "tail", "streams", "mixture", *_ORDER}
)


@dataclass(frozen=True, slots=True)
class LoaderState:
    """All that a run needs to continue; `to_dict` and `from_dict` are each other's inverse."""

    position: int
    epoch_batches: int
    settings: RunSettings

    def to_dict(self) -> dict[str, object]:
        """Plain data (ints, strings, lists, dicts) that shares nothing with the loader."""
        settings = self.settings
        order, mixture = settings.order.to_dict(), settings.mixture
        return {
            "version": STATE_VERSION,
            "position": self.position,
            "epoch_batches": self.epoch_batches,
            "order_version": order.pop("version"),
            **order,
            "tail": settings.tail,
            "streams": [stream.to_dict() for stream in settings.streams],
            "mixture": None
            if mixture is None
            else {"schedule": mixture.schedule.to_list(), "epoch_samples": mixture.epoch_samples},
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
        if not isinstance(data["streams"], list) or not data["streams"]:
            raise StateError(f"the state must have a list of streams, not {data['streams']!r:.80}")
        streams = tuple(StreamSettings.from_dict(entry) for entry in data["streams"])
        order = {"version": data["order_version"]} | {name: data[name] for name in _ORDER}
        return cls(
            position=checked_count(data, "position"),
            epoch_batches=checked_count(data, "epoch_batches"),
            settings=RunSettings(
                OrderSpec.from_dict(order), data["tail"], streams, _mixture(data["mixture"], len(streams))
            ),
        )


def resume(
    saved: LoaderState, current: RunSettings, *, fixed: frozenset[str], on_mismatch: OnMismatch
) -> LoaderState:
    """The state to continue in: `saved`, if its settings are the `current` ones; StateError otherwise.

    `fixed` names which of "lanes", "window", "schedule" and "epoch_samples" the user has set; the others are
    taken from `saved`. "fork" takes the position on purpose and keeps the `current` settings where they
    differ.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, not {on_mismatch!r}")
    order = saved.settings.order
    if order.shuffle == current.order.shuffle:
        kept = {name: getattr(order, name) for name in ("lanes", "window") if name not in fixed}
        current = replace(current, order=replace(current.order, **kept))
    current = _with_saved_schedule(saved, current, fixed)
    differences = saved.settings.differences(current, saved.position)
    if not differences:
        return replace(saved, settings=current)
    if on_mismatch == "error":
        raise StateError(
            "the state does not belong to this loader:\n"
            + "\n".join(f"  {each.what}: saved {each.before}, loader has {each.now}" for each in differences)
            + "\nuse the settings of the run that saved it, or load_state_dict(state, on_mismatch='fork') "
            "to continue from its position in another order"
        )
    return LoaderState(saved.position, 0, current)


def _with_saved_schedule(saved: LoaderState, current: RunSettings, fixed: frozenset[str]) -> RunSettings:
    """`current` with the weights of `saved`: all, or those before its position if a schedule is given.

    Unchanged where they cannot be taken over, which is a difference then.
    """
    before, now = saved.settings.mixture, current.mixture
    if before is None or now is None or len(saved.settings.streams) > len(current.streams):
        return current
    schedule = before.schedule.padded(len(current.streams))
    if "schedule" in fixed:
        if not now.schedule.agrees_before(schedule, saved.position):
            return current
        schedule = now.schedule
    elif schedule.weights_at(0) != now.schedule.weights_at(0):
        return current
    samples = now.epoch_samples if "epoch_samples" in fixed else before.epoch_samples
    return replace(current, mixture=MixtureSettings(schedule, samples))


def _mixture(entry: object, streams: int) -> MixtureSettings | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or entry.keys() != {"schedule", "epoch_samples"}:
        raise StateError(f"a mixture's state has schedule and epoch_samples; this one: {entry!r:.200}")
    return MixtureSettings.from_data(entry["schedule"], entry, streams)


def _from_version_1(data: Mapping[str, object]) -> dict[str, Any]:
    """A state of version 1 in today's form: it had one stream, with a weight that meant nothing."""
    streams = data.get("streams")
    if isinstance(streams, list) and all(isinstance(entry, Mapping) for entry in streams):
        streams = [
            {"name": "", "excluded": "", **{k: v for k, v in entry.items() if k != "weight"}}
            for entry in streams
        ]
    return {**data, "version": STATE_VERSION, "streams": streams, "mixture": None}
