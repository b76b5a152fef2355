"""What runs on the machines of the lab: the store, Ray, Slurm; and what is measured of them.

The first machine is the head: it runs Ray's head and the command of a build, as the first node of a Slurm job
does. The store is a machine of its own, whose link is as wide as those of all others together.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.machines import LabError, Machine, Running
from servers.bucket import s3_client
from servers.ceph import ACCESS_KEY, SECRET_KEY
from shardkit.kernels.numba_support import kernel_cache
from support.ray_cluster import RAY_ENVIRONMENT

__all__ = ["Lab", "LabError", "Moved"]

RAY_PORT, STORE_PORT, GATEWAY_PORT = 6379, 8000, 7480
START_SECONDS = 600.0  # Ray on eight nodes takes a minute on two idle cores
_RAY_MEMORY = 2_000_000_000
# A machine counts as dead after 30 s without an answer: eight of them share two cores.
_RAY = RAY_ENVIRONMENT | {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_worker_niceness": "0",
}
_KEPT = ("PATH", "HOME", "LANG", "RES_OPTIONS")


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes on the interfaces of the machines while a case ran."""

    received: tuple[int, ...]  # of each machine
    sent: tuple[int, ...]
    store: int  # received and sent

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.received, self.sent, strict=True)))

    def link_seconds(self, mbit: float) -> float:
        """Return how long the link of the busiest machine takes for its bytes alone."""
        return max(*self.received, *self.sent) * 8e-6 / mbit

    @property
    def between(self) -> int:
        """Bytes that went from one machine to another: each is counted at two interfaces."""
        return max(0, sum(self.nodes) - self.store) // 2

    @property
    def between_share(self) -> float:
        return self.between / max(1, self.between + self.store)


@dataclass
class Lab:
    """Machines, the folder that holds what the lab itself writes, and what runs on the machines."""

    machines: list[Machine]
    folder: Path
    store: Machine | None = None  # None: `endpoint` is a store that exists
    endpoint: str = ""
    bucket: str = "lab"
    python: str = sys.executable  # on the machines, as is `checkout`
    checkout: Path = Path(__file__).resolve().parents[2]
    delay: float = 0.0
    rows: dict[int, str] = field(default_factory=dict)  # of each step of an undisturbed training run
    _ray: dict[str, Running] = field(default_factory=dict)
    _client: Any = None

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def ray_runs(self) -> bool:
        return bool(self._ray)

    @property
    def address(self) -> str:
        return f"{self.head.address}:{RAY_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of all programs on the machines."""
        nvme = self.head.nvme
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        secrets = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        if self.store is None:
            secrets = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        return {
            **kept, **secrets, **_RAY, **kernel_cache(),
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.checkout}:{self.checkout}/tests",
            "SHARDKIT_FACTS_DIR": f"{nvme}/facts",
            "TMPDIR": f"{nvme}/tmp",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start_store(self) -> None:
        """Start Ceph's gateway on the store's machine, behind a relay that takes `delay`; make a bucket."""
        if self.store is not None:
            program, place = f"{self.checkout}/tests/servers/rgw.py", f"{self.store.nvme}/rgw"
            keep = [self.python, program, "keep", "--stay", "--dir", place, "--port", str(GATEWAY_PORT)]
            kept = self.store.start(keep, self.environment)
            self.wait_for(kept, '"port"')
            relay = [self.python, f"{self.checkout}/tests/cluster/relay.py", "--delay", str(self.delay)]
            ends = ["--listen", f"{self.store.address}:{STORE_PORT}", "--to", f"127.0.0.1:{GATEWAY_PORT}"]
            self.store.start([*relay, *ends], self.environment)
            self.endpoint = f"http://{self.store.address}:{STORE_PORT}"
        os.environ.update({name: value for name, value in self.environment.items() if "AWS" in name})
        self._client = s3_client(self.endpoint)
        within(START_SECONDS, "the store answers", self._answers)
        if self.store is not None:
            self._client.create_bucket(Bucket=self.bucket)

    def _answers(self) -> bool:
        try:
            self._client.list_buckets()
        except Exception:  # whatever a store that starts does
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return {name: bytes} of every object below a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{prefix}/"
        )
        listed = (entry for page in pages for entry in page.get("Contents", []))
        return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in listed}

    def tree(self, prefix: str) -> dict[str, str]:
        """Return {name: SHA-256} of every object below a prefix."""
        found = {}
        for name in self.sizes(prefix):
            body = self._client.get_object(Bucket=self.bucket, Key=f"{prefix}/{name}")["Body"].read()
            found[name] = hashlib.sha256(body).hexdigest()
        return found

    def start_ray(self, nodes: int | None = None) -> None:
        """Start Ray's head on the first machine, and a node on each other (of the first `nodes`)."""
        machines = self.machines[: nodes or len(self.machines)]
        head = ["ray", "start", "--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        self._ray = {self.head.name: self._start_ray_on(self.head, head)}
        self.wait_for(self._ray[self.head.name], "Ray runtime started")
        for machine in machines[1:]:
            self.join_ray(machine)
            self.wait_for_nodes()  # one after the other: Ray gives up where a start takes too long

    def wait_for_nodes(self) -> None:
        """Wait until Ray runs on all machines where it was started."""
        for node in self._ray.values():
            self.wait_for(node, "Ray runtime started")

    def join_ray(self, machine: Machine, clock: str | None = None) -> None:
        """Start a node of Ray, again whenever it ends; `clock`: how far its clock is off, such as "+10m"."""
        again = ["bash", "-c", 'until "$@"; do sleep 2; done', "-"]
        join = [*again, "ray", "start", f"--address={self.address}"]
        self._ray[machine.name] = self._start_ray_on(machine, join, clock)

    def _start_ray_on(self, machine: Machine, command: Sequence[str], clock: str | None = None) -> Running:
        options = ["--block", "--num-cpus=1", f"--memory={_RAY_MEMORY}", "--object-store-memory=80000000"]
        place = [f"--node-ip-address={machine.address}", f"--temp-dir={machine.nvme}/ray"]
        environment = self.environment | ({} if clock is None else off_clock(clock))
        return machine.start([*command, *options, *place], environment)

    def end_ray(self) -> None:
        """End Ray on all machines."""
        for machine in self.machines:
            if not machine.is_gone:
                machine.end_all()
        self._ray = {}

    def leave(self) -> None:
        """End all that was started, and leave links as they were."""
        for machine in [*self.machines, *([self.store] if self.store else [])]:
            machine.leave()

    def mend(self) -> None:
        """Boot what is gone, connect what is cut off, and have all machines join Ray again if it runs."""
        for machine in [*self.machines, *([self.store] if self.store else [])]:
            if machine.is_gone:
                machine.boot()
            machine.link(True)
            machine.rate(machine.mbit)
        if self._ray and self._ray[self.head.name].code is not None:
            self.end_ray()
            self.start_ray()
        for machine in self.machines:
            if machine.name in self._ray and self._ray[machine.name].code is not None:
                self.join_ray(machine)
        self.wait_for_nodes()

    def build(self, recipe: str, output: str, *, ray: bool = True) -> Running:
        """Start the command of a build on the head, with or without Ray."""
        engine = ["--engine", "ray", "--ray-address", self.address] if ray else ["--workers", "1"]
        command = [self.python, "-m", "shardkit", "build", recipe, *self.places(output), *engine]
        return self.head.start(command, self.environment)

    def places(self, output: str) -> list[str]:
        """Return the arguments of a build that say where its output, work folder and scratch are."""
        places = {"work": f"s3://{self.bucket}/work/{output}", "scratch": f"{self.head.nvme}/scratch"}
        keys = [part for name, place in places.items() for part in ("--set", f"{name}={place}")]
        return ["--output", f"s3://{self.bucket}/{output}", *keys]

    def wait_for(self, running: Running, text: str, seconds: float = START_SECONDS) -> None:
        """Wait until a command has printed a text; LabError if it ends before, or does not in time."""

        def has_printed() -> bool:
            if text in running.text():
                return True
            if running.code is not None:
                raise LabError(f"ended with {running.code} before it printed {text!r}: {end_of(running)}")
            return False

        within(seconds, f"{text!r} in {running.log}", has_printed)

    def finish(self, running: Running, seconds: float) -> int:
        """Wait until a command ends and return its exit status; LabError if it takes longer."""
        within(seconds, f"the end of {running.log}: {end_of(running)}", lambda: running.code is not None)
        assert running.code is not None
        return running.code

    def meter(self) -> Callable[[], Moved]:
        """Return a function that returns what has moved since now."""
        machines = [*self.machines, *([self.store] if self.store else [])]
        before = [machine.moved() for machine in machines]

        def moved() -> Moved:
            now = [machine.moved() for machine in machines]
            received, sent = (
                tuple(end[way] - start[way] for start, end in zip(before, now, strict=True)) for way in (0, 1)
            )
            count = len(self.machines)
            store = received[-1] + sent[-1] if self.store else sum(received) + sum(sent)
            return Moved(received[:count], sent[:count], store)

        return moved


def off_clock(offset: str) -> dict[str, str]:
    """Return the environment of a process whose clock of the day is off by so much."""
    found = faketime_library()
    assert found is not None
    # Monotonic clocks are shifted as well: left alone, libfaketime 0.9.10 has Python's time.sleep fail.
    return {"LD_PRELOAD": found, "FAKETIME": offset}


def faketime_library() -> str | None:
    """Return the library that shifts a process's clock, if Debian's package libfaketime is installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return str(found[0]) if found else None


def end_of(running: Running, lines: int = 12) -> str:
    return "\n".join(running.text().splitlines()[-lines:])


def within(seconds: float, what: str, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; LabError if that takes longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)
