"""The servers that other tests rely on: the proxy breaks what it is told to, and the S3 server is one."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers.bucket import RgwBucket, s3_client
from servers.fault_proxy import Fault, FaultProxy, Rule
from servers.origin import Origin, content, running_origin
from servers.rgw import RgwServer

pytest_plugins = ["support.s3_rgw"]

pytestmark = pytest.mark.extended  # as what uses these servers
TESTS = Path(__file__).resolve().parent
SECONDS = 10.0  # the longest any single answer may take
Connection = http.client.HTTPConnection


@pytest.fixture(scope="module")
def shared_origin() -> Iterator[Origin]:
    with running_origin() as running:
        yield running


@pytest.fixture(scope="module")
def shared_proxy(shared_origin: Origin) -> Iterator[FaultProxy]:
    with FaultProxy(shared_origin.address, seed=7) as running:
        yield running


@pytest.fixture
def origin(shared_origin: Origin) -> Origin:
    shared_origin.seen.clear()
    return shared_origin


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> FaultProxy:
    shared_proxy.set_rules()
    return shared_proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Connection]:
    with closing(connect(proxy)) as connection:
        yield connection


def connect(proxy: FaultProxy) -> Connection:
    return Connection("127.0.0.1", proxy.port, timeout=SECONDS)


def ask(connection: Connection, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def read_until_broken(connection: Connection, path: str) -> tuple[bytes, type[Exception] | None]:
    """What arrived of a response's body, and what ended it."""
    connection.request("GET", path)
    response = connection.getresponse()
    data = b""
    try:
        while piece := response.read1(1 << 16):
            data += piece
    except (OSError, http.client.HTTPException) as error:
        return data, type(error)
    return data, None if response.isclosed() and not response.length else EOFError


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# The proxy without a rule.


def test_one_connection_carries_every_kind_of_message_unchanged(origin: Origin, client: Connection) -> None:
    large = content(3_000_000)
    assert ask(client, "GET", "/3000000") == (200, large)
    assert ask(client, "HEAD", "/3000000") == (200, b"")
    assert ask(client, "GET", "/status/204") == (204, b"")
    assert ask(client, "GET", "/status/304") == (304, b"")
    assert ask(client, "GET", "/chunked/12345") == (200, content(12345))
    assert ask(client, "PUT", "/a", large) == (200, b"ok")
    assert ask(client, "PUT", "/b", (piece for piece in (b"one", b"two"))) == (200, b"ok")  # chunked
    assert ask(client, "GET", "/0") == (200, b"")
    assert [seen.body for seen in origin.seen if seen.method == "PUT"] == [large, b"onetwo"]
    assert {seen.host for seen in origin.seen} == {f"127.0.0.1:{client.port}"}  # ours, which was signed
    assert len({seen.connection for seen in origin.seen}) == 1


def test_a_client_that_expects_100_continue_gets_it_before_its_body(
    origin: Origin, proxy: FaultProxy
) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as sock:
        sock.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 100")
        assert origin.seen == []
        sock.sendall(b"12345")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    assert [seen.body for seen in origin.seen] == [b"12345"]


def test_an_answer_to_the_head_alone_ends_the_connection(origin: Origin, proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as sock:
        sock.sendall(b"PUT /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        answer = b""
        while piece := sock.recv(1000):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 403")
    assert answer.endswith(b"\r\n\r\nno")


def test_a_server_that_is_gone_resets_the_connection(proxy: FaultProxy) -> None:
    with running_origin() as gone:
        address = gone.address
    with FaultProxy(address) as before_nothing, closing(connect(before_nothing)) as connection:
        with pytest.raises(ConnectionError):
            ask(connection, "GET", "/1")
        before_nothing.set_rules()  # and the proxy lives on


def test_many_connections_at_once_get_their_own_bytes(proxy: FaultProxy) -> None:
    def fetch(size: int) -> bool:
        with closing(connect(proxy)) as connection:
            return all(ask(connection, "GET", f"/{size}") == (200, content(size)) for _ in range(3))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(fetch, range(100_000, 164_000, 1000)))


# Faults, as a client sees them.


def test_delay_comes_before_the_request_goes_on(
    origin: Origin, proxy: FaultProxy, client: Connection
) -> None:
    proxy.set_rules(Rule(fault="delay", delay_seconds=0.2))
    began = time.monotonic()
    assert ask(client, "GET", "/10") == (200, content(10))
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_status_answers_as_s3_does_without_asking_the_server(
    status: int, code: str, origin: Origin, proxy: FaultProxy, client: Connection
) -> None:
    proxy.set_rules(Rule(fault="status", status=status, code=code, count=3))
    for method, body in (("GET", None), ("PUT", content(100_000))):
        got, answer = ask(client, method, "/10", body)
        assert got == status
        assert f"<Code>{code}</Code>".encode() in answer
    assert ask(client, "HEAD", "/10") == (status, b"")
    assert origin.seen == []
    assert ask(client, "GET", "/10") == (200, content(10))  # the connection has stayed good


def test_status_answers_before_the_body_of_who_expects_100_continue(
    origin: Origin, proxy: FaultProxy
) -> None:
    proxy.set_rules(Rule(fault="status"))
    with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as sock:
        sock.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        answer = b""
        while piece := sock.recv(1000):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 503")
    assert origin.seen == []


def test_refuse_resets_before_the_server_knows(origin: Origin, proxy: FaultProxy, client: Connection) -> None:
    proxy.set_rules(Rule(fault="refuse"))
    with pytest.raises(ConnectionResetError):
        ask(client, "GET", "/10")
    assert origin.seen == []


def test_a_lost_acknowledgement_loses_nothing_else(
    origin: Origin, proxy: FaultProxy, client: Connection
) -> None:
    proxy.set_rules(Rule(fault="lost_acknowledgement"))
    with pytest.raises(ConnectionResetError):
        ask(client, "PUT", "/a", b"12345")
    assert [seen.body for seen in origin.seen] == [b"12345"]
    assert proxy.log()[0].status == 200


@pytest.mark.parametrize("fault", ["lost_acknowledgement", "hang"])
def test_faults_concern_the_answer_and_not_the_100_before_it(
    fault: Fault, origin: Origin, proxy: FaultProxy
) -> None:
    proxy.set_rules(Rule(fault=fault, after_bytes=None if fault == "hang" else 0))
    with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as sock:
        sock.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"12345")
        sock.settimeout(0.2)
        with pytest.raises((ConnectionResetError, TimeoutError)):
            sock.recv(1)
    assert [seen.body for seen in origin.seen] == [b"12345"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fault=st.sampled_from(["reset", "truncate"]),
    size=st.integers(1, 2_000_000),
    part=st.floats(0, 1, exclude_max=True),
    chunked=st.booleans(),
)
def test_broken_bodies_end_at_the_very_byte(
    proxy: FaultProxy, fault: Any, size: int, part: float, chunked: bool
) -> None:
    after = int(size * part)
    proxy.set_rules(Rule(fault=fault, after_bytes=after))
    with closing(connect(proxy)) as connection:
        data, error = read_until_broken(connection, f"/{'chunked/' if chunked else ''}{size}")
    assert data == content(size)[:after]
    if fault == "reset":
        assert error is ConnectionResetError
    else:
        assert error in (EOFError, http.client.IncompleteRead)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 2_000_000), part=st.floats(0, 1, exclude_max=True), length=st.integers(1, 300_000))
def test_corruption_flips_these_bytes_and_no_others(
    proxy: FaultProxy, size: int, part: float, length: int
) -> None:
    after = int(size * part)
    proxy.set_rules(Rule(fault="corrupt", after_bytes=after, length=length))
    with closing(connect(proxy)) as connection:
        _, data = ask(connection, "GET", f"/{size}")
    good = content(size)
    flipped = bytes(byte ^ 0xFF for byte in good[after : after + length])
    assert data == good[:after] + flipped + good[after + length :]


@pytest.mark.parametrize("after", [None, 0, 5000])
def test_a_hang_is_silence_on_an_open_connection(after: int | None, proxy: FaultProxy) -> None:
    proxy.set_rules(Rule(fault="hang", after_bytes=after, count=1))
    with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as sock:
        sock.sendall(b"GET /10000 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, data = b"", b""
        if after is not None:
            while b"\r\n\r\n" not in head:
                head += sock.recv(1)
            while len(data) < after:
                data += sock.recv(1 << 16)
        sock.settimeout(0.15)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    assert data == content(10_000)[: after or 0]
    with closing(connect(proxy)) as connection:  # the count is used up
        assert ask(connection, "GET", "/10000") == (200, content(10_000))


def test_a_hang_of_some_seconds_goes_on_afterwards(proxy: FaultProxy, client: Connection) -> None:
    proxy.set_rules(Rule(fault="hang", after_bytes=5000, hang_seconds=0.2))
    began = time.monotonic()
    assert ask(client, "GET", "/10000") == (200, content(10_000))
    assert time.monotonic() - began >= 0.2


def test_a_trickle_brings_byte_after_byte(proxy: FaultProxy, client: Connection) -> None:
    proxy.set_rules(Rule(fault="trickle", after_bytes=1000, bytes_per_second=50))
    client.request("GET", "/1010")
    response = client.getresponse()
    assert response.read(1000) == content(1000)
    began = time.monotonic()
    assert response.read() == content(1010)[1000:]
    assert 0.15 <= time.monotonic() - began < SECONDS


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_each_throttled_connection_has_the_rate_for_itself(method: str, proxy: FaultProxy) -> None:
    size, rate = 400_000, 1e6
    proxy.set_rules(Rule(fault="throttle", bytes_per_second=rate))

    def move(_: int) -> float:
        with closing(connect(proxy)) as connection:
            began = time.monotonic()
            if method == "GET":
                assert ask(connection, "GET", f"/{size}") == (200, content(size))
            else:
                assert ask(connection, "PUT", "/a", content(size)) == (200, b"ok")
            return time.monotonic() - began

    with ThreadPoolExecutor(4) as pool:
        seconds = [*pool.map(move, range(4))]
    assert min(seconds) >= 0.9 * size / rate
    assert max(seconds) < 4 * size / rate  # together they would need all of that


# Rules and their account.


def test_a_request_meets_the_first_rule_that_fits_and_has_hits_left(
    origin: Origin, proxy: FaultProxy, client: Connection
) -> None:
    proxy.set_rules(
        Rule(fault="status", status=501, method="PUT"),
        Rule(fault="status", status=502, path=r"^/2\d$", skip=1, count=1),
        Rule(fault="status", status=503, header={"range": "bytes=5-"}),
        Rule(fault="delay", count=2),
    )
    assert [ask(client, "GET", path)[0] for path in ("/20", "/21", "/22", "/30")] == [200, 502, 200, 200]
    assert ask(client, "PUT", "/20", b"x")[0] == 501
    client.request("GET", "/20", headers={"Range": "bytes=5-7"})
    response = client.getresponse()
    assert (response.status, bool(response.read())) == (503, True)
    assert proxy.hits() == [1, 1, 1, 2]
    log = proxy.log()
    assert [request.fault for request in log] == ["delay", "status", "delay", None, "status", "status"]
    assert [request.target for request in log] == ["/20", "/21", "/22", "/30", "/20", "/20"]
    assert [request.bytes for request in log] == [20, 0, 22, 30, 0, 0]
    assert log[-1].range == "bytes=5-7"
    proxy.set_rules()
    assert (proxy.hits(), proxy.log()) == ([], [])


def test_chance_is_the_same_each_time(proxy: FaultProxy, client: Connection) -> None:
    def outcomes() -> list[int]:
        proxy.set_rules(Rule(fault="status", probability=0.5))
        return [ask(client, "GET", "/1")[0] for _ in range(40)]

    first = outcomes()
    assert set(first) == {200, 503}
    assert outcomes() == first


@pytest.mark.parametrize(
    "rule", [{"fault": "explode"}, {"fault": "reset", "after_bytes": None}, {"fault": "delay", "typo": 1}]
)
def test_rules_without_a_meaning_are_refused(rule: dict[str, Any], client: Connection) -> None:
    status, answer = ask(client, "PUT", "/__faults", json.dumps([rule]))
    assert status == 400
    assert json.loads(answer)["error"]


def test_the_proxy_ends_with_whoever_started_it(origin: Origin) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from servers.fault_proxy import FaultProxy\n"
        f"proxy = FaultProxy({origin.address!r}); proxy.start()\n"
        "print(proxy.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with closing(Connection("127.0.0.1", port, timeout=SECONDS)) as connection:
            assert ask(connection, "GET", "/1") == (200, content(1))
        process.kill()
    wait_until(lambda: not listens(port), "the proxy is still there")


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


# The S3 server, seen by boto3 alone.


def error_code(caught: pytest.ExceptionInfo[Any]) -> str:
    return str(caught.value.response["Error"]["Code"])


def test_the_server_checks_signatures(rgw_bucket: RgwBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    good = s3_client(rgw_bucket.endpoint_url)
    good.put_object(Bucket=rgw_bucket.name, Key="a", Body=b"1")
    with closing(Connection(rgw_bucket.endpoint_url.removeprefix("http://"), timeout=SECONDS)) as connection:
        assert ask(connection, "GET", f"/{rgw_bucket.name}/a")[0] == 403
    for name, code in (
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, "wrong")
            bad = s3_client(rgw_bucket.endpoint_url)
        with pytest.raises(bad.exceptions.ClientError) as caught:
            bad.get_object(Bucket=rgw_bucket.name, Key="a")
        assert error_code(caught) == code


def test_signatures_stay_valid_through_the_proxy(rgw_bucket: RgwBucket, rgw_proxy: FaultProxy) -> None:
    client = s3_client(rgw_proxy.endpoint_url)
    data = content(300_000)
    client.put_object(Bucket=rgw_bucket.name, Key="odd key+ä", Body=data)
    assert client.get_object(Bucket=rgw_bucket.name, Key="odd key+ä")["Body"].read() == data
    assert [(request.method, request.status) for request in rgw_proxy.log()] == [("PUT", 200), ("GET", 200)]


def test_the_server_keeps_parts_ranges_and_versions(rgw_bucket: RgwBucket) -> None:
    client = s3_client(rgw_bucket.endpoint_url)
    names = {"Bucket": rgw_bucket.name, "Key": "a"}
    parts = [content(5 << 20), content(1000)]
    upload = client.create_multipart_upload(**names)["UploadId"]
    tags = [
        client.upload_part(**names, UploadId=upload, PartNumber=number, Body=part)["ETag"]
        for number, part in enumerate(parts, 1)
    ]
    done = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(**names, UploadId=upload, MultipartUpload={"Parts": done})
    version = client.head_object(**names)["ETag"]
    assert version.endswith('-2"')
    answer = client.get_object(**names, Range=f"bytes={(5 << 20) - 3}-{(5 << 20) + 2}", IfMatch=version)
    assert answer["Body"].read() == parts[0][-3:] + parts[1][:3]
    assert answer["ContentRange"] == f"bytes {(5 << 20) - 3}-{(5 << 20) + 2}/{(5 << 20) + 1000}"
    with pytest.raises(client.exceptions.ClientError) as caught:
        client.get_object(**names, IfMatch='"another"')
    assert error_code(caught) == "PreconditionFailed"


def test_listings_come_sorted_and_in_pages(rgw_bucket: RgwBucket) -> None:
    client = s3_client(rgw_bucket.endpoint_url)
    keys = ["a/1", "a/10", "a/2", "b", "ä"]
    for key in reversed(keys):
        client.put_object(Bucket=rgw_bucket.name, Key=key, Body=b"")
    pages = [
        *client.get_paginator("list_objects_v2").paginate(
            Bucket=rgw_bucket.name, PaginationConfig={"PageSize": 2}
        )
    ]
    assert [[entry["Key"] for entry in page["Contents"]] for page in pages] == [keys[:2], keys[2:4], keys[4:]]


def test_of_eight_conditional_writes_one_wins(rgw_bucket: RgwBucket) -> None:
    client = s3_client(rgw_bucket.endpoint_url)
    together = threading.Barrier(8)

    def write(number: int) -> str:
        together.wait(SECONDS)
        try:
            client.put_object(Bucket=rgw_bucket.name, Key="a", Body=b"%d" % number, IfNoneMatch="*")
        except client.exceptions.ClientError as error:
            return str(error.response["Error"]["Code"])
        return str(number)

    with ThreadPoolExecutor(8) as pool:
        outcomes = [*pool.map(write, range(8))]
    winner = client.get_object(Bucket=rgw_bucket.name, Key="a")["Body"].read().decode()
    assert sorted(outcomes) == sorted([winner, *["PreconditionFailed"] * 7])


def test_a_new_gateway_has_the_old_ones_objects(rgw: RgwServer, rgw_bucket: RgwBucket) -> None:
    client = s3_client(rgw_bucket.endpoint_url)
    client.put_object(Bucket=rgw_bucket.name, Key="a", Body=b"1")
    old = rgw.gateway_pid
    rgw.signal_gateway(signal.SIGKILL)
    rgw.restart_gateway()
    assert rgw.gateway_pid != old
    assert client.get_object(Bucket=rgw_bucket.name, Key="a")["Body"].read() == b"1"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("rgw")
@pytest.mark.parametrize("victim", ["starter", "keeper"])
def test_a_second_server_runs_beside_and_nothing_of_it_stays_when_its_owner_is_killed(victim: str) -> None:
    code = (
        f"import sys, json; sys.path.insert(0, {str(TESTS)!r})\n"
        "from servers.rgw import RgwServer\n"
        "server = RgwServer(); server.start(); print(json.dumps(server.state), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        state = json.loads(starter.stdout.readline())
        pids = [state["keeper"], *state["pids"].values()]
        assert len(pids) == 4
        assert all(map(is_running, pids))
        os.kill(starter.pid if victim == "starter" else state["keeper"], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), "a daemon is still there")
        starter.kill()
    if victim == "starter":
        wait_until(lambda: not Path(state["folder"]).exists(), "the folder is still there")
    shutil.rmtree(state["folder"], ignore_errors=True)


@pytest.mark.usefixtures("rgw")
def test_the_command_starts_shows_and_stops_a_server(tmp_path: Path) -> None:
    folder = Path(f"/tmp/rgw-{os.getpid()}-{time.time_ns()}")  # the path of a Unix socket must be short

    def run(verb: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TESTS / "servers" / "rgw.py"), verb, "--dir", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=90)

    assert run("status").returncode == 1
    started = run("start")
    try:
        assert "AWS_ENDPOINT_URL=http://127.0.0.1:" in started.stdout, started.stderr
        assert run("start").returncode == 1  # one is there
        assert run("status").stdout == started.stdout
        port = int(started.stdout.splitlines()[0].rpartition(":")[2])
        assert listens(port)
    finally:
        stopped = run("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not listens(port)
    assert not folder.exists()
