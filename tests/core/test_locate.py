"""Datasets are found by folder or index, explained where they are not whole, verified to the byte."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.indexes import NodeIndexes
from shardkit.card import MAX_CARD_BYTES
from shardkit.cli.info import describe
from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.locate import find_remote
from shardkit.datasets.verify import verify
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats.mds.index import LARGE_INDEX_BYTES, TABLE_SHARDS, index_files, parse_index
from shardkit.manifest import Column, FileInfo, ShardInfo
from shardkit.publish.contents import content_hash
from shardkit.storage import open_store
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import METADATA_NAME, Store, StoreError, TransientError
from support.loader_data import parts, token_rows
from support.noted_store import NotedStore
from support.remote_harness import fresh_url, make_remote_kind, put_folder, quick_policy, write_hashed
from support.s3_moto import S3Server, s3_server
from support.small_dataset import make_dataset
from support.stores import FaultRule, FaultyStore

KINDS = ["mds", "mds_zstd", "tar"]
FILES = {"provenance/part-00000.parquet", "report.html"}  # beside the shards of the first two

Upload = Callable[..., Store]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small dataset of each kind, with hashes; those of MDS have a card and files beside the shards."""
    root = tmp_path_factory.mktemp("locate")
    make_dataset(root / "mds")
    make_dataset(root / "mds_zstd", compression="zstd")
    write_hashed(root / "tar", "tar", token_rows(40), parts(40, 5))
    return {kind: root / kind for kind in KINDS}


@pytest.fixture
def upload(folders: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path) -> Upload:
    """Puts a dataset into a store of its own."""

    def to(where: str, kind: str = "mds") -> Store:
        url = str(tmp_path / "data") if where == "local" else fresh_url()
        if where == "s3":
            url = f"s3://{request.getfixturevalue('server').new_bucket()}/some/prefix"
        store = open_store(url)
        put_folder(folders[kind], store)
        return store

    return to


def shard_of(store: Store) -> str:
    return next(info.key for info in store.list() if "00002" in info.key)


# What is wrong is named.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("where", "kind"), [*product(["local", "memory"], KINDS), ("s3", "mds_zstd")])
def test_a_whole_dataset_passes_where_it_is(upload: Upload, where: str, kind: str, quick: bool) -> None:
    store = upload(where, kind)
    before = [(info.key, info.version) for info in store.list()]
    report = verify(store.url, quick=quick)
    assert report.ok
    assert report.to_dict()["ok"] is True
    assert report.problems == ()
    assert (report.path, report.shards, report.samples) == (store.url, 5, 40)
    assert report.hashed == (0 if quick else 5)
    assert report.bytes == sum(
        info.bytes for info in store.list() if ".mds" in info.key or ".tar" in info.key
    )
    assert [(info.key, info.version) for info in store.list()] == before


def flip(store: Store, key: str) -> None:
    data = store.get(key)
    middle = len(data) // 2
    store.put(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def cut(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-1])


def extend(store: Store, key: str) -> None:
    store.put(key, store.get(key) + b"\0")


def empty(store: Store, key: str) -> None:
    store.put(key, b"")


def remove(store: Store, key: str) -> None:
    store.delete(key)


HARMS = [flip, cut, extend, empty, remove]
ON_S3 = [flip, cut, remove]  # what a server answers otherwise than memory does


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("where", "kind", "harm"),
    [*product(["local", "memory"], KINDS, HARMS), *product(["s3"], ["mds"], ON_S3)],
)
def test_a_shard_that_is_not_the_indexs_is_named(
    upload: Upload, where: str, kind: str, harm: Callable[[Store, str], None]
) -> None:
    store = upload(where, kind)
    name = shard_of(store)
    harm(store, name)
    assert [problem.file for problem in verify(store.url).problems] == [name]
    quick = [problem.file for problem in verify(store.url, quick=True).problems]
    if harm is not flip:
        assert quick == [name]
    elif where != "local":  # where the structure is looked at, too
        assert quick == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("where", "harm"), [*product(["local", "memory"], HARMS), *product(["s3"], ON_S3)])
def test_a_file_beside_the_shards_that_is_not_the_cards_is_named(
    upload: Upload, where: str, harm: Callable[[Store, str], None]
) -> None:
    store = upload(where)
    for name in FILES:
        harm(store, name)
    assert {problem.file for problem in verify(store.url).problems} == FILES
    assert {problem.file for problem in verify(store.url, quick=True).problems} == (
        set() if harm is flip else FILES
    )


def test_problems_say_what_is_wrong_and_all_are_told_at_once(
    upload: Upload, capfd: pytest.CaptureFixture[str]
) -> None:
    store = upload("memory")
    names = [info.key for info in store.list() if info.key.endswith(".mds")]
    size = store.head(names[0]).bytes
    for name, harm in zip(names, HARMS, strict=True):
        harm(store, name)
    told = [problem.problem for problem in verify(store.url).problems]
    assert "xxh64 is " in told[0]
    assert "the index states " in told[0]
    assert told[1] == f"has {size - 1:,} bytes, expected {size:,}"
    assert told[2] == f"has {size + 1:,} bytes, expected {size:,}"
    assert told[3] == f"has 0 bytes, expected {size:,}"
    assert "there is no such object" in told[4]
    told = [problem.problem for problem in verify(store.url, quick=True).problems]
    assert told[0] == f"has {size - 1:,} bytes, the index states {size:,}"
    assert main(["verify", store.url]) == 1
    out, err = capfd.readouterr()
    assert "5 problems" in out
    assert [line.split(":")[0] for line in err.splitlines()] == names


def test_a_card_of_another_dataset_is_found_with_verify(upload: Upload) -> None:
    store = upload("memory")
    card = json.loads(store.get("dataset.json"))
    store.put("dataset.json", json.dumps(card | {"fingerprint": "00"}).encode())
    assert [problem.file for problem in verify(store.url).problems] == ["dataset.json"]
    with open_dataset(store.url) as dataset:
        assert len(dataset) == 40
    with pytest.raises(ShardError, match=r"data/dataset\.json: is the card of another dataset"):
        open_dataset(store.url, verify=True)


# Where a dataset is.


@pytest.mark.parametrize(("where", "kind"), [*product(["local", "memory"], KINDS), ("s3", "tar")])
def test_a_folder_and_its_index_are_the_same_dataset(
    upload: Upload, folders: dict[str, Path], where: str, kind: str
) -> None:
    store = upload(where, kind)
    index = "shards.json" if kind == "tar" else "index.json"
    expected = describe(str(folders[kind])) | {"path": ""}
    for url in (store.url, f"{store.url}/", f"{store.url}/{index}"):
        assert describe(url) | {"path": ""} == expected
        with open_dataset(url) as dataset:
            assert dataset.location == store.url
            with open_dataset(folders[kind]) as local:
                for number in (0, 17, 39):
                    got, wanted = dataset[number], local[number]
                    assert got.keys() == wanted.keys()
                    for name, value in wanted.items():
                        np.testing.assert_array_equal(got[name], value)
            if where != "local":
                with pytest.raises(ShardError, match="is remote: it has no local path"):
                    _ = dataset.path


def test_opening_takes_two_small_requests_and_no_shard(upload: Upload, server: S3Server) -> None:
    store = upload("s3")
    server.requests.clear()
    with open_dataset(store.url) as dataset:
        assert dataset.sequence_length == 4
    path = store.url.removeprefix("s3:/")
    names = ("dataset.json", "index.json")
    assert sorted(server.requests) == [f"GET {path}/{name}" for name in names]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["sound", "sound, cached", "stale", "damaged", "absent", "unknown hash"])
def test_index_bin_of_a_store_is_read_if_it_belongs_to_the_index(case: str, tmp_path: Path) -> None:
    columns = (Column("tokens", "ndarray:uint16:8", 16),)
    infos = [FileInfo(f"shard.{n:05}.mds", 1000, {"xxh64": f"{n:016x}"}) for n in range(TABLE_SHARDS)]
    files = index_files([ShardInfo(info, 50, columns) for info in infos])
    index, table = files["index.json"], files["index.bin"]
    assert len(index) >= LARGE_INDEX_BYTES
    bodies: list[MemoryBody] = []

    def hand_out(number: int, body: MemoryBody) -> MemoryBody:
        bodies.append(body)
        return body

    store = NotedStore(hand_out=hand_out)
    digest = "0" * 32 if case == "stale" else content_hash(index)
    store.put("index.json", index, metadata={} if case == "unknown hash" else {METADATA_NAME: digest})
    if case != "absent":
        store.put("index.bin", table[:-100] if case == "damaged" else table)
    expected = parse_index("index.json", index)
    node = NodeIndexes(tmp_path, trust_seconds=60.0, wait_seconds=30.0) if "cached" in case else None
    for _ in range(2 if node else 1):
        found = find_remote(store, "index.json", indexes=node).manifest
        assert found.fingerprint == expected.fingerprint
        assert list(found.shards) == list(expected.shards)
    asked = ["dataset.json", "index.json", *([] if case == "unknown hash" else ["index.bin"])]
    asked += ["index.json"] if case in ("stale", "damaged", "absent") else []
    assert sorted(read.key for read in store.reads) == sorted(asked)
    read = sum(len(index) - body.left for body in bodies if body.info.key == "index.json")
    assert read == (0 if case.startswith("sound") else len(index))


def test_a_large_index_is_opened_by_a_store_that_allows_one_connection(tmp_path: Path) -> None:
    columns = (Column("tokens", "ndarray:uint16:8", 16),)
    infos = [FileInfo(f"shard.{n:05}.mds", 1000, {"xxh64": f"{n:016x}"}) for n in range(TABLE_SHARDS)]
    files = index_files([ShardInfo(info, 50, columns) for info in infos])
    below = NotedStore()
    below.put("index.json", files["index.json"], metadata={METADATA_NAME: content_hash(files["index.json"])})
    below.put("index.bin", files["index.bin"])
    store = ResilientStore(below, quick_policy(deadline_seconds=1.0), connections=1)
    assert len(find_remote(store, "index.json").manifest.shards) == TABLE_SHARDS


@pytest.mark.parametrize("where", ["local", "memory"])
def test_two_indexes_are_not_guessed_about(upload: Upload, folders: dict[str, Path], where: str) -> None:
    store = upload(where)
    put_folder(folders["tar"], store)
    if where != "local":
        store.delete("dataset.json")  # what has a card was published as one dataset
    with pytest.raises(
        ShardError, match=r"has both index\.json and shards\.json; open one of them by its name"
    ):
        open_dataset(store.url)
    for name, kind in (("index.json", "mds"), ("shards.json", "tar")):
        with open_dataset(f"{store.url}/{name}") as dataset:
            assert dataset.manifest.format == kind


@pytest.mark.parametrize("where", ["memory", "s3"])
def test_what_is_not_there_is_explained(upload: Upload, where: str) -> None:
    store = upload(where)

    def refusal(url: str) -> str:
        with pytest.raises(ShardError) as caught:
            open_dataset(url)
        return str(caught.value)

    nothing = "holds no dataset: looked for index.json (MDS), shards.json, *.tar, *.parquet"
    assert refusal(f"{store.url}/deeper").startswith(f"{store.url}/deeper: {nothing}")
    assert refusal(f"{store.url}/other.json") == f"{store.url}: holds no other.json"
    assert "is not a list of tar shards" in refusal(f"{store.url}/dataset.json")
    store.delete("index.json")
    unfinished = "is unfinished: it has a card but no index; run the upload or the build again"
    assert refusal(store.url) == f"{store.url}: {unfinished}"
    assert refusal(f"{store.url}/index.json") == f"{store.url}: holds no index.json"
    store.delete("dataset.json")
    assert "such as shard.00000.mds) but no index.json, which an MDS writer writes last" in refusal(store.url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://", "memory:: holds no dataset"),
        ("memory:///", "memory:: holds no dataset"),
        ("memory:/x", "'memory:/x' is a URL; give a path on this machine"),
        ("memory://x/*.tar", "memory://x/*.tar: a pattern must match only .tar files: no file matches"),
        ("memory://x/part.tar", "memory://x/part.tar: there is no such object"),
        ("memory://x/{1..2", "has a '{' without its '}'"),
        ("file:///nowhere", "/nowhere: there is no such file or folder"),
        ("file:///nowhere/index.json", "/nowhere/index.json: there is no such file or folder"),
        ("s3://", "not an S3 URL: expected s3://bucket/prefix"),
        ("s3:///key", "not an S3 URL"),
        ("://x", "not a valid URL"),
        ("a b://x", "not a valid URL"),
        ("nonsense://x", "nonsense"),
    ],
)
def test_an_odd_url_is_an_error_that_names_it(url: str, words: str) -> None:
    for use in (open_dataset, verify, describe):
        with pytest.raises(ShardkitError) as caught:
            use(url)
        assert words in str(caught.value)


def test_a_bucket_that_is_not_there_is_named(server: S3Server) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/data/: there is no such bucket"):
        open_dataset("s3://no-such-bucket/data")


# Stores that refuse or fail.


def missing_is_forbidden(
    environ: dict[str, Any], start_response: Callable[..., Any], app: Callable[..., Iterable[bytes]]
) -> Iterable[bytes]:
    """What S3 answers to whoever may read a bucket's objects but not list them."""
    answers: list[tuple[str, Any]] = []
    body = list(app(environ, lambda status, headers, info=None: answers.append((status, headers))))
    status, headers = answers[0]
    if status.startswith("404"):
        body = [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        status, headers = "403 Forbidden", [("Content-Length", str(len(body[0])))]
    start_response(status, headers)
    return body


@pytest.mark.parametrize("key", ["index.json", "shards.json", "dataset.json"])
def test_what_states_a_size_that_no_index_has_is_refused_before_memory_is_taken(
    tmp_path: Path, key: str
) -> None:
    def huge(number: int, body: MemoryBody) -> MemoryBody:
        info = replace(body.info, bytes=1 << 50) if body.info.key == key else body.info
        return MemoryBody(info, memoryview(body.read()))

    kind = "tar" if key == "shards.json" else "mds"
    store = NotedStore(make_remote_kind(tmp_path / kind, kind), hand_out=huge)
    store.put("dataset.json", b"{}")
    tracemalloc.start()
    with pytest.raises(ShardError, match=rf"/{key}: the store states 1,125,899,906,842,624 bytes; at most"):
        find_remote(store)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 << 20


def test_a_bucket_that_may_be_read_and_not_listed_holds_a_dataset_all_the_same(
    upload: Upload, server: S3Server
) -> None:
    mds, tar = upload("s3"), upload("s3", "tar")
    server.intercept = missing_is_forbidden
    try:
        assert verify(mds.url, quick=True).ok
        assert verify(tar.url, quick=True).ok
        with pytest.raises(StoreError, match=r"index\.json") as caught:
            open_dataset(f"{mds.url}/deeper")
        assert caught.value.status == 403
    finally:
        server.intercept = None


@pytest.mark.parametrize("key", ["index.json", "shards.json", "dataset.json"])
def test_a_store_that_fails_is_not_taken_for_an_absent_file(upload: Upload, key: str) -> None:
    below = upload("memory")
    if key == "shards.json":
        below.delete("dataset.json")
    store = FaultyStore(below, [FaultRule(fault="error", key=key)])
    with pytest.raises(TransientError, match=key):
        find_remote(store)


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize(
    ("card", "words"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "must be a JSON object"),
        (b'{"a": "' + b"x" * MAX_CARD_BYTES + b'"}', "(larger than|at most) 67,108,864"),
    ],
)
def test_a_card_that_is_none_is_named(upload: Upload, where: str, card: bytes, words: str) -> None:
    store = upload(where, "tar")
    store.put("dataset.json", card)
    with pytest.raises(ShardError, match=words) as caught:
        open_dataset(store.url)
    assert caught.value.file == f"{store.url}/dataset.json"


def test_a_dataset_without_a_card_has_none(upload: Upload) -> None:
    store = upload("memory")
    store.delete("dataset.json")
    found = find_remote(MemoryStore(store.url))
    assert (found.card, found.folder) == (None, None)
    assert found.manifest.samples == 40


def test_tars_without_a_list_are_found_in_a_bucket(
    folders: dict[str, Path], server: S3Server, tmp_path: Path
) -> None:
    store = open_store(f"s3://{server.new_bucket()}/some/prefix")
    for file in sorted(folders["tar"].glob("*.tar")):
        store.put(f"tars/{file.name}", file)
    listing_is_forbidden = False

    def intercept(
        environ: dict[str, Any], start_response: Callable[..., Any], app: Callable[..., Iterable[bytes]]
    ) -> Iterable[bytes]:
        if listing_is_forbidden and "list-type" in environ["QUERY_STRING"]:
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            start_response("403 Forbidden", [("Content-Length", str(len(body)))])
            return [body]
        return app(environ, start_response)

    server.intercept = intercept
    expected = open_dataset(folders["tar"])
    options = CacheOptions(folder=tmp_path)
    try:
        for name in ("", "/*.tar", "/shard-{00000..00004}.tar"):
            server.requests.clear()
            with open_dataset(f"{store.url}/tars{name}", cache=options) as dataset:
                assert [int(str(s["__key__"])) for s in dataset] == [int(str(s["__key__"])) for s in expected]
                fetched = [line for line in server.requests if line.startswith("GET") and ".tar" in line]
                assert len(fetched) == (0 if name else 5), "what was scanned once is known"
        listing_is_forbidden = True
        with open_dataset(f"{store.url}/tars/shard-{{00000..00004}}.tar", cache=options) as dataset:
            assert len(dataset) == 40
        with pytest.raises(StoreError, match="status 403"):
            open_dataset(f"{store.url}/tars/*.tar")
    finally:
        server.intercept = None
