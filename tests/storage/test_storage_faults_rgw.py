"""The S3 store, alone and made resilient, over a real S3 server that fails in every way a network can.

Whatever happens, an operation ends in bounded time, with the right bytes or with an error of the right kind.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from urllib3.connection import HTTPConnection

from servers.bucket import RgwBucket, s3_client
from servers.fault_proxy import Fault, FaultProxy, Rule
from servers.rgw import RgwServer
from shardkit.storage import (
    Body,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    ResilientStore,
    RetryPolicy,
    StorageOptions,
    Store,
    StoreError,
    ThrottledError,
    TransientError,
)
from shardkit.storage.s3 import S3Store, _DirectReads
from shardkit.storage.s3_client import S3Client
from shardkit.storage.s3_upload import PART_BYTES

pytest_plugins = ["support.s3_rgw"]

DATA = random.Random(1).randbytes(2_000_000)
LARGE = random.Random(2).randbytes(40 << 20)  # more than the sockets between reader and server can hold
pytestmark = pytest.mark.extended  # moto is the quick server; the real one is for CI

WAKING_BYTES = 128 << 10  # a reader of a long body is woken for so many at a time
SHORT_BYTES = 500_000
READ_TIMEOUT_SECONDS = 0.7
HANG_SECONDS = 0.2  # the read timeout where nothing but a hang is met
SLACK_SECONDS = 5.0  # of a busy machine, above what the settings allow
POLICY = RetryPolicy(
    backoff_seconds=0.02,
    longest_backoff_seconds=0.2,
    deadline_seconds=30.0,
    answer_seconds=10.0,
    floor_bytes_per_second=500_000.0,
    window_seconds=0.3,
)
SHORT = RetryPolicy(backoff_seconds=0.02, deadline_seconds=1.5, hedge=False)


@pytest.fixture(scope="module")
def direct(rgw_module_bucket: RgwBucket) -> Iterator[S3Store]:
    """Past the proxy, to prepare and to look; has an object "a" that holds DATA."""
    options = StorageOptions(endpoint_url=rgw_module_bucket.endpoint_url, read_timeout_seconds=30)
    store = S3Store(f"{rgw_module_bucket.url}/data", options)
    store.put("a", DATA)
    yield store
    store.close()


Through = Callable[[float], S3Store]


@pytest.fixture(scope="module")
def through(
    direct: S3Store, rgw_module_bucket: RgwBucket, rgw_proxy_process: FaultProxy
) -> Iterator[Through]:
    """Makes stores behind the proxy, by their read timeout; each once, because making one takes longest."""
    made: dict[float, S3Store] = {}

    def store(read_timeout_seconds: float) -> S3Store:
        if read_timeout_seconds not in made:
            options = StorageOptions(
                endpoint_url=rgw_proxy_process.endpoint_url,
                read_timeout_seconds=read_timeout_seconds,
                connections=8,
            )
            made[read_timeout_seconds] = S3Store(direct.url, options)
        return made[read_timeout_seconds]

    yield store
    for each in made.values():
        each.close()


@pytest.fixture
def plain(through: Through) -> S3Store:
    return through(READ_TIMEOUT_SECONDS)


@pytest.fixture
def patient(through: Through) -> S3Store:
    return through(30.0)


@pytest.fixture
def resilient(plain: S3Store) -> Iterator[ResilientStore]:
    store = ResilientStore(plain, POLICY, connections=8)
    yield store
    store.close()


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK_SECONDS


def read(body: Body) -> bytes:
    buffer, data = memoryview(bytearray(1 << 18)), bytearray()
    while count := body.readinto(buffer):
        data += buffer[:count]
    return bytes(data)


def read_until_error(body: Body) -> tuple[bytes, StoreError | None]:
    """What arrived, and what ended it."""
    buffer, data = memoryview(bytearray(1 << 18)), bytearray()
    try:
        while count := body.readinto(buffer):
            data += buffer[:count]
    except StoreError as error:
        return bytes(data), error
    return bytes(data), None


def read_object(store: Store) -> object:
    with store.open("a") as body:
        return read(body)


# Each operation on the object "a", and what it gives if all goes well.
PUT = DATA[:100_000]
OPERATIONS: dict[str, tuple[str, Callable[[Store], object], object]] = {
    "head": ("HEAD", lambda store: store.head("a").bytes, len(DATA)),
    "get": ("GET", lambda store: store.get("a", 1000, 2000), DATA[1000:2000]),
    "open": ("GET", read_object, DATA),
    "list": ("GET", lambda store: [info.key for info in store.list("a")], ["a"]),
    "put": ("PUT", lambda store: store.put("put", PUT).bytes, len(PUT)),
    "put_if_absent": ("PUT", lambda store: store.put("new", PUT, if_absent=True).bytes, len(PUT)),
    "delete": ("DELETE", lambda store: store.delete("deleted"), None),
}
parametrize_operations = pytest.mark.parametrize("operation", OPERATIONS)
WRITTEN = {"put": "put", "put_if_absent": "new"}

# Faults that an answer's head never gets past, and what they are to a store.
EARLY_FAULTS: dict[str, tuple[Rule, type[TransientError], int | None]] = {
    "503": (Rule(fault="status"), ThrottledError, 503),
    "500": (Rule(fault="status", status=500, code="InternalError"), TransientError, 500),
    "refuse": (Rule(fault="refuse"), TransientError, None),
    "hang": (Rule(fault="hang", after_bytes=None), TransientError, None),
    "lost_acknowledgement": (Rule(fault="lost_acknowledgement"), TransientError, None),
}
parametrize_early_faults = pytest.mark.parametrize("fault", EARLY_FAULTS)


# The store alone: it tries once.


@parametrize_operations
@parametrize_early_faults
def test_a_request_that_fails_is_made_once_and_fails_in_kind(
    fault: str, operation: str, through: Through, rgw_proxy: FaultProxy
) -> None:
    rule, kind, status = EARLY_FAULTS[fault]
    rgw_proxy.set_rules(rule)
    method, run, _ = OPERATIONS[operation]
    store = through(HANG_SECONDS if fault == "hang" else READ_TIMEOUT_SECONDS)
    with ends_within(READ_TIMEOUT_SECONDS), pytest.raises(TransientError) as caught:
        run(store)
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert store.url in str(caught.value)
    assert [request.method for request in rgw_proxy.log()] == [method]


@pytest.mark.parametrize("after", [0, 1_000_000, len(DATA) - 1])
@pytest.mark.parametrize("fault", ["reset", "truncate", "hang"])
def test_a_body_that_breaks_gives_its_bytes_and_then_an_error(
    fault: Fault, after: int, plain: S3Store, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(Rule(fault=fault, after_bytes=after))
    with ends_within(READ_TIMEOUT_SECONDS), plain.open("a") as body:
        data, error = read_until_error(body)
    assert data == DATA[: len(data)]
    held_back = WAKING_BYTES if fault == "hang" and after == 1_000_000 else 1
    assert after - held_back < len(data) <= after
    assert type(error) is TransientError
    assert f"after {len(data):,} of {len(DATA):,} bytes" in str(error)


def test_long_bodies_are_received_into_the_readers_buffer_and_leave_their_connection_for_the_next(
    patient: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    readinto = _DirectReads.readinto

    def counted(reads: _DirectReads, buffer: memoryview) -> int:
        counts.append(readinto(reads, buffer))
        return counts[-1]

    monkeypatch.setattr(_DirectReads, "readinto", counted)
    connections: list[HTTPConnection] = []
    connect = HTTPConnection.connect

    def noted(connection: HTTPConnection) -> None:
        connections.append(connection)
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", noted)
    patient.close()  # what other tests have left open
    for stop in (None, len(DATA) - 1, None):
        counts.clear()
        assert patient.get("a", 0, stop) == DATA[:stop]
        assert len(DATA) - (1 << 20) <= sum(counts) < len(DATA)
    assert len(connections) == 1


def test_a_short_body_that_trickles_gives_what_there_is_without_waiting_for_more(
    plain: S3Store, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(Rule(fault="trickle", after_bytes=1000, bytes_per_second=20))
    buffer, data = memoryview(bytearray(1 << 18)), bytearray()
    with ends_within(1), plain.open("a", 0, SHORT_BYTES) as body:
        while len(data) < 1005:
            data += buffer[: body.readinto(buffer)]
    assert data == DATA[: len(data)]


def test_a_long_body_that_trickles_ends_by_the_read_timeout(plain: S3Store, rgw_proxy: FaultProxy) -> None:
    rgw_proxy.set_rules(Rule(fault="trickle", after_bytes=1000, bytes_per_second=20))
    with ends_within(2 * READ_TIMEOUT_SECONDS), plain.open("a") as body:
        data, error = read_until_error(body)
    assert data == DATA[: len(data)]
    assert type(error) is TransientError


def test_a_flipped_byte_arrives_without_an_error_so_shards_need_hashes(
    plain: S3Store, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(Rule(fault="corrupt", after_bytes=500))
    data = plain.get("a", 1000)
    assert (data[:500], data[501:]) == (DATA[1000:1500], DATA[1501:])
    assert data[500] == DATA[1500] ^ 0xFF


# Made resilient: faults that pass leave no trace but time.


@parametrize_operations
@parametrize_early_faults
def test_failures_that_pass_are_not_seen(
    fault: str, operation: str, direct: S3Store, resilient: ResilientStore, rgw_proxy: FaultProxy
) -> None:
    direct.delete("new")
    rule, kind, _ = EARLY_FAULTS[fault]
    rgw_proxy.set_rules(replace(rule, count=1 if fault == "hang" else 3))
    _, run, expected = OPERATIONS[operation]
    with ends_within(2):
        assert run(resilient) == expected
    assert rgw_proxy.hits()[0] >= 1
    metrics = resilient.metrics.snapshot()
    assert metrics.errors[kind.__name__] >= 1
    assert metrics.in_flight == 0
    if operation in WRITTEN:
        assert direct.get(WRITTEN[operation]) == PUT


@parametrize_operations
@parametrize_early_faults
def test_failures_that_stay_end_in_kind_after_several_attempts(
    fault: str, operation: str, direct: S3Store, through: Through, rgw_proxy: FaultProxy
) -> None:
    if (operation, fault) == ("put_if_absent", "lost_acknowledgement"):
        pytest.skip("does not stay: the second try finds what the first one wrote")
    direct.delete("new")
    rule, kind, status = EARLY_FAULTS[fault]
    rgw_proxy.set_rules(rule)
    store = ResilientStore(through(HANG_SECONDS if fault == "hang" else READ_TIMEOUT_SECONDS), SHORT)
    with ends_within(3), pytest.raises(TransientError) as caught:
        OPERATIONS[operation][1](store)
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert rgw_proxy.hits()[0] >= 3
    assert store.metrics.snapshot().retries >= 2
    store.close()


def test_failures_that_stay_end_by_the_deadline(plain: S3Store, rgw_proxy: FaultProxy) -> None:
    rgw_proxy.set_rules(Rule(fault="status"))
    policy = RetryPolicy(longest_backoff_seconds=0.1, deadline_seconds=0.7)
    store = ResilientStore(plain, policy)
    with ends_within(policy.deadline_seconds), pytest.raises(TransientError):  # the last try may be cut short
        store.get("a")
    store.close()


@pytest.mark.parametrize(
    "rule",
    [
        Rule(fault="reset", after_bytes=300_000),
        Rule(fault="truncate", after_bytes=300_000),
        Rule(fault="hang", after_bytes=1_500_000, count=1),
        Rule(fault="trickle", after_bytes=700_000, count=1),
        Rule(fault="throttle", bytes_per_second=8e6),
        Rule(fault="delay", delay_seconds=0.2),
    ],
    ids=lambda rule: rule.fault,
)
def test_a_body_goes_on_over_faults(rule: Rule, resilient: ResilientStore, rgw_proxy: FaultProxy) -> None:
    rgw_proxy.set_rules(rule)
    with ends_within(5), resilient.open("a", 10) as body:
        assert read(body) == DATA[10:]
    assert rgw_proxy.hits()[0] >= 1
    metrics = resilient.metrics.snapshot()
    assert metrics.bytes_read == len(DATA) - 10
    starts = [int(re.findall(r"bytes=(\d+)-", request.range or "")[0]) for request in rgw_proxy.log()]
    assert starts == sorted(starts)
    if rule.fault in ("reset", "truncate"):
        # A busy machine may time out now and then, and begin where it was.
        assert sorted({*starts}) == [10 + 300_000 * number for number in range(7)]  # not a byte twice
        assert metrics.resumed_bodies >= 6
    elif rule.fault == "hang":
        assert starts[-1] == 1_500_010
    elif rule.fault == "trickle":
        assert 700_100 - WAKING_BYTES < starts[-1] < 700_100


def test_a_short_body_that_trickles_is_cut_and_opened_again(
    resilient: ResilientStore, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(Rule(fault="trickle", after_bytes=10_000, bytes_per_second=40, count=1))
    with ends_within(3):
        assert resilient.get("a", 0, SHORT_BYTES) == DATA[:SHORT_BYTES]
    assert resilient.metrics.snapshot().slow_bodies == 1


def test_a_slow_start_is_overtaken_by_a_second_request(patient: S3Store, rgw_proxy: FaultProxy) -> None:
    store = ResilientStore(patient, RetryPolicy(hedge_share=1.0))
    for _ in range(store.policy.hedge_samples):
        store.get("a", 0, 10)
    rgw_proxy.set_rules(Rule(fault="hang", after_bytes=None, count=1))
    with ends_within(1):
        assert store.get("a", 5, 15) == DATA[5:15]
    assert store.metrics.snapshot().hedges_won >= 1
    store.close()


def test_a_burst_of_503_costs_only_time(resilient: ResilientStore, rgw_proxy: FaultProxy) -> None:
    rgw_proxy.set_rules(Rule(fault="status", count=20))
    with ThreadPoolExecutor(8) as pool, ends_within(10):
        assert [*pool.map(lambda _: resilient.get("a", 0, 1000), range(24))] == [DATA[:1000]] * 24
    metrics = resilient.metrics.snapshot()
    assert metrics.throttled == 20
    assert metrics.last_status == 503


def test_an_object_replaced_between_two_connections_is_an_error_and_never_a_mixture(
    direct: S3Store, resilient: ResilientStore, rgw_proxy: FaultProxy
) -> None:
    direct.put("changing", DATA)
    rgw_proxy.set_rules(Rule(fault="reset", after_bytes=500_000))
    with ends_within(2), resilient.open("changing") as body:
        direct.put("changing", DATA[::-1])
        data, error = read_until_error(body)
    assert data == DATA[:500_000]
    assert type(error) is ObjectChangedError


def test_absence_and_conflict_are_said_at_once_and_not_tried_again(patient: S3Store) -> None:
    store = ResilientStore(patient)
    for run in (store.head, store.get, store.open):
        with pytest.raises(ObjectNotFoundError):
            run("missing")
    with pytest.raises(ObjectExistsError):
        store.put("a", b"other", if_absent=True)
    with pytest.raises(ObjectChangedError):
        store.get("a", version="another")
    assert store.metrics.snapshot().retries == 0
    assert store.get("a") == DATA
    store.close()


# Uploads in parts.

LARGE_RULES = {
    "part-503": Rule(fault="status", method="PUT", path="partNumber=2", count=1),
    "part-lost": Rule(fault="lost_acknowledgement", method="PUT", path="partNumber=1", count=1),
    "completion-lost": Rule(fault="lost_acknowledgement", method="POST", path="uploadId", count=1),
    "start-refused": Rule(fault="refuse", method="POST", path=r"\?uploads", count=1),
}


def uploads_left(bucket: RgwBucket) -> int:
    client = s3_client(bucket.endpoint_url)
    return len(client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", []))


@pytest.mark.parametrize("name", LARGE_RULES)
def test_an_upload_in_parts_lands_whole_and_leaves_no_parts(
    name: str,
    direct: S3Store,
    patient: S3Store,
    rgw_module_bucket: RgwBucket,
    rgw_proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    file, data = tmp_path / "file", LARGE[: PART_BYTES + 1000]
    file.write_bytes(data)
    rgw_proxy.set_rules(LARGE_RULES[name])
    store = ResilientStore(patient, POLICY)
    with ends_within(10):
        info = store.put(name, file)
    store.close()
    assert rgw_proxy.hits() == [1]
    assert direct.head(name).version == info.version
    assert direct.get(name) == data
    assert uploads_left(rgw_module_bucket) == 0


def test_a_large_conditional_write_whose_answer_is_lost_is_known_for_ours(
    direct: S3Store, patient: S3Store, rgw_proxy: FaultProxy, tmp_path: Path
) -> None:
    file, data = tmp_path / "file", LARGE[: PART_BYTES + 1000]
    file.write_bytes(data)
    rgw_proxy.set_rules(Rule(fault="lost_acknowledgement", count=1))
    store = ResilientStore(patient, POLICY)
    with ends_within(10):
        info = store.put("conditional", file, if_absent=True)
    assert direct.head("conditional").version == info.version
    with pytest.raises(ObjectExistsError):
        store.put("conditional", data[::-1], if_absent=True)
    assert direct.get("conditional") == data
    store.close()


def test_the_server_refuses_a_body_whose_md5_is_not_the_signed_one(
    direct: S3Store, rgw_module_bucket: RgwBucket
) -> None:
    client = S3Client(rgw_module_bucket.url, StorageOptions(endpoint_url=rgw_module_bucket.endpoint_url))
    digest = base64.b64encode(hashlib.md5(b"sent").digest()).decode()
    names = {"Bucket": rgw_module_bucket.name, "Key": "changed on the way"}
    with pytest.raises(StoreError, match="BadDigest"):
        client.request("put_object", "where", "write", Body=b"came", ContentMD5=digest, **names)
    client.close()
    with pytest.raises(ObjectNotFoundError):
        direct.head("changed on the way")


def test_an_upload_that_fails_for_good_leaves_nothing(
    direct: S3Store, patient: S3Store, rgw_module_bucket: RgwBucket, rgw_proxy: FaultProxy
) -> None:
    rgw_proxy.set_rules(Rule(fault="status", method="PUT", path="partNumber=2"))
    with ends_within(5), pytest.raises(ThrottledError):
        patient.put("unfinished", LARGE[: PART_BYTES + 1000])
    with pytest.raises(ObjectNotFoundError):
        direct.head("unfinished")
    assert uploads_left(rgw_module_bucket) == 0


# Everything at once.


STORM: list[tuple[Fault, int]] = [
    ("status", 0),
    ("refuse", 0),
    ("lost_acknowledgement", 0),
    ("truncate", 100_000),
    ("reset", 200_000),
    ("hang", 150_000),
    ("throttle", 0),
]


def test_a_storm_of_faults_changes_no_byte(
    direct: S3Store, resilient: ResilientStore, rgw_proxy: FaultProxy
) -> None:
    objects = {f"storm/{number}": DATA[number * 50_000 :][:400_000] for number in range(8)}
    for key, data in objects.items():
        direct.put(key, data)
    rgw_proxy.set_rules(
        *[
            Rule(fault=fault, probability=0.06, after_bytes=after, bytes_per_second=4e6)
            for fault, after in STORM
        ]
    )

    def work(number: int) -> None:
        chance = random.Random(number)
        key = chance.choice(list(objects))
        start = chance.randrange(400_000)
        stop = chance.randrange(start + 1, 400_001)
        assert resilient.get(key, start, stop) == objects[key][start:stop]
        resilient.put(f"copies/{number}", objects[key], if_absent=chance.random() < 0.5)

    with ThreadPoolExecutor(6) as pool, ends_within(30):
        list(pool.map(work, range(48)))
    assert len({request.fault for request in rgw_proxy.log()}) >= 4
    copies = list(direct.list("copies/"))
    assert [info.bytes for info in copies] == [400_000] * 48
    for info in copies:
        assert direct.get(info.key) in objects.values()
    assert resilient.metrics.snapshot().in_flight == 0


# The server itself dies, or stops.


@pytest.fixture(scope="module")
def _large(direct: S3Store) -> None:
    direct.put("large", LARGE)


@pytest.fixture
def gateway(rgw: RgwServer, _large: None) -> Iterator[RgwServer]:
    """The server, with an object "large"; it is well again at the end."""
    yield rgw
    rgw.restart_gateway()


@pytest.fixture(scope="module")
def to_gateway(direct: S3Store, rgw_module_bucket: RgwBucket) -> Iterator[S3Store]:
    """No proxy between: its buffers would hide what happens."""
    options = StorageOptions(endpoint_url=rgw_module_bucket.endpoint_url, read_timeout_seconds=1.5)
    store = S3Store(direct.url, options)
    yield store
    store.close()


parametrize_signals = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)


@parametrize_signals
def test_a_server_that_goes_while_a_body_is_read_is_an_error_in_bounded_time(
    number: signal.Signals, gateway: RgwServer, to_gateway: S3Store
) -> None:
    with ends_within(2), to_gateway.open("large") as body:
        first = bytearray(1 << 16)
        count = body.readinto(memoryview(first))
        gateway.signal_gateway(number)
        data, error = read_until_error(body)
    data = bytes(first[:count]) + data
    assert len(data) < len(LARGE)
    assert data == LARGE[: len(data)]
    assert type(error) is TransientError
    with ends_within(2), pytest.raises(TransientError):
        to_gateway.head("large")


@parametrize_signals
def test_a_server_that_comes_back_costs_only_time(
    number: signal.Signals, gateway: RgwServer, to_gateway: S3Store
) -> None:
    def come_back() -> None:
        if number == signal.SIGSTOP:
            gateway.signal_gateway(signal.SIGCONT)
        else:
            gateway.restart_gateway()

    store = ResilientStore(to_gateway, POLICY)
    timer = threading.Timer(0.7, come_back)
    with ends_within(15), store.open("large") as body:
        first = bytearray(1 << 16)
        count = body.readinto(memoryview(first))
        gateway.signal_gateway(number)
        timer.start()
        rest = read(body)
    timer.join()
    assert bytes(first[:count]) + rest == LARGE
    if number == signal.SIGKILL:
        assert store.metrics.snapshot().resumed_bodies >= 1
    store.close()


def test_a_server_that_stays_away_ends_an_operation_by_its_deadline(
    gateway: RgwServer, to_gateway: S3Store
) -> None:
    policy = RetryPolicy(longest_backoff_seconds=0.2, deadline_seconds=1.0)
    store = ResilientStore(to_gateway, policy)
    gateway.signal_gateway(signal.SIGKILL)
    with ends_within(policy.deadline_seconds), pytest.raises(TransientError):
        store.get("large", 0, 10)
    store.close()


# The contract.


@pytest.mark.usefixtures("rgw_module_bucket")  # for the credentials, in the environment
def test_the_store_keeps_its_contract_on_a_real_server(rgw: RgwServer) -> None:
    """All of the suite for stores but what never reaches a server."""
    suite = Path(__file__).with_name("test_storage_conformance.py")
    plugins = ["no:cacheprovider", "no:xdist", "servers.shared_botocore"]
    chosen = "s3-real and not keys_that_leave and not prefixes_that_no_key and not survive_pickling"
    command = [sys.executable, "-m", "pytest", "-q", *(f"-p{plugin}" for plugin in plugins), "-k", chosen]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"SHARDKIT_TEST_S3_ENDPOINT": rgw.endpoint_url, "PYTHONPATH": str(suite.parents[1])}
    done = subprocess.run(
        [*command, str(suite)],
        env=environment, cwd=suite.parent.parent, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert re.search(r"\b[1-9]\d+ passed", done.stdout), done.stdout[-1000:]
