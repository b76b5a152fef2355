"""Inputs in stores: the same names and documents as of local files, of one version each, or an error."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import socket
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from shardkit.errors import BuildError, RecipeError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.s3 import S3Store
from shardkit.storage.store import StorageOptions
from shardkit.writers import BuildResult, build
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.cuts import UNCOUNTED
from shardkit.writers.inputs.files import InputFile, find_files, open_input
from shardkit.writers.inputs.patterns import expand_path, key_matches
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.remote_files import expand_url
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.ledger import Ledger, Quarantine
from shardkit.writers.stages.record_counts import count_records
from support.read_inputs import recipe
from support.remote_harness import fresh_url, put_folder
from support.s3_moto import S3Server, s3_server
from support.small_build import make_corpus, tree
from support.task_folders import TaskFolders

NAMES = (
    "a.jsonl", "b.jsonl.zst", "sub/a.jsonl", "sub/deep/a.jsonl", "sub/deep/b.txt", "_SUCCESS", ".a.jsonl",
    "sub/_hidden/a.jsonl", "sub/.a.jsonl", "we[ir]d.jsonl", "subway/a.jsonl", "c.jsonl/part.jsonl",
    "c.jsonl/_SUCCESS", "c.jsonl/.part.jsonl.crc", "c.jsonl/x/_temporary/part.jsonl",
)  # fmt: skip
PATTERNS = (
    "*", "*.jsonl", "**", "**/*.jsonl", "sub/**", "sub/**/a.jsonl", "**/deep/*", "sub*/a.jsonl", "_*",
    ".*.jsonl", "?.jsonl", "[ab].jsonl*", "sub/*/*", "**/_hidden/*", "sub/_hidden/*", "**/**/a.jsonl",
    "none/*", "*/", "we[ir]d.jsonl", "sub", "sub/", "a.jsonl", "", "c*", "c.json?", "*/deep", "*/_hidden",
)  # fmt: skip


def texts(built: Recipe, storage: StorageOptions | None = None) -> list[tuple[str, int, bytes, str]]:
    """(file, record, document id, text) of all documents."""
    rows: list[tuple[str, int, bytes, str]] = []
    for split in scan_inputs(built, storage):
        split = pickle.loads(pickle.dumps(split))  # as workers get it
        for batch in read_split(split, built.inputs[split.source], Ledger(), Quarantine()):
            columns = [batch.column(name).to_pylist() for name in ("file", "record", "document_id", "text")]
            rows += zip(*columns, strict=True)
    return rows


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(fresh_url())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_the_same_files_in_a_bucket_and_in_a_folder(
    pattern: str, store: MemoryStore, tmp_path: Path
) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        store.put(name, b"x")
    local = {
        path.relative_to(tmp_path).as_posix(): match for path, match in expand_path(tmp_path, pattern).items()
    }
    found = expand_url(f"{store.url}/{pattern}", None)
    assert {url.removeprefix(store.url + "/"): match for url, (_, _, match) in found.items()} == local


def test_two_stars_cross_folders_that_are_not_hidden_and_no_name_is_matched_in_part() -> None:
    assert key_matches("a/**/z", "a/z")
    assert key_matches("a/**/z", "a/b/c/z")
    assert not key_matches("a/**/z", "a/.b/z")
    assert not key_matches("a/*", "ab/c")
    assert not key_matches("a/**", "a")


def test_a_glob_reads_the_folders_that_it_matches_and_no_folder_markers() -> None:
    assert key_matches("a/*", "a/b/c")
    assert not key_matches("a/*", "a/b/_c/d")
    assert not key_matches("a/*", "a/b/")
    assert not key_matches("a/**", "a/b/")


@pytest.mark.parametrize(
    ("path", "exclude", "left"),
    [
        ("data", ["MANIFEST.json"], ["data/a.jsonl", "data/b/c.jsonl", "data/b/d.txt"]),
        ("data", ["*.json*"], ["data/b/d.txt"]),
        ("data", ["b"], ["data/MANIFEST.json", "data/a.jsonl"]),
        ("data/**", ["data/*.jsonl"], ["data/MANIFEST.json", "data/b/c.jsonl", "data/b/d.txt"]),
        ("data/*", ["data/b/**", "MANIFEST.*"], ["data/a.jsonl"]),
        ("data/*", ["data"], ["data/MANIFEST.json", "data/a.jsonl", "data/b/c.jsonl", "data/b/d.txt"]),
    ],
)
def test_excluded_files_are_not_found_in_a_folder_or_in_a_bucket(
    path: str, exclude: list[str], left: list[str], store: MemoryStore, tmp_path: Path
) -> None:
    for name in ("data/a.jsonl", "data/b/c.jsonl", "data/b/d.txt", "data/MANIFEST.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        store.put(name, b"x")
    local = recipe(tmp_path, {"path": path, "exclude": exclude})
    assert list(find_files(local, local.inputs[0], "inputs[0].path").files) == left
    urls = [f"{store.url}/{pattern}" if "/" in pattern else pattern for pattern in exclude]
    remote = recipe(tmp_path, {"path": f"{store.url}/{path}", "base": store.url, "exclude": urls})
    assert list(find_files(remote, remote.inputs[0], "inputs[0].path").files) == left


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{a,b}.jsonl*", ["a.jsonl", "b.jsonl.zst"]),
        ("d/n-{08..11}.txt", ["d/n-08.txt", "d/n-09.txt", "d/n-10.txt", "d/n-11.txt"]),
        ("{d,e}", ["d/n-08.txt", "d/n-09.txt", "d/n-10.txt", "d/n-11.txt", "e/x.txt"]),
        ("{d,e}/*-{08,09}.txt", None),
        ("{d/n-08,e/x}.txt", ["d/n-08.txt", "e/x.txt"]),
        ("set{1,2}/*.txt", ["set{1,2}/a.txt"]),
        ("we{ir}d.txt", ["we{ir}d.txt"]),
        ("half{.txt", ["half{.txt"]),
        ("we[[]1].txt", ["we[1].txt"]),
        ("{d,none}", None),
        ("n{1..3}.txt", None),
    ],
)
def test_lists_in_braces_name_files_and_each_item_must_be_there(
    pattern: str, expected: list[str] | None, store: MemoryStore, tmp_path: Path
) -> None:
    for name in (
        "a.jsonl", "b.jsonl.zst", "d/n-08.txt", "d/n-09.txt", "d/n-10.txt", "d/n-11.txt", "e/x.txt", "n1.txt",
        "n2.txt", "set{1,2}/a.txt", "set1/b.txt", "set2/b.txt", "we{ir}d.txt", "half{.txt", "we[1].txt",
        "we1.txt",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        store.put(name, b"x")
    for base, path in ((None, pattern), (store.url, f"{store.url}/{pattern}")):
        made = recipe(tmp_path, {"path": path, "base": base})
        if expected is None:
            with pytest.raises(RecipeError, match=r"inputs\[0\].path: .* lists .*, which matches no "):
                find_files(made, made.inputs[0], "inputs[0].path")
        else:
            assert list(find_files(made, made.inputs[0], "inputs[0].path").files) == expected


@pytest.mark.parametrize(
    ("path", "read", "warned"),
    [
        ("d", ["d/b.jsonl"], 5),
        ("d/**/*.jsonl", ["d/b.jsonl"], 5),
        ("d/*.jsonl", ["d/b.jsonl"], 2),
        ("d/_*", ["d/_SUCCESS.jsonl", "d/_part/c.jsonl", "d/_train.jsonl"], 1),
        ("d/_train.jsonl", ["d/_train.jsonl"], 0),
        ("d/_part", ["d/_part/c.jsonl"], 1),
        ("d/.x/*", ["d/.x/e.jsonl"], 0),
        ("d/{b,_train}.jsonl", ["d/_train.jsonl", "d/b.jsonl"], 0),
    ],
)
def test_files_whose_names_begin_with_a_dot_or_underscore_are_counted_and_said_unless_they_are_spelled(
    path: str, read: list[str], warned: int, store: MemoryStore, tmp_path: Path
) -> None:
    for name in ("b.jsonl", "_train.jsonl", "_SUCCESS.jsonl", "_part/c.jsonl", "_part/_d.jsonl", ".x/e.jsonl",
                 "_SUCCESS", ".b.jsonl.crc", "._b.jsonl", ".git/config"):  # fmt: skip
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("{}")
        store.put(f"d/{name}", b"{}")
    for config in ({"path": path}, {"path": f"{store.url}/{path}", "base": store.url}):
        made = recipe(tmp_path, config | {"exclude": "_SUCCESS"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sorted(split.file for split in scan_inputs(made)) == read
        said = [str(one.message) for one in caught]
        assert len(said) == (warned > 0), said
        if warned:
            more = f" and {warned - 1} more are" if warned > 1 else " is"
            assert f"{more} not read, as a name begins with . or _" in said[0]


def test_an_input_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    made = recipe(tmp_path, {"path": "*.jsonl", "exclude": "a*"})
    with pytest.raises(RecipeError, match="matches 1 files, but all are excluded"):
        find_files(made, made.inputs[0], "inputs[0].path")


def test_documents_have_the_ids_of_local_ones_where_base_says_what_to_leave_out(
    store: MemoryStore, tmp_path: Path
) -> None:
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(50))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text(lines)
    table = pa.table({"text": [f"row {n}" for n in range(500)], "other": ["x"] * 500})
    pq.write_table(table, tmp_path / "data/b.parquet", row_group_size=100)
    put_folder(tmp_path, store)
    local = texts(recipe(tmp_path, "data"))
    assert len(local) == 550
    assert texts(recipe(tmp_path, {"path": f"{store.url}/data", "base": store.url})) == local
    assert texts(recipe(tmp_path, {"path": f"{store.url}/*/*", "base": f"{store.url}/"})) == local
    named = texts(recipe(tmp_path, f"{store.url}/data/**"))
    assert [row[0].removeprefix(f"{store.url}/") for row in named] == [row[0] for row in local]
    assert not {row[2] for row in named} & {row[2] for row in local}


@pytest.mark.parametrize("split_bytes", [700, 2000])
def test_large_files_are_cut_as_at_home_and_their_records_have_the_same_numbers(
    store: MemoryStore, tmp_path: Path, split_bytes: int
) -> None:
    rows = [hashlib.sha256(bytes([n])).hexdigest() for n in range(250)]
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"text": rows}), data / "b.parquet", row_group_size=50)
    lines = [b'{"text": "%s"}' % (b"x" * (n * 37 % 900)) for n in range(120)]
    (data / "a.jsonl").write_bytes(b"\n".join(lines))  # the last line has no newline
    (data / "c.jsonl").write_bytes(b"\n" * 3000 + lines[50] * 90 + b"\n\n")
    (data / "d.jsonl").write_bytes(b"no newline" * 500)
    put_folder(data, store)
    local = scan_inputs(recipe(data, "."), split_bytes=split_bytes)
    remote = scan_inputs(recipe(data, {"path": store.url, "base": store.url}), split_bytes=split_bytes)
    assert any(split.first_record == UNCOUNTED for split in remote)
    counted = count_records(remote, TaskFolders(tmp_path / "work"))
    cuts = [
        [(s.index, s.file, s.start, s.end, s.first_record, s.bytes) for s in splits]
        for splits in (local, counted)
    ]
    assert cuts[0] == cuts[1]
    assert len({cut[1] for cut in cuts[0]}) == 4
    assert len(cuts[0]) > 10


def test_first_bytes_are_looked_at_in_a_store_as_at_home(store: MemoryStore, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = "".join(f'{{"text": "{n}"}}\n' for n in range(50))
    (data / "a.jsonl").write_bytes(lines.encode("utf-16"))
    (data / "b.jsonl").write_bytes(gzip.compress(lines.encode()))
    (data / "c.jsonl").write_text(f"[{','.join(lines.splitlines())}]")
    put_folder(data, store)
    built = recipe(data, {"path": store.url, "base": store.url})
    splits = scan_inputs(built, split_bytes=40)
    assert [split.file for split in splits] == ["a.jsonl", "b.jsonl", "c.jsonl"]  # none is cut at newlines
    found = [
        text
        for split in splits
        for batch in read_split(split, built.inputs[0], Ledger(), Quarantine())
        for text in batch.column("text").to_pylist()
    ]
    assert found == [str(n) for n in range(50)] * 3
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    (data / "d.parquet").write_text(pointer)
    put_folder(data, store)
    *_, split = scan_inputs(recipe(data, {"path": store.url, "base": store.url}))
    with pytest.raises(BuildError, match="git lfs pull"):
        list(read_split(split, built.inputs[0], Ledger(), Quarantine(max_bad_fraction=1.0)))


def test_inputs_that_are_not_there_or_clash_are_named(store: MemoryStore, tmp_path: Path) -> None:
    other = MemoryStore(fresh_url())
    for place in (store, other):
        place.put("a.jsonl", b"{}")
    (tmp_path / "a.jsonl").write_text("{}")
    based = {"path": f"{store.url}/a.jsonl", "base": store.url}
    cases: list[tuple[tuple[str | dict[str, Any], ...], str]] = [
        ((f"{store.url}/b*",), r"inputs\[0\].path: memory://.*/b\* matches no object"),
        ((f"{store.url}/*.jsonl", f"{store.url}/a.jsonl"), "is the same file as .* read twice"),
        ((based, {"path": f"{other.url}/a.jsonl", "base": other.url}), "would both be called a.jsonl"),
        (("a.jsonl", based), "would both be called a.jsonl"),
        (({"path": f"{store.url}/a.jsonl", "base": other.url},), r"inputs\[0\].base: .* is not below"),
        (("nosuch://place/a.jsonl",), r"inputs\[0\].path: nosuch://place"),
        (("https://127.0.0.1:9/folder/",), r"inputs\[0\].path: .* cannot be listed over http"),
    ]
    for inputs, message in cases:
        with pytest.raises(RecipeError, match=message):
            scan_inputs(recipe(tmp_path, *inputs))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changed_since_the_scan_stops_the_build_and_is_named(
    store: MemoryStore, tmp_path: Path, name: str
) -> None:
    pq.write_table(pa.table({"text": ["some text"] * 40}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 9)
    store.put(name, tmp_path / name)
    built = recipe(tmp_path, f"{store.url}/{name}")
    (split,) = scan_inputs(built)
    store.put(name, tmp_path / name)  # the same bytes: the version tells
    with pytest.raises(
        BuildError, match=rf"{store.url}/{name}: cannot be read: the object changed after it was listed"
    ):
        list(read_split(split, built.inputs[0], Ledger(), Quarantine(max_bad_fraction=1.0)))


class FolderFileSystem(LocalFileSystem):  # type: ignore[misc]
    protocol = ("inputtest",)


def test_other_file_systems_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec.register_implementation("inputtest", FolderFileSystem, clobber=True)
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"data/{name}.jsonl").write_text(json.dumps({"text": name}))
    url = f"inputtest://{tmp_path}"
    assert texts(recipe(tmp_path, {"path": f"{url}/data/*.jsonl", "base": url})) == texts(
        recipe(tmp_path, "data")
    )


def test_a_file_on_a_web_server_is_named_without_its_query(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")  # fsspec's http
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as web:
        threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}"
        signed = {"path": f"{url}/data/a.jsonl?signature=1", "base": url}
        assert texts(recipe(tmp_path, signed)) == texts(recipe(tmp_path, "data"))
        with pytest.raises(RecipeError, match=r"b.jsonl: there is no such file"):
            scan_inputs(recipe(tmp_path, f"{url}/b.jsonl"))
        web.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """Built of local files, whose plain ones are many splits."""
    path = make_corpus(tmp_path_factory.mktemp("corpus"), 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=5000))
        return build(path, workers=1, progress=False)


def dropped(result: BuildResult) -> list[str]:
    """Documents that filters dropped, without their texts, which are a sample of each split."""
    rows = pq.read_table(result.output / "dropped").drop_columns(["text"]).to_pylist()
    return sorted(map(repr, rows))


@pytest.mark.extended
def test_a_corpus_moved_to_a_bucket_gives_the_same_shards(
    local: BuildResult, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = local.output.parent
    base = f"s3://{server.new_bucket()}/some/corpus"
    monkeypatch.delenv("AWS_ENDPOINT_URL")  # so that workers know the server from the tasks alone
    storage = StorageOptions(endpoint_url=server.endpoint_url)
    with_inputs = S3Store(base, storage)
    for pattern in ("plain-*", "tables/*", "lines*"):
        for file in corpus.glob(pattern):
            with_inputs.put(file.relative_to(corpus).as_posix(), file)
    patterns = ("plain-*.jsonl", "tables", "**/lines.jsonl.gz")
    overrides = [f"inputs[{n}].path={base}/{pattern}" for n, pattern in enumerate(patterns)]
    overrides += [f"inputs[{n}].base={base}" for n in range(len(patterns))]

    def build_remote() -> BuildResult:
        return build(
            corpus / "recipe.yaml",
            output=tmp_path / "out",
            overrides=overrides,
            workers=1,
            progress=False,
            storage=storage,
        )

    result = build_remote()
    shards = {
        name: digest
        for name, digest in tree(local.output).items()
        if name not in ("dataset.json", "report.html") and not name.startswith("dropped/")
    }
    assert {name: digest for name, digest in tree(result.output).items() if name in shards} == shards
    assert result.fingerprint == local.fingerprint
    assert dropped(result) == dropped(local)
    card = json.loads((result.output / "dataset.json").read_text())
    assert card["funnel"] == json.loads((local.output / "dataset.json").read_text())["funnel"]

    server.requests.clear()
    assert build_remote().up_to_date
    bodies = [request for request in server.requests if request.startswith("GET") and "jsonl" in request]
    assert bodies == []  # sizes and versions are enough

    with_inputs.put("lines.jsonl.gz", corpus / "plain-0.jsonl")
    with pytest.raises(BuildError, match="made from other input files"):
        build_remote()


def test_an_input_below_the_output_is_refused(server: S3Server, tmp_path: Path) -> None:
    bucket = server.new_bucket()
    server.client().put_object(Bucket=bucket, Key="data/in/a.jsonl", Body=b"{}")
    path = make_corpus(tmp_path, 20)
    overrides = [f"inputs=[{{path: 's3://{bucket}/**/*.jsonl'}}]"]
    with pytest.raises(RecipeError, match="use separate folders for inputs, output and work"):
        build(path, output=f"s3://{bucket}/data", overrides=overrides, workers=1, progress=False)


def test_a_store_that_is_away_when_a_worker_first_reads_is_waited_for_as_in_any_outage() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        waits: dict[str, Any] = {"retry_seconds": 1.0, "first_contact_seconds": 0.1}
        options = StorageOptions(endpoint_url=endpoint, anonymous=True, **waits)
        listed = InputFile("a.jsonl", "s3://bucket/a.jsonl", 2, "version", options)
        with pytest.raises(OSError, match="get failed") as caught:
            open_input(listed).read()
    assert "has not answered yet" not in str(caught.value)
