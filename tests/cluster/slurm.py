"""Slurm on the machines of a lab: slurmctld on the head, and a slurmd on each machine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from cluster.lab import Lab, within
from cluster.machines import LabError, Machine
from servers.slurm import CONFIG

__all__ = ["LabSlurm"]

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
START_SECONDS = 90.0


class LabSlurm:
    """A running Slurm, configured on each machine; it ends with the machines' processes."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._place = lab, f"{lab.head.nvme}/slurm"
        self._config, self._key = f"{self._place}/slurm.conf", secrets.token_bytes(128)
        nodes = [
            f"NodeName={machine.name} NodeAddr={machine.address} Port=6818 CPUs=1 RealMemory=4000"
            for machine in lab.machines
        ]
        head = {"host": lab.head.name, "address": lab.head.address, "port": 6817}
        self._text = CONFIG.format(**head, folder=self._place, nodes="\n".join(nodes))
        self.environment = lab.environment | {"SLURM_CONF": self._config}
        for machine in lab.machines:
            self.start_node(machine)
        within(START_SECONDS, "all nodes of Slurm are idle", self._is_idle)

    def start_node(self, machine: Machine) -> None:
        """Start Slurm's daemons on a machine, with a state of its own."""
        machine.run(["rm", "-rf", self._place])
        machine.run(["mkdir", "-p", f"{self._place}/spool-{machine.name}", f"{self._place}/state"])
        machine.put(self._config, self._text.encode())
        machine.put(f"{self._place}/munge.key", self._key)
        machine.run(["chmod", "600", f"{self._place}/munge.key"])
        names = ("socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self._place}/munge.{name.removesuffix('-file')}" for name in names]
        munge = ["munged", "--foreground", "--force", f"--key-file={self._place}/munge.key", *files]
        machine.start(munge, self.environment)
        socket = f"{self._place}/munge.socket"
        machine.run(["sh", "-c", 'until [ -S "$0" ]; do sleep 0.1; done', socket])
        if machine is self._lab.head:
            machine.start(["slurmctld", "-D", "-c"], self.environment)
        machine.start(["slurmd", "-D", "-N", machine.name], self.environment)

    def _is_idle(self) -> bool:
        try:
            states = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()
        except LabError:  # slurmctld is not there yet
            return False
        return states == ["idle"] * len(self._lab.machines)

    def run(self, *command: str) -> str:
        """Return what a command of Slurm prints on the head."""
        return self._lab.head.run(command, self.environment).strip()

    def submit(self, arguments: Sequence[str]) -> str:
        """Hand a batch job in, which writes into the head's folder; return its number."""
        return self.run("sbatch", "--parsable", f"--chdir={self._lab.head.nvme}", *arguments)

    def log(self, job: str) -> str:
        file = f"{self._lab.head.nvme}/shardkit-{job}.log"
        return self._lab.head.run(["sh", "-c", 'cat "$0" 2> /dev/null || true', file])

    def wait(self, job: str, seconds: float) -> str:
        """Return the state in which a job ended, or in which it still is after so long."""
        deadline = time.monotonic() + seconds
        while (state := self._state(job)) not in _ENDED and time.monotonic() < deadline:
            time.sleep(1.0)
        return state

    def _state(self, job: str) -> str:
        facts = self.run("scontrol", "show", "job", "-o", job).split()
        return next(fact for fact in facts if fact.startswith("JobState=")).partition("=")[2]
