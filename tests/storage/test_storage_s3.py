"""What the S3 store adds to the contract: error kinds, checked answers, uploads, credentials, settings."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit.errors import MissingExtraError
from shardkit.storage import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
)
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.s3 import NONCE, S3Store
from shardkit.storage.s3_client import GRACE_SECONDS, RENEWAL_SECONDS, S3Client
from shardkit.storage.s3_upload import MAX_OBJECT_BYTES, PART_BYTES, part_bytes
from support.remote_harness import quick_policy
from support.s3_moto import App, Intercept, S3Server, aws_environment, s3_server
from support.stores import FakeClock

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def running_server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def server(running_server: S3Server) -> Iterator[S3Server]:
    yield running_server
    running_server.intercept = None


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Store]:
    made = S3Store(f"s3://{server.new_bucket()}/prefix", StorageOptions(endpoint_url=server.endpoint_url))
    server.requests.clear()
    yield made
    made.close()


def error_answer(status: int, code: str) -> Intercept:
    """Every request fails; as in S3, the answer to a HEAD has no body."""

    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        text = f"<Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else text
        start_response(
            f"{status} Failed", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")]
        )
        return [body]

    return intercept


def changed_headers(change: Callable[[dict[str, str]], object], methods: str = "GET PUT POST") -> Intercept:
    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], info: Any = None) -> Any:
            changed = {name.lower(): value for name, value in headers}
            if environ["REQUEST_METHOD"] in methods.split():
                change(changed)
            return start_response(status, list(changed.items()))

        return app(environ, start)

    return intercept


ERRORS = [
    (404, "NoSuchKey", ObjectNotFoundError, "no such object"),
    (404, "NoSuchBucket", ObjectNotFoundError, "no such bucket"),
    (412, "PreconditionFailed", ObjectChangedError, "version"),
    (503, "SlowDown", ThrottledError, "fewer requests"),
    (503, "ServiceUnavailable", ThrottledError, "fewer requests"),
    (429, "TooManyRequests", ThrottledError, "fewer requests"),
    (400, "RequestLimitExceeded", ThrottledError, "fewer requests"),
    (500, "InternalError", TransientError, "InternalError"),
    (502, "BadGateway", TransientError, "BadGateway"),
    (504, "GatewayTimeout", TransientError, "GatewayTimeout"),
    (400, "RequestTimeout", TransientError, "RequestTimeout"),
    (409, "OperationAborted", TransientError, "OperationAborted"),
    (416, "InvalidRange", StoreError, "after the object's end"),
    (403, "AccessDenied", StoreError, "policies"),
    (403, "SignatureDoesNotMatch", StoreError, "secret key"),
    (403, "InvalidObjectState", StoreError, "archived"),
    (403, "RequestTimeTooSkewed", StoreError, "clock"),
    (400, "ExpiredToken", StoreError, "expired"),
    (403, "InvalidAccessKeyId", StoreError, "access key"),
    (400, "InvalidRequest", StoreError, "as asked"),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("status", "code", "kind", "words"), ERRORS, ids=[code for _, code, _, _ in ERRORS])
def test_each_failure_is_of_one_kind_and_says_where(
    store: S3Store, server: S3Server, status: int, code: str, kind: type[StoreError], words: str
) -> None:
    server.intercept = error_answer(status, code)
    for attempt in (lambda: store.open("a", 1, 2), lambda: list(store.list())):
        with pytest.raises(StoreError, match=words) as caught:
            attempt()
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert store.url in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, ObjectNotFoundError),
        (403, StoreError),
        (400, StoreError),
        (503, ThrottledError),
        (500, TransientError),
    ],
)
def test_a_head_has_no_error_body_and_goes_by_its_status(
    store: S3Store, server: S3Server, status: int, kind: type[StoreError]
) -> None:
    server.intercept = error_answer(status, "")
    with pytest.raises(StoreError) as caught:
        store.head("a")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (412, "PreconditionFailed", ObjectExistsError),
        (409, "ConditionalRequestConflict", TransientError),
        (400, "BadDigest", TransientError),
        (403, "AccessDenied", StoreError),
        (503, "SlowDown", ThrottledError),
    ],
)
def test_writes_fail_in_their_own_kinds(
    store: S3Store, server: S3Server, status: int, code: str, kind: type[StoreError]
) -> None:
    server.intercept = error_answer(status, code)
    with pytest.raises(StoreError) as caught:
        store.put("a", b"1")
    assert type(caught.value) is kind


@pytest.mark.parametrize("status", [500, 503])
def test_a_request_is_made_once(store: S3Store, server: S3Server, status: int) -> None:
    server.intercept = error_answer(status, "Whatever")
    attempts: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.put("a", b"1"),
        lambda: list(store.list()),
        lambda: store.delete("a"),
    ]
    for number, attempt in enumerate(attempts, 1):
        with pytest.raises(TransientError):
            attempt()
        assert len(server.requests) == number


def test_a_server_that_is_not_there_is_a_transient_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = StorageOptions(endpoint_url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TransientError, match="bucket/a"):
            S3Store("s3://bucket", options).get("a")


def test_deleting_from_a_bucket_that_is_not_there_is_an_error(server: S3Server) -> None:
    with pytest.raises(ObjectNotFoundError, match="no such bucket"):
        S3Store("s3://no-such-bucket").delete("a")


# Answers that are not what was asked for.


def test_a_server_that_ignores_ranges_is_refused(store: S3Store, server: S3Server) -> None:
    store.put("a", b"0123456789")

    def without_range(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        environ.pop("HTTP_RANGE", None)
        return app(environ, start_response)

    server.intercept = without_range
    for start, stop in [(0, 5), (5, 10), (5, None)]:
        with pytest.raises(StoreError, match="does not support ranges"):
            store.open("a", start, stop)
    assert store.get("a", 0, 10) == store.get("a", 0, 99) == b"0123456789"  # all is what was asked for


@pytest.mark.parametrize(
    "content_range",
    ["bytes 2-5/10", "bytes 1-5/10", "bytes 2-4/10", "bytes */10", "bytes 2-4/*", "items 2-4/10"],
)
def test_an_answer_with_another_range_is_refused(
    store: S3Store, server: S3Server, content_range: str
) -> None:
    store.put("a", b"0123456789")
    server.intercept = changed_headers(lambda headers: headers.update({"content-range": content_range}))
    if content_range == "bytes 2-4/10":
        assert store.get("a", 2, 5) == b"234"
    else:
        with pytest.raises(StoreError, match=r"requested bytes|Content-Range"):
            store.open("a", 2, 5)


def test_an_answer_of_another_version_is_refused(store: S3Store, server: S3Server) -> None:
    version = store.put("a", b"0123456789").version
    server.intercept = changed_headers(lambda headers: headers.update({"etag": '"other"'}))
    with pytest.raises(ObjectChangedError, match="version other"):
        store.open("a", version=version)


@pytest.mark.parametrize(("header", "words"), [("etag", "no ETag"), ("content-length", "Content-Length")])
def test_an_answer_without_version_or_length_is_refused(
    store: S3Store, server: S3Server, header: str, words: str
) -> None:
    store.put("a", b"0123456789")
    server.intercept = changed_headers(lambda headers: headers.pop(header), "GET HEAD")
    for read in (store.head, store.open):
        with pytest.raises(StoreError, match=words):
            read("a")


def test_a_key_that_is_not_unicode_is_refused(store: S3Store) -> None:
    with pytest.raises(StoreError, match="Unicode"):
        store.put("a\udcff", b"1")


def test_ranges_and_versions_are_asked_for_only_where_needed(store: S3Store, server: S3Server) -> None:
    version = store.put("a", b"0123456789").version
    seen: list[tuple[str | None, str | None]] = []

    def watch(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        seen.append((environ.get("HTTP_RANGE"), environ.get("HTTP_IF_MATCH")))
        return app(environ, start_response)

    server.intercept = watch
    store.get("a")
    store.get("a", 3, version=version)
    store.get("a", 0, 4)
    assert seen == [(None, None), ("bytes=3-", f'"{version}"'), ("bytes=0-3", None)]


def test_a_listing_goes_over_all_pages(store: S3Store, server: S3Server) -> None:
    keys = sorted(f"folder/{number} +ä" for number in range(7))
    for key in keys:
        store.put(key, b"1")

    def small_pages(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        environ["QUERY_STRING"] += "&max-keys=3"
        return app(environ, start_response)

    server.intercept = small_pages
    server.requests.clear()
    assert [info.key for info in store.list("folder/")] == keys
    assert len(server.requests) == 3


def test_a_listing_that_is_not_sorted_is_refused(store: S3Store, server: S3Server) -> None:
    def unsorted(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        names = ["prefix/b", "prefix/a"]
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>1</Size><ETag>x</ETag></Contents>" for name in names
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    server.intercept = unsorted
    with pytest.raises(StoreError, match="not sorted by key"):
        list(store.list())


@pytest.mark.parametrize(
    ("entries", "tokens"), [(1, "same"), (0, "same"), pytest.param(0, "new", marks=pytest.mark.extended)]
)
def test_a_listing_that_repeats_a_page_or_never_ends_is_an_error(
    store: S3Store, server: S3Server, entries: int, tokens: str
) -> None:
    sent = itertools.count()

    def same(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        entry = "<Contents><Key>prefix/a</Key><Size>1</Size><ETag>x</ETag></Contents>" * entries
        token = tokens if tokens == "same" else next(sent)
        end = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        body = f"<ListBucketResult>{end}{entry}</ListBucketResult>".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    server.intercept = same
    server.requests.clear()
    with pytest.raises(StoreError, match="not sorted by key" if entries else "does not end"):
        list(store.list())
    assert len(server.requests) <= 1001


ERROR_PAGE = '<?xml version="1.0"?>\n<Error><Code>{}</Code><Message>as asked</Message></Error>'


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sent_as", ["application/xml", "binary/octet-stream", "text/plain"])
@pytest.mark.parametrize("etag", [[], [("ETag", '"x"')]], ids=["", "with an ETag"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalError", TransientError),
        ("NewWords", TransientError),
        ("SlowDown", ThrottledError),
        ("NoSuchKey", ObjectNotFoundError),
        ("AccessDenied", StoreError),
    ],
)
def test_an_error_that_comes_with_status_200_is_that_error(
    store: S3Store,
    server: S3Server,
    code: str,
    kind: type[StoreError],
    etag: list[tuple[str, str]],
    sent_as: str,
) -> None:
    """Whatever type it is sent as: proxies keep that of the object."""

    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        body = ERROR_PAGE.format(code).encode()
        start_response("200 OK", [("Content-Length", str(len(body))), ("Content-Type", sent_as), *etag])
        return [body]

    server.intercept = intercept
    for attempt in (partial(store.get, "a"), partial(store.get, "a", 5, 10)):
        with pytest.raises(StoreError, match=f"{code}: as asked; the server sent this error") as caught:
            attempt()
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalError", TransientError),
        ("SlowDown", ThrottledError),
        ("AccessDenied", StoreError),
        ("InvalidAccessKeyId", StoreError),
    ],
)
@pytest.mark.parametrize("request_name", ["list", "complete"])
def test_an_error_in_a_200_that_lists_or_completes_an_upload_is_that_error(
    store: S3Store, server: S3Server, code: str, kind: type[StoreError], request_name: str
) -> None:
    """S3 answers so when parts take long to be put together."""

    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        if not ("list-type" in query or (environ["REQUEST_METHOD"] == "POST" and "uploadId" in query)):
            return app(environ, start_response)
        body = ERROR_PAGE.format(code).encode()
        start_response("200 OK", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [body]

    server.intercept = intercept
    with pytest.raises(StoreError, match=f"{code}: ") as caught:
        list(store.list()) if request_name == "list" else store.put("large", bytes(20 << 20))
    assert type(caught.value) is kind


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><title>Log in</title>", b"\n<HTML><body>Log in</body>"])
def test_a_web_page_in_place_of_an_object_is_named(store: S3Store, server: S3Server, page: bytes) -> None:
    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", str(len(page))), ("Content-Type", "text/html")])
        return [page]

    server.intercept = intercept
    for attempt in (partial(store.get, "a"), partial(store.get, "a", 5, 10)):
        with pytest.raises(StoreError, match="a web page in place of the object: check the endpoint"):
            attempt()


def test_an_error_that_comes_with_status_200_is_tried_again(store: S3Store, server: S3Server) -> None:
    store.put("a", b"0123456789")
    failures = itertools.count()

    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        if next(failures) >= 2:
            return app(environ, start_response)
        body = ERROR_PAGE.format("InternalError").encode()
        start_response("200 OK", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [body]

    server.intercept = intercept
    assert ResilientStore(store, quick_policy()).get("a", 2, 5) == b"234"


def test_objects_that_are_xml_are_objects(store: S3Store, server: S3Server) -> None:
    server.intercept = changed_headers(lambda headers: headers.update({"content-type": "text/xml"}), "GET")
    for data in (b"<Errors><Code>1</Code></Errors>", b"<a><Error><Code>x</Code></Error></a>", b""):
        store.put("a", data)
        assert store.get("a") == data
    assert store.get("a", 0, 0) == b""


@pytest.mark.parametrize("operation", ["get", "head", "list"])
@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Location": "http://login.example/in?token=secret"}, "redirects to http://login.example/in: check"),
        ({"x-amz-bucket-region": "http://odd place"}, "redirects to an address that it does not name"),
        ({}, "redirects to an address that it does not name"),
        ({"x-amz-bucket-region": "eu-west-9"}, "is in region eu-west-9: set --storage region=eu-west-9"),
    ],
)
def test_a_redirect_is_reported_as_what_it_is_after_few_requests(
    store: S3Store, server: S3Server, headers: dict[str, str], words: str, operation: str
) -> None:
    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        start_response("301 Moved Permanently", [("Content-Length", "0"), *headers.items()])
        return [b""]

    server.intercept = intercept
    server.requests.clear()
    with pytest.raises(StoreError, match=words) as caught:
        list(store.list()) if operation == "list" else getattr(store, operation)("a")
    assert "secret" not in str(caught.value)
    assert len(server.requests) <= 3


# Bodies, from a server that sends what the test says.

Script = Callable[[socket.socket], None]
HEADERS = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "v"\r\n\r\n'


@contextlib.contextmanager
def scripted_store(script: Script, **options: Any) -> Iterator[S3Store]:
    """A store whose server answers every connection with `script`, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    script(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield S3Store("s3://bucket", StorageOptions(endpoint_url=url, **options))
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    aws_environment(monkeypatch, None)


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("sent", [0, 1, 999])
def test_a_body_that_ends_early_is_a_transient_error(sent: int) -> None:
    with scripted_store(lambda connection: connection.sendall(HEADERS + b"x" * sent)) as store:
        with pytest.raises(TransientError, match=f"after {sent} of 1,000 bytes"):
            store.get("a")
        got = 0
        with contextlib.suppress(TransientError), store.open("a") as body:
            while got < 1000:
                got += body.readinto(memoryview(bytearray(64)))
        assert got == sent


@pytest.mark.usefixtures("credentials")
def test_a_body_that_stops_is_a_transient_error_after_the_read_timeout() -> None:
    over = threading.Event()

    def stop(connection: socket.socket) -> None:
        connection.sendall(HEADERS + b"x" * 10)
        over.wait(120)

    with scripted_store(stop, read_timeout_seconds=0.5) as store, store.open("a") as body:
        buffer = memoryview(bytearray(64))
        assert body.readinto(buffer) == 10
        began = time.monotonic()
        with pytest.raises(TransientError, match="after 10 of 1,000 bytes"):
            body.readinto(buffer)
        assert time.monotonic() - began < 60
        over.set()


@pytest.mark.usefixtures("credentials")
def test_an_answer_that_does_not_come_is_a_transient_error_after_the_read_timeout() -> None:
    over = threading.Event()

    def never(connection: socket.socket) -> None:
        over.wait(120)

    with scripted_store(never, read_timeout_seconds=0.2) as store:
        began = time.monotonic()
        with pytest.raises(TransientError):
            store.get("a")
        assert time.monotonic() - began < 60
        over.set()


@pytest.mark.usefixtures("credentials")
def test_bytes_are_handed_out_as_they_arrive() -> None:
    """A trickle never fills a large buffer; a reader gets each piece without waiting for the next."""
    taken = threading.Semaphore(0)

    def trickle(connection: socket.socket) -> None:
        connection.sendall(HEADERS)
        for _ in range(5):
            connection.sendall(b"abc")
            assert taken.acquire(timeout=60)

    with scripted_store(trickle) as store, store.open("a") as body:
        buffer = memoryview(bytearray(1 << 20))
        for _ in range(5):
            assert body.readinto(buffer) == 3
            taken.release()


@pytest.mark.usefixtures("credentials")
def test_closing_a_body_ends_a_read_of_another_thread() -> None:
    reading, over = threading.Event(), threading.Event()

    def stop(connection: socket.socket) -> None:
        connection.sendall(HEADERS + b"x" * 10)
        over.wait(120)

    with scripted_store(stop, read_timeout_seconds=120) as store, ThreadPoolExecutor(1) as pool:
        body = store.open("a")
        buffer = memoryview(bytearray(64))
        body.readinto(buffer)

        def read() -> None:
            reading.set()
            body.readinto(buffer)

        waiting = pool.submit(read)
        assert reading.wait(60)
        began = time.monotonic()
        body.close()
        with pytest.raises(TransientError, match="closed"):
            waiting.result(60)
        assert time.monotonic() - began < 60  # closing did not wait for the read timeout either
        with pytest.raises(TransientError, match="closed"):
            body.readinto(buffer)
        over.set()


def test_a_body_is_compared_with_the_servers_checksum_where_settings_ask_for_it(server: S3Server) -> None:
    options = StorageOptions(endpoint_url=server.endpoint_url, checksums="when_supported")
    store = S3Store(f"s3://{server.new_bucket()}", options)
    data = bytes(range(256)) * 1000
    store.put("a", data)
    assert store.get("a") == data
    assert store.get("a", 5, 1000) == data[5:1000]

    def flip(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        return [b"".join(app(environ, start_response)).replace(b"\x07\x08", b"\x07\x09", 1)]

    server.intercept = flip
    with pytest.raises(TransientError, match="checksum"):
        store.get("a")


# Uploads.


def test_every_request_of_an_upload_carries_the_md5_of_its_content(store: S3Store, server: S3Server) -> None:
    data = bytes(PART_BYTES) + b"rest"
    seen: list[tuple[int, str]] = []

    def watch(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            seen.append((int(environ["CONTENT_LENGTH"]), environ["HTTP_CONTENT_MD5"]))
        return app(environ, start_response)

    server.intercept = watch
    store.put("large", data)
    store.put("small", b"small")
    store.put("conditional", data, if_absent=True)
    pieces = [data[:PART_BYTES], b"rest", b"small", data]
    expected = [(len(piece), base64.b64encode(hashlib.md5(piece).digest()).decode()) for piece in pieces]
    assert sorted(seen[:2], reverse=True) + seen[2:] == expected


@pytest.mark.parametrize("stated", [None, "true"])
def test_bodies_that_carry_their_md5_are_signed_by_it_unless_the_configuration_says_otherwise(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str | None
) -> None:
    config = tmp_path / "config"
    config.write_text(f"[default]\ns3 =\n    payload_signing_enabled = {stated}\n" if stated else "")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    signed: dict[str, set[bool]] = {"PUT": set(), "POST": set(), "GET": set()}

    def watch(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        assert environ["REQUEST_METHOD"] != "PUT" or "content-md5" in environ["HTTP_AUTHORIZATION"]
        is_signed = environ["HTTP_X_AMZ_CONTENT_SHA256"] != "UNSIGNED-PAYLOAD"
        signed[environ["REQUEST_METHOD"]].add(is_signed)
        return app(environ, start_response)

    store = S3Store(f"s3://{server.new_bucket()}", StorageOptions(endpoint_url=server.endpoint_url))
    server.intercept = watch
    store.put("large", bytes(PART_BYTES + 1))
    store.put("small", b"small")
    assert store.get("small") == b"small"
    store.close()
    assert signed == {"PUT": {stated is not None}, "POST": {True}, "GET": {True}}


@pytest.mark.parametrize("failing", ["upload_part", "complete"])
def test_an_upload_that_fails_leaves_nothing_behind(store: S3Store, server: S3Server, failing: str) -> None:
    refuse = error_answer(500, "InternalError")

    def fail(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        is_part, is_end = "partNumber=2" in query, environ["REQUEST_METHOD"] == "POST" and "uploadId" in query
        if is_part if failing == "upload_part" else is_end:
            return refuse(environ, start_response, app)
        return app(environ, start_response)

    server.intercept = fail
    with pytest.raises(TransientError):
        store.put("large", bytes(3 * PART_BYTES))
    server.intercept = None
    bucket = store.url.split("/")[2]
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket=bucket)
    assert list(store.list()) == []


def test_parts_that_arrive_after_the_first_failure_are_gone_too(store: S3Store, server: S3Server) -> None:
    """The abort waits for the parts that are on their way: one stored after it would stay for ever."""
    aborted, late = threading.Event(), threading.Event()
    refuse = error_answer(500, "InternalError")

    def delay(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        if "partNumber=1" in query:
            return refuse(environ, start_response, app)
        if "partNumber=2" in query:
            late.wait(1)  # far longer than the refusal of part 1 takes
            assert not aborted.is_set()
        if environ["REQUEST_METHOD"] == "DELETE":
            aborted.set()
        return app(environ, start_response)

    server.intercept = delay
    with pytest.raises(TransientError, match="part 1 of 2"):
        store.put("large", bytes(2 * PART_BYTES))
    assert aborted.is_set()
    server.intercept = None
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket=store.url.split("/")[2])


@pytest.mark.parametrize("size", [10, PART_BYTES + 10], ids=["one-request", "parts"])
def test_an_object_that_was_stored_wrongly_is_a_transient_error(
    store: S3Store, server: S3Server, size: int
) -> None:
    wrong = f'"{"0" * 32}"'
    server.intercept = changed_headers(lambda headers: headers.update({"etag": wrong}), "PUT")
    if size > PART_BYTES:  # the parts' own ETags are returned to the server as they came
        server.intercept = wrong_etag_at_the_end
    with pytest.raises(TransientError, match="upload it again"):
        store.put("a", bytes(size))


def wrong_etag_at_the_end(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
    if environ["REQUEST_METHOD"] != "POST" or "uploadId" not in environ["QUERY_STRING"]:
        return app(environ, start_response)
    list(app(environ, lambda *_: None))
    body = (
        f"<CompleteMultipartUploadResult><ETag>{'0' * 32}-2</ETag></CompleteMultipartUploadResult>".encode()
    )
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


def test_a_new_object_that_was_stored_wrongly_is_removed_again(store: S3Store, server: S3Server) -> None:
    server.intercept = changed_headers(lambda headers: headers.update({"etag": f'"{"0" * 32}"'}), "PUT")
    with pytest.raises(TransientError):
        store.put("a", b"1", if_absent=True)
    server.intercept = None
    assert list(store.list()) == []
    store.put("a", b"1", if_absent=True)


def test_etags_of_encrypted_objects_are_no_md5(store: S3Store, server: S3Server) -> None:
    headers = {"etag": f'"{"0" * 32}"', "x-amz-server-side-encryption": "aws:kms"}
    server.intercept = changed_headers(lambda found: found.update(headers), "PUT")
    assert store.put("a", b"1").version == "0" * 32


def test_a_completion_that_names_no_etag_is_looked_up(store: S3Store, server: S3Server) -> None:
    """Ceph's answer."""

    def silent(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "POST" or "uploadId" not in environ["QUERY_STRING"]:
            return app(environ, start_response)
        list(app(environ, lambda *_: None))
        body = b"<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    server.intercept = silent
    info = store.put("a", bytes(PART_BYTES + 1))
    assert info.version == store.head("a").version


@given(st.integers(1, MAX_OBJECT_BYTES))
def test_any_object_fits_into_ten_thousand_parts(total_bytes: int) -> None:
    size = part_bytes(total_bytes)
    assert size >= PART_BYTES
    assert -(-total_bytes // size) <= 10_000
    assert size <= 5 << 30
    assert size == PART_BYTES or total_bytes > 10_000 * PART_BYTES


def test_an_object_beyond_s3s_limit_is_refused(store: S3Store, server: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as handle:
        handle.truncate(MAX_OBJECT_BYTES + 1)
    with pytest.raises(StoreError, match="exceed S3"):
        store.put("a", file)
    assert server.requests == []


@pytest.mark.parametrize(
    "metadata",
    [{"Upper": "x"}, {"ä": "x"}, {"a": "ä"}, {"a": "x\r\ny: z"}, {"a": " x"}, {"a": "x" * 3000}, {"": "x"}],
)
def test_metadata_that_http_cannot_carry_is_refused(
    store: S3Store, server: S3Server, metadata: dict[str, str]
) -> None:
    with pytest.raises(StoreError, match="metadata"):
        store.put("a", b"1", metadata=metadata)
    assert server.requests == []


# Writes whose acknowledgement is lost.


def lost_acknowledgement(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
    if environ["REQUEST_METHOD"] not in ("PUT", "POST"):
        return app(environ, start_response)
    list(app(environ, lambda *_: None))
    return error_answer(500, "InternalError")({**environ, "CONTENT_LENGTH": "0"}, start_response, app)


@pytest.mark.parametrize("size", [10, PART_BYTES + 10])
def test_a_write_that_is_tried_again_finds_itself(
    store: S3Store, server: S3Server, tmp_path: Path, size: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    sources: dict[str, bytes | Path] = {"bytes": bytes(size), "file": file}
    for key, data in sources.items():
        server.intercept = lost_acknowledgement
        with pytest.raises(TransientError):
            store.put(key, data, if_absent=True)
        with pytest.raises(TransientError):
            store.put(key, data, if_absent=True)
        server.intercept = None
        info = store.put(key, data, if_absent=True)
        assert info.version == store.head(key).version
        with pytest.raises(ObjectExistsError):  # that was the answer; the next write is another one
            store.put(key, data, if_absent=True)


def test_a_write_does_not_take_anothers_object_for_its_own(store: S3Store, server: S3Server) -> None:
    other = S3Store(store.url)
    server.intercept = error_answer(500, "InternalError")
    with pytest.raises(TransientError):
        store.put("a", b"same", if_absent=True)  # without effect
    server.intercept = None
    other.put("a", b"same", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("a", b"same", if_absent=True)


def test_other_content_is_another_write(store: S3Store, server: S3Server) -> None:
    server.intercept = lost_acknowledgement
    with pytest.raises(TransientError):
        store.put("a", b"one", if_absent=True)
    server.intercept = None
    with pytest.raises(ObjectExistsError):
        store.put("a", b"two", if_absent=True)


def test_a_nonce_from_the_caller_finds_the_write_from_another_store(store: S3Store, server: S3Server) -> None:
    server.intercept = lost_acknowledgement
    with pytest.raises(TransientError):
        store.put("a", b"1", if_absent=True, metadata={NONCE: "mine"})
    server.intercept = None
    other = S3Store(store.url)
    with pytest.raises(ObjectExistsError):
        other.put("a", b"1", if_absent=True, metadata={NONCE: "another"})
    assert other.put("a", b"1", if_absent=True, metadata={NONCE: "mine"}).bytes == 1


def test_a_write_that_a_proxy_sends_twice_succeeds(store: S3Store, server: S3Server) -> None:
    def twice(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            import io

            list(app({**environ, "wsgi.input": io.BytesIO(body)}, lambda *_: None))
            return app({**environ, "wsgi.input": io.BytesIO(body)}, start_response)
        return app(environ, start_response)

    server.intercept = twice
    assert store.put("a", b"1", if_absent=True).bytes == 1


# Credentials.


def only_key(accepted: dict[str, str], code: str, status: int) -> Intercept:
    """Takes requests that are signed with the accepted key, and answers others as S3 does."""
    refuse = error_answer(status, code)

    def intercept(environ: dict[str, Any], start_response: Start, app: App) -> Iterable[bytes]:
        if f"Credential={accepted['key']}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return app(environ, start_response)
        return refuse(environ, start_response, app)

    return intercept


@pytest.fixture
def credentials_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    write("first")
    return write


@pytest.mark.parametrize(
    ("code", "status"),
    [("ExpiredToken", 400), ("InvalidAccessKeyId", 403), ("InvalidToken", 400), ("AccessDenied", 403)],
)
def test_credentials_that_were_renewed_are_read_again(
    server: S3Server, credentials_file: Callable[[str], None], code: str, status: int
) -> None:
    store = S3Store(f"s3://{server.new_bucket()}")
    accepted = {"key": "first"}
    server.intercept = only_key(accepted, code, status)
    store.put("a", b"1")
    accepted["key"] = "second"
    credentials_file("second")
    assert store.get("a") == b"1"


def test_renewed_credentials_are_found_by_a_head_and_by_all_threads(
    server: S3Server, credentials_file: Callable[[str], None]
) -> None:
    store = S3Store(f"s3://{server.new_bucket()}")
    accepted = {"key": "first"}
    server.intercept = only_key(accepted, "ExpiredToken", 400)
    store.put("a", b"1")
    accepted["key"] = "second"
    credentials_file("second")
    with ThreadPoolExecutor(8) as pool:
        assert [info.bytes for info in pool.map(store.head, ["a"] * 16)] == [1] * 16


def test_refused_requests_do_not_become_a_storm_of_lookups(
    server: S3Server, credentials_file: Callable[[str], None]
) -> None:
    bucket, clock = server.new_bucket(), FakeClock()
    client = S3Client("s3://bucket", StorageOptions(), clock=clock)

    def get() -> None:
        client.request("list_objects_v2", "where", Bucket=bucket)

    get()
    server.intercept = only_key({"key": "second"}, "ExpiredToken", 400)
    server.requests.clear()
    for _ in range(5):  # nothing has changed: one look, and no request again
        with pytest.raises(StoreError, match="renew them"):
            get()
    assert len(server.requests) == 5
    credentials_file("second")
    with pytest.raises(StoreError):
        get()
    clock.sleep(RENEWAL_SECONDS)
    get()


def test_keys_that_were_revoked_before_the_new_ones_came_are_waited_for(
    server: S3Server, credentials_file: Callable[[str], None]
) -> None:
    bucket, clock = server.new_bucket(), FakeClock()
    client = S3Client("s3://bucket", StorageOptions(), clock=clock)

    def get() -> None:
        client.request("list_objects_v2", "where", Bucket=bucket)

    accepted = {"key": "first"}
    server.intercept = only_key(accepted, "InvalidAccessKeyId", 403)
    for key in ("second", "third"):
        get()
        accepted["key"] = key
        for _ in range(3):
            with pytest.raises(TransientError, match="does not know this access key"):
                get()
            clock.sleep(GRACE_SECONDS / 4)
        credentials_file(key)
    get()
    accepted["key"] = "none"
    with pytest.raises(TransientError):
        get()
    clock.sleep(GRACE_SECONDS)
    with pytest.raises(StoreError, match="does not know this access key") as caught:
        get()
    assert not isinstance(caught.value, TransientError), "they do not come"
    fresh = S3Client("s3://bucket", StorageOptions(), clock=clock)
    with pytest.raises(StoreError) as caught:
        fresh.request("list_objects_v2", "where", Bucket=bucket)
    assert not isinstance(caught.value, TransientError), "keys that never worked are wrong"


def test_without_credentials_the_error_says_what_to_set(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server.requests.clear()
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID") as caught:
        S3Store("s3://bucket").get("a")
    assert type(caught.value) is StoreError
    assert server.requests == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half")
    with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY"):
        S3Store("s3://bucket").get("a")


def test_a_profile_that_is_not_there_is_named(server: S3Server) -> None:
    with pytest.raises(StoreError, match="no-such-profile"):
        S3Store("s3://bucket", StorageOptions(profile="no-such-profile")).get("a")


# Settings.


def client_of(**options: Any) -> Any:
    return S3Client("s3://bucket", StorageOptions(**options)).botocore_client()


@pytest.fixture
def aws_config(credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    file = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))

    def write(text: str) -> None:
        file.write_text(text)

    return write


@pytest.mark.parametrize("name", ["option", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "file"])
def test_an_endpoint_brings_the_defaults_of_compatible_servers(
    aws_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = "http://127.0.0.1:9"
    if name == "file":
        aws_config(f"[default]\nendpoint_url = {url}\n")
    elif name != "option":
        monkeypatch.setenv(name, url)
    client = client_of(endpoint_url=url if name == "option" else None)
    assert client.meta.endpoint_url == url
    assert client.meta.region_name == "us-east-1"
    assert client.meta.config.s3["addressing_style"] == "path"
    assert client.meta.config.request_checksum_calculation == "when_required"
    assert client.meta.config.response_checksum_validation == "when_required"


def test_options_and_aws_configuration_win_over_those_defaults(
    aws_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    aws_config("[default]\nregion = eu-north-1\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    client = client_of(endpoint_url="http://localhost:9")
    assert client.meta.region_name == "eu-north-1"
    assert client.meta.config.s3["addressing_style"] == "virtual"
    assert client.meta.config.request_checksum_calculation == "when_supported"
    assert client.meta.config.response_checksum_validation == "when_required"
    client = client_of(
        endpoint_url="http://localhost:9", region="r", path_style=True, checksums="when_required"
    )
    assert client.meta.region_name == "r"
    assert client.meta.config.s3["addressing_style"] == "path"
    assert client.meta.config.request_checksum_calculation == "when_required"


@pytest.mark.usefixtures("credentials")
def test_aws_itself_keeps_botocores_defaults() -> None:
    client = client_of(region="eu-west-1")
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    assert not client.meta.config.s3 or "addressing_style" not in client.meta.config.s3
    assert client.meta.config.request_checksum_calculation == "when_supported"


@pytest.mark.usefixtures("credentials")
def test_timeouts_and_connections_come_from_the_options_and_nothing_is_retried() -> None:
    config = client_of(connect_timeout_seconds=1.5, read_timeout_seconds=2.5, connections=7).meta.config
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (1.5, 2.5, 7)
    assert config.retries["total_max_attempts"] == 1


@pytest.mark.usefixtures("credentials")
def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(StoreError, match="endpoint"):
        S3Store("s3://bucket", StorageOptions(endpoint_url="no url")).get("a")


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("credentials")
@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("source", ["option", "environment", "not a URL"])
def test_a_password_in_the_endpoint_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    endpoint = "http://zaphod:secret%40word@127.0.0.1:9"
    if source == "not a URL":
        endpoint = "http://zaphod:secretword@bad host"
    options = StorageOptions(endpoint_url=endpoint)
    if source == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        options = StorageOptions()
    policy = quick_policy(deadline_seconds=0.5, report_seconds=0.01)
    store = ResilientStore(S3Store("s3://bucket", options), policy)
    with caplog.at_level("DEBUG", "shardkit"), pytest.raises(StoreError) as caught:
        store.get("a")
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(options)
    assert "zaphod" not in shown
    assert "secret" not in shown


def test_passwords_of_any_store_are_left_out_of_its_errors() -> None:
    error = StoreError("ftp://a:b@host/x", "cannot open http://c:d@e@host:1/y or s3://bucket/k@v", status=5)
    assert str(error) == "ftp://host/x: cannot open http://host:1/y or s3://bucket/k@v (status 5)"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store("s3://bucket")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("botocore", "boto3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[s3\]'"):
        store.get("a")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///a", "s3://b", "s3://buck et/a", "s3://bucket?x", "s3://bucket/../a"]
)
def test_urls_without_a_bucket_are_refused(url: str) -> None:
    with pytest.raises(StoreError):
        S3Store(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b//", "s3://bucket/a/b"),
        ("s3://bucket/a%20b c", "s3://bucket/a%20b c"),
    ],
)
def test_a_url_is_kept_as_it_was_written(url: str, expected: str) -> None:
    assert S3Store(url).url == expected


def seen_headers(server: S3Server) -> list[tuple[str, dict[str, str]]]:
    """A list to which the server adds method, path and query, and the Amazon headers of each request."""
    seen: list[tuple[str, dict[str, str]]] = []

    def note(environ: dict[str, Any], start: Any, app: Any) -> Any:
        headers = {
            name[11:].lower(): value for name, value in environ.items() if name.startswith("HTTP_X_AMZ_")
        }
        signed = {"signed": "yes"} if "HTTP_AUTHORIZATION" in environ else {}
        seen.append((f"{environ['REQUEST_METHOD']} {environ['QUERY_STRING']}", headers | signed))
        return app(environ, start)

    server.intercept = note
    return seen


@pytest.mark.parametrize("key_id", [None, "arn:aws:kms:us-east-1:1:key/2"])
def test_every_write_asks_for_the_encryption_that_a_bucket_demands(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, key_id: str | None
) -> None:
    monkeypatch.setattr("shardkit.storage.s3_upload.PART_BYTES", 5 << 20)
    options = StorageOptions(encryption="aws:kms", kms_key_id=key_id, requester_pays=True)
    store, seen = S3Store(f"s3://{server.new_bucket()}/p", options), seen_headers(server)
    try:
        store.put("small", b"1")
        store.put("new", b"1", if_absent=True)
        store.put("large", bytes(6 << 20))
        assert store.get("small") == b"1"
        assert [info.key for info in store.list()] == ["large", "new", "small"]
        store.head("new")
        store.delete("small")
    finally:
        server.intercept = None
    wanted = {"server_side_encryption": "aws:kms"} | (
        {"server_side_encryption_aws_kms_key_id": key_id} if key_id else {}
    )
    begins = [head for what, head in seen if what in ("PUT ", "POST uploads") or what.startswith("PUT x-id")]
    assert len(begins) == 3
    assert all(wanted.items() <= head.items() for head in begins)
    assert all(head.get("request_payer") == "requester" for _, head in seen)


def test_a_public_bucket_is_read_without_credentials(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = server.new_bucket()
    server.client().put_bucket_acl(Bucket=bucket, ACL="public-read")
    server.client().put_object(Bucket=bucket, Key="a", Body=b"1", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=r"a public bucket .*StorageOptions\(anonymous=True\)"):
        S3Store(f"s3://{bucket}").get("a")
    seen = seen_headers(server)
    try:
        for store in (
            one := S3Store(f"s3://{bucket}", StorageOptions(anonymous=True)),
            pickle.loads(pickle.dumps(one)),
        ):
            assert store.get("a") == b"1"
            assert [info.key for info in store.list()] == ["a"]
            with pytest.raises(ObjectNotFoundError):
                store.head("b")
    finally:
        server.intercept = None
    assert seen
    assert not any("signed" in headers for _, headers in seen)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"encryption": "aes"}, "encryption must be one of AES256, aws:kms, aws:kms:dsse"),
        ({"kms_key_id": "x"}, "set encryption, too"),
        ({"kms_key_id": "x", "encryption": "AES256"}, "set encryption, too"),
        ({"anonymous": True, "profile": "x"}, "give either anonymous or profile"),
    ],
)
def test_options_of_buckets_that_contradict_each_other_are_refused(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        StorageOptions(**options)


def test_mosaicml_s_variable_names_the_endpoint_where_aws_s_do_not(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = server.new_bucket()
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    S3Store(f"s3://{bucket}").put("a", b"1")  # AWS_ENDPOINT_URL comes first
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("S3_ENDPOINT_URL", server.endpoint_url)
    assert S3Store(f"s3://{bucket}").get("a") == b"1"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "prefix",
    [
        "2024-01-01T00:00:00", "run:1/x", "C:/x", "a/b:c", "tab\tx", "a+b", "pct%20x", "hash#x", "amp&x",
        "ümläut", "star*x", "br[1]", "tilde~", "'quote'", '"x"', "semi;x", "equals=x", "$HOME", "a b", "@x",
    ],
)  # fmt: skip
def test_any_legal_key_is_a_prefix(server: S3Server, prefix: str) -> None:
    store = S3Store(f"s3://{server.new_bucket()}/{prefix}")
    store.put(prefix, b"1")
    assert store.get(prefix) == b"1"
    assert [info.key for info in store.list()] == [prefix]


@pytest.mark.parametrize("key", ["/a", "../a", "a/../b", "./a", "a\\b", "a\0b", "", "\ud800"])
def test_keys_that_leave_the_prefix_are_refused(key: str) -> None:
    with pytest.raises(StoreError, match="bad key"):
        S3Store("s3://bucket/x").head(key)


@pytest.mark.parametrize(
    "url",
    [
        "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/my-ap/prefix",
        "s3://arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap/prefix",
        "s3://arn:aws:s3:::bucket/prefix/*.tar",
        "s3://arn:aws-cn:s3:::bucket/part-{0..3}.tar",
        "S3://ARN:aws:s3:::bucket/index.json",
    ],
)
def test_a_bucket_that_is_named_by_its_arn_is_refused_with_what_to_give(url: str) -> None:
    for opened in (S3Store, sk.open):
        with pytest.raises(StoreError, match=r"names a bucket by its ARN: use .* access point's alias"):
            opened(url)


def test_an_object_is_created_once_where_a_server_with_versions_ignores_the_condition(
    server: S3Server,
) -> None:
    name = server.new_bucket()
    state = {"Status": "Enabled"}
    server.client().put_bucket_versioning(Bucket=name, VersioningConfiguration=state)
    store = S3Store(f"s3://{name}")

    def forget(environ: dict[str, Any], start: Any, app: Any) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return app(environ, start)

    server.intercept = forget
    try:
        store.put("a", b"first", if_absent=True)
        with pytest.raises(ObjectExistsError):
            store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"first"
        store.delete("a")
        store.put("a", b"third", if_absent=True)
        assert store.get("a") == b"third"
    finally:
        server.intercept = None
