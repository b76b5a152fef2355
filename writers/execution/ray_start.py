"""How a Ray cluster is reached, or started on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardkit.errors import BuildError, MissingExtraError

__all__ = ["import_ray", "start_ray"]

OBJECT_STORE_BYTES = 100_000_000  # records of finished tasks pass through it, nothing else
_CONNECT_SECONDS = 10.0
_LOCAL = "local"


def import_ray() -> Any:
    """The module; MissingExtraError if it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "the engine ray") from error
    return ray


def start_ray(address: str | None, workers: int, memory_bytes: int) -> None:
    """Connect to the cluster at `address`, else at $RAY_ADDRESS, else start one here for `workers` tasks.

    Says nothing on stdout or stderr. BuildError if that is not possible.
    """
    ray = import_ray()
    address = address or os.environ.get("RAY_ADDRESS") or _LOCAL
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        settings |= {
            "num_cpus": workers,
            "_memory": workers * memory_bytes,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    else:
        _check_reachable(address)
    try:
        with _no_usage_statistics():
            ray.init(address, **settings)
    except (ray.exceptions.RayError, ImportError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        what = "Ray cannot be started here" if address == _LOCAL else f"the Ray cluster at {address}"
        problem = str(error).strip().rpartition("\n")[2]  # of a traceback of the other side, the error
        raise BuildError(f"{what}: {problem}") from error
    # What raylets report of lost processes would be printed on stdout, which is for results; the engine tells
    # of lost tasks. There is no public switch for it.
    ray._private.worker._worker_logs_enabled = False


def _check_reachable(address: str) -> None:
    """Ray itself waits for a minute and more, and then ends this process."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or another scheme
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        problem = f"cannot be reached ({error}); is it running, and is this its address?"
        raise BuildError(f"the Ray cluster at {address} {problem}") from error


@contextmanager
def _no_usage_statistics() -> Iterator[None]:
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
