"""File systems of fsspec as stores: with and without what a store would like them to have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from shardkit.errors import MissingExtraError
from shardkit.storage import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
    open_store,
)
from shardkit.storage.fsspec_store import FsspecStore

BLOCK = 8 << 20


class PlainFileSystem(LocalFileSystem):  # type: ignore[misc]
    """As many are: no exclusive creation; listings are remembered."""

    protocol = ("plaintest",)
    failure: Exception | None = None

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "xb":
            raise ValueError("unknown mode")
        return super()._open(path, mode=mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        failure = type(self).failure
        if failure is not None:
            raise failure
        return super().cat_file(path, start=start, end=end, **options)


class RamFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = ("ramtest",)
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("ramtest://"))


@pytest.fixture(scope="module", autouse=True)
def schemes() -> None:
    fsspec.register_implementation("plaintest", PlainFileSystem)
    fsspec.register_implementation("ramtest", RamFileSystem)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FsspecStore]:
    made = open_store(f"plaintest://{tmp_path}/set")
    assert isinstance(made, FsspecStore)
    yield made
    PlainFileSystem.failure = None


def test_a_registered_file_system_is_a_store() -> None:
    store = open_store("ramtest://data/set")
    info = store.put("folder/a b", bytes(range(100)), if_absent=True)
    store.put("b", b"2")
    assert store.get("folder/a b", 10, 20, version=info.version) == bytes(range(10, 20))
    with pytest.raises(ObjectExistsError):
        store.put("folder/a b", b"x", if_absent=True)
    assert [(found.key, found.version) for found in store.list()] == [
        ("b", store.head("b").version),
        ("folder/a b", info.version),
    ]
    assert open_store("ramtest://data").get("set/b") == b"2"
    store.put("b", b"3")
    assert store.get("b") == b"3"
    store.delete("b")
    store.delete("b")
    with pytest.raises(ObjectNotFoundError):
        store.head("b")


def test_without_exclusive_creation_if_absent_is_refused_and_writes_nothing(store: FsspecStore) -> None:
    with pytest.raises(StoreError, match="no exclusive creation") as caught:
        store.put("a", b"1", if_absent=True)
    assert type(caught.value) is StoreError
    assert list(store.list()) == []


def test_an_object_replaced_between_two_blocks_ends_the_read(store: FsspecStore) -> None:
    store.put("a", b"o" * (BLOCK + 10))
    with store.open("a") as body:
        buffer = memoryview(bytearray(BLOCK))
        assert body.readinto(buffer) == BLOCK
        store.put("a", b"n" * (BLOCK + 10))
        with pytest.raises(ObjectChangedError):
            body.readinto(buffer)


def test_blocks_are_as_large_as_the_range_at_most(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", bytes(2 * BLOCK + 10))
    asked: list[tuple[Any, Any]] = []
    original = PlainFileSystem.cat_file

    def watch(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        asked.append((start, end))
        return original(self, path, start=start, end=end, **options)

    monkeypatch.setattr(PlainFileSystem, "cat_file", watch)
    store.get("a", 5, 10)
    store.get("a")
    assert asked == [(5, 10), (0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 10)]


def test_a_write_that_fails_leaves_the_old_object(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.put("a", b"old")
    monkeypatch.setattr(
        "shardkit.storage.fsspec_store.shutil.copyfileobj",
        lambda source, target, size: target.write(b"n") and 1 / 0,
    )
    (tmp_path / "source").write_bytes(b"new")
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        store.put("a", tmp_path / "source")
    assert store.get("a") == b"old"


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (FileNotFoundError("x"), ObjectNotFoundError),
        (PermissionError("x"), StoreError),
        (ConnectionResetError("x"), TransientError),
        (TimeoutError("x"), TransientError),
        (StatusError(503), ThrottledError),
        (StatusError(429), ThrottledError),
        (StatusError(500), TransientError),
        (StatusError(403), StoreError),
        (RuntimeError("x"), StoreError),
    ],
    ids=str,
)
def test_failures_become_the_kinds_of_a_store(
    store: FsspecStore, failure: Exception, kind: type[StoreError]
) -> None:
    store.put("a", b"1")
    PlainFileSystem.failure = failure
    with pytest.raises(StoreError, match="/a") as caught:
        store.get("a")
    assert type(caught.value) is kind
    assert caught.value.status == getattr(failure, "status", None)


@pytest.mark.parametrize("field", ["ETag", "generation", "md5Hash", "updated"])
def test_versions_come_from_what_the_file_system_knows(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    entry: dict[str, Any] = {"name": "a", "size": 3, "type": "file", field: "one"}
    monkeypatch.setattr(PlainFileSystem, "info", lambda self, path, **options: dict(entry))
    first = store.head("a").version
    assert store.head("a").version == first
    entry[field] = "two"
    assert store.head("a").version != first


def test_a_file_system_that_cannot_tell_versions_is_refused(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"name": "a", "size": 3, "type": "file"}
    monkeypatch.setattr(PlainFileSystem, "info", lambda self, path, **options: entry)
    with pytest.raises(StoreError, match="versions"):
        store.head("a")


def test_an_unknown_protocol_is_answered_with_known_ones() -> None:
    with pytest.raises(StoreError, match=r"^s4://bucket/x: .* not known: s4; URLs begin with s3://, hf://"):
        FsspecStore("s4://bucket/x").head("a")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[fsspec\]'"):
        open_store("gs://bucket").head("a")


def test_without_the_file_systems_own_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match="gcsfs"):
        open_store("gs://bucket").head("a")
