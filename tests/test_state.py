"""States: plain data, checked when loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardkit.errors import StateError
from shardkit.loaders.state import LoaderState, StreamState, resume
from shardkit.order import OrderSpec

STATE = LoaderState(
    position=120,
    epoch_batches=3,
    order=OrderSpec(seed=17, lanes=8, window=100),
    tail="carry",
    streams=(StreamState("aa", 50),),
)
NOTHING_FIXED: frozenset[str] = frozenset()


def test_a_state_survives_json() -> None:
    assert LoaderState.from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE


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
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"order_version": 9}, "version 9"),
        ({"position": -1}, "position"),
        ({"position": 1.0}, "position"),
        ({"position": True}, "position"),
        ({"position": 1 << 62}, "position"),
        ({"tail": "keep"}, "tail"),
        ({"lanes": 0}, "lanes"),
        ({"streams": []}, "one stream"),
        ({"streams": [{"fingerprint": "aa", "samples": 5}]}, "fingerprint, samples and weight"),
        ({"streams": [{"fingerprint": 5, "samples": 5, "weight": 1}]}, "fingerprint"),
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
    current = replace(STATE, position=0, order=replace(STATE.order, lanes=4, window=7))
    assert resume(STATE, current, fixed=NOTHING_FIXED, on_mismatch="error") == STATE
    with pytest.raises(StateError, match="lanes: saved 8, loader has 4") as caught:
        resume(STATE, current, fixed=frozenset({"lanes"}), on_mismatch="error")
    assert "window" not in str(caught.value).split("use the settings")[0]


def test_every_constant_is_compared_and_all_differences_are_listed() -> None:
    current = replace(
        STATE, tail="drop", order=replace(STATE.order, seed=18), streams=(StreamState("bb", 51),)
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


def test_another_shuffle_is_a_difference() -> None:
    current = replace(STATE, order=OrderSpec(17, 1, 1, "none"))
    with pytest.raises(StateError, match="shuffle: saved 'window', loader has 'none'"):
        resume(STATE, current, fixed=NOTHING_FIXED, on_mismatch="error")


def test_a_fork_keeps_the_position_and_the_loaders_own_settings() -> None:
    current = replace(STATE, position=0, epoch_batches=0, order=replace(STATE.order, seed=18, window=9))
    forked = resume(STATE, current, fixed=frozenset({"window"}), on_mismatch="fork")
    assert forked.position == 120
    assert forked.epoch_batches == 0
    assert (forked.order.seed, forked.order.lanes, forked.order.window) == (18, 8, 9)


def test_a_fork_without_differences_is_a_resume() -> None:
    assert resume(STATE, replace(STATE, position=0), fixed=NOTHING_FIXED, on_mismatch="fork") == STATE


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="on_mismatch"):
        resume(STATE, STATE, fixed=NOTHING_FIXED, on_mismatch="ignore")  # type: ignore[arg-type]
