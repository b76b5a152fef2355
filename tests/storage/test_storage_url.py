"""Which store a URL means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.storage import StoreError, is_remote, open_store
from shardkit.storage.fsspec_store import FsspecStore
from shardkit.storage.local import LocalStore
from shardkit.storage.memory import MemoryStore
from shardkit.storage.s3 import S3Store
from shardkit.storage.url import local_path, split_url


@pytest.mark.parametrize(
    ("url", "kind", "kept"),
    [
        ("/data/set", LocalStore, "/data/set"),
        ("data/set", LocalStore, "data/set"),
        ("file:///data/a%20set", LocalStore, "/data/a set"),
        ("FILE:///data", LocalStore, "/data"),
        ("s3://bucket/prefix/", S3Store, "s3://bucket/prefix"),
        ("S3://bucket", S3Store, "s3://bucket"),
        ("memory://name/prefix", MemoryStore, "memory://name/prefix"),
        ("gs://bucket/prefix", FsspecStore, "gs://bucket/prefix"),
    ],
)
def test_a_url_opens_its_store(url: str, kind: type, kept: str) -> None:
    store = open_store(url)
    assert type(store) is kind
    assert store.url == kept


def test_a_path_opens_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "://x", "a b://x", "no-scheme://x"])
def test_what_can_be_no_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        open_store(url)


def test_a_scheme_that_nobody_knows_is_an_error_that_names_it() -> None:
    with pytest.raises(StoreError, match="nonsense"):
        open_store("nonsense://x").head("a")


@pytest.mark.parametrize(
    ("url", "remote"),
    [
        ("/a", False),
        ("a", False),
        ("file:///a", False),
        ("s3://b", True),
        ("memory://m", True),
        ("c:/a", False),
    ],
)
def test_remote_is_what_is_not_on_this_machine(url: str, remote: bool) -> None:
    assert is_remote(url) is remote
    assert is_remote(Path("/a")) is False


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b.json", ("s3://bucket/a", "b.json")),
        ("s3://bucket/b.json", ("s3://bucket", "b.json")),
        ("s3://bucket/a/", ("s3://bucket", "a")),
        ("s3://bucket", ("s3://bucket", "")),
    ],
)
def test_a_url_splits_into_folder_and_name(url: str, parts: tuple[str, str]) -> None:
    assert split_url(url) == parts


def test_file_urls_are_paths() -> None:
    assert local_path("file:///a%2Fb/c%25") == Path("/a/b/c%")
    assert local_path(Path("/x")) == Path("/x")


def test_importing_stores_imports_neither_boto3_nor_fsspec() -> None:
    code = (
        "import sys\n"
        "from shardkit.storage import fsspec_store, open_store, resilient, s3\n"
        "open_store('s3://bucket'), open_store('gs://bucket')\n"
        "print([name for name in ('boto3', 'botocore', 'urllib3', 'fsspec', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
