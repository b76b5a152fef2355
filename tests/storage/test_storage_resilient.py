"""The store around a store: every fault ends in the right answer or the right error, and in bounded time."""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.storage import connect, threads
from shardkit.storage.memory import MemoryStore
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    ThrottledError,
    TransientError,
)
from support.stores import (
    FaultRule,
    FaultyStore,
    ScriptedStore,
    WrappedStore,
    fresh_memory,
    retrying,
)

TIMEOUT = 60.0  # for what happens within milliseconds on a machine that is not overloaded
ERROR, THROTTLE = FaultRule(fault="error"), FaultRule(fault="throttle")
LOST, RESET = FaultRule(fault="lost_ack"), FaultRule(fault="reset", after_bytes=1)
DATA = random.Random(4).randbytes(3000)


def scripted(*script: FaultRule | None) -> ScriptedStore:
    store = ScriptedStore(script)
    store.below.put("key", DATA, metadata={"name": "value"})
    return store


def check_head(store: Store) -> None:
    assert store.head("key").bytes == len(DATA)


def check_get(store: Store) -> None:
    assert store.get("key", 10, 20) == DATA[10:20]


def check_open(store: Store) -> None:
    with store.open("key", 2990) as body:
        buffer = memoryview(bytearray(100))
        assert body.readinto(buffer) == 10
        assert buffer[:10] == DATA[2990:]


def check_put(store: Store) -> None:
    assert store.put("new", b"new bytes").bytes == 9
    assert store.get("new") == b"new bytes"


def check_list(store: Store) -> None:
    assert [info.key for info in store.list()] == ["key"]


def check_delete(store: Store) -> None:
    store.delete("key")
    with pytest.raises(ObjectNotFoundError):
        store.head("key")


Check = Callable[[Store], None]
CHECKS = [check_head, check_get, check_open, check_put, check_list, check_delete]
every_operation = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])


@every_operation
def test_failures_that_may_pass_are_tried_again(check: Check) -> None:
    faulty = scripted(ERROR, THROTTLE, ERROR)
    store = retrying(faulty)
    check(store)
    found = store.metrics.snapshot()
    assert (found.retries, found.throttled, found.errors["TransientError"]) == (3, 1, 2)
    assert found.last_status in (500, 404)
    assert len(faulty.clock.slept) == 3
    assert found.in_flight == 0


@every_operation
def test_failures_that_stay_are_raised_at_once(check: Check) -> None:
    faulty = scripted(FaultRule(fault="deny"))
    store = retrying(faulty)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        check(store)
    assert not isinstance(caught.value, TransientError)
    assert len(faulty.requests) == 1
    assert (store.metrics.snapshot().retries, store.metrics.snapshot().in_flight) == (0, 0)


@every_operation
def test_failures_that_never_pass_end_in_an_error_of_their_kind(check: Check) -> None:
    faulty = scripted(*[THROTTLE] * 100)
    store = retrying(faulty, deadline_seconds=2.0)
    with pytest.raises(
        ThrottledError, match=r"\w+ failed after \d+ attempts in [01]\.\d s: SlowDown .*\(status 503"
    ):
        check(store)
    assert 4 <= len(faulty.requests) <= 30
    assert store.metrics.snapshot().in_flight == 0


def test_an_object_that_is_not_there_is_asked_for_once() -> None:
    faulty = scripted()
    with pytest.raises(ObjectNotFoundError):
        retrying(faulty).get("absent")
    assert faulty.requests == ["open"]


def test_a_put_whose_acknowledgement_was_lost_finds_its_own_object(tmp_path: Path) -> None:
    faulty = scripted(LOST)
    store = retrying(faulty)
    assert store.put("new", DATA, if_absent=True, metadata={"nonce": "1"}).bytes == len(DATA)
    assert faulty.requests.count("put") == 2
    file = tmp_path / "file"
    file.write_bytes(DATA)
    faulty.script = [LOST]
    assert store.put("from-file", file, if_absent=True).bytes == len(DATA)
    assert faulty.below.get("from-file") == DATA
    assert store.metrics.snapshot().bytes_written == 2 * len(DATA)


@pytest.mark.parametrize(
    ("theirs", "metadata"),
    [(DATA[::-1], {"nonce": "1"}), (DATA[:-1], {"nonce": "1"}), (DATA, {"nonce": "2"})],
    ids=["other-bytes", "other-size", "other-metadata"],
)
def test_a_put_after_a_failure_does_not_take_another_writers_object_for_its_own(
    theirs: bytes, metadata: dict[str, str]
) -> None:
    faulty = scripted(ERROR)
    faulty.below.put("new", theirs, metadata=metadata)
    with pytest.raises(ObjectExistsError):
        retrying(faulty).put("new", DATA, if_absent=True, metadata={"nonce": "1"})
    assert faulty.below.get("new") == theirs


class BriefStore(ScriptedStore):
    """Where objects are removed before anybody looks at them."""

    def rule_for(self, operation: str, key: str) -> FaultRule | None:
        if operation == "head":
            self.below.delete(key)
        return super().rule_for(operation, key)


def test_a_put_after_a_failure_fails_as_any_other_if_the_object_in_its_way_is_removed_meanwhile() -> None:
    store = BriefStore([ERROR])
    store.below.put("new", DATA)
    with pytest.raises(ObjectExistsError):
        retrying(store).put("new", DATA, if_absent=True)


def test_a_file_that_is_not_there_is_the_stores_to_complain_about(tmp_path: Path) -> None:
    store = connect(tmp_path / "store")
    with pytest.raises(StoreError, match="missing"):
        store.put("new", tmp_path / "missing")
    store.close()


def test_a_put_that_did_not_fail_before_does_not_look_at_what_is_there() -> None:
    faulty = scripted()
    with pytest.raises(ObjectExistsError):
        retrying(faulty).put("key", DATA, if_absent=True)
    assert faulty.requests == ["put"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([None, ERROR, THROTTLE]), max_size=30), st.integers(0, 35))
def test_a_listing_over_failures_has_every_object_once_and_in_order(
    script: list[FaultRule | None], count: int
) -> None:
    faulty = ScriptedStore(script)
    keys = [f"part/{number:03d}" for number in range(count)]
    for key in (*keys, "other"):
        faulty.below.put(key, b"")
    store = retrying(faulty, deadline_seconds=1e4)
    assert [info.key for info in store.list("part/")] == keys
    store.close()
    for key in (*keys, "other"):
        faulty.below.delete(key)


def test_a_long_listing_that_breaks_goes_on_behind_what_it_handed_out() -> None:
    faulty = ScriptedStore()
    keys = [f"{number:05d}" for number in range(2500)]
    for key in keys:
        faulty.below.put(key, b"")
    store = retrying(faulty)
    listing = store.list()
    found = [next(listing).key for _ in range(1000)]
    faulty.script = [None, ERROR, None, THROTTLE]
    found += [info.key for info in listing]
    assert found == keys
    assert store.metrics.snapshot().retries == 2


def wait_until(condition: Callable[[], bool], problem: str = "") -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.001)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FaultyStore]]:
    """Makes stores whose requests after the first `skip` answer when released: at the end at the latest."""
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.2)
    before = set(threading.enumerate())
    stores: list[FaultyStore] = []

    def make(skip: int = 0, count: int | None = None) -> FaultyStore:
        rule = FaultRule(fault="late", skip=skip, count=count, seconds=TIMEOUT)
        stores.append(FaultyStore(fresh_memory(), [rule]))
        stores[-1].below.put("key", DATA)
        return stores[-1]

    yield make
    for store in stores:
        store.release()

    def are_gone() -> bool:
        new = set(threading.enumerate()) - before
        return all(thread.name != "shardkit-store" for thread in new)

    wait_until(are_gone, "threads outlive close")


Hanging = Callable[..., FaultyStore]


@pytest.mark.sampled(2)
@every_operation
def test_an_operation_ends_by_its_deadline_though_the_store_never_answers(
    check: Check, hanging: Hanging
) -> None:
    policy = RetryPolicy(deadline_seconds=0.3, answer_seconds=0.1, floor_bytes_per_second=1e9)
    store = ResilientStore(hanging(), policy)
    began = time.monotonic()
    with pytest.raises(TransientError, match="no answer within 0"):
        check(store)
    assert time.monotonic() - began < TIMEOUT / 2
    assert store.metrics.snapshot().in_flight == 0, "the place is free though the request hangs"
    store.close()


def test_an_answer_that_comes_after_its_operation_ended_is_closed(hanging: Hanging) -> None:
    below = hanging(count=1)
    store = ResilientStore(below, RetryPolicy(answer_seconds=0.5))
    assert store.get("key") == DATA
    below.release()
    store.close()
    wait_until(lambda: below.bodies == 2 and not below.open_bodies)
    assert store.metrics.snapshot().errors == {"TransientError": 1}


def hedged(below: FaultyStore, *, connections: int = 32, **settings: Any) -> ResilientStore:
    """With enough quick reads behind it to know that what hangs is slow, and to afford one hedge."""
    policy = RetryPolicy(hedge_delay_seconds=0.02, **settings)
    store = ResilientStore(below, policy, connections=connections)
    for _ in range(20):
        assert store.get("key") == DATA
    return store


def test_a_read_that_hangs_is_asked_for_again_and_the_second_answer_counts(hanging: Hanging) -> None:
    below = hanging(skip=20, count=1)
    store = hedged(below)
    with store.open("key") as body:
        assert body.read() == DATA
    found = store.metrics.snapshot()
    assert (found.hedges, found.hedges_won, found.retries, found.in_flight) == (1, 1, 0, 0)
    assert found.requests == {"get": 20, "open": 2}
    below.release()
    store.close()
    wait_until(lambda: below.bodies == 22 and not below.open_bodies, "the loser is closed when it answers")


def test_when_everything_is_slow_only_a_share_is_asked_for_twice(hanging: Hanging) -> None:
    below = hanging(skip=20)
    store = hedged(below)
    with ThreadPoolExecutor(16) as pool:
        reads = [pool.submit(store.get, "key") for _ in range(16)]
        wait_until(lambda: len(below.log) == 17)
        time.sleep(0.1)
        assert len(below.log) == 17
        below.release()
        assert all(read.result(TIMEOUT) == DATA for read in reads)
    assert store.metrics.snapshot().hedges == 1, "36 reads, of which a twentieth"
    store.close()


def test_a_full_store_is_not_asked_twice(hanging: Hanging) -> None:
    below = hanging(skip=20, count=1)
    store = hedged(below, connections=1)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.get, "key")
        wait_until(lambda: len(below.log) == 1)
        with pytest.raises(TimeoutError):
            read.result(0.1)
        below.release()
        assert read.result(TIMEOUT) == DATA
    assert store.metrics.snapshot().hedges == 0
    store.close()


def test_only_reads_are_hedged(hanging: Hanging) -> None:
    store = hedged(hanging(skip=20, count=1), answer_seconds=0.5)
    assert store.head("key").bytes == len(DATA)
    found = store.metrics.snapshot()
    assert (found.hedges, found.retries) == (0, 1)
    store.close()


def test_a_503_burst_narrows_the_gate_and_successes_widen_it() -> None:
    faulty = scripted(*[THROTTLE] * 8)
    store = retrying(faulty)
    assert store.metrics.snapshot().concurrency_limit == 32
    store.head("key")
    low = store.metrics.snapshot().concurrency_limit
    assert 1 <= low <= 8
    faulty.clock.sleep(1.0)
    for _ in range(600):
        store.head("key")
    assert store.metrics.snapshot().concurrency_limit == 32
    assert store.metrics.snapshot().throttled == 8


def test_the_store_never_sees_more_at_once_than_connections() -> None:
    class Counting(WrappedStore):
        most = inside = 0
        lock = threading.Lock()

        def head(self, key: str) -> ObjectInfo:
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            found = super().head(key)
            with self.lock:
                self.inside -= 1
            return found

    counting = Counting(scripted().below)
    store = ResilientStore(counting, connections=3)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda _: store.head("key"), range(300)))
    assert 1 <= counting.most <= 3
    store.close()


def test_bodies_left_open_end_in_an_error_that_says_so() -> None:
    faulty = scripted()
    store = ResilientStore(faulty, RetryPolicy(deadline_seconds=0.5), connections=2)
    bodies = [store.open("key"), store.open("key")]
    with pytest.raises(TransientError, match="2 are in use: close bodies that are no longer read"):
        store.open("key")
    for body in bodies:
        body.close()
    assert store.get("key") == DATA


def test_an_urgent_read_passes_long_transfers_that_fill_the_store() -> None:
    store = ResilientStore(scripted(), RetryPolicy(deadline_seconds=0.5), connections=8)
    bodies = [store.open("key") for _ in range(7)]
    with pytest.raises(TransientError, match="connections"):
        store.open("key")
    assert store.urgent.get("key", 0, 10) == DATA[:10]
    assert store.urgent.metrics is store.metrics
    for body in bodies:
        body.close()


def test_a_pickled_copy_works_by_itself() -> None:
    store = ResilientStore(
        MemoryStore("memory://pickled"), RetryPolicy(report_seconds=3), StoreMetrics(), connections=2
    )
    store.put("key", DATA)
    for original in (store, store.urgent):
        copy = pickle.loads(pickle.dumps(original))
        assert copy.get("key") == DATA
        assert copy.policy == store.policy
        assert copy.metrics.snapshot().requests == {"get": 1}
        assert copy.metrics.snapshot().concurrency_limit == 2
        copy.close()


def test_a_forked_child_can_use_the_store_while_the_parent_was_busy(hanging: Hanging) -> None:
    below = hanging(skip=1)
    store = ResilientStore(below, connections=2)
    body = store.open("key")
    with ThreadPoolExecutor(2) as pool:
        heads = [pool.submit(store.head, "key") for _ in range(2)]
        wait_until(lambda: len(below.log) == 1)
        child = os.fork()
        if not child:
            below.release()
            body.close()
            os._exit(0 if store.get("key") == DATA and store.head("key").bytes == len(DATA) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        body.close()
        below.release()
        assert all(head.result(TIMEOUT).bytes == len(DATA) for head in heads)
    store.close()


def test_it_may_be_used_again_after_close() -> None:
    faulty = scripted()
    store = retrying(faulty)
    store.close()
    assert faulty.requests == ["close"]
    assert store.get("key") == DATA
    store.close()


def test_an_error_that_no_store_should_raise_comes_out_as_it_is() -> None:
    class Wrong(ScriptedStore):
        def rule_for(self, operation: str, key: str) -> FaultRule | None:
            raise ZeroDivisionError

    store = retrying(Wrong())
    with pytest.raises(ZeroDivisionError):
        store.head("key")
    with pytest.raises(ZeroDivisionError):
        store.open("key")
    assert store.metrics.snapshot().in_flight == 0


def test_connect_opens_any_url_with_the_limits_of_its_options(tmp_path: Path) -> None:
    metrics = StoreMetrics()
    store = connect(
        tmp_path, StorageOptions(connections=5), policy=RetryPolicy(report_seconds=2), metrics=metrics
    )
    store.put("folder/key", DATA)
    assert (tmp_path / "folder/key").read_bytes() == DATA
    assert store.url == str(tmp_path)
    assert metrics.snapshot().concurrency_limit == 5
    assert store.policy.report_seconds == 2
    store.close()


OPERATIONS = st.sampled_from(["put", "get", "head", "list", "delete", "put_if_absent"])


@settings(deadline=None)
@given(
    script=st.lists(st.sampled_from([None, ERROR, THROTTLE, LOST, RESET]), max_size=30),
    steps=st.lists(st.tuples(OPERATIONS, st.sampled_from("ab")), max_size=12),
)
def test_over_failures_a_store_does_what_it_does_without_them(
    script: list[FaultRule | None], steps: list[tuple[str, str]]
) -> None:
    faulty = ScriptedStore(script)
    store: Store = retrying(faulty, deadline_seconds=1e4)
    model: dict[str, bytes] = {}
    for number, (operation, key) in enumerate(steps):
        data = f"{number} of {key}".encode()
        if operation == "put":
            store.put(key, data)
            model[key] = data
        elif operation == "put_if_absent":
            if key in model:
                with pytest.raises(ObjectExistsError):
                    store.put(key, data, if_absent=True)
            else:
                store.put(key, data, if_absent=True)
                model[key] = data
        elif operation == "delete":
            store.delete(key)
            model.pop(key, None)
        elif operation == "list":
            assert [info.key for info in store.list()] == sorted(model)
        elif key in model:
            assert store.get(key) == model[key]
            assert store.head(key).bytes == len(model[key])
        else:
            with pytest.raises(ObjectNotFoundError):
                store.get(key)
    store.close()
    for key in "ab":
        faulty.below.delete(key)
