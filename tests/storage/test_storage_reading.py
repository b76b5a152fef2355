"""Objects read in pieces: every byte, the hashes that others compute, and no object taken for another."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from shardkit.errors import ShardError
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, TransientError, hash_object, read_object
from support.remote_harness import fresh_url
from support.stores import FaultRule, FaultyStore

PIECE = 1 << 20  # read at a time
SIZES = [0, 1, 700, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7]


class ShortStore(MemoryStore):
    """Says that objects are three bytes longer than they are."""

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        info, data = self._find(key)
        return MemoryBody(ObjectInfo(key, info.bytes + 3, info.version), memoryview(data))


@pytest.fixture
def store() -> MemoryStore:
    """Objects named by their sizes."""
    store = MemoryStore(fresh_url())
    for size in SIZES:
        store.put(str(size), content(size))
    return store


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("expected", ["stated", "any"])
def test_an_object_is_read_whole(store: MemoryStore, size: int, expected: str) -> None:
    data = read_object(store, str(size), size if expected == "stated" else -1)
    assert data.dtype == np.uint8
    assert data.tobytes() == content(size)


@pytest.mark.parametrize("size", SIZES)
def test_hashes_are_those_that_others_compute(store: MemoryStore, size: int) -> None:
    assert hash_object(store, str(size), ["sha256", "md5"]) == {
        "sha256": hashlib.sha256(content(size)).hexdigest(),
        "md5": hashlib.md5(content(size)).hexdigest(),
    }
    assert hash_object(store, str(size), []) == {}


def test_bodies_that_come_in_bits_are_read_to_their_end(store: MemoryStore) -> None:
    slow = FaultyStore(store, [FaultRule(fault="trickle", after_bytes=3, seconds=0.0)])
    assert read_object(slow, "700").tobytes() == content(700)
    assert hash_object(slow, "700", ["sha1"]) == {"sha1": hashlib.sha1(content(700)).hexdigest()}


@pytest.mark.parametrize("expected", [0, 699, 701])
def test_an_object_of_another_size_is_an_error_that_states_both(store: MemoryStore, expected: int) -> None:
    with pytest.raises(ShardError) as caught:
        read_object(store, "700", expected)
    assert str(caught.value) == f"{store.url}/700: has 700 bytes, expected {expected:,}"


def test_an_object_that_ends_before_its_size_is_an_error_that_says_where(store: MemoryStore) -> None:
    with pytest.raises(ShardError, match=r"/700: ended after 700 of 703 bytes"):
        read_object(ShortStore(store.url), "700")


def test_an_unknown_hash_and_the_stores_errors_come_as_they_are(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="crc7"):
        hash_object(store, "700", ["md5", "crc7"])
    broken = FaultyStore(store, [FaultRule(fault="reset", after_bytes=3)])
    for read in (read_object, lambda store, key: hash_object(store, key, ["md5"])):
        with pytest.raises(ObjectNotFoundError, match="nothing"):
            read(store, "nothing")
        with pytest.raises(TransientError, match="reset after 3 bytes"):
            read(broken, "700")
