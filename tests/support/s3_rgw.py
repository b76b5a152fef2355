"""Fixtures with a real S3 server, Ceph RGW, one per test process.

A test module has them by `pytest_plugins = ["support.s3_rgw"]`, without importing this one.
Without Debian's packages of Ceph such tests are skipped, or fail where SHARDKIT_REQUIRE_RGW=1.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from servers.bucket import RgwBucket, s3_client
from servers.fault_proxy import FaultProxy
from servers.rgw import INSTALL, RgwServer, missing_programs

__all__ = ["rgw", "rgw_bucket", "rgw_environment", "rgw_module_bucket", "rgw_proxy", "rgw_proxy_process"]

_REQUIRE = "SHARDKIT_REQUIRE_RGW"
# What would lead a client elsewhere than to the server of the test.
_CLEARED = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION", "AWS_SECURITY_TOKEN",
    "AWS_SESSION_TOKEN", "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION",
)  # fmt: skip


@pytest.fixture(scope="session")
def rgw() -> Iterator[RgwServer]:
    """The server; whoever kills its gateway calls `restart_gateway` before the end of the test."""
    if missing := missing_programs():
        reason = f"no {missing[0]} on this machine: {INSTALL}"
        if os.environ.get(_REQUIRE) == "1":
            pytest.fail(f"{_REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    with RgwServer() as server:
        yield server


@pytest.fixture(scope="session")
def rgw_proxy_process(rgw: RgwServer) -> Iterator[FaultProxy]:
    """The proxy of all tests: for fixtures that outlive one. Its rules are `rgw_proxy`'s to set."""
    with FaultProxy(rgw.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def rgw_proxy(rgw_proxy_process: FaultProxy) -> Iterator[FaultProxy]:
    """A fault proxy before the server, without rules."""
    rgw_proxy_process.set_rules()
    yield rgw_proxy_process
    rgw_proxy_process.set_rules()


@pytest.fixture(scope="session")
def _administrator(rgw: RgwServer) -> Iterator[Any]:
    with rgw_environment(rgw):
        client = s3_client(rgw.endpoint_url)
        client.list_buckets()  # finds its credentials now
    yield client
    client.close()


@pytest.fixture
def rgw_bucket(rgw: RgwServer, _administrator: Any) -> Iterator[RgwBucket]:
    """A fresh bucket; emptied and removed at the end."""
    with rgw_environment(rgw), _bucket(rgw, _administrator) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def rgw_module_bucket(rgw: RgwServer, _administrator: Any) -> Iterator[RgwBucket]:
    """One for all tests of a module, where making one for each would take longer than the tests."""
    with rgw_environment(rgw), _bucket(rgw, _administrator) as bucket:
        yield bucket


@contextmanager
def rgw_environment(server: RgwServer) -> Iterator[None]:
    """Set the server's credentials and nothing that leads elsewhere; the endpoint is the caller's to say."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _CLEARED:
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        patch.setenv("AWS_DEFAULT_REGION", server.region)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        yield


@contextmanager
def _bucket(server: RgwServer, client: Any) -> Iterator[RgwBucket]:
    name = f"test-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    yield RgwBucket(name, server.endpoint_url)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for entry in page.get("Contents", []):
            client.delete_object(Bucket=name, Key=entry["Key"])
    for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", []):
        client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
    client.delete_bucket(Bucket=name)
