"""States: plain data, checked when loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardkit.errors import StateError
from shardkit.loaders.state import LoaderState, resume
from shardkit.order.mixture import Schedule
from shardkit.order.order import OrderSpec
from shardkit.order.run_settings import MixtureSettings, RunSettings, StreamSettings

SETTINGS = RunSettings(
    order=OrderSpec(seed=17, lanes=8, window=100), tail="carry", streams=(StreamSettings("aa", 50),)
)
STATE = LoaderState(position=120, epoch_batches=3, settings=SETTINGS)
ENTRY = {"fingerprint": "aa", "samples": 50, "name": "", "excluded": ""}
MIXTURE = MixtureSettings(Schedule(((0, (3, 1)), (100, (1, 1)), (200, (1, 3)))), 80)
MIXED_SETTINGS = replace(
    SETTINGS,
    streams=(StreamSettings("aa", 50, "web"), StreamSettings("bb", 30, "code")),
    mixture=MIXTURE,
)
MIXED = replace(STATE, settings=MIXED_SETTINGS)
NOTHING_FIXED: frozenset[str] = frozenset()


@pytest.mark.parametrize("state", [STATE, MIXED])
def test_a_state_survives_json(state: LoaderState) -> None:
    assert LoaderState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_a_state_of_version_1_is_read() -> None:
    data = STATE.to_dict() | {
        "version": 1,
        "streams": [{"fingerprint": "aa", "samples": 50, "weight": 3}],
    }
    del data["mixture"]
    assert LoaderState.from_dict(data) == STATE


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
        ({"version": 3}, "version 3"),
        ({"version": None}, "version None"),
        ({"order_version": 9}, "version 9"),
        ({"position": -1}, "position"),
        ({"position": 1.0}, "position"),
        ({"position": True}, "position"),
        ({"position": 1 << 62}, "position"),
        ({"tail": "keep"}, "tail"),
        ({"lanes": 0}, "lanes"),
        ({"streams": []}, "list of streams"),
        ({"streams": [{"fingerprint": "aa", "samples": 5}]}, "excluded, fingerprint, name, samples"),
        ({"streams": [{"fingerprint": 5, "samples": 5, "name": "a", "excluded": ""}]}, "fingerprint"),
        ({"streams": [ENTRY, ENTRY]}, "mixture if it has several streams"),
        ({"mixture": {"schedule": [[0, [1]]], "epoch_samples": 50}}, "mixture if it has several streams"),
        ({"mixture": 5}, "schedule and epoch_samples"),
        ({"streams": [ENTRY, ENTRY], "mixture": {"schedule": [[0, [1]]], "epoch_samples": 5}}, "of 1 stream"),
        ({"streams": [ENTRY, ENTRY], "mixture": {"schedule": [[0, [0, 0]]], "epoch_samples": 5}}, "weight"),
        (
            {"streams": [ENTRY, ENTRY], "mixture": {"schedule": [[0, [1, 0]]], "epoch_samples": 0}},
            "epoch_samples",
        ),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        LoaderState.from_dict(STATE.to_dict() | change)


@pytest.mark.parametrize("data", [None, [], "state", {}])
def test_other_things_than_states_are_refused(data: object) -> None:
    with pytest.raises(StateError):
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
    mixture = MixtureSettings(Schedule(segments), 80)
    return replace(MIXED_SETTINGS, streams=MIXED_SETTINGS.streams + more, mixture=mixture)


def schedule_of(state: LoaderState) -> list[list[object]]:
    assert state.settings.mixture is not None
    return state.settings.mixture.schedule.to_list()


def test_a_saved_schedule_is_gone_on_with_if_the_streams_weights_are_those_it_began_with() -> None:
    assert resume(MIXED, with_schedule((0, (3, 1))), fixed=NOTHING_FIXED, on_mismatch="error") == MIXED
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
    with pytest.raises(StateError, match=r"stream 1: saved bb .30 samples., loader has none"):
        resume(MIXED, fewer, fixed=NOTHING_FIXED, on_mismatch="error")


def test_excluded_rows_and_the_length_of_an_epoch_are_constants() -> None:
    excluded = replace(SETTINGS, streams=(StreamSettings("aa", 50, excluded="0f"),))
    with pytest.raises(StateError, match="without those of exclusion list 0f"):
        resume(STATE, excluded, fixed=NOTHING_FIXED, on_mismatch="error")
    longer = replace(MIXED_SETTINGS, mixture=replace(MIXTURE, epoch_samples=90))
    assert resume(MIXED, longer, fixed=NOTHING_FIXED, on_mismatch="error") == MIXED
    with pytest.raises(StateError, match="epoch_samples: saved 80, loader has 90"):
        resume(MIXED, longer, fixed=frozenset({"epoch_samples"}), on_mismatch="error")


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


def test_a_fork_without_differences_is_a_resume() -> None:
    assert resume(STATE, SETTINGS, fixed=NOTHING_FIXED, on_mismatch="fork") == STATE


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="on_mismatch"):
        resume(STATE, SETTINGS, fixed=NOTHING_FIXED, on_mismatch="ignore")  # type: ignore[arg-type]
