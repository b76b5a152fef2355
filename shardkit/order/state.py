"""The state of a training run: one small plain dict, the same on every rank, that any later run can resume.

A state holds one moving number, `position` (samples delivered to the training loop, over all ranks and
epochs), and the run's settings (`shardkit.order.run_settings`). Loading compares every setting and raises an
error that lists the differences. Batch size, world size and prefetching are not settings, so they may change.
A loader that was not given `lanes` or `window` takes them from the state, and always takes the version of the
order from it: a run continues as it began, whatever the current defaults are. `epoch_batches` (batches
delivered in the epoch) is used for len() only.

A mixture's schedule of weights and the sizes of optimizer steps (`global_batch`) may change with the
position. Before the saved position they must agree; after it they may be changed (the loader's arguments win
over saved values), and streams may be added at the end of the list.

All states have the same keys, and their lists contain no dicts. torch.distributed.checkpoint stores each
value under its path and loads the paths that exist in the new loader's state; lists it then stores whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shardkit.errors import StateError
from shardkit.order.batches import StepSizes
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec
from shardkit.order.run_settings import Difference, RunSettings, StreamSettings, checked_count

STATE_VERSION = 4  # version 2 added mixtures, 3 step sizes, 4 the lanes and windows of single streams
OnMismatch = Literal["error", "fork"]

_ORDER = ("seed", "shuffle", "lanes", "window")
_STREAM = ("name", "fingerprint", "samples", "excluded", "lanes", "window")
_COMMON = frozenset({"version", "position", "epoch_batches", "order_version", "tail", "streams", *_ORDER})
_SINCE_3 = _COMMON | {"schedule", "epoch_samples", "global_batch"}
_KEYS = {1: _COMMON, 2: _COMMON | {"mixture"}, 3: _SINCE_3, 4: _SINCE_3}


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Everything that a run needs to continue; `from_dict` is the inverse of `to_dict`."""

    position: int
    epoch_batches: int
    settings: RunSettings
    step_sizes: StepSizes | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain data (ints, strings, lists, dicts) that shares no objects with the loader."""
        settings = self.settings
        order = settings.order.to_dict()
        return {
            "version": STATE_VERSION,
            "position": self.position,
            "epoch_batches": self.epoch_batches,
            "order_version": order.pop("version"),
            **order,
            "tail": settings.tail,
            "streams": {name: [getattr(stream, name) for stream in settings.streams] for name in _STREAM},
            "schedule": None if settings.schedule is None else settings.schedule.to_list(),
            "epoch_samples": settings.epoch_samples,
            "global_batch": None if self.step_sizes is None else self.step_sizes.to_list(),
        }

    @classmethod
    def from_dict(cls, data: object) -> LoaderState:
        """Build a state from plain data of this or an earlier version; raises StateError if it is invalid."""
        data = _checked_keys(data)
        if data["version"] < 3:
            data = _from_version_1_or_2(data)
        if data["version"] < 4 and isinstance(data["streams"], Mapping):
            none = [0] * len(data["streams"].get("name", ()))
            data["streams"] = {**data["streams"], "lanes": none, "window": none}
        streams = tuple(StreamSettings.from_dict(entry) for entry in _entries(data["streams"]))
        order = {"version": data["order_version"]} | {name: data[name] for name in _ORDER}
        schedule, sizes = data["schedule"], data["global_batch"]
        samples = checked_count(data, "epoch_samples")
        if not samples:
            raise StateError("epoch_samples must be at least 1")
        return cls(
            position=checked_count(data, "position"),
            epoch_batches=checked_count(data, "epoch_batches"),
            settings=RunSettings(
                OrderSpec.from_dict(order),
                data["tail"],
                streams,
                None if schedule is None else Schedule.from_list(schedule),
                samples,
            ),
            step_sizes=None if sizes is None else StepSizes.from_list(sizes),
        )


def resume(
    saved: LoaderState,
    current: RunSettings,
    *,
    fixed: frozenset[str],
    on_mismatch: OnMismatch,
    step_sizes: StepSizes | None = None,
) -> LoaderState:
    """Return the state to continue from: `saved`, if its settings agree with `current`.

    Raises StateError if they do not.

    `fixed` names which of "lanes", "window", "schedule", "epoch_samples" and "global_batch" (the loader's own
    `step_sizes`) the user has set; the others are taken from `saved`. With on_mismatch "fork", a difference
    is not an error: the run continues from the saved position with the `current` settings.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {', '.join(get_args(OnMismatch))}, not {on_mismatch!r}")
    current = _with_saved_shuffle(saved.settings, current, fixed)
    current = _with_saved_schedule(saved, current, fixed)
    differences = saved.settings.differences(current, saved.position)
    before = saved.step_sizes
    if "global_batch" not in fixed:
        step_sizes = before
    elif before and step_sizes and not step_sizes.agrees_before(before, saved.position):
        what = f"global_batch before position {saved.position:,}"
        differences.append(Difference(what, str(before.to_list()), str(step_sizes.to_list())))
    if not differences:
        return replace(saved, settings=current, step_sizes=step_sizes)
    if on_mismatch == "error":
        raise StateError(
            "the state does not belong to this loader:\n"
            + "\n".join(f"  {each.what}: saved {each.before}, loader has {each.now}" for each in differences)
            + "\nuse the settings of the run that saved it, or load_state_dict(state, on_mismatch='fork') "
            "to continue from its position in another order"
        )
    return LoaderState(saved.position, 0, current, step_sizes)


def _with_saved_shuffle(saved: RunSettings, current: RunSettings, fixed: frozenset[str]) -> RunSettings:
    """Return `current` with the order version, lanes and windows of `saved`, except for settings in `fixed`.

    Streams that were added since keep their own lanes and windows.
    """
    order = replace(current.order, version=saved.order.version)
    if saved.order.shuffle != order.shuffle:
        return replace(current, order=order)
    kept = [name for name in ("lanes", "window") if name not in fixed]
    streams = list(current.streams)
    for number, stream in enumerate(streams):
        known = saved.streams[number] if number < len(saved.streams) else None
        own = current.order_of(number)
        streams[number] = replace(stream, **{name: getattr(known or own, name) for name in kept})
    order = replace(order, **{name: getattr(saved.order, name) for name in kept})
    return replace(current, order=order, streams=tuple(streams))


def _with_saved_schedule(saved: LoaderState, current: RunSettings, fixed: frozenset[str]) -> RunSettings:
    """Return `current` with the schedule and epoch size of `saved`, except for settings in `fixed`.

    Returns `current` unchanged if the saved values do not fit it; `resume` then reports the difference.
    """
    before, schedule = saved.settings, current.schedule
    if len(before.streams) > len(current.streams):
        return current
    if before.schedule is None or schedule is None:
        if before.schedule is not schedule or before.streams[0].data != current.streams[0].data:
            return current
    else:
        known = before.schedule.padded(len(current.streams))
        if "schedule" in fixed:
            if not schedule.agrees_before(known, saved.position):
                return current
        elif known.weights_at(0) != schedule.weights_at(0):
            return current
        else:
            schedule = known
    samples = current.epoch_samples if "epoch_samples" in fixed else before.epoch_samples
    return replace(current, schedule=schedule, epoch_samples=samples)


def _checked_keys(data: object) -> dict[str, Any]:
    """Return `data` as a dict with the keys of its version; raises StateError for anything else."""
    if not isinstance(data, Mapping):
        raise StateError(f"a loader's state must be a dict, not {type(data).__name__}")
    if "version" not in data or "position" not in data:
        within = [name for name, value in data.items() if isinstance(value, Mapping) and "position" in value]
        hint = f"load the dict under {within[0]!r}" if within else "load the dict that state_dict() returned"
        found = f"has the keys {', '.join(map(repr, data))}" if data else "is empty"
        raise StateError(f"not a loader's state: this dict {found:.200}; {hint}")
    version = data["version"]
    if isinstance(version, bool) or not isinstance(version, Hashable) or version not in _KEYS:
        raise StateError(
            f"the state has version {version!r:.80}, but this shardkit reads versions up to {STATE_VERSION}: "
            "continue with the version of shardkit that saved it"
        )
    if data.keys() != _KEYS[version]:
        missing, unknown = (
            sorted(_KEYS[version] - data.keys()),
            sorted(map(str, data.keys() - _KEYS[version])),
        )
        raise StateError(f"not a loader's state: missing keys {missing}, unknown keys {unknown}")
    return dict(data)


def _entries(streams: object) -> list[dict[str, object]]:
    """Return one dict of settings per stream, from lists of values by setting name."""
    if isinstance(streams, Mapping) and streams.keys() == set(_STREAM):
        columns = list(streams.values())
        if all(isinstance(each, list) and len(each) == len(columns[0]) > 0 for each in columns):
            return [dict(zip(streams, entry, strict=True)) for entry in zip(*columns, strict=True)]
    names = ", ".join(_STREAM)
    raise StateError(
        f"`streams` in a state must map each of {names} to a list, with one entry per stream; got "
        f"{streams!r:.200}"
    )


def _from_version_1_or_2(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a state to the current form: these versions had one dict per stream and one for the mixture.

    Version 1 had one stream, with a weight that had no effect.
    """
    streams, mixture = data["streams"], data.pop("mixture", None)
    if not isinstance(streams, list) or not streams or not all(isinstance(one, Mapping) for one in streams):
        raise StateError(f"the state must have a list of streams, not {streams!r:.80}")
    if data["version"] == 1:
        streams = [
            {"name": "", "excluded": "", **{k: v for k, v in one.items() if k != "weight"}} for one in streams
        ]
    names = streams[0].keys()
    if any(one.keys() != names for one in streams):
        raise StateError(f"the state's streams have different keys: {streams!r:.200}")
    if mixture is None:
        mixture = {"schedule": None, "epoch_samples": streams[0].get("samples")}
    elif not isinstance(mixture, Mapping) or mixture.keys() != {"schedule", "epoch_samples"}:
        raise StateError(f"a mixture's state must have schedule and epoch_samples; got {mixture!r:.200}")
    columns = {name: [one[name] for one in streams] for name in names}
    return {**data, "streams": columns, **mixture, "global_batch": None}
