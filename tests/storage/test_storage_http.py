"""Files of web servers are read exactly, or refused with the reason, however the server behaves."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from servers.web import Fault, WebServer, web_server
from shardkit.storage import (
    ObjectChangedError,
    ObjectInfo,
    ObjectNotFoundError,
    ResilientStore,
    RetryPolicy,
    StoreError,
    ThrottledError,
    TransientError,
    open_store,
)
from shardkit.storage.http_store import HttpStore
from shardkit.storage.object_file import open_object

DATA = bytes(range(251)) * 20_000  # 5 MB: several ranges of a file that is read from front to back
QUICKLY = RetryPolicy(backoff_seconds=0.01, longest_backoff_seconds=0.05, deadline_seconds=3.0, hedge=False)
LATER = 86_400


@pytest.fixture
def web() -> Iterator[WebServer]:
    files = {"a/b c.bin": DATA, "empty.txt": b"", "small.txt": b"some text"}
    with web_server(files) as running:
        yield running


def retrying(web: WebServer) -> ResilientStore:
    return ResilientStore(HttpStore(web.url), QUICKLY)


def read_whole(store: ResilientStore, info: ObjectInfo) -> bytes:
    with open_object(store, info) as file:
        return file.read()


@pytest.mark.parametrize(
    "without",
    [
        set(),
        {"ranges"},
        {"head"},
        {"head", "ranges"},
        {"etag"},
        {"modified"},
        {"etag", "ranges", "head"},
    ],
    ids=lambda without: "no " + " ".join(sorted(without)),
)
def test_a_file_is_read_whole_and_in_parts_from_any_server(web: WebServer, without: set[str]) -> None:
    web.without |= without
    store = retrying(web)
    info = store.head("a/b c.bin")
    assert info.bytes == len(DATA)
    assert read_whole(store, info) == DATA
    assert store.get("a/b c.bin", 1_000_000, 1_000_010, version=info.version) == DATA[1_000_000:1_000_010]
    assert store.get("a/b c.bin") == DATA
    assert store.get("empty.txt") == b""
    assert store.head("empty.txt").bytes == 0
    assert store.get("small.txt", 2) == b"me text"
    assert store.get("small.txt", 3, 3) == b""
    with pytest.raises(StoreError, match=r"not a range|ends before the range"):
        store.get("small.txt", 10)


def test_a_server_without_ranges_sends_a_file_once_to_who_reads_it_in_order(web: WebServer) -> None:
    web.without.add("ranges")
    store = retrying(web)
    info = store.head("a/b c.bin")
    web.requests.clear()
    assert read_whole(store, info) == DATA
    assert web.requests == ["GET /a/b%20c.bin"]
    with open_object(store, info) as file:  # and whoever seeks gets what is there, too
        file.seek(-5, 2)
        assert file.read() == DATA[-5:]
        file.seek(2_000_000)
        assert file.read(5) == DATA[2_000_000:2_000_005]


def test_many_files_of_a_server_without_ranges_are_read_in_turns(web: WebServer) -> None:
    web.without.add("ranges")
    web.files |= {f"{n}.bin": DATA[n : n + 3_000_000] for n in range(12)}
    store = retrying(web)
    files = [open_object(store, store.head(f"{n}.bin")) for n in range(12)]
    read = [b""] * 12
    while any(pieces := [file.read(700_000) for file in files]):
        read = [one + piece for one, piece in zip(read, pieces, strict=True)]
    assert read == [DATA[n : n + 3_000_000] for n in range(12)]
    store.close()


def test_a_weak_etag_and_a_strong_one_are_the_same_version(web: WebServer) -> None:
    store = HttpStore(web.url)
    strong = store.head("small.txt").version
    web.weak = True
    assert store.get("small.txt", version=strong) == b"some text"


@pytest.mark.parametrize("without", ["", "etag", "ranges"])
def test_a_file_that_was_replaced_is_not_mixed_with_the_old_one(web: WebServer, without: str) -> None:
    web.without.add(without)
    store = retrying(web)
    info = store.head("a/b c.bin")
    with open_object(store, info) as file:
        assert file.read(5) == DATA[:5]
    web.files["a/b c.bin"] = DATA[:-1]
    with pytest.raises(ObjectChangedError, match="has version"):
        store.get("a/b c.bin", 0, 9, version=info.version)


def test_files_of_unknown_size_or_version_are_refused_with_the_way_out(web: WebServer) -> None:
    store = HttpStore(web.url)
    web.without |= {"length", "ranges"}
    with pytest.raises(StoreError, match=r"does not state the size of the file; download it"):
        store.head("small.txt")
    web.packs = True
    with pytest.raises(StoreError, match=r"which it compresses in transit \(gzip\)"):
        store.head("small.txt")
    web.packs, web.without = False, {"etag", "modified"}
    with pytest.raises(StoreError, match="neither an ETag nor Last-Modified"):
        store.head("small.txt")


def test_redirects_are_followed_and_loops_end(web: WebServer) -> None:
    store = HttpStore(web.url)
    web.faults = {
        "/x": [Fault(302, {"Location": "/small.txt"}, method="*", repeat=True)],
        "/far": [Fault(307, {"Location": f"{web.url}/x"}, method="*", repeat=True)],
        "/loop": [Fault(301, {"Location": "/loop"}, method="*", repeat=True)],
        "/nowhere": [Fault(302, method="*", repeat=True)],
        "/secret": [Fault(302, {"Location": "ftp://host/x"}, method="*", repeat=True)],
    }
    assert store.head("x").bytes == 9
    assert store.get("far", 0, 4) == b"some"
    with pytest.raises(StoreError, match="redirected the request more than 5 times"):
        store.get("loop")
    with pytest.raises(StoreError, match="answers 302, not a file"):
        store.get("nowhere")
    with pytest.raises(StoreError, match="ftp"):
        store.get("secret")


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, StoreError, "answers 400"),
        (401, StoreError, "asks for a user and password"),
        (403, StoreError, "private or absent, or too many requests"),
        (404, ObjectNotFoundError, "no such file"),
        (410, ObjectNotFoundError, "no such file"),
        (429, ThrottledError, "asks for fewer requests"),
        (500, TransientError, "answers 500"),
        (503, ThrottledError, "asks for fewer requests"),
        (204, StoreError, "answers 204, not a file"),
    ],
)
def test_a_status_is_the_error_that_it_means(
    web: WebServer, status: int, kind: type[StoreError], message: str
) -> None:
    web.faults["/small.txt"] = [Fault(status, method="*", repeat=True)]
    store = HttpStore(web.url)
    for read in (store.head, store.get):
        with pytest.raises(kind, match=message) as raised:
            read("small.txt")
        assert raised.value.status == status


def test_short_troubles_only_cost_time(web: WebServer) -> None:
    web.faults["/a/b%20c.bin"] = [
        Fault(503, {"Retry-After": "0"}),
        Fault(429, {"Retry-After": format_datetime(datetime.now(UTC) - timedelta(1))}),
        Fault(cut_at=0, resets=True),
        Fault(cut_at=900_001),
        Fault(500),
        Fault(cut_at=70_000, resets=True),
    ]
    store = retrying(web)
    info = store.head("a/b c.bin")
    assert read_whole(store, info) == DATA
    assert not web.faults["/a/b%20c.bin"]


def test_a_server_without_ranges_that_breaks_off_is_read_again_from_its_start(web: WebServer) -> None:
    web.without.add("ranges")
    web.faults["/a/b%20c.bin"] = [Fault(cut_at=3_000_000), Fault(cut_at=4_000_000, resets=True)]
    store = retrying(web)
    assert read_whole(store, store.head("a/b c.bin")) == DATA


@pytest.mark.parametrize(
    "stated",
    [str(LATER), format_datetime(datetime.now(UTC) + timedelta(days=1))],
    ids=["seconds", "date"],
)
def test_a_server_that_asks_to_come_back_tomorrow_is_not_waited_for(web: WebServer, stated: str) -> None:
    web.faults["/small.txt"] = [Fault(503, {"Retry-After": stated}, method="*", repeat=True)]
    began = time.monotonic()
    with pytest.raises(ThrottledError, match="failed after 1 attempt"):
        retrying(web).head("small.txt")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("stated", ["", "soon", "\xb2", "9" * 5000, "-5", "Mon, 99 Foo 2026"])
def test_a_retry_after_that_says_nothing_is_ignored(web: WebServer, stated: str) -> None:
    web.faults["/small.txt"] = [Fault(503, {"Retry-After": stated}, method="*")]
    assert retrying(web).head("small.txt").bytes == 9


def test_names_keep_their_characters_and_passwords_go_to_their_host_only(web: WebServer) -> None:
    web.files |= {"ä #1%.txt": b"x", "q": b"q"}
    store = pickle.loads(pickle.dumps(open_store(f"http://user:secret@127.0.0.1:{web.port}")))
    assert store.get("ä #1%25.txt") == b"x"
    assert store.get("q?signature=a/b&c=%20") == b"q"
    assert web.requests[-1] == "GET /q?signature=a/b&c=%20"
    with pytest.raises(ObjectNotFoundError) as raised:
        store.get("none")
    assert "secret" not in f"{store.url} {raised.value}"


def test_a_web_server_is_not_written_to_nor_listed(web: WebServer) -> None:
    store = open_store(web.url)
    for refused in (lambda: store.put("x", b""), lambda: store.delete("x"), lambda: list(store.list())):
        with pytest.raises(StoreError, match="web server"):
            refused()


def test_a_host_that_does_not_answer_is_named_with_the_reason() -> None:
    with pytest.raises(TransientError, match=r"http://127\.0\.0\.1:9/x: .*[Cc]onnection refused"):
        HttpStore("http://127.0.0.1:9").head("x")
