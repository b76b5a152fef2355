"""Repositories of the Hugging Face Hub as stores: one commit is read, and versions are hashes."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from servers.hub import TOKEN, HubServer, Rule
from shardkit.storage import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    ResilientStore,
    RetryPolicy,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
    connect,
)
from shardkit.storage.hub import HubPlace, HubStore, content_version
from shardkit.storage.hub_client import HubClient
from support.hub_environment import hub_server

LINES = b'{"text": "one"}\n' * 300
LARGE = bytes(range(256)) * 1000  # in a file of an ending that the Hub stores outside of git


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(running: HubServer) -> Iterator[HubServer]:
    running.rules.replace([])
    running.requests.clear()
    running.tokens_seen.clear()
    yield running
    running.rules.replace([])
    running.on_request = None


@pytest.fixture
def name(hub: HubServer) -> str:
    made = hub.new_repository()
    hub.commit(made, {"a/lines.jsonl": LINES, "a/table.parquet": LARGE, "b.txt": b""})
    return made


def quick(store: HubStore, **settings: Any) -> ResilientStore:
    defaults: dict[str, Any] = {"backoff_seconds": 0.01, "deadline_seconds": 20.0, "hedge": False}
    return ResilientStore(store, RetryPolicy(**(defaults | settings)))


@pytest.mark.parametrize(
    ("url", "repository", "revision", "path"),
    [
        ("hf://datasets/org/name", "org/name", None, ""),
        ("hf://datasets/org/name/a/b.jsonl", "org/name", None, "a/b.jsonl"),
        ("hf://datasets/org/name@v1.0/a", "org/name", "v1.0", "a"),
        ("hf://datasets/org/name@feature%2Fx/a", "org/name", "feature/x", "a"),
        ("hf://datasets/org/name@refs/pr/7/a", "org/name", "refs/pr/7", "a"),
        ("hf://datasets/org/name@refs/convert/parquet", "org/name", "refs/convert/parquet", ""),
        ("hf://datasets/o.r-g/na_me.v2@a%40b/c@d", "o.r-g/na_me.v2", "a@b", "c@d"),
    ],
)
def test_a_url_names_a_repository_a_revision_and_a_path(
    url: str, repository: str, revision: str | None, path: str
) -> None:
    place = HubPlace.parse(url)
    assert place == HubPlace(repository, revision, path)
    assert HubPlace.parse(f"{place.root}/{path}") == place


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/name", "hf://models/org/name", "hf://datasets/name", "hf://datasets/org/name@/a",
        "hf://datasets/../name", "hf://datasets/org/na me", "hf://datasets//name", "hf://buckets/org/name",
        "hf://datasets/org/name/../../other", "hf://",
    ],
)  # fmt: skip
def test_what_is_no_dataset_repository_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"hf://datasets/ORG/NAME|bad key"):
        HubStore(url)


def test_a_url_of_something_else_on_the_hub_says_so() -> None:
    for url in ("hf://org/name", "hf://models/org/name", "hf://buckets/org/name"):
        with pytest.raises(StoreError, match="is the URL of a model, a space or a bucket"):
            connect(url)


def test_files_in_git_and_beside_it_are_read_by_ranges_with_their_hashes_as_versions(
    hub: HubServer, name: str
) -> None:
    store = HubStore(f"hf://datasets/{name}/a")
    listed = {info.key: (info.bytes, info.version) for info in store.list()}
    blob = hashlib.sha1(b"blob %d\0" % len(LINES) + LINES).hexdigest()
    assert listed == {
        "lines.jsonl": (len(LINES), blob),
        "table.parquet": (len(LARGE), hashlib.sha256(LARGE).hexdigest()),
    }
    for key, data in [("lines.jsonl", LINES), ("table.parquet", LARGE)]:
        version = listed[key][1]
        assert content_version(data, len(version)) == version
        assert store.head(key).version == version
        assert store.get(key, version=version) == data
        assert store.get(key, 1000, 1016, version=version) == data[1000:1016]
        with pytest.raises(ObjectChangedError):
            store.get(key, 5, 9, version=version[::-1])
    assert hub.tokens_seen == {f"Bearer {TOKEN}"}  # at the Hub; the other host refuses requests with one


def test_a_pinned_store_reads_one_commit_whatever_becomes_of_the_branch(hub: HubServer, name: str) -> None:
    live = HubStore(f"hf://datasets/{name}")
    commit = hub.repositories[name].branches["main"]
    pinned = live.pinned()
    assert pinned.url == f"hf://datasets/{name}@{commit}"
    assert pinned.pinned() is pinned
    before = live.head("a/lines.jsonl").version
    hub.commit(name, {"a/lines.jsonl": b"other\n", "a/table.parquet": None, "new": b"1"})
    copy: HubStore = pickle.loads(pickle.dumps(pinned))
    for store in (pinned, copy):
        assert [info.key for info in store.list()] == ["a/lines.jsonl", "a/table.parquet", "b.txt"]
        assert store.get("a/lines.jsonl", version=before) == LINES
        assert store.get("a/table.parquet", 7, 11) == LARGE[7:11]
        assert store.head("a/lines.jsonl").version == before
    assert live.get("a/lines.jsonl") == b"other\n"
    with pytest.raises(ObjectChangedError):
        live.get("a/lines.jsonl", version=before)
    with pytest.raises(ObjectNotFoundError):
        live.get("a/table.parquet")
    with pytest.raises(StoreError, match="is a commit, which cannot be changed"):
        pinned.put("x", b"1")
    hub.repositories[name].tags["v1"] = commit
    assert HubStore(f"hf://datasets/{name}@v1").pinned().url == pinned.url


def test_a_listing_of_many_pages_is_that_of_one_commit(hub: HubServer, name: str) -> None:
    hub.commit(name, {f"many/{number:03d}/x.txt": b"%d" % number for number in range(40)})
    hub.page_entries = 7
    moved = []

    def move(request: str) -> None:
        if "cursor=14" in request:
            moved.append(hub.commit(name, {"many/039/x.txt": None, "many/000/y.txt": b"new"}))

    hub.on_request = move
    try:
        keys = [info.key for info in HubStore(f"hf://datasets/{name}").list("many/")]
    finally:
        hub.page_entries = 1000
    assert moved
    assert keys == [f"many/{number:03d}/x.txt" for number in range(40)]


def test_a_listing_whose_pages_name_each_other_is_an_error(
    hub: HubServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = HubClient.json, []

    def in_circles(client: HubClient, method: str, path: str, where: str, body: object = None) -> Any:
        found, _ = real(client, method, path, where, body)
        if "/tree/" not in path:
            return found, None
        asked.append(path)
        return found, f"{path}&turn=1" if "turn" not in path else asked[0]

    monkeypatch.setattr(HubClient, "json", in_circles)
    with pytest.raises(StoreError, match="does not end: 2 pages"):
        list(HubStore(f"hf://datasets/{name}").list())
    assert len(asked) == 2


def test_a_listing_whose_pages_always_differ_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()

    def endless(client: HubClient, method: str, path: str, where: str, body: object = None) -> Any:
        if "/tree/" not in path:
            return {"sha": "a" * 40}, None
        number = next(asked)
        entry = {"type": "file", "path": f"f{number}", "size": 1, "oid": "b" * 40}
        return [entry], f"{path.partition('&cursor')[0]}&cursor={number}"

    monkeypatch.setattr(HubClient, "json", endless)
    for limit, value in (("_MOST_PAGES", 20), ("_MOST_FILES", 30)):
        monkeypatch.setattr(f"shardkit.storage.hub.{limit}", value)
        with pytest.raises(StoreError, match="the server's listing does not end"):
            list(HubStore(f"hf://datasets/{name}").list())
        monkeypatch.undo()
        monkeypatch.setattr(HubClient, "json", endless)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (400, {"X-Error-Message": "\x1b[31mtoken {token}"}, b""),
        (403, {"X-Error-Message": "Bearer {token} is bad"}, b""),
        (500, {"X-Error-Message": "authorization: {token}\u202e"}, b""),
        (200, {}, b"[" * 200_000),
        (200, {}, b'{"a":' * 200_000),
        (200, {}, b"9" * 20_000),
        (200, {}, b"\xff\xfe\x00"),
        (200, {}, b""),
    ],
)
def test_what_a_hostile_server_answers_is_a_clean_error(
    status: int, headers: dict[str, str], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "api_org_SECRETSECRET"

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(
                    key, value.format(token=token).encode("latin-1", "replace").decode("latin-1")
                )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as hostile:
        thread = threading.Thread(target=hostile.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hostile.server_address[1]}")
        monkeypatch.setenv("HF_TOKEN", token)
        try:
            with pytest.raises(StoreError) as caught:
                list(HubStore("hf://datasets/org/name").list())
        finally:
            hostile.shutdown()
            thread.join()
    assert token not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_listing_of_which_a_page_is_missing_is_an_error(hub: HubServer, name: str) -> None:
    hub.commit(name, {f"many/{number:03d}.txt": b"" for number in range(9)})
    hub.page_entries = 4
    hub.rules.replace([Rule(fault="status", status=404, path="cursor=8")])
    try:
        for prefix in ("", "many/"):
            with pytest.raises(StoreError, match="cannot be listed"):
                list(HubStore(f"hf://datasets/{name}").list(prefix))
    finally:
        hub.page_entries = 1000
    hub.rules.replace([Rule(fault="status", status=404, path="/tree/")])  # a server without the interface
    with pytest.raises(StoreError, match="cannot be listed"):
        list(HubStore(f"hf://datasets/{name}").list())


@pytest.mark.parametrize(
    "rule",
    [
        Rule(fault="status", status=429, path="/resolve/", count=2),
        Rule(fault="status", status=503, path="/resolve/", count=2),
        Rule(fault="status", status=500, path="/object/", count=2),
        Rule(fault="status", status=403, path="/object/", count=1),  # a signature that has expired
        Rule(fault="truncate", after_bytes=100_000, path="/object/", count=2),
        Rule(fault="lost_acknowledgement", path="/object/", count=1),
        Rule(fault="lost_acknowledgement", path="/resolve/", count=1),
    ],
    ids=lambda rule: f"{rule.fault}-{rule.status}-{rule.path.strip('/')}",
)
def test_a_read_survives_what_ends_by_itself(hub: HubServer, name: str, rule: Rule) -> None:
    hub.rules.replace([rule])
    store = quick(HubStore(f"hf://datasets/{name}@main/a"))
    assert store.get("table.parquet") == LARGE
    counts = store.metrics.snapshot()
    assert counts.bytes_read == len(LARGE)
    assert sum(counts.errors.values()) == rule.count
    assert sum(counts.requests.values()) == 1 + (rule.count or 0)


def test_a_body_that_breaks_after_the_branch_moved_is_not_continued_with_other_bytes(
    hub: HubServer, name: str
) -> None:
    hub.rules.replace([Rule(fault="truncate", after_bytes=100_000, path="/object/", count=1)])
    moved: list[str] = []

    def move(request: str) -> None:
        if "/object/" in request and not moved:
            moved.append(hub.commit(name, {"a/table.parquet": LARGE[::-1]}))

    hub.on_request = move
    live = quick(HubStore(f"hf://datasets/{name}"))
    with pytest.raises(ObjectChangedError):
        live.get("a/table.parquet")
    hub.on_request = None
    assert live.get("a/table.parquet") == LARGE[::-1]
    pinned = live.pinned()
    moved.clear()
    hub.rules.replace([Rule(fault="truncate", after_bytes=100_000, path="/object/", count=1)])
    hub.on_request = lambda request: None if moved else moved.append(hub.commit(name, {"b.txt": b"!"}))
    assert pinned.get("a/table.parquet") == LARGE[::-1]


def test_a_renamed_private_repository_is_found_by_its_old_name(hub: HubServer) -> None:
    new = hub.new_repository(is_private=True)
    hub.commit(new, {"a.txt": b"small", "b.parquet": LARGE})
    hub.renamed["team/old"] = new
    try:
        store = HubStore("hf://datasets/team/old").pinned()
        keys = [info.key for info in store.list()]
        contents = [store.get(key, 1, 5, version=store.head(key).version) for key in keys]
    finally:
        hub.renamed.clear()
    assert keys == ["a.txt", "b.parquet"]
    assert contents == [b"mall", LARGE[1:5]]


def test_ranges_of_one_content_ask_the_hub_once_where_it_lies(hub: HubServer, name: str) -> None:
    live = HubStore(f"hf://datasets/{name}/a")
    version = live.head("table.parquet").version

    def resolved(store: HubStore, **wanted: Any) -> int:
        hub.requests.clear()
        for start in range(0, 50_000, 5_000):
            assert store.get("table.parquet", start, start + 9, **wanted) == LARGE[start : start + 9]
        return sum("/resolve/" in request for request in hub.requests)

    assert resolved(live) == 10  # the branch may move at any time
    assert resolved(live, version=version) == 10
    pinned = live.pinned()
    assert resolved(pinned) == 1
    hub.rules.replace([Rule(fault="status", status=403, path="/object/", count=1)])  # it has expired
    assert resolved(pinned) == 1
    hub.commit(name, {"a/table.parquet": LARGE[::-1]})
    assert pinned.get("table.parquet", 3, 9) == LARGE[3:9]
    with pytest.raises(StoreError) as caught:
        pinned.get("table.parquet", len(LARGE) + 5)
    assert caught.value.status == 416


def test_throttling_says_when_to_come_back(hub: HubServer, name: str) -> None:
    hub.rules.replace([Rule(fault="status", status=429, count=1)])
    with pytest.raises(ThrottledError) as caught:
        HubStore(f"hf://datasets/{name}").get("b.txt")
    assert caught.value.status == 429
    assert caught.value.retry_after_seconds == 0.0


def test_errors_say_what_to_do(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private, gated = hub.new_repository(is_private=True), hub.new_repository(is_gated=True)
    open_to_all = hub.new_repository()
    hub.commit(private, {"a.jsonl": LINES})

    def reading(name: str, suffix: str = "") -> list[Callable[[], object]]:
        store = HubStore(f"hf://datasets/{name}{suffix}")
        return [lambda: store.get("a.jsonl"), lambda: store.head("a.jsonl"), lambda: [*store.list()]]

    def check(attempts: list[Callable[[], object]], words: str) -> None:
        for attempt in attempts:
            with pytest.raises(StoreError, match=words) as caught:
                attempt()
            assert type(caught.value) is StoreError
            assert "hf://datasets/team/" in str(caught.value)
            assert TOKEN not in str(caught.value)

    assert HubStore(f"hf://datasets/{private}").get("a.jsonl") == LINES
    check(reading("team/none"), "no such dataset repository, or the token that was sent may not read it")
    check(reading(open_to_all, "@none"), "no such branch, tag or commit")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    check(reading(private), "it is private: set HF_TOKEN")
    check(reading(gated), "is gated: accept its conditions on its page")
    with pytest.raises(StoreError, match="a token with the right to write"):
        HubStore(f"hf://datasets/{open_to_all}").put("x", b"1")
    (tmp_path / "token").write_text(f"{TOKEN}\n")  # as `hf auth login` leaves it; seen without a restart
    assert HubStore(f"hf://datasets/{private}").get("a.jsonl") == LINES
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    check(reading(gated), "is gated")


def test_a_hub_that_does_not_answer_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        store = quick(HubStore("hf://datasets/org/name"), first_contact_seconds=0.2)
        began = time.monotonic()
        with pytest.raises(TransientError, match="check its URL, the endpoint and the network"):
            store.pinned()
        assert time.monotonic() - began < 5
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    with pytest.raises(StoreError, match="HF_ENDPOINT"):
        HubStore("hf://datasets/org/name").get("a")


@pytest.mark.parametrize("after_bytes", [None, 5_000])
def test_a_silent_server_is_left_after_the_read_timeout(
    hub: HubServer, name: str, after_bytes: int | None
) -> None:
    silence: dict[str, Any] = {"fault": "hang", "hang_seconds": 2.0, "after_bytes": after_bytes}
    hub.rules.replace([Rule(path="/object/", count=1, **silence)])
    store = quick(HubStore(f"hf://datasets/{name}/a", StorageOptions(read_timeout_seconds=0.2)))
    began = time.monotonic()
    assert store.get("table.parquet") == LARGE
    assert time.monotonic() - began < 1.5
    assert sum(store.metrics.snapshot().errors.values()) == 1


def test_a_body_that_is_closed_by_another_thread_ends_a_read_in_this_one(hub: HubServer, name: str) -> None:
    hub.rules.replace([Rule(fault="hang", hang_seconds=3.0, after_bytes=5_000, path="/object/")])
    body = HubStore(f"hf://datasets/{name}").open("a/table.parquet")
    buffer, read = memoryview(bytearray(len(LARGE))), 0
    while read < 5_000:
        read += body.readinto(buffer[read:])
    began = time.monotonic()
    threading.Timer(0.1, body.close).start()
    with pytest.raises(TransientError, match=r"after 5,000 of 256,000 bytes"):
        body.readinto(buffer)
    assert time.monotonic() - began < 2.0


def test_a_proxy_of_the_environment_is_used(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = hub.new_repository()
    hub.commit(name, {"a.txt": b"1"})
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("http_proxy", hub.endpoint)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert HubStore(f"hf://datasets/{name}").get("a.txt") == b"1"
    assert hub.requests[-1].startswith("GET http://hub.invalid/datasets/")
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(StoreError, match="check HF_ENDPOINT and the proxies") as caught:
        HubStore(f"hf://datasets/{name}").get("a.txt")
    assert type(caught.value) is StoreError


@pytest.mark.extended
def test_one_commit_has_all_its_files_or_none(hub: HubServer, name: str, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(LARGE * 100)  # sent in parts
    store = connect(f"hf://datasets/{name}/new")
    assert isinstance(store, ResilientStore)
    assert store.has_commits
    commits = len(hub.repositories[name].commits)
    files: dict[str, bytes | Path] = {f"{n}.txt": b"%d" % n for n in range(30)}
    files |= {"big.bin": tmp_path / "big.bin", "empty.bin": b"", "copy.mds": LARGE}
    infos = store.commit(files)
    assert len(hub.repositories[name].commits) == commits + 1
    assert infos == {info.key: info for info in store.list()}
    assert infos["copy.mds"].version == hashlib.sha256(LARGE).hexdigest()
    assert store.get("big.bin") == LARGE * 100
    hub.requests.clear()
    store.commit({"again.mds": LARGE, "more.txt": b"x"}, ["0.txt", "1.txt", "none.txt"])
    assert len(hub.repositories[name].commits) == commits + 2
    assert not [request for request in hub.requests if request.startswith("PUT")]  # the Hub has these bytes
    assert {info.key for info in store.list()} == {*files, "again.mds", "more.txt"} - {"0.txt", "1.txt"}
    assert (
        store.metrics.snapshot().bytes_written == len(LARGE) * 102 + sum(len(str(n)) for n in range(30)) + 1
    )


@pytest.mark.extended
def test_a_commit_whose_acknowledgement_is_lost_is_made_once_more_or_found(hub: HubServer, name: str) -> None:
    store = quick(HubStore(f"hf://datasets/{name}"))
    hub.rules.replace([Rule(fault="lost_acknowledgement", path="/commit/", count=1)])
    assert store.put("index.json", b"{}", if_absent=True).bytes == 2
    with pytest.raises(ObjectExistsError):
        store.put("index.json", b"[]", if_absent=True)
    hub.rules.replace([Rule(fault="lost_acknowledgement", path="/commit/", count=1)])
    store.put("index.json", b"[]")
    assert store.get("index.json") == b"[]"


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule",
    [
        Rule(fault="status", status=429, path="/preupload/", count=1),
        Rule(fault="status", status=503, path="/commit/", count=1),
        Rule(fault="status", status=500, path="/upload/", count=1),
        Rule(fault="lost_acknowledgement", path="/upload/", count=1),
        Rule(fault="lost_acknowledgement", path="objects/batch", count=1),
    ],
    ids=lambda rule: f"{rule.fault}-{rule.status}-{rule.path.strip('/')}",
)
def test_a_write_survives_what_ends_by_itself(hub: HubServer, name: str, rule: Rule) -> None:
    hub.rules.replace([rule])
    data = LARGE + str(rule).encode()
    info = quick(HubStore(f"hf://datasets/{name}")).put("w.parquet", data)
    assert info.version == hashlib.sha256(data).hexdigest()
    assert hub.files(name)["w.parquet"] == data


UPLOAD_BY_PEER = """
import json, sys
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
api, (name, folder) = HfApi(), sys.argv[1:]
api.upload_folder(repo_id=name, repo_type="dataset", folder_path=folder)
listed = api.list_repo_tree(name, repo_type="dataset", recursive=True)
files = [entry for entry in listed if isinstance(entry, RepoFile)]
print(json.dumps({f.path: f.blob_id if f.lfs is None else f.lfs.sha256 for f in files}))
"""
READ_BY_PEER = """
import json, sys
from pathlib import Path
from huggingface_hub import HfApi, HfFileSystem
api, (name, folder, *keys) = HfApi(), sys.argv[1:]
for key in keys:
    got = Path(api.hf_hub_download(name, key, repo_type="dataset", cache_dir=folder)).read_bytes()
    assert HfFileSystem().cat_file(f"datasets/{name}/{key}", start=5, end=99) == got[5:99]
    print(json.dumps(got.hex()))
"""


def run_peer(code: str, *arguments: str | Path) -> list[Any]:
    """Run the Hub's own library in a process of its own, as it reads the environment once; JSON by line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.extended
def test_what_the_hubs_own_library_writes_is_read_and_the_other_way_round(
    hub: HubServer, tmp_path: Path
) -> None:
    name = hub.new_repository()
    files = {"x/a.jsonl": LINES, "x/b.parquet": LARGE, "top.txt": b"t"}
    for key, data in files.items():
        (tmp_path / "in" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / key).write_bytes(data)
    [versions] = run_peer(UPLOAD_BY_PEER, name, tmp_path / "in")
    store = HubStore(f"hf://datasets/{name}")
    assert {info.key: store.get(info.key, version=info.version) for info in store.list()} == files
    assert {info.key: info.version for info in store.list()} == versions
    store.commit({"y/c.mds": LARGE[::-1], "y/d.txt": b"d" * 200})
    read = run_peer(READ_BY_PEER, name, tmp_path / "cache", "y/c.mds", "y/d.txt")
    assert [bytes.fromhex(content) for content in read] == [LARGE[::-1], b"d" * 200]
