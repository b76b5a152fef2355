"""One suite for every store: what `shardkit.storage.store` promises, whoever implements or wraps it.

With SHARDKIT_TEST_S3_ENDPOINT (and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) set, the S3 store is also held
to it on that server; a bucket is made there for each test and removed again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.hub import HubServer
from shardkit.storage import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    Store,
    StoreError,
    TransientError,
)
from shardkit.storage.fsspec_store import FsspecStore
from shardkit.storage.hub import HubStore
from shardkit.storage.local import LocalStore, _take_away
from shardkit.storage.memory import MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.s3 import S3Store
from support.hub_environment import hub_server
from support.s3_moto import S3Server, aws_environment, s3_server
from support.stores import FaultyStore, ThrottledStore

Maker = Callable[[], Store]
ENDPOINT = os.environ.get("SHARDKIT_TEST_S3_ENDPOINT")
ENDPOINT_KEYS = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "faulty": FaultyStore,
    "resilient": ResilientStore,
    "throttled": lambda store: ThrottledStore(store, latency_seconds=1e-6, bytes_per_second=1e10),
}
KEEPS_METADATA = {"memory", "s3", "s3-real", *WRAPPERS}
KINDS: list[Any] = ["local", "memory", "s3", "fsspec", *WRAPPERS]
KINDS.append(pytest.param("hub", marks=pytest.mark.extended))  # a put is five requests
if ENDPOINT:
    KINDS.append("s3-real")
ODD_KEYS = [
    "a b.mds",
    "a+b&c=d?e#f%20g",
    "ä/ö ü.bin",
    "deep/er/est/x",
    "list-10",
    "list-9",
    "naïve~'\"()!*",
    "shard.00000.mds.zstd",
    "z/日本語",
    "z/\U0001f600",
    "z/\uff5e",
]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes stores over the same, at first empty, objects."""
    if kind == "local":
        yield lambda: LocalStore(tmp_path / "store")
    elif kind == "s3":
        bucket = request.getfixturevalue("server").new_bucket()
        yield lambda: S3Store(f"s3://{bucket}/some/prefix")
    elif kind == "hub":
        name = request.getfixturevalue("hub").new_repository()
        yield lambda: HubStore(f"hf://datasets/{name}/some/prefix")
    elif kind == "fsspec":
        with TemporaryDirectory() as folder:  # on a disk: in memory, halves of files are seen
            yield lambda: FsspecStore(f"file://{folder}/store")
    elif kind == "s3-real":
        with real_environment():
            url = f"s3://{request.getfixturevalue('real_bucket')}/{uuid.uuid4().hex}/some/prefix"
            yield lambda: S3Store(url)
    else:
        url = f"memory://{uuid.uuid4().hex}/some/prefix"
        wrap = WRAPPERS.get(kind)
        yield lambda: MemoryStore(url) if wrap is None else wrap(MemoryStore(url))


@pytest.fixture
def store(make_store: Maker) -> Iterator[Store]:
    made = make_store()
    yield made
    made.close()


@contextlib.contextmanager
def real_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        aws_environment(patch, ENDPOINT)
        for name, value in ENDPOINT_KEYS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def real_bucket() -> Iterator[str]:
    """One for all tests, each of which has a prefix of its own: to make one takes longer than a test."""
    import boto3

    assert ENDPOINT is not None
    with real_environment():
        client = boto3.Session().client("s3", region_name="us-east-1")
        bucket = f"shardkit-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=bucket)
    yield bucket
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        keys = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
        client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
    client.delete_bucket(Bucket=bucket)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def drain(body: Any, buffer_bytes: int) -> bytes:
    buffer, data = memoryview(bytearray(buffer_bytes)), bytearray()
    while count := body.readinto(buffer):
        assert 0 < count <= buffer_bytes
        data += buffer[:count]
    assert body.readinto(buffer) == 0  # the end stays the end
    return bytes(data)


@pytest.mark.parametrize("is_file", [False, True], ids=["bytes", "file"])
def test_what_was_put_is_what_is_read(store: Store, tmp_path: Path, is_file: bool) -> None:
    data, file = content(300_000), tmp_path / "source"
    file.write_bytes(data)
    info = store.put("folder/a.bin", file if is_file else data)
    assert (info.key, info.bytes) == ("folder/a.bin", len(data))
    assert store.get("folder/a.bin") == data
    head = store.head("folder/a.bin")
    assert (head.key, head.bytes, head.version) == (info.key, info.bytes, info.version)
    assert head.version


def test_a_file_that_cannot_be_read_puts_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing") as caught:
        store.put("b", tmp_path / "missing")
    assert type(caught.value) is StoreError  # the object is not what is missing
    with pytest.raises(StoreError):
        store.put("b", tmp_path)
    assert list(store.list()) == []


@pytest.mark.sampled(2)
def test_large_objects_are_written_whole(store: Store, tmp_path: Path) -> None:
    data = content((32 << 20) + 12_345)
    file = tmp_path / "source"
    file.write_bytes(data)
    for source in (data, file):
        info = store.put("large", source)
        assert info.bytes == len(data)
        assert store.head("large").version == info.version
        assert store.get("large") == data
        assert store.get("large", 16 << 20, (16 << 20) + 7, version=info.version) == data[16 << 20 :][:7]
    with pytest.raises(ObjectExistsError):
        store.put("large", content(33 << 20, seed=1), if_absent=True)
    assert store.get("large") == data


def test_an_object_may_be_empty(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for source in (b"", tmp_path / "empty"):
        info = store.put("empty", source)
        assert info.bytes == 0
        assert store.get("empty") == b""
        assert store.get("empty", 0, 0) == b""
        assert store.get("empty", 0, 100, version=info.version) == b""
        with store.open("empty", 0, 10) as body:
            assert body.info.bytes == 0
            assert body.readinto(memoryview(bytearray(4))) == 0
        with pytest.raises(StoreError) as caught:
            store.get("empty", 1)
        assert not isinstance(caught.value, ObjectNotFoundError | TransientError)
    with pytest.raises(ObjectChangedError):
        store.get("empty", 0, 0, version="another")
    with pytest.raises(ObjectChangedError):
        store.get("empty", 0, 10, version="another")


EDGES = [
    *((0, None), (0, 10), (0, 1), (0, 11), (9, 10), (9, 1 << 50), (3, 7), (5, 5), (0, 0), (9, None)),
    *((-1, None), (-1, 5), (10, None), (11, None), (10, 20), (10, 10), (5, 4)),  # not inside
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("data", [b"0123456789", content(5000)], ids=["edges", "any"])
def test_a_range_is_the_slice_or_refused(store: Store, data: bytes) -> None:
    version = store.put("a", data).version

    def check(start: int, stop: int | None, buffer_bytes: int, pinned: bool) -> None:
        if not 0 <= start < len(data) or (stop is not None and stop < start):
            for read in (store.get, store.open):
                with pytest.raises(StoreError, match="/a") as caught:
                    read("a", start, stop)
                assert type(caught.value) is StoreError
            return
        with store.open("a", start, stop, version=version if pinned else None) as body:
            assert (body.info.key, body.info.bytes, body.info.version) == ("a", len(data), version)
            assert drain(body, buffer_bytes) == data[start:stop]
        assert store.get("a", start, stop) == data[start:stop]

    if len(data) == 10:
        for edge in EDGES:
            check(*edge, 3, True)
        return
    any_range = given(
        start=st.integers(-2, 5100),
        stop=st.none() | st.integers(-2, 6000),
        buffer_bytes=st.sampled_from([29, 512, 1 << 20]),
        pinned=st.booleans(),
    )
    settings(max_examples=40, deadline=None, database=None, derandomize=True)(any_range(check))()


@pytest.mark.parametrize("buffer_bytes", [1, 999, 1 << 20])
def test_a_body_fills_buffers_of_any_size(store: Store, buffer_bytes: int) -> None:
    data = content(3_000 if buffer_bytes == 1 else 2_000_000)
    store.put("a", data)
    with store.open("a") as body:
        assert drain(body, buffer_bytes) == data
    with store.open("a", 100, 2_900) as body:
        assert drain(body, buffer_bytes) == data[100:2_900]


def test_reading_into_part_of_a_buffer_leaves_the_rest_alone(store: Store) -> None:
    store.put("a", b"abc")
    buffer = bytearray(b"..........")
    with store.open("a") as body:
        count = body.readinto(memoryview(buffer)[2:9])
    assert buffer[2 : 2 + count] == b"abc"[:count]
    assert buffer[:2] == b".."
    assert set(buffer[5:]) == {ord(".")}


def test_a_body_may_be_left_early_and_closed_twice(store: Store) -> None:
    data = content(4 << 20)
    store.put("a", data)
    for _ in range(40):  # more than a store has connections, if leaving kept one
        body = store.open("a")
        body.readinto(memoryview(bytearray(10)))
        body.close()
        body.close()
    assert store.get("a") == data


def test_a_version_pins_what_is_read(store: Store) -> None:
    first = store.put("a", b"first")
    assert store.get("a", version=first.version) == b"first"
    second = store.put("a", b"other")
    assert second.version != first.version
    assert store.head("a").version == second.version
    assert store.get("a", 1, 3, version=second.version) == b"th"
    for start, stop in [(0, None), (1, 3), (2, 2)]:
        with pytest.raises(ObjectChangedError):
            store.get("a", start, stop, version=first.version)
        with pytest.raises(ObjectChangedError):
            store.open("a", start, stop, version=first.version)


@pytest.mark.sampled(2)
def test_an_object_replaced_while_it_is_read_is_never_a_mixture(store: Store) -> None:
    size = 24 << 20  # more than any buffer on the way
    old, new = b"o" * size, b"n" * size
    store.put("a", old)
    with store.open("a") as body:
        buffer = memoryview(bytearray(1 << 20))
        read = bytes(buffer[: body.readinto(buffer)])
        store.put("a", new)
        try:
            while count := body.readinto(buffer):
                read += bytes(buffer[:count])
        except StoreError:
            assert set(read) == {ord("o")}
        else:
            assert read == old
    assert store.get("a") == new


def test_readers_see_whole_objects_while_writers_replace_them(store: Store) -> None:
    size = 200_000
    store.put("a", b"0" * size)
    written = threading.Event()

    def write() -> None:
        for number in range(1, 8):
            store.put("a", str(number).encode() * size)
        written.set()

    def read() -> int:
        count = 0
        while not written.is_set() or not count:
            try:
                data = store.get("a")
            except (ObjectChangedError, TransientError):
                continue
            assert len(data) == size
            assert len(set(data)) == 1
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        pool.submit(write).result(60)
        assert all(reader.result(60) > 0 for reader in readers)
    assert store.get("a") == b"7" * size


def test_what_is_not_there_is_not_found(store: Store) -> None:
    store.put("folder/a", b"1")
    for key in ("b", "folder", "folder/b", "folder/a/b"):
        for read in (store.head, store.get, store.open):
            with pytest.raises(ObjectNotFoundError) as caught:
                read(key)
            assert key in str(caught.value)
    with pytest.raises(ObjectNotFoundError):
        store.open("b", 5, 9, version="any")
    with pytest.raises(ObjectNotFoundError):
        store.get("b", 0, 0)


def test_deleting_is_idempotent(store: Store) -> None:
    store.put("a", b"1")
    store.put("ab", b"2")
    store.delete("a")
    store.delete("a")
    store.delete("never/was")
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    assert store.get("ab") == b"2"


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "key",
    ["", "/a", "..", "../a", "a/../b", "a/./b", "./a", "a\\b", "a\x00b", "a" * 5000],
)
def test_keys_that_leave_the_store_are_refused(store: Store, key: str) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: store.head(key),
        lambda: store.get(key),
        lambda: store.open(key),
        lambda: store.put(key, b"1"),
        lambda: store.delete(key),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError) as caught:
            attempt()
        assert type(caught.value) is StoreError
    assert list(store.list()) == []


def test_putting_if_absent_happens_once(store: Store) -> None:
    info = store.put("a", b"first", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("a", b"second", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("a", b"first", if_absent=True)  # the same content is no excuse
    assert store.get("a", version=info.version) == b"first"
    store.delete("a")
    store.put("a", b"third", if_absent=True)
    assert store.get("a") == b"third"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("same_content", [False, True], ids=["different-content", "same-content"])
def test_of_eight_that_put_if_absent_one_wins(make_store: Maker, same_content: bool) -> None:
    stores = [make_store() for _ in range(8)]
    for round_number in range(3):
        barrier = threading.Barrier(8)
        key = f"race-{round_number}"

        def race(number: int, key: str = key, barrier: threading.Barrier = barrier) -> bytes | None:
            data = b"same" * 500 if same_content else str(number).encode() * 2_000
            barrier.wait(30)
            try:
                stores[0 if same_content else number].put(key, data, if_absent=True)
            except ObjectExistsError:
                return None
            return data

        with ThreadPoolExecutor(8) as pool:
            winners = [data for data in pool.map(race, range(8)) if data is not None]
        assert len(winners) == 1
        assert stores[0].get(key) == winners[0]


def test_a_large_object_put_if_absent_wins_once(store: Store) -> None:
    barrier = threading.Barrier(2)

    def race(number: int) -> bytes | None:
        data = str(number).encode() * (17 << 20)
        barrier.wait(30)
        try:
            store.put("large", data, if_absent=True)
        except (ObjectExistsError, TransientError) as error:
            return None if isinstance(error, ObjectExistsError) else b""
        return data

    with ThreadPoolExecutor(2) as pool:
        winners = [data for data in pool.map(race, range(2)) if data]
    assert len(winners) == 1
    assert store.get("large") == winners[0]


def fill(folder: Path, content: bytes) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(content)
    (folder / "sub" / "b").write_bytes(content * 2)
    return folder


def test_a_folder_is_put_once_with_all_its_files(store: Store, tmp_path: Path) -> None:
    store.put_folder("tasks/x.1", fill(tmp_path / "one", b"1"), "record", b"all")
    assert [(info.key, info.bytes) for info in store.list()] == [
        ("tasks/x.1/a", 1), ("tasks/x.1/record", 3), ("tasks/x.1/sub/b", 2),
    ]  # fmt: skip
    assert (store.get("tasks/x.1/sub/b"), store.get("tasks/x.1/record")) == (b"11", b"all")
    with pytest.raises(ObjectExistsError):
        store.put_folder("tasks/x.1", fill(tmp_path / "two", b"1"), "record", b"all")
    store.delete("tasks/x.1/record")
    store.delete("tasks/x.1/a")
    store.put_folder("tasks/x.1", fill(tmp_path / "three", b"3"), "record", b"again")
    assert [store.get(f"tasks/x.1/{key}") for key in ("a", "record", "sub/b")] == [b"3", b"again", b"33"]


def test_of_eight_that_put_a_folder_one_wins(make_store: Maker, tmp_path: Path) -> None:
    folders, barrier = [fill(tmp_path / str(number), b"1") for number in range(8)], threading.Barrier(8)

    def race(number: int) -> bool:
        store, folder = make_store(), folders[number]
        barrier.wait(30)
        try:
            store.put_folder("tasks/x", folder, "record", str(number).encode())
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        winners = [str(number).encode() for number, won in enumerate(pool.map(race, range(8))) if won]
    assert winners == [make_store().get("tasks/x/record")]


def test_listing_is_sorted_and_complete(store: Store) -> None:
    assert list(store.list()) == []
    assert list(store.list("no/such/")) == []
    infos = {}
    for number, key in enumerate(random.Random(1).sample(ODD_KEYS, len(ODD_KEYS))):
        infos[key] = store.put(key, b"x" * number)
    listed = list(store.list())
    assert [info.key for info in listed] == sorted(ODD_KEYS)
    for info in listed:
        assert (info.bytes, info.version) == (infos[info.key].bytes, infos[info.key].version)
        assert len(store.get(info.key)) == info.bytes


@pytest.mark.sampled(19)
@pytest.mark.parametrize(
    "prefix", ["z/", "z", "list", "list-9", "a", "deep/er/", "deep/e", "ä/ö", "nothing", "z/日"]
)
def test_a_prefix_selects_keys_that_begin_so(store: Store, prefix: str) -> None:
    for key in ODD_KEYS:
        store.put(key, b"1")
    expected = sorted(key for key in ODD_KEYS if key.startswith(prefix))
    assert [info.key for info in store.list(prefix)] == expected


@pytest.mark.parametrize("prefix", ["/", "../", "..", "a/../", "//", "./"])
def test_prefixes_that_no_key_has_select_nothing(store: Store, prefix: str) -> None:
    store.put("a/b", b"1")
    assert list(store.list(prefix)) == []


def test_an_object_under_an_object_is_stored_or_refused(store: Store) -> None:
    store.put("a", b"1")
    try:
        store.put("a/b", b"2")
    except StoreError as caught:
        error: StoreError | None = caught
    else:
        error = None
        assert store.get("a/b") == b"2"
    assert type(error) in (StoreError, type(None))
    assert [info.key for info in store.list()] == (["a", "a/b"] if error is None else ["a"])
    assert store.get("a") == b"1"


def test_a_version_does_not_come_back(store: Store) -> None:
    """Not even where the file system hands out the same inode again within a tick of its clock."""
    infos = [store.put("a", bytes([number, 0])) for number in range(20)]
    assert len({info.version for info in infos}) == 20


def test_metadata_comes_back(store: Store, kind: str) -> None:
    metadata = {"xxh64": "0123456789abcdef", "shard-number": "17", "text": "a, b; c=d"}
    store.put("a", b"1", metadata=metadata)
    found = store.head("a").metadata
    if kind in KEEPS_METADATA:
        assert {name: found.get(name) for name in metadata} == metadata
    else:
        assert found == {}
    store.put("a", b"2")
    assert "xxh64" not in store.head("a").metadata
    store.put("b", b"1", if_absent=True, metadata=metadata)
    if kind in KEEPS_METADATA:
        assert store.head("b").metadata["shard-number"] == "17"


def test_a_pickled_store_sees_the_same_objects(store: Store) -> None:
    store.put("a", b"1")
    copy: Store = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url
    assert copy.get("a") == b"1"
    copy.put("b", b"2")
    assert store.get("b") == b"2"
    copy.close()


def test_two_stores_at_one_url_see_the_same_objects(make_store: Maker) -> None:
    one, two = make_store(), make_store()
    one.put("a", b"1")
    assert two.get("a", version=one.head("a").version) == b"1"
    assert one.url == two.url
    assert not one.url.endswith("/")


@pytest.mark.sampled(3)
def test_threads_may_share_a_store(store: Store) -> None:
    datas = {f"key-{number}": content(50_000, seed=number) for number in range(16)}

    def work(key: str) -> bool:
        store.put(key, datas[key])
        parts = [store.get(key, start, start + 10_000) for start in range(0, 50_000, 10_000)]
        return b"".join(parts) == datas[key] and store.head(key).bytes == 50_000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, datas))
    assert [info.key for info in store.list()] == sorted(datas)


def test_a_closed_store_opens_again(store: Store) -> None:
    store.put("a", b"1")
    store.close()
    store.close()
    assert store.get("a") == b"1"


def test_a_forked_child_may_use_the_store(store: Store) -> None:
    store.put("a", b"parent")
    child = os.fork()
    if not child:  # pragma: no cover (in the child)
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if store.get("a") == b"parent" else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.get("a") == b"parent"


def test_errors_survive_pickling(store: Store) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        store.get("not-there")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


def test_a_local_folder_that_is_whole_again_stays(tmp_path: Path) -> None:
    """Another process had found it without its record, before it was put again."""
    target = tmp_path / "store" / "x"
    LocalStore(target.parent).put_folder("x", fill(tmp_path / "one", b"1"), "record", b"all")
    _take_away(target, "record", tmp_path)
    assert sorted(path.name for path in target.iterdir()) == ["a", "record", "sub"]
    (target / "record").unlink()
    _take_away(target, "record", tmp_path)
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_local_listing_begins_before_it_has_seen_all(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("a.b", "a/1", "a/2", "ab"):
        store.put(key, b"1")
    listing = store.list()
    assert next(listing).key == "a.b"
    store.put("a/3", b"1")
    assert [info.key for info in listing] == ["a/1", "a/2", "a/3", "ab"]


@pytest.mark.parametrize("key", ["c:/a", "a\nb", "a\tb"])
def test_names_of_files_have_a_stricter_rule_than_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(StoreError, match="bad key"):
        LocalStore(tmp_path).put(key, b"1")
    assert not list(tmp_path.iterdir())
