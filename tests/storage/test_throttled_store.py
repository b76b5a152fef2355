"""Latency and bandwidth, on a clock that only sleeping moves."""

from __future__ import annotations

import time
import uuid

import pytest

from shardkit.storage import Store
from shardkit.storage.memory import MemoryStore
from support.throttled_store import ThrottledStore

MIB = 1 << 20


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.sleeps += 1

    def since(self, began: float) -> float:
        return self.now - began


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inner() -> Store:
    store = MemoryStore(f"memory://{uuid.uuid4().hex}")
    store.put("a", bytes(range(256)) * 4096)  # 1 MiB
    return store


def throttled(inner: Store, clock: Clock, latency: float = 0.0, rate: float | None = None) -> ThrottledStore:
    return ThrottledStore(
        inner, latency_seconds=latency, bytes_per_second=rate, clock=clock, sleep=clock.sleep
    )


def test_every_request_waits_for_the_latency_once(inner: Store, clock: Clock) -> None:
    store = throttled(inner, clock, latency=0.25)
    store.head("a")
    store.get("a")
    store.open("a").close()
    store.put("b", b"1")
    assert len(list(store.list())) == 2
    store.delete("b")
    assert clock.now == 100.0 + 6 * 0.25


@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 16, 1 << 24])
def test_a_body_takes_its_size_over_the_bandwidth(inner: Store, clock: Clock, buffer_bytes: int) -> None:
    began = clock.now
    buffer, data = memoryview(bytearray(buffer_bytes)), b""
    with throttled(inner, clock, rate=MIB / 4).open("a") as body:
        while count := body.readinto(buffer):
            data += buffer[:count]
            assert len(data) <= clock.since(began) * MIB / 4 + 1  # nothing comes too early
    assert data == inner.get("a")
    assert clock.since(began) == pytest.approx(4.0)


def test_reads_and_writes_in_one_piece_take_as_long(inner: Store, clock: Clock) -> None:
    store = throttled(inner, clock, latency=1.0, rate=MIB / 4)
    store.get("a")
    assert clock.now == pytest.approx(105.0)
    store.get("a", 0, 256)
    store.put("b", bytes(MIB))
    assert clock.now == pytest.approx(111.0, abs=0.01)


def test_a_reader_that_pauses_gains_little(inner: Store, clock: Clock) -> None:
    began = clock.now
    with throttled(inner, clock, rate=MIB / 4).open("a") as body:
        clock.now += 60.0
        while body.readinto(memoryview(bytearray(1 << 16))):
            pass
    assert 63.8 < clock.since(began) < 64.1


def test_bodies_are_paced_each_for_itself(inner: Store, clock: Clock) -> None:
    store = throttled(inner, clock, rate=MIB)
    bodies = [store.open("a") for _ in range(3)]
    began, buffer = clock.now, memoryview(bytearray(MIB))
    while sum(body.readinto(buffer) for body in bodies):
        pass
    # One thread reads all three, so what one sleeps the others have been sent meanwhile.
    assert 1.0 <= clock.since(began) < 3.0


def test_on_a_real_clock_the_bandwidth_holds(inner: Store) -> None:
    store = ThrottledStore(inner, latency_seconds=0.01, bytes_per_second=8 * MIB)
    began = time.monotonic()
    with store.open("a") as body:
        while body.readinto(memoryview(bytearray(1 << 16))):
            pass
    assert 0.135 - 0.02 <= time.monotonic() - began < 30


def test_without_limits_nothing_waits(inner: Store, clock: Clock) -> None:
    store = throttled(inner, clock)
    store.get("a")
    with store.open("a") as body:
        assert body.readinto(memoryview(bytearray(2 * MIB))) == MIB
    assert clock.sleeps == 0


@pytest.mark.parametrize(
    "limits", [{"latency_seconds": -1.0}, {"bytes_per_second": 0.0}, {"latency_seconds": float("nan")}]
)
def test_limits_that_make_no_sense_are_refused(inner: Store, limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        ThrottledStore(inner, **limits)  # type: ignore[arg-type]
