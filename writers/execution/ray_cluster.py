"""Connects to a Ray cluster, or starts Ray on this machine, and watches the head of the cluster.

If the head dies, Ray ends this process after a minute with a message of its own; `Head` detects that earlier
and raises an error with advice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shardkit.errors import BuildError, MissingExtraError
from shardkit.units import format_bytes
from shardkit.writers.execution.ray_node import node_key
from shardkit.writers.execution.resources import Resources

OBJECT_STORE_BYTES = 100_000_000  # size of Ray's object store; only records of finished tasks use it

_CONNECT_SECONDS = 10.0

_ASK_SECONDS = 1.0

HEAD_SECONDS = 30.0  # time without an answer before the build ends; Ray ends this process after 60 s

_LOCAL = "local"


def import_ray() -> Any:
    """Return the module `ray`; raises MissingExtraError if it is not installed."""
    try:
        with _kept_sigterm():
            import ray
            import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "the engine ray") from error
    return ray


@contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Restore the caller's handler of SIGTERM at the end of the block, in which Ray replaces it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and before is not signal.getsignal(signal.SIGTERM):
            signal.signal(signal.SIGTERM, before)


def start_ray(address: str | None, workers: int, memory_bytes: int) -> None:
    """Connect to the Ray cluster at `address`; if that is None, at $RAY_ADDRESS; else start Ray here.

    A Ray started here has room for `workers` tasks of `memory_bytes` each. Prints nothing to stdout or
    stderr. Raises BuildError if Ray cannot be started or connected to.
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
        with _no_usage_statistics(), _kept_sigterm():
            ray.init(address, **settings)
    except (ray.exceptions.RayError, ImportError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        what = "Ray cannot be started here" if address == _LOCAL else f"the Ray cluster at {address}"
        problem = str(error).strip().rpartition("\n")[2]  # the last line of a remote traceback is the error
        raise BuildError(f"{what}: {problem}") from error
    # Raylets would print reports of lost processes to stdout, which is for results only; the engine warns of
    # lost tasks. Ray has no public setting for this.
    ray._private.worker._worker_logs_enabled = False


def _check_reachable(address: str) -> None:
    """Raise BuildError if the head at `address` does not accept connections; Ray would end this process."""
    host, port = _host_and_port(address.removeprefix("ray://").partition("/")[0])
    if not host or not port.isdecimal():
        return  # "auto", or an address of another form, which Ray checks
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        problem = f"cannot be reached ({error}); is it running, and is this its address?"
        raise BuildError(f"the Ray cluster at {address} {problem}") from error


def _host_and_port(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), port


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


class Head:
    """Checks whether the cluster's head at `address` (host:port) answers; with "", it counts as alive."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._answered = clock()

    def is_there(self) -> bool:
        """Return whether the head accepts connections. If it does not, any call of Ray would block."""
        if self._address:
            try:
                socket.create_connection(_host_and_port(self._address), timeout=_ASK_SECONDS).close()
            except OSError:
                return False
        self._answered = self._clock()
        return True

    def check(self) -> bool:
        """Return whether the head is alive. Raises BuildError if it has not answered for `HEAD_SECONDS`."""
        if self.is_there():
            return True
        silent = self._clock() - self._answered
        if silent > HEAD_SECONDS:
            raise BuildError(
                f"the head of the Ray cluster ({self._address}) has not answered for {silent:.0f} s: it has "
                f"died, or cannot be reached; start the cluster again, then run the same command: finished "
                f"tasks are kept"
            )
        return False

    def nodes_of(self, refs: Iterable[Any]) -> list[tuple[str, str]]:
        """Return Ray's ids and the names, as far as known, of the nodes that run the tasks `refs`."""
        from ray.experimental import internal_kv

        nodes = []
        if self.is_there():
            for ref in refs:
                with suppress(Exception):  # if a node cannot be read, messages go without its name
                    node = internal_kv._internal_kv_get(node_key(ref.task_id().hex())).decode()
                    nodes.append((node.partition(" ")[0], node.partition(" ")[2]))
        return nodes


def connected_head() -> Head:
    """Return the connected cluster's head; behind a proxy (ray://), it is not watched and counts as alive."""
    from ray.util import client

    proxy: Any = client.ray
    return Head("" if proxy.is_connected() else import_ray().get_runtime_context().gcs_address)


def slots_of(nodes: Sequence[dict[str, Any]], needed: Resources) -> int:
    """Return how many tasks that need these resources fit on the living nodes in `ray.nodes()`."""
    amounts = {"CPU": needed.cpus, "memory": needed.memory, "GPU": needed.gpus}
    return sum(
        min(int(resources.get(name, 0) / amount) for name, amount in amounts.items() if amount)
        for resources in (node["Resources"] for node in nodes if node["Alive"])
    )


def described(nodes: Sequence[dict[str, Any]]) -> str:
    """Return the CPUs, memory and GPUs of the three largest living nodes as text, for messages."""
    living = [node["Resources"] for node in nodes if node["Alive"]]
    names = "CPU", "memory", "GPU"
    sizes = sorted({tuple(int(one.get(name, 0)) for name in names) for one in living}, reverse=True)
    texts = [
        f"{cpus} CPUs with {format_bytes(memory)}"
        + (f" and {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "")
        for cpus, memory, gpus in sizes[:3]
        if cpus
    ]
    return ", ".join(texts) if texts else "none with a CPU"
