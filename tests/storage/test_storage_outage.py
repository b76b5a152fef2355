"""An outage of a store costs time, not the run, at its start too; a command gives up within seconds."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.fault_proxy import FaultProxy, Rule
from shardkit.cli.common import add_storage_arguments, storage_options
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import LoaderConfig, grouped
from shardkit.loaders.streams import open_streams
from shardkit.storage import (
    ObjectNotFoundError,
    ResilientStore,
    RetryPolicy,
    StorageOptions,
    StoreError,
    TransientError,
    connect,
)
from shardkit.storage.memory import MemoryStore
from support.loader_data import make_dataset
from support.remote_harness import QUICK, fresh_url, put_folder
from support.s3_moto import S3Server, s3_server

QUICKLY = RetryPolicy(longest_backoff_seconds=0.2, first_contact_seconds=0.3, report_seconds=0.5, hedge=False)
FIRST_CONTACT_LIMIT_SECONDS = 10.0
OUTAGE_SECONDS = 2.0
AWAY_SECONDS = 8.0  # longer than a command waits


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    """A way to the server that can be cut; the server keeps its objects."""
    with FaultProxy(server.endpoint_url) as between:
        yield between


def options_for(proxy: FaultProxy) -> StorageOptions:
    return StorageOptions(endpoint_url=proxy.endpoint_url, read_timeout_seconds=1.0)


def cut(proxy: FaultProxy, seconds: float) -> threading.Thread:
    """Refuse connections for so long."""
    proxy.stop()

    def restart() -> None:
        time.sleep(seconds)
        proxy.start()

    thread = threading.Thread(target=restart)
    thread.start()
    return thread


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.extended
def test_every_operation_rides_out_an_outage_and_reports_it_once(
    server: S3Server, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = connect(f"s3://{server.new_bucket()}/data", options_for(proxy), policy=QUICKLY)
    store.put("key", b"bytes")
    file = tmp_path / "file"
    file.write_bytes(b"other bytes")
    operations: dict[str, Callable[[], object]] = {
        "head": lambda: store.head("key").bytes,
        "get": lambda: store.get("key"),
        "list": lambda: next(info.key for info in store.list()),
        "put": lambda: store.put("new", file).bytes,
        "delete": lambda: store.delete("absent"),
    }
    restarted = cut(proxy, OUTAGE_SECONDS)
    answers: dict[str, object] = {}

    def run(name: str) -> None:
        answers[name] = operations[name]()

    threads = [threading.Thread(target=run, args=(name,)) for name in operations]
    with caplog.at_level(logging.WARNING, "shardkit.storage"):
        for thread in threads:
            thread.start()
        for thread in (*threads, restarted):
            thread.join()
    assert answers == {"head": 5, "get": b"bytes", "list": "key", "put": 11, "delete": None}
    failing, again = caplog.messages
    assert failing.startswith(f"{store.url}: ")
    assert "retrying for up to" in failing
    assert "Could not connect" in failing
    assert again.startswith(f"{store.url}: answers again after ")
    assert store.metrics.snapshot().outages == 1
    store.close()


@pytest.mark.extended
def test_a_run_rides_out_an_outage_of_its_store(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    ride_out(server, proxy, tmp_path, OUTAGE_SECONDS)


@pytest.mark.extended
def test_a_run_rides_out_an_outage_of_a_minute(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    ride_out(server, proxy, tmp_path, 60.0)


def ride_out(server: S3Server, proxy: FaultProxy, folder: Path, seconds: float) -> None:
    """Read a dataset through a store that is gone before the first batch, with the policy of a run."""
    make_dataset(folder / "made", "mds", samples=600, shards=6)
    url = f"s3://{server.new_bucket()}/data"
    direct = connect(url)
    put_folder(folder / "made", direct)
    direct.close()
    with StreamingLoader(url, batch_size=10, storage=options_for(proxy), **grouped(QUICK)) as loader:
        restarted = cut(proxy, seconds)
        began = time.monotonic()
        ids = [sample for batch in loader for sample in batch["sample_id"].tolist()]
        took = time.monotonic() - began
        restarted.join()
    assert len(ids) == len(set(ids)) == 600
    assert took > seconds, "the outage was met"


@pytest.mark.parametrize(("timeout_seconds", "expected"), [(1800.0, 1800.0), (30.0, 600.0)])
def test_a_store_does_not_fail_before_the_loader_that_waits_for_it(
    timeout_seconds: float, expected: float, tmp_path: Path
) -> None:
    url = fresh_url()
    make_dataset(tmp_path / "made", "mds")
    put_folder(tmp_path / "made", MemoryStore(url))
    config = LoaderConfig(timeout_seconds=timeout_seconds)
    [dataset] = open_streams(url, config, processes=1).streams.datasets
    assert dataset.shards is not None
    assert dataset.shards.store.policy.deadline_seconds == expected
    assert dataset.shards.store.policy.first_contact_seconds == expected, "away at the start, as later"
    dataset.close()


def test_a_wrong_port_is_an_error_within_seconds(server: S3Server) -> None:
    wrong = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(TransientError, match=r"Could not connect.*has not answered yet: check") as caught:
        timed_first_contact(StorageOptions(endpoint_url=wrong, first_contact_seconds=3.0))
    assert wrong in str(caught.value)


def test_a_host_name_that_does_not_resolve_is_an_error_within_seconds(server: S3Server) -> None:
    with pytest.raises(TransientError, match="has not answered yet: check"):
        timed_first_contact(StorageOptions(endpoint_url="http://no-such-host.invalid"), QUICKLY)


def test_a_server_that_accepts_and_never_answers_is_an_error_within_seconds(server: S3Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TransientError, match="has not answered yet: check"):
            timed_first_contact(StorageOptions(endpoint_url=endpoint, read_timeout_seconds=0.5), QUICKLY)


def timed_first_contact(options: StorageOptions, policy: RetryPolicy | None = None) -> None:
    """Read from a store, by default with the policy of a run; its error must come soon."""
    began = time.monotonic()
    try:
        connect("s3://some-bucket/data", options, policy=policy).get("key")
    finally:
        assert time.monotonic() - began < FIRST_CONTACT_LIMIT_SECONDS


@pytest.mark.extended
@pytest.mark.parametrize("away", ["refused", "no name"])
def test_a_store_that_is_away_when_a_run_starts_is_waited_for_and_named_at_once(
    away: str,
    server: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"s3://{server.new_bucket()}/data"
    make_dataset(tmp_path / "made", "mds")
    put_folder(tmp_path / "made", connect(url, options_for(proxy)))
    began, resolve = time.monotonic(), socket.getaddrinfo

    def failing(*arguments: Any, **options: Any) -> Any:
        if time.monotonic() - began < AWAY_SECONDS:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return resolve(*arguments, **options)

    if away == "no name":
        monkeypatch.setattr(socket, "getaddrinfo", failing)
    else:
        cut(proxy, AWAY_SECONDS)
    with caplog.at_level(logging.WARNING, "shardkit.storage"):
        loader = StreamingLoader(url, batch_size=4, storage=options_for(proxy), **grouped(QUICK))
        assert len(next(iter(loader))["sample_id"]) == 4
    loader.close()
    assert time.monotonic() - began > AWAY_SECONDS
    failed, again = caplog.messages[0], caplog.messages[-1]
    assert "has been failing for 0 s" in failed
    assert "has not answered yet: check its URL" in failed
    assert "answers again after" in again


def test_a_command_gives_up_soon_where_a_job_waits() -> None:
    parser = argparse.ArgumentParser()
    add_storage_arguments(parser)
    arguments = parser.parse_args([])
    assert storage_options(arguments).first_contact_seconds == 5.0
    assert storage_options(arguments, is_job=True).first_contact_seconds == 60.0


@pytest.mark.parametrize(("status", "code"), [(403, "InvalidAccessKeyId"), (404, "NoSuchBucket")])
def test_what_a_server_refuses_is_an_error_at_once(
    status: int, code: str, server: S3Server, proxy: FaultProxy
) -> None:
    proxy.set_rules(Rule(fault="status", status=status, code=code))
    store = connect("s3://some-bucket/data", options_for(proxy))
    with pytest.raises(StoreError) as caught:
        store.get("key")
    assert caught.value.status == status
    assert store.metrics.snapshot().retries == 0
    store.close()


def test_a_busy_server_at_first_contact_is_waited_for(server: S3Server, proxy: FaultProxy) -> None:
    proxy.set_rules(Rule(fault="status", status=503, count=6))
    policy = dataclasses.replace(QUICKLY, first_contact_seconds=0.01)
    store = connect(f"s3://{server.new_bucket()}/data", options_for(proxy), policy=policy)
    with pytest.raises(ObjectNotFoundError):
        store.get("key")
    assert store.metrics.snapshot().throttled == 6
    store.close()


def test_a_copy_in_another_process_knows_that_the_store_was_there(
    server: S3Server, proxy: FaultProxy
) -> None:
    policy = dataclasses.replace(QUICKLY, first_contact_seconds=0.01, jitter=RetryPolicy().jitter)
    store = connect(f"s3://{server.new_bucket()}/data", options_for(proxy), policy=policy)
    store.put("key", b"bytes")
    copy: ResilientStore = pickle.loads(pickle.dumps(store))
    restarted = cut(proxy, 0.5)
    assert copy.get("key") == b"bytes"
    restarted.join()
    for each in (store, copy):
        each.close()
