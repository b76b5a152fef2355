"""The stores that tests misbehave with: faults are those of the rules, the same in every run; latency and
bandwidth are as stated."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardkit.storage import Store, StoreError, ThrottledError, TransientError
from support.stores import (
    BodyFault,
    Event,
    FakeClock,
    FaultRule,
    FaultyStore,
    RequestFault,
    ThrottledStore,
    fresh_memory,
)

DATA = bytes(range(256)) * 40
MIB = 1 << 20


@pytest.fixture
def inner() -> Store:
    store = fresh_memory()
    store.put("a", DATA)
    return store


def requests(store: Store) -> dict[str, Callable[[], Any]]:
    return {
        "head": lambda: store.head("a"),
        "get": lambda: store.get("a"),
        "open": lambda: store.open("a"),
        "put": lambda: store.put("b", b"1"),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete("a"),
    }


def outcome(store: Store, operation: str = "head") -> str:
    try:
        requests(store)[operation]()
    except StoreError as error:
        return f"{type(error).__name__} {error.status}"
    return "ok"


@pytest.mark.parametrize("operation", ["head", "get", "open", "put", "list", "delete"])
@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        ("throttle", ThrottledError, 503),
        ("error", TransientError, 500),
        ("refuse", TransientError, None),
        ("deny", StoreError, 403),
        ("hang", TransientError, None),
    ],
)
def test_a_request_that_fails_has_no_effect(
    inner: Store, operation: Any, fault: RequestFault, kind: type[StoreError], status: int | None
) -> None:
    before = list(inner.list())
    store = FaultyStore(inner, [FaultRule(fault=fault, operation=operation, seconds=0.0)])
    with pytest.raises(StoreError, match="injected") as caught:
        requests(store)[operation]()
    assert (type(caught.value), caught.value.status) == (kind, status)
    assert list(inner.list()) == before
    assert [event.operation for event in store.log] == [operation]


def test_a_lost_acknowledgement_leaves_the_effect(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="lost_ack")])
    with pytest.raises(TransientError):
        store.put("b", b"written")
    assert inner.get("b") == b"written"
    with pytest.raises(TransientError):
        store.delete("a")
    assert [info.key for info in inner.list()] == ["b"]
    for operation in ("head", "get", "open", "list"):
        assert outcome(FaultyStore(inner, [FaultRule(fault="lost_ack")]), operation) != "ok"


def drained(store: Store, start: int = 0, stop: int | None = None) -> tuple[bytes, bool]:
    """(the bytes that came, whether they ended in a TransientError)."""
    data, buffer = b"", memoryview(bytearray(1000))
    with store.open("a", start, stop) as body:
        try:
            while count := body.readinto(buffer):
                data += buffer[:count]
        except TransientError:
            return data, True
    return data, False


@pytest.mark.parametrize("fault", ["reset", "truncate", "stall"])
@pytest.mark.parametrize("after_bytes", [0, 1, 999, 1000, 5000])
def test_a_body_breaks_after_so_many_bytes(inner: Store, fault: BodyFault, after_bytes: int) -> None:
    store = FaultyStore(inner, [FaultRule(fault=fault, after_bytes=after_bytes, seconds=0.0)])
    assert drained(store) == (DATA[:after_bytes], True)
    assert drained(store, 100, 6000) == (DATA[100 : 100 + after_bytes], True)
    with pytest.raises(TransientError, match=f"{fault} after {after_bytes:,} bytes"):
        store.get("a")


@pytest.mark.parametrize("fault", ["reset", "truncate", "short", "stall", "corrupt", "trickle"])
@pytest.mark.parametrize("after_bytes", [50, 51])
def test_a_body_that_ends_before_is_left_alone(inner: Store, fault: BodyFault, after_bytes: int) -> None:
    store = FaultyStore(inner, [FaultRule(fault=fault, after_bytes=after_bytes)])
    assert drained(store, 7, 57) == (DATA[7:57], False)
    assert store.get("a", len(DATA) - 50) == DATA[-50:]


@pytest.mark.parametrize("after_bytes", [0, 1, 999, 1000, 1001, len(DATA) - 1])
def test_corruption_changes_one_byte(inner: Store, after_bytes: int) -> None:
    store = FaultyStore(inner, [FaultRule(fault="corrupt", after_bytes=after_bytes)])
    for data in (drained(store)[0], store.get("a")):
        assert len(data) == len(DATA)
        assert [i for i, (one, two) in enumerate(zip(data, DATA, strict=True)) if one != two] == [after_bytes]
    assert inner.get("a") == DATA


def test_a_short_body_ends_without_an_error(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="short", after_bytes=10)])
    assert drained(store) == (DATA[:10], False)
    assert (store.bodies, store.open_bodies) == (1, 0)


def test_a_late_answer_comes_after_its_time_with_its_effect(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="late", seconds=0.01)])
    assert [outcome(store, operation) for operation in requests(store)] == ["ok"] * 6
    assert [info.key for info in inner.list()] == ["b"]


def test_a_trickle_comes_byte_by_byte(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="trickle", after_bytes=10, seconds=0.001)])
    buffer = memoryview(bytearray(1000))
    with store.open("a", 0, 20) as body:
        assert [body.readinto(buffer) for _ in range(12)] == [10] + [1] * 10 + [0]
    assert store.get("a", 0, 20) == DATA[:20]


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_what_hangs_ends_when_it_is_released(inner: Store, fault: Any) -> None:
    store = FaultyStore(inner, [FaultRule(fault=fault, seconds=600.0)])
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "a") for _ in range(4)]
        while len(store.log) < 4:  # all of them are waiting, or about to
            time.sleep(0.001)
        store.release()
        for future in waiting:
            with pytest.raises(TransientError):
                future.result(300)
    assert time.monotonic() - began < 300


def test_a_rule_names_operations_and_keys(inner: Store) -> None:
    inner.put("shard.00001.mds", b"1")
    store = FaultyStore(inner, [FaultRule(fault="error", operation="read", key=r"\.mds$")])
    assert store.get("a") == DATA
    assert store.head("shard.00001.mds").bytes == 1
    store.put("shard.00001.mds", b"2")
    for read in (store.get, store.open):
        with pytest.raises(TransientError):
            read("shard.00001.mds")
    assert store.log == [
        Event(0, "error", "get", "shard.00001.mds"),
        Event(0, "error", "open", "shard.00001.mds"),
    ]


def test_skip_and_count_bound_a_rule(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="error", operation="head", skip=2, count=3)])
    assert [outcome(store) for _ in range(8)] == ["ok"] * 2 + ["TransientError 500"] * 3 + ["ok"] * 3


def test_the_first_rule_that_fits_strikes(inner: Store) -> None:
    rules = [FaultRule(fault="throttle", count=1), FaultRule(fault="error", count=2)]
    store = FaultyStore(inner, rules)
    assert [outcome(store) for _ in range(4)] == ["ThrottledError 503", *["TransientError 500"] * 2, "ok"]


def test_probability_is_met_and_repeats_with_the_seed(inner: Store) -> None:
    rule = FaultRule(fault="error", probability=0.3)

    def run(seed: int) -> list[str]:
        store = FaultyStore(inner, [rule], seed=seed)
        return [outcome(store) for _ in range(1000)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert 240 < run(1).count("TransientError 500") < 360
    assert "ok" not in {outcome(FaultyStore(inner, [FaultRule(fault="error")], seed=s)) for s in range(20)}
    never = FaultyStore(inner, [FaultRule(fault="error", probability=0.0)])
    assert {outcome(never) for _ in range(100)} == {"ok"}


def test_threads_do_not_change_which_requests_fail(inner: Store) -> None:
    keys = [f"key-{number}" for number in range(8)]
    for key in keys:
        inner.put(key, b"1")

    def run(threads: int) -> dict[str, int]:
        store = FaultyStore(inner, [FaultRule(fault="error", probability=0.5)], seed=3)

        def ask(key: str) -> None:
            for _ in range(20):
                try:
                    store.head(key)
                except TransientError:
                    continue

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(ask, keys))
        return {key: sum(event.key == key for event in store.log) for key in keys}

    assert run(1) == run(8)


def test_counts_hold_between_threads(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="error", skip=10, count=25)])
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: outcome(store), range(200)))
    assert outcomes.count("TransientError 500") == len(store.log) == 25


def test_a_pickled_store_starts_over_with_the_same_rules(inner: Store) -> None:
    store = FaultyStore(inner, [FaultRule(fault="error", count=1)], seed=5)
    assert outcome(store) != "ok"
    copy = pickle.loads(pickle.dumps(store))
    assert copy.log == []
    assert [outcome(copy), outcome(copy)] == ["TransientError 500", "ok"]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def large() -> Store:
    store = fresh_memory()
    store.put("a", bytes(range(256)) * 4096)  # 1 MiB
    return store


def throttled(
    large: Store, clock: FakeClock, latency: float = 0.0, rate: float | None = None
) -> ThrottledStore:
    return ThrottledStore(
        large, latency_seconds=latency, bytes_per_second=rate, clock=clock, sleep=clock.sleep
    )


def test_every_request_waits_for_the_latency_once(large: Store, clock: FakeClock) -> None:
    store = throttled(large, clock, latency=0.25)
    store.head("a")
    store.get("a")
    store.open("a").close()
    store.put("b", b"1")
    assert len(list(store.list())) == 2
    store.delete("b")
    assert clock.now == 1000.0 + 6 * 0.25


@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 16, 1 << 24])
def test_a_body_takes_its_size_over_the_bandwidth(large: Store, clock: FakeClock, buffer_bytes: int) -> None:
    began = clock.now
    buffer, data = memoryview(bytearray(buffer_bytes)), b""
    with throttled(large, clock, rate=MIB / 4).open("a") as body:
        while count := body.readinto(buffer):
            data += buffer[:count]
            assert len(data) <= (clock.now - began) * MIB / 4 + 1  # nothing comes too early
    assert data == large.get("a")
    assert (clock.now - began) == pytest.approx(4.0)


def test_reads_and_writes_in_one_piece_take_as_long(large: Store, clock: FakeClock) -> None:
    store = throttled(large, clock, latency=1.0, rate=MIB / 4)
    store.get("a")
    assert clock.now == pytest.approx(1005.0)
    store.get("a", 0, 256)
    store.put("b", bytes(MIB))
    assert clock.now == pytest.approx(1011.0, abs=0.01)


def test_a_reader_that_pauses_gains_little(large: Store, clock: FakeClock) -> None:
    began = clock.now
    with throttled(large, clock, rate=MIB / 4).open("a") as body:
        clock.now += 60.0
        while body.readinto(memoryview(bytearray(1 << 16))):
            pass
    assert 63.8 < (clock.now - began) < 64.1
