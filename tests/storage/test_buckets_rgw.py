"""Kinds of buckets on a real S3 server: public, encrypted by order, with versions, with odd keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardkit as sk
from servers.bucket import RgwBucket, s3_client
from servers.ceph import KMS_KEY
from shardkit.loaders.config import Layout
from shardkit.storage import ObjectExistsError, ObjectNotFoundError, StorageOptions, StoreError
from shardkit.storage.s3 import NONCE, S3Store
from shardkit.storage.s3_upload import PART_BYTES
from support.loader_data import make_dataset
from support.remote_harness import put_folder
from support.small_build import EOS, train_bpe

pytest_plugins = ["support.s3_rgw"]
pytestmark = pytest.mark.extended  # moto is the quick server; the real one is for CI

KMS: dict[str, Any] = {"encryption": "aws:kms", "kms_key_id": KMS_KEY}


@pytest.fixture
def client(rgw_bucket: RgwBucket) -> Iterator[Any]:
    client = s3_client(rgw_bucket.endpoint_url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("buckets") / "data", "mds")


@pytest.fixture
def versioned(rgw_bucket: RgwBucket, client: Any) -> Iterator[RgwBucket]:
    """A bucket that keeps versions, all of which are removed at the end."""
    state = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket=rgw_bucket.name, VersioningConfiguration=state)
    yield rgw_bucket
    for page in client.get_paginator("list_object_versions").paginate(Bucket=rgw_bucket.name):
        for each in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]:
            client.delete_object(Bucket=rgw_bucket.name, Key=each["Key"], VersionId=each["VersionId"])


def store_of(bucket: RgwBucket, prefix: str = "", **options: Any) -> S3Store:
    return S3Store(f"{bucket.url}/{prefix}", StorageOptions(endpoint_url=bucket.endpoint_url, **options))


def allow(client: Any, bucket: RgwBucket, *statements: dict[str, Any]) -> None:
    """Give the bucket a policy; "Resource" is what follows the bucket's name."""
    full = [
        {"Principal": "*"} | each | {"Resource": [f"arn:aws:s3:::{bucket.name}{end}" for end in ends]}
        for each in statements
        for ends in [each["Resource"]]
    ]
    policy = {"Version": "2012-10-17", "Statement": full}
    client.put_bucket_policy(Bucket=bucket.name, Policy=json.dumps(policy))


def first_rows(url: str, endpoint_url: str, **options: Any) -> list[int]:
    storage = StorageOptions(endpoint_url=endpoint_url, **options)
    with sk.StreamingLoader(
        url, batch_size=53, layout=Layout(tensors="numpy"), storage=storage, seed=1
    ) as loader:
        return sorted(int(row[0]) for row in next(iter(loader))["tokens"])


@pytest.mark.parametrize("may_list", [True, False])
def test_a_public_dataset_is_streamed_without_credentials(
    rgw_bucket: RgwBucket, client: Any, data: Path, monkeypatch: pytest.MonkeyPatch, may_list: bool
) -> None:
    put_folder(data, store_of(rgw_bucket, "mds"))
    put_folder(data, store_of(rgw_bucket, "other"))
    read = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": ["/*"]}
    listing = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [""]}
    allow(client, rgw_bucket, *([read, listing] if may_list else [read]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    url = f"{rgw_bucket.url}/mds"
    assert first_rows(url, rgw_bucket.endpoint_url, anonymous=True) == list(range(1, 54))
    with pytest.raises(StoreError, match="AccessDenied"):
        store_of(rgw_bucket, anonymous=True).put("mds/x", b"1")


@pytest.mark.parametrize("may_list", [True, False])
def test_a_build_reads_a_public_bucket_unsigned_and_writes_to_a_private_one(
    rgw_bucket: RgwBucket, client: Any, tmp_path: Path, may_list: bool
) -> None:
    """Credentials that the public bucket refuses are for the other one; `storage` of the input says so."""
    names = [f"crawl/{number:03d}.jsonl" for number in range(40)]
    for number, name in enumerate(names):
        store_of(rgw_bucket).put(name, json.dumps({"text": f"words of {number} " * 9}).encode())
    store_of(rgw_bucket).put("list.paths", "\n".join(names).encode())
    # Who signs a request is refused; anybody else is not.
    owner = f"arn:aws:iam:::user/{client.list_buckets()['Owner']['ID']}"
    read = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": ["/*"]}
    listing = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [""]}
    signed = {
        "Effect": "Deny",
        "Action": ["s3:GetObject"],
        "Resource": ["/crawl/*"],
        "Principal": {"AWS": [owner]},
    }
    allow(client, rgw_bucket, *([read, listing] if may_list else [read]), signed)
    train_bpe(f"words of {number} " for number in range(40)).save(str(tmp_path / "tokenizer.json"))
    output = f"{rgw_bucket.url}/out"
    public = {
        "path": f"{rgw_bucket.url}/list.paths",
        "list": True,
        "base": rgw_bucket.url,
        "storage": {"anonymous": True},
    }
    recipe = {
        "inputs": [public],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": output,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    storage = StorageOptions(endpoint_url=rgw_bucket.endpoint_url)
    with pytest.raises(StoreError, match="AccessDenied"):
        store_of(rgw_bucket).get("crawl/000.jsonl")
    result = sk.build(tmp_path / "recipe.yaml", workers=1, progress=False, storage=storage)
    assert result.funnel.kept.documents == 40
    assert store_of(rgw_bucket).head("out/index.json").bytes > 0
    with pytest.raises(StoreError, match="AccessDenied"):
        store_of(rgw_bucket, anonymous=True).put("out/x", b"1")


def test_a_private_bucket_refuses_requests_without_credentials(rgw_bucket: RgwBucket) -> None:
    store_of(rgw_bucket).put("a", b"1")
    with pytest.raises(StoreError, match=r"AccessDenied.*check the policies"):
        store_of(rgw_bucket, anonymous=True).get("a")


def test_a_bucket_that_demands_encryption_takes_writes_that_ask_for_it(
    rgw_bucket: RgwBucket, client: Any
) -> None:
    header = "s3:x-amz-server-side-encryption"
    write = {"Effect": "Deny", "Action": "s3:PutObject", "Resource": ["/*"]}
    conditions: list[dict[str, Any]] = [{"Null": {header: "true"}}, {"StringNotEquals": {header: "aws:kms"}}]
    allow(client, rgw_bucket, *[write | {"Condition": each} for each in conditions])
    for options in ({}, {"encryption": "AES256"}):
        with pytest.raises(StoreError, match=r"AccessDenied.*--storage encryption=aws:kms"):
            store_of(rgw_bucket, **options).put("a", b"1")
    store = store_of(rgw_bucket, **KMS)
    store.put("a", b"0123456789")
    store.put("b", b"1", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("b", b"2", if_absent=True)
    plain = store_of(rgw_bucket)  # to read, nothing needs to be said
    assert (plain.get("a", 3, 7), plain.get("b")) == (b"3456", b"1")
    for key in ("a", "b"):
        assert client.head_object(Bucket=rgw_bucket.name, Key=key)["ServerSideEncryption"] == "aws:kms"


def test_objects_in_parts_are_encrypted_and_read_by_range(rgw_bucket: RgwBucket, client: Any) -> None:
    large = bytes(range(256)) * ((PART_BYTES >> 8) + 1000)
    store = store_of(rgw_bucket, **KMS)
    info = store.put("large", large)
    assert info.bytes == len(large)
    assert store.get("large", PART_BYTES - 5, PART_BYTES + 5) == large[PART_BYTES - 5 : PART_BYTES + 5]
    answer = client.head_object(Bucket=rgw_bucket.name, Key="large")
    assert answer["SSEKMSKeyId"] == KMS_KEY


def test_a_key_that_the_server_does_not_have_is_named(rgw_bucket: RgwBucket) -> None:
    with pytest.raises(StoreError, match="no-such-key"):
        store_of(rgw_bucket, encryption="aws:kms", kms_key_id="no-such-key").put("a", b"1")


def test_where_the_requester_pays_every_request_says_so(
    rgw_bucket: RgwBucket, client: Any, data: Path
) -> None:
    paid = {"Payer": "Requester"}
    client.put_bucket_request_payment(Bucket=rgw_bucket.name, RequestPaymentConfiguration=paid)
    put_folder(data, store_of(rgw_bucket, "mds", requester_pays=True))
    url = f"{rgw_bucket.url}/mds"
    assert first_rows(url, rgw_bucket.endpoint_url, requester_pays=True) == list(range(1, 54))


@pytest.mark.parametrize(
    "prefix",
    [
        "2024-01-01T00:00:00", "run:1/x", "C:/x", "tab\tx", "a+b c", "pct%20x", "hash#x", "quest?x", "amp&x",
        "ümläut/日本", "star*x", "br[1]", "brace{1,2}", "brace{1..3}", "tilde~", "semi;x=1", "double//slash",
        "'quotes\"", "$HOME", "date=2024-01-01/part 1", "!x", "[ab]/{c,d}",
    ],
)  # fmt: skip
def test_a_dataset_below_any_legal_key_is_streamed(rgw_bucket: RgwBucket, data: Path, prefix: str) -> None:
    put_folder(data, store_of(rgw_bucket, prefix))
    url = f"{rgw_bucket.url}/{prefix}"
    assert first_rows(url, rgw_bucket.endpoint_url) == list(range(1, 54))


def test_versions_are_replaced_and_delete_markers_hide_them(versioned: RgwBucket) -> None:
    store = store_of(versioned, "p")
    first = store.put("a", b"1").version
    second = store.put("a", b"22").version
    assert store.get("a", version=second) == b"22"
    with pytest.raises(StoreError):
        store.get("a", version=first)
    store.delete("a")
    store.delete("a")
    assert list(store.list()) == []
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    store.put("a", b"333", if_absent=True)
    assert [(info.key, info.bytes) for info in store.list()] == [("a", 3)]


def test_an_object_with_versions_is_created_once(versioned: RgwBucket, client: Any) -> None:
    """Also where the server ignores the condition of a put, as Ceph does in such buckets."""
    store = store_of(versioned, "p")
    for key in ("a/b", "ab", "a"):  # neighbors in the listing
        store.put(key, b"first", if_absent=True)
    store.put("plain", b"first")
    for key in ("a", "plain"):
        with pytest.raises(ObjectExistsError):
            store.put(key, b"second", if_absent=True)
        assert store.get(key) == b"first"
    store.delete("a")
    store.put("a", b"third", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("a", b"fourth", if_absent=True)
    assert store.get("a") == b"third"
    listed = client.list_object_versions(Bucket=versioned.name, Prefix="p/a")
    assert [each["Size"] for each in listed["Versions"] if each["Key"] == "p/a"] == [5, 5]


def test_a_repeated_write_whose_answer_was_lost_is_a_success(versioned: RgwBucket) -> None:
    store, nonce = store_of(versioned), {NONCE: "of-this-write"}
    store.put("a", b"mine", if_absent=True, metadata=nonce)
    assert store.put("a", b"mine", if_absent=True, metadata=nonce).bytes == 4
    with pytest.raises(ObjectExistsError):
        store.put("a", b"else", if_absent=True)


def test_of_rivals_exactly_one_creates_an_object_with_versions(versioned: RgwBucket) -> None:
    store = store_of(versioned)

    def write(number: int) -> int | None:
        try:
            store.put("a", b"%d" % number, if_absent=True)
        except ObjectExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        written = [number for number in pool.map(write, range(8)) if number is not None]
    assert len(written) == 1
    assert store.get("a") == b"%d" % written[0]
