"""A Ray cluster of several nodes on this machine, some of which are killed.

    with RayCluster(nodes=2) as cluster:
        build(recipe, engine="ray", ray_address=cluster.address)
        cluster.kill(0)

The head runs no tasks: drivers attach to it. Nodes die as machines do: all their processes get SIGKILL.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

__all__ = ["NODE_MEMORY", "RAY_ENVIRONMENT", "RayCluster", "can_hide_folders"]

# Read by Ray as it is imported and by each of its processes. Dead nodes are noticed within a second or two.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else each start writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # what others do on this machine ends no test's task
}
NODE_MEMORY = 4_000_000_000  # what Ray counts with; nothing reserves it
_STORE_BYTES = 80_000_000
_HEAD: dict[str, Any] = {
    "num_cpus": 0,
    "memory": 1,
    "object_store_memory": _STORE_BYTES,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
_START_SECONDS = 120.0


class RayCluster:
    """From `with` to its end: a head, and `nodes` nodes; Ray believes that each has `cpus` and `gpus`."""

    def __init__(self, nodes: int = 2, cpus: int = 1, gpus: int = 0) -> None:
        self._count, self._cpus, self._gpus = nodes, cpus, gpus
        self._patch = pytest.MonkeyPatch()
        self._raylets: list[psutil.Process] = []
        self._machines: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for name, value in RAY_ENVIRONMENT.items():
            self._patch.setenv(name, value)
        for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
            self._patch.delenv(name, raising=False)
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=_HEAD)
        try:
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()
        for number in range(len(self._raylets)):
            self.kill(number)
        for machine in self._machines:
            machine.kill()
            machine.wait()
        with suppress(Exception):
            self._cluster.shutdown()
        self._patch.undo()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> int:
        """The number of a new node."""
        node = self._cluster.add_node(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            memory=NODE_MEMORY,
            object_store_memory=_STORE_BYTES,
        )
        self._raylets.append(psutil.Process(node.all_processes["raylet"][0].process.pid))
        return len(self._raylets) - 1

    def add_machine(self, hidden: Path) -> int:
        """The number of a new node that has an empty folder of its own at `hidden`: another machine."""
        ray = Path(sys.executable).with_name("ray")
        start = f"{ray} start --address={self.address} --num-cpus={self._cpus} --memory={NODE_MEMORY}"
        start += f" --object-store-memory={_STORE_BYTES} --block"
        before = {node["NodeID"] for node in self._living()}
        machine = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"mount -t tmpfs tmpfs {hidden} && exec {start}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._machines.append(machine)
        deadline = time.monotonic() + _START_SECONDS
        while not {node["NodeID"] for node in self._living()} - before:
            assert time.monotonic() < deadline
            assert machine.poll() is None
            time.sleep(0.1)
        children = psutil.Process(machine.pid).children(recursive=True)
        [raylet] = [child for child in children if child.name() == "raylet"]
        self._raylets.append(raylet)
        return len(self._raylets) - 1

    def _living(self) -> list[dict[str, Any]]:
        return [node for node in self._cluster.global_state.node_table() if node["Alive"]]

    def running(self, number: int, task: str) -> list[int]:
        """Processes of a node that are at a task whose name begins with `task`."""
        with suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in self._raylets[number].children()
                if any(part.startswith(f"ray::{task}") for part in child.cmdline())
            ]
        return []

    def kill_head(self) -> None:
        """SIGKILL all that runs on the head; the cluster is of no use any more."""
        for processes in self._cluster.head_node.all_processes.values():
            for info in processes:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(info.process.pid).kill()

    def suspend(self, number: int) -> None:
        """Stop all that runs on a node: it answers nothing, and its connections stay open."""
        for process in [*self._raylets[number].children(recursive=True), self._raylets[number]]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def kill(self, number: int) -> None:
        """SIGKILL all that runs on a node."""
        with suppress(psutil.NoSuchProcess):
            raylet = self._raylets[number]
            for process in [raylet, *raylet.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        # Ray's own record of its processes, so that a later end of the cluster does not trip over it.
        for node in list(self._cluster.worker_nodes):
            if node.all_processes["raylet"][0].process.pid == self._raylets[number].pid:
                self._cluster.remove_node(node, allow_graceful=False)


def can_hide_folders() -> bool:
    """Whether this user may start processes that see other file systems (`add_machine`)."""
    if not shutil.which("unshare"):
        return False
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0
