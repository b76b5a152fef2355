"""States: plain data, checked when loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import StateError
from shardkit.order.batches import StepSizes
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec
from shardkit.order.run_settings import RunSettings, StreamSettings
from shardkit.order.state import LoaderState, resume

SETTINGS = RunSettings(
    order=OrderSpec(seed=17, lanes=8, window=100), tail="carry", streams=(StreamSettings("aa", 50),)
)
STATE = LoaderState(position=120, epoch_batches=3, settings=SETTINGS)
TWO = {
    "name": ["", ""], "fingerprint": ["aa", "aa"], "samples": [50, 50], "excluded": ["", ""],
    "lanes": [0, 0], "window": [0, 0],
}  # fmt: skip
SCHEDULE = Schedule(((0, (3, 1)), (100, (1, 1)), (200, (1, 3))))
GOLDEN = Path(__file__).parents[1] / "golden"
MIXED_SETTINGS = replace(
    SETTINGS,
    streams=(StreamSettings("aa", 50, "web"), StreamSettings("bb", 30, "code")),
    schedule=SCHEDULE,
    epoch_samples=80,
)
MIXED = replace(STATE, settings=MIXED_SETTINGS)
NOTHING_FIXED: frozenset[str] = frozenset()


STEPS = replace(STATE, step_sizes=StepSizes(((0, 12), (36, 24), (84, 16))))


@pytest.mark.parametrize("state", [STATE, MIXED, STEPS])
def test_a_state_survives_json(state: LoaderState) -> None:
    assert LoaderState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def in_first_order(state: LoaderState) -> LoaderState:
    settings = state.settings
    return replace(state, settings=replace(settings, order=replace(settings.order, version=1)))


@pytest.mark.parametrize(
    ("number", "state"),
    [(0, STATE), (1, STATE), (2, MIXED), (3, replace(MIXED, step_sizes=STEPS.step_sizes))],
)
def test_states_of_earlier_versions_go_on_in_their_order(number: int, state: LoaderState) -> None:
    """As version 1 (the first of them), version 2 and version 3 saved them."""
    saved = LoaderState.from_dict(json.loads((GOLDEN / "loader_states.json").read_text())[number])
    assert saved == in_first_order(state)
    own = (replace(stream, lanes=64, window=9) for stream in state.settings.streams[1:])
    streams = (*state.settings.streams[:1], *own)
    now = replace(state.settings, order=OrderSpec(seed=17, lanes=1024, window=7), streams=streams)
    assert resume(saved, now, fixed=NOTHING_FIXED, on_mismatch="error") == saved


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixture": 5}, "a mixture's state must have schedule and epoch_samples; got 5"),
        ({"mixture": {"schedule": None}}, "a mixture's state must have schedule and epoch_samples"),
        ({"streams": 5}, "must have a list of streams"),
        ({"streams": []}, "must have a list of streams"),
        ({"streams": [{"name": ""}, 5]}, "must have a list of streams"),
    ],
)
def test_a_state_of_an_earlier_version_that_is_not_one_is_refused(change: dict[str, Any], words: str) -> None:
    saved = json.loads((GOLDEN / "loader_states.json").read_text())[2]
    assert saved["version"] == 2
    with pytest.raises(StateError, match=words):
        LoaderState.from_dict(saved | change)
    saved["streams"][1]["extra"] = 1
    with pytest.raises(StateError, match="streams have different keys"):
        LoaderState.from_dict(saved)


def test_all_states_have_the_same_keys_and_no_dicts_in_lists() -> None:
    """torch.distributed.checkpoint would make a key of each of these dicts, and miss those of new streams."""
    states = [state.to_dict() for state in (STATE, MIXED, STEPS)]
    assert len({(*state, *state["streams"]) for state in states}) == 1  # type: ignore[misc]
    for state in states:
        assert all(type(each) in (str, int) for values in state["streams"].values() for each in values)  # type: ignore[attr-defined]


def test_a_state_is_flat_plain_data_with_the_names_users_set() -> None:
    data = STATE.to_dict()
    assert {name: data[name] for name in ("position", "seed", "shuffle", "lanes", "window", "tail")} == {
        "position": 120,
        "seed": 17,
        "shuffle": "window",
        "lanes": 8,
        "window": 100,
        "tail": "carry",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 5}, "version 5"),
        ({"version": None}, "version None"),
        ({"version": [4]}, r"version \[4\]"),
        ({"version": {}}, "version {}"),
        ({"order_version": 9}, "version 9"),
        ({"position": -1}, "position"),
        ({"position": 1.0}, "position"),
        ({"position": True}, "position"),
        ({"position": 1 << 62}, "position"),
        ({"tail": "keep"}, "tail"),
        ({"lanes": 0}, "lanes"),
        ({"streams": []}, "map each of name"),
        ({"streams": {"name": [], "fingerprint": [], "samples": [], "excluded": []}}, "one entry per stream"),
        ({"streams": TWO | {"name": [""]}}, "one entry per stream"),
        ({"streams": {name: [] for name in TWO}}, "one entry per stream"),
        ({"streams": {"fingerprint": ["aa"], "samples": [5]}}, "map each of name, fingerprint, samples"),
        ({"streams": {name: [5] for name in TWO} | {"name": [""]}}, "fingerprint must be text"),
        ({"streams": TWO | {"lanes": [0, "8"]}}, "lanes must be a whole number"),
        ({"streams": TWO | {"lanes": [0, 1 << 17]}, "schedule": [[0, [1, 1]]]}, "stream 1: lanes must be"),
        ({"streams": TWO}, "schedule of weights if it has several streams"),
        ({"schedule": [[0, [1]]]}, "schedule of weights if it has several streams"),
        ({"schedule": 5}, "list of .start"),
        ({"streams": TWO, "schedule": [[0, [1]]]}, "of 1 stream"),
        ({"streams": TWO, "schedule": [[0, [0, 0]]]}, "weight"),
        ({"epoch_samples": 0}, "epoch_samples"),
        ({"global_batch": [[5, 16]]}, "must begin at position 0"),
        ({"global_batch": [[0, 0]]}, "at least 1 sequence"),
        ({"global_batch": [[0, 16], [0, 8]]}, "ascending"),
        ({"global_batch": [16]}, "list of .position"),
        ({"global_batch": "many"}, "list of .position"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        LoaderState.from_dict(STATE.to_dict() | change)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "a dict, not NoneType"),
        ([], "a dict, not list"),
        ("state", "a dict, not str"),
        ({}, "this dict is empty"),
        ({"model": {}}, "has the keys 'model'; load the dict that state_dict"),
        ({"version": 4}, "has the keys 'version'; load the dict that state_dict"),
        ({"position": 5}, "has the keys 'position'; load the dict that state_dict"),
        ({"step": 5, "loader": STATE.to_dict()}, "keys 'step', 'loader'; load the dict under 'loader'"),
    ],
)
def test_other_things_than_states_are_refused_by_what_they_are(data: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        LoaderState.from_dict(data)


def test_a_missing_key_is_named() -> None:
    data = STATE.to_dict()
    del data["tail"]
    with pytest.raises(StateError, match="tail"):
        LoaderState.from_dict(data)


def test_lanes_and_window_come_from_the_state_unless_they_were_set() -> None:
    current = replace(SETTINGS, order=replace(SETTINGS.order, lanes=4, window=7))
    assert resume(STATE, current, fixed=NOTHING_FIXED, on_mismatch="error") == STATE
    with pytest.raises(StateError, match="lanes: saved 8, loader has 4") as caught:
        resume(STATE, current, fixed=frozenset({"lanes"}), on_mismatch="error")
    assert "window" not in str(caught.value).split("use the settings")[0]


def test_each_stream_goes_on_with_its_lanes_and_window() -> None:
    streams = (MIXED_SETTINGS.streams[0], replace(MIXED_SETTINGS.streams[1], lanes=2, window=5))
    saved = replace(MIXED, settings=replace(MIXED_SETTINGS, streams=streams))
    assert LoaderState.from_dict(json.loads(json.dumps(saved.to_dict()))) == saved
    assert [(o.lanes, o.window) for o in map(saved.settings.order_of, range(2))] == [(8, 100), (2, 5)]
    current = replace(with_schedule((0, (3, 1, 0)), streams=3), order=OrderSpec(17, 4, 7))
    resumed = resume(saved, current, fixed=NOTHING_FIXED, on_mismatch="error").settings
    assert [resumed.order_of(n).lanes for n in range(3)] == [8, 2, 4], "what is added has its own"
    given = with_schedule((0, (3, 1)))
    with pytest.raises(StateError, match="lanes: saved 2, loader has 8"):
        resume(saved, given, fixed=frozenset({"lanes"}), on_mismatch="error")


def test_every_constant_is_compared_and_all_differences_are_listed() -> None:
    current = replace(
        SETTINGS, tail="drop", order=replace(SETTINGS.order, seed=18), streams=(StreamSettings("bb", 51),)
    )
    with pytest.raises(StateError) as caught:
        resume(STATE, current, fixed=NOTHING_FIXED, on_mismatch="error")
    for words in (
        "seed: saved 17, loader has 18",
        "tail: saved 'carry', loader has 'drop'",
        "aa",
        "bb",
        "51",
    ):
        assert words in str(caught.value)


def with_schedule(*segments: tuple[int, tuple[int, ...]], streams: int = 2) -> RunSettings:
    more = (StreamSettings("cc", 20, "more"),) * (streams - 2)
    return replace(MIXED_SETTINGS, streams=MIXED_SETTINGS.streams + more, schedule=Schedule(segments))


def schedule_of(state: LoaderState) -> list[list[object]]:
    assert state.settings.schedule is not None
    return state.settings.schedule.to_list()


def test_a_saved_schedule_is_gone_on_with_if_the_streams_weights_are_those_it_began_with() -> None:
    assert resume(MIXED, with_schedule((0, (3, 1))), fixed=NOTHING_FIXED, on_mismatch="error") == MIXED
    soon = with_schedule((0, (3, 1)), (1, (1, 1)))
    assert resume(MIXED, soon, fixed=NOTHING_FIXED, on_mismatch="error") == MIXED
    saved = replace(MIXED, settings=soon)
    assert resume(saved, with_schedule((0, (3, 1))), fixed=NOTHING_FIXED, on_mismatch="error") == saved
    with pytest.raises(StateError, match=r"weights before position 120: saved \[\[0, \[3, 1\]\]"):
        resume(MIXED, with_schedule((0, (2, 1))), fixed=NOTHING_FIXED, on_mismatch="error")


def test_a_given_schedule_wins_for_what_follows_the_position_and_must_agree_before_it() -> None:
    fixed = frozenset({"schedule"})
    current = with_schedule((0, (3, 1)), (100, (1, 1)), (120, (5, 1)))
    resumed = resume(MIXED, current, fixed=fixed, on_mismatch="error")
    assert schedule_of(resumed) == [[0, [3, 1]], [100, [1, 1]], [120, [5, 1]]]
    assert resumed.position == 120
    with pytest.raises(StateError, match="weights before position 120"):
        resume(MIXED, with_schedule((0, (3, 1)), (119, (5, 1))), fixed=fixed, on_mismatch="error")
    forked = resume(MIXED, with_schedule((0, (3, 1))), fixed=fixed, on_mismatch="fork")
    assert schedule_of(forked) == [[0, [3, 1]]]
    assert forked.position == 120


def test_streams_may_be_added_behind_the_others() -> None:
    current = with_schedule((0, (3, 1, 0)), streams=3)
    resumed = resume(MIXED, current, fixed=NOTHING_FIXED, on_mismatch="error")
    assert schedule_of(resumed) == [[0, [3, 1, 0]], [100, [1, 1, 0]], [200, [1, 3, 0]]]
    assert len(resumed.settings.streams) == 3
    current = with_schedule((0, (3, 1, 1)), streams=3)
    with pytest.raises(StateError, match="weights before"):
        resume(MIXED, current, fixed=NOTHING_FIXED, on_mismatch="error")
    fewer = replace(SETTINGS, streams=MIXED_SETTINGS.streams[:1])
    with pytest.raises(StateError, match=r"stream 1: saved fingerprint bb .30 samples., loader has none"):
        resume(MIXED, fewer, fixed=NOTHING_FIXED, on_mismatch="error")


def test_excluded_rows_and_the_length_of_an_epoch_are_constants() -> None:
    excluded = replace(SETTINGS, streams=(StreamSettings("aa", 50, excluded="0f"),))
    with pytest.raises(StateError, match="without the rows of exclusion list 0f"):
        resume(STATE, excluded, fixed=NOTHING_FIXED, on_mismatch="error")
    for state, samples in ((MIXED, 80), (STATE, 50)):
        longer = replace(state.settings, epoch_samples=90)
        assert resume(state, longer, fixed=NOTHING_FIXED, on_mismatch="error") == state
        with pytest.raises(StateError, match=f"epoch_samples: saved {samples}, loader has 90"):
            resume(state, longer, fixed=frozenset({"epoch_samples"}), on_mismatch="error")


def test_sizes_of_steps_are_the_saved_ones_unless_some_are_given_that_agree_before_the_position() -> None:
    saved = replace(STEPS, position=36)
    for none, fixed in ((None, NOTHING_FIXED), (StepSizes(((0, 7),)), NOTHING_FIXED)):
        assert resume(saved, SETTINGS, fixed=fixed, on_mismatch="error", step_sizes=none) == saved
    given = frozenset({"global_batch"})
    changed = StepSizes(((0, 12), (36, 48)))
    resumed = resume(saved, SETTINGS, fixed=given, on_mismatch="error", step_sizes=changed)
    assert resumed == replace(saved, step_sizes=changed)
    resumed = resume(STATE, SETTINGS, fixed=given, on_mismatch="error", step_sizes=changed)
    assert resumed == replace(STATE, step_sizes=changed), "the state knew no steps"
    other = StepSizes(((0, 12), (24, 48)))
    with pytest.raises(StateError, match=r"global_batch before position 36: saved \[\[0, 12\], \[36, 24\]"):
        resume(saved, SETTINGS, fixed=given, on_mismatch="error", step_sizes=other)
    forked = resume(saved, SETTINGS, fixed=given, on_mismatch="fork", step_sizes=other)
    assert forked == replace(saved, epoch_batches=0, step_sizes=other)


def test_another_shuffle_is_a_difference() -> None:
    current = replace(SETTINGS, order=OrderSpec(17, 1, 1, "none"))
    with pytest.raises(StateError, match="shuffle: saved 'window', loader has 'none'"):
        resume(STATE, current, fixed=NOTHING_FIXED, on_mismatch="error")


def test_a_fork_keeps_the_position_and_the_loaders_own_settings() -> None:
    current = replace(SETTINGS, order=replace(SETTINGS.order, seed=18, window=9))
    forked = resume(STATE, current, fixed=frozenset({"window"}), on_mismatch="fork")
    assert forked.position == 120
    assert forked.epoch_batches == 0
    assert (forked.settings.order.seed, forked.settings.order.lanes, forked.settings.order.window) == (
        18,
        8,
        9,
    )


def test_a_fork_to_other_data_or_weights_has_epochs_of_the_loaders_own_length() -> None:
    other = replace(SETTINGS, streams=(StreamSettings("bb", 51),))
    mixed = replace(MIXED_SETTINGS, epoch_samples=90)
    scheduled = replace(with_schedule((0, (2, 1))), epoch_samples=90)
    for saved, current, fixed in (
        (STATE, other, NOTHING_FIXED),
        (STATE, mixed, NOTHING_FIXED),
        (MIXED, scheduled, frozenset({"schedule"})),
    ):
        forked = resume(saved, current, fixed=fixed, on_mismatch="fork").settings
        assert (forked.schedule, forked.epoch_samples) == (current.schedule, current.epoch_samples)
    agreeing = replace(with_schedule((0, (3, 1)), (100, (1, 1)), (120, (5, 1))), epoch_samples=90)
    resumed = resume(MIXED, agreeing, fixed=frozenset({"schedule"}), on_mismatch="error")
    assert resumed.settings.epoch_samples == MIXED_SETTINGS.epoch_samples


def test_a_fork_without_differences_is_a_resume() -> None:
    assert resume(STATE, SETTINGS, fixed=NOTHING_FIXED, on_mismatch="fork") == STATE


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="on_mismatch"):
        resume(STATE, SETTINGS, fixed=NOTHING_FIXED, on_mismatch="ignore")  # type: ignore[arg-type]
