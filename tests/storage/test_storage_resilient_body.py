"""A body over broken connections: the object's bytes of one version, or an error, in bounded time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.storage.resilient import ResilientBody
from shardkit.storage.store import Body, ObjectChangedError, StoreError, ThrottledError, TransientError
from support.stores import Fault, FaultRule, ScriptedStore, retrying

DATA = random.Random(3).randbytes(5000)


def fault(kind: Fault, after_bytes: int = 0) -> FaultRule:
    """A trickle is a byte in ten seconds."""
    return FaultRule(fault=kind, after_bytes=after_bytes, seconds=10.0)


def scripted(*script: FaultRule | None, data: bytes = DATA) -> ScriptedStore:
    store = ScriptedStore(script)
    store.below.put("key", data)
    return store


def read(body: Body, step: int = 700) -> bytes:
    found = bytearray()
    buffer = memoryview(bytearray(step))
    while count := body.readinto(buffer):
        found += buffer[:count]
    return bytes(found)


def test_a_broken_body_goes_on_from_the_next_byte() -> None:
    faulty = scripted(fault("reset", 1000), fault("reset", 0), fault("reset", 2500))
    store = retrying(faulty)
    with store.open("key") as body:
        assert read(body) == DATA
    found = store.metrics.snapshot()
    assert found.resumed_bodies == found.retries == found.errors["TransientError"] == 3
    assert (found.requests, found.bytes_read, found.in_flight) == ({"open": 4}, 5000, 0)
    assert faulty.open_bodies == 0
    version = faulty.below.head("key").version
    assert faulty.versions == [None, version, version, version], "pinned to what was seen first"


def test_a_body_that_ends_early_is_broken_too() -> None:
    store = retrying(scripted(fault("short", 1234)))
    with store.open("key", 100, 4900) as body:
        assert read(body) == DATA[100:4900]
    assert store.metrics.snapshot().resumed_bodies == 1


def test_errors_between_two_connections_are_tried_again() -> None:
    store = retrying(scripted(fault("reset", 10), fault("throttle"), fault("error"), fault("throttle")))
    with store.open("key") as body:
        assert read(body) == DATA
    found = store.metrics.snapshot()
    assert (found.throttled, found.retries, found.resumed_bodies) == (2, 4, 1)


@pytest.mark.parametrize("rule", [fault("reset", 10), fault("short", 10)], ids=lambda rule: rule.fault)
def test_an_object_replaced_before_the_body_goes_on_is_an_error_and_never_a_mixture(rule: FaultRule) -> None:
    faulty = scripted(rule)
    with retrying(faulty).open("key") as body:
        buffer = memoryview(bytearray(10))
        assert body.readinto(buffer) == 10
        faulty.below.put("key", DATA[::-1])
        with pytest.raises(ObjectChangedError):
            body.readinto(buffer)
    assert faulty.open_bodies == 0


def test_a_store_that_ignores_the_pinned_version_is_caught() -> None:
    class Careless(ScriptedStore):
        def open(
            self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
        ) -> Body:
            return super().open(key, start, stop)

    faulty = Careless([fault("reset", 10)])
    faulty.below.put("key", DATA)
    with retrying(faulty).open("key") as body:
        body.readinto(memoryview(bytearray(10)))
        faulty.below.put("key", DATA[::-1])
        with pytest.raises(ObjectChangedError, match=r"was replaced while it was read \(10 of 5,000 bytes"):
            body.readinto(memoryview(bytearray(10)))
    assert faulty.open_bodies == 0


def test_bytes_that_arrive_start_the_time_of_the_attempts_again() -> None:
    faulty = scripted(*[fault("reset", 100)] * 49)
    store = retrying(faulty, deadline_seconds=1.0, floor_bytes_per_second=100.0)
    assert read(store.open("key")) == DATA
    assert sum(faulty.clock.slept) > 1.0


def test_without_a_byte_the_time_runs_out_and_the_error_says_how_far_it_got() -> None:
    faulty = scripted(fault("reset", 1000), *[fault("reset", 0)] * 99)
    store = retrying(faulty, deadline_seconds=2.0)
    with store.open("key") as body:
        assert body.readinto(memoryview(bytearray(1000))) == 1000
        with pytest.raises(
            TransientError,
            match=r"/key: read failed after \d+ attempts in .* s, 1,000 of 5,000 bytes had arrived: reset",
        ):
            body.readinto(memoryview(bytearray(1000)))
    assert store.metrics.snapshot().in_flight == 0
    assert faulty.open_bodies == 0


def test_throttled_to_the_end_is_a_throttled_error_with_its_status() -> None:
    store = retrying(scripted(fault("reset", 10), *[fault("throttle")] * 1000))
    with store.open("key") as body, pytest.raises(ThrottledError) as caught:
        read(body)
    assert caught.value.status == 503
    assert "10 of 5,000 bytes had arrived" in str(caught.value)


def test_an_error_that_will_stay_is_raised_at_once() -> None:
    faulty = scripted(fault("reset", 10), fault("deny"))
    with retrying(faulty).open("key") as body, pytest.raises(StoreError, match="AccessDenied"):
        read(body)
    assert faulty.requests == ["open", "open"]


def test_a_slow_body_is_cut_and_opened_again() -> None:
    faulty = scripted(fault("trickle", 2000), data=DATA * 100)
    store = retrying(faulty, window_seconds=10.0)
    with store.open("key") as body:
        assert read(body) == DATA * 100
    found = store.metrics.snapshot()
    assert (found.slow_bodies, found.resumed_bodies) == (1, 1)
    assert faulty.clock.now - 1000.0 < 21, "within two windows"


def test_a_body_that_is_slow_on_every_connection_ends_by_its_deadline() -> None:
    faulty = scripted(*[fault("trickle", 0)] * 10_000)
    store = retrying(faulty, deadline_seconds=100.0, floor_bytes_per_second=100.0)
    with store.open("key") as body, pytest.raises(TransientError, match="the body arrives too slowly"):
        read(body)
    assert 140 < faulty.clock.now - 1000.0 < 200, "100 s, and 5,000 bytes at 100 bytes per second"
    assert store.metrics.snapshot().slow_bodies < 8, "a slow network is not cut again and again"


def test_a_byte_now_and_then_does_not_put_off_the_deadline_for_ever() -> None:
    faulty = scripted(*[fault("reset", 1)] * 1000)
    store = retrying(
        faulty,
        backoff_seconds=10.0,
        deadline_seconds=100.0,
        floor_bytes_per_second=100.0,
        window_seconds=1e6,
    )
    with store.open("key") as body, pytest.raises(TransientError, match="read failed after"):
        read(body)
    assert 120 < faulty.clock.now - 1000.0 <= 150, "100 s, and 5,000 bytes at 100 bytes per second"


def test_a_reader_that_takes_its_time_is_not_a_slow_body() -> None:
    faulty = scripted()
    store = retrying(faulty)
    with store.open("key") as body:
        buffer = memoryview(bytearray(100))
        for _ in range(50):
            faulty.clock.now += 3600
            assert body.readinto(buffer) == 100
    assert store.metrics.snapshot().slow_bodies == 0


def test_a_body_read_to_its_end_makes_room_before_it_is_closed() -> None:
    store = retrying(scripted())
    body = store.open("key", 0, 100)
    assert store.metrics.snapshot().in_flight == 1
    buffer = memoryview(bytearray(100))
    assert body.readinto(buffer) == 100
    assert store.metrics.snapshot().in_flight == 0
    assert body.readinto(buffer) == body.readinto(buffer) == 0
    body.close()
    assert store.metrics.snapshot().bytes_read == 100


def test_an_empty_range_is_read_without_a_wait() -> None:
    store = retrying(scripted(data=b""))
    assert store.get("key") == b""
    assert store.metrics.snapshot().in_flight == 0


def test_a_closed_body_is_not_read_and_may_be_closed_again() -> None:
    faulty = scripted()
    body = retrying(faulty).open("key")
    body.readinto(memoryview(bytearray(10)))
    body.close()
    body.close()
    assert faulty.open_bodies == 0
    with pytest.raises(ValueError, match="closed"):
        body.readinto(memoryview(bytearray(10)))


@pytest.mark.parametrize("steps", range(8))
def test_a_body_that_is_closed_while_it_is_read_is_not_opened_again(steps: int) -> None:
    faulty = scripted(fault("reset", 10))
    looks = itertools.count(-100)

    def close_at_a_look() -> float:
        if next(looks) == steps:  # as another thread may, between any two steps
            body.close()
        return 1000.0

    store = retrying(faulty, clock=close_at_a_look)
    body = store.open("key")
    assert body.readinto(memoryview(bytearray(10))) == 10
    looks = itertools.count()
    with pytest.raises((TransientError, ValueError), match=r"reset|closed"):
        read(body, 1)
    assert next(looks) < 60, "it ended because it was closed"
    assert faulty.open_bodies == store.metrics.snapshot().in_flight == 0


def test_an_object_whose_version_is_unknown_is_not_gone_on_with() -> None:
    class Unversioned(ScriptedStore):
        def open(
            self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
        ) -> Body:
            body = super().open(key, start, stop)
            body.info = replace(body.info, version="")  # type: ignore[misc]
            return body

    faulty = Unversioned([fault("reset", 10)])
    faulty.below.put("key", DATA)
    with retrying(faulty).open("key") as body, pytest.raises(TransientError, match="reset"):
        read(body)
    assert faulty.requests == ["open"]


def test_more_bytes_than_were_asked_for_are_an_error() -> None:
    class Generous(ScriptedStore):
        def open(
            self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
        ) -> Body:
            return super().open(key, start, None)

    faulty = Generous()
    faulty.below.put("key", DATA)
    with retrying(faulty).open("key", 0, 100) as body, pytest.raises(StoreError, match="50 bytes more than"):
        body.readinto(memoryview(bytearray(150)))


FAULTS = st.one_of(
    st.none(),
    st.builds(fault, st.sampled_from(["reset", "short", "trickle"]), st.integers(0, 3000)),
    st.builds(fault, st.sampled_from(["error", "throttle"])),
)


@settings(deadline=None)
@given(
    script=st.lists(FAULTS, max_size=25),
    span=st.tuples(st.integers(0, 4999), st.integers(0, 6000)).map(sorted),
    steps=st.lists(st.integers(1, 2000), min_size=1, max_size=6),
    seconds=st.floats(0.5, 100.0),
    replaced=st.none() | st.integers(0, 10),
)
def test_whatever_breaks_the_bytes_are_those_of_the_object_or_there_is_an_error(
    script: list[FaultRule | None], span: list[int], steps: list[int], seconds: float, replaced: int | None
) -> None:
    faulty = scripted(*script)
    store = retrying(faulty, deadline_seconds=seconds)
    start, stop = min(span[0], 4999), span[1]
    found = bytearray()
    try:
        with store.open("key", start, stop) as body:
            assert isinstance(body, ResilientBody)
            for number in range(10_000):
                if number == replaced:
                    faulty.below.put("key", DATA[::-1])
                buffer = memoryview(bytearray(steps[number % len(steps)]))
                count = body.readinto(buffer)
                if not count:
                    break
                found += buffer[:count]
        assert found == DATA[start:stop]
    except TransientError:
        assert DATA[start:stop].startswith(found), "what came before the error is right too"
    except ObjectChangedError:
        assert replaced is not None
        assert DATA[start:stop].startswith(found), "what came before the error is right too"
    assert faulty.clock.now - 1000.0 < 2 * store.policy.transfer_seconds(5000) + 60
    assert faulty.open_bodies == store.metrics.snapshot().in_flight == 0
    assert store.metrics.snapshot().bytes_read == len(found)
    store.close()
