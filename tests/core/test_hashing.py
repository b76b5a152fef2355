from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import xxhash

from shardkit.errors import ShardError
from shardkit.hashing import HASH_NAMES, digest_of, hash_bytes, hash_file, new_hash


def test_every_named_hash_gives_the_same_digest_for_bytes_and_files(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000  # more than one read
    (tmp_path / "file").write_bytes(data)
    digests = hash_bytes(data, sorted(HASH_NAMES))
    assert digests == hash_file(tmp_path / "file", sorted(HASH_NAMES))
    assert digests["sha1"] == hashlib.sha1(data).hexdigest()
    assert digests["xxh3_128"] == xxhash.xxh3_128_hexdigest(data)


def test_the_names_of_the_mds_format_are_all_known() -> None:
    known = {
        "blake2b",
        "blake2s",
        "md5",
        "sha1",
        "sha224",
        "sha256",
        "sha384",
        "sha512",
        "sha3_224",
        "sha3_256",
    }
    assert known | {"sha3_384", "sha3_512", "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"} <= HASH_NAMES


@pytest.mark.parametrize("name", ["crc32", "shake_128", "", "SHA1"])
def test_unknown_hashes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="unknown hash"):
        new_hash(name)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no-such-file"):
        hash_file(tmp_path / "no-such-file", ["xxh64"])


def test_digests_of_plain_data_ignore_key_order_and_are_pinned() -> None:
    assert digest_of({"b": [1, 2], "a": "ü"}) == digest_of({"a": "ü", "b": [1, 2]})
    assert digest_of({"a": 1}) == "2c6b113b8dd15ffbded9860b43eb0c6c"
    with pytest.raises(ValueError, match="JSON"):
        digest_of({"a": float("nan")})
