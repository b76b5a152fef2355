"""A Slurm cluster on this machine, for tests: slurmctld, and nodes that are slurmd processes on loopback.

    with SlurmCluster(nodes=4, cpus=1) as cluster:
        job = cluster.submit("--nodes=4", "job.sbatch")
        assert cluster.wait(job, 120) == "COMPLETED"

tests/servers/install_slurm.sh installs what it needs; slurmd starts jobs as root only. A job of the partition
"high" preempts those of "low", which are requeued. A keeper process owns the daemons: it ends them, with all
jobs, and removes their folder when its standard input closes, so also when whoever started it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from servers.ceph import free_port

__all__ = ["CONFIG", "INSTALL", "SlurmCluster", "SlurmError", "why_not"]

INSTALL = "bash tests/servers/install_slurm.sh installs it (Debian)"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
START_SECONDS = 60.0  # 3 s on an idle machine
STEP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_LOG_LINES = 12
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")

# Memory and CPUs are what the file says, whatever this machine has. A requeued job may start again once
# credentials of its first run have expired, which takes two minutes by default.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=10
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 State=UP
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={mib}"


class SlurmError(Exception):
    """The cluster could not be started, or a command of it failed; the message has the ends of its logs."""


def why_not() -> str:
    """What keeps this machine from running a cluster, or ""."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no {', '.join(missing)} on this machine: {INSTALL}"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


class _Daemons:
    """The processes of a cluster, in the process that owns them (the keeper)."""

    def __init__(self, folder: Path, nodes: int, cpus: int, mib: int) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        self.names = [f"n{number + 1}" for number in range(nodes)]
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        host = socket.gethostname().partition(".")[0]
        lines = [
            _NODE.format(name=name, host=host, port=free_port(), cpus=cpus, mib=mib) for name in self.names
        ]
        text = CONFIG.format(
            host=host, address="127.0.0.1", port=free_port(), folder=folder, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self) -> None:
        """Start all of them, and wait until every node is idle; SlurmError."""
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        munge = [f"--{option}={self.folder}/munge.{option.removesuffix('-file')}" for option in files]
        self._start("munged", "--foreground", "--force", "--num-threads=2", *munge)
        _wait_for((self.folder / "munge.socket").exists, STEP_SECONDS, self.logs)
        self._start("slurmctld", "-D", "-c")
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir()
            self.start_node(name)

        def is_idle() -> bool:
            command = ["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"]
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            return found.split() == [word for name in self.names for word in (name, "idle")]

        _wait_for(is_idle, START_SECONDS, self.logs)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", name, name=name)

    def _start(self, *command: str, name: str = "") -> None:
        def die_with_us() -> None:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

        output = (self.folder / f"{name or command[0]}.out").open("wb")
        self.processes[name or command[0]] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_us,
        )

    def stop(self) -> None:
        """End every process, those of jobs too, and remove the folder."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(STEP_SECONDS)
        while left := _processes_of(self.folder / "slurm.conf"):  # a step may start a process meanwhile
            _kill(left)
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """The last lines of what each daemon wrote."""
        ends = []
        for file in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
            ends += [f"{file.name}:", *file.read_text(errors="replace").splitlines()[-_LOG_LINES:]]
        return "\n".join(ends)


def _wait_for(condition: Callable[[], bool], seconds: float, logs: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SlurmError(f"the cluster did not start within {seconds:.0f} s\n{logs()}")
        time.sleep(0.1)


def _processes_of(config: Path, node: str | None = None) -> list[psutil.Process]:
    """All processes of the cluster with this configuration; with `node`, those of jobs there."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if process.pid == os.getpid() or environment.get("SLURM_CONF") != str(config):
                continue
            if node is None or environment.get("SLURMD_NODENAME") == node:
                found[process.pid] = process
                if (parent := process.parent()) is not None and parent.name().startswith("slurmstepd"):
                    found[parent.pid] = parent
    return list(found.values())


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, STEP_SECONDS)


class SlurmCluster:
    """A running cluster of the nodes n1, n2, …, as a context manager."""

    def __init__(self, *, nodes: int = 4, cpus: int = 1, mib: int = 4000) -> None:
        self._arguments = [str(number) for number in (nodes, cpus, mib)]
        self._pids: dict[str, int] = {}

    def __enter__(self) -> Self:
        if problem := why_not():
            raise SlurmError(problem)
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # names of sockets are short
        self._config = self._folder / "slurm.conf"
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(self._folder), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._ask()
        except SlurmError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(2 * STEP_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which Slurm's commands find the cluster."""
        return {"SLURM_CONF": str(self._config)}

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """What a command of Slurm prints; SlurmError."""
        settings = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        done = subprocess.run(
            command,
            env=settings | environment | self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=STEP_SECONDS,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
        """Hand a batch job in; its number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment)

    def show(self, job: str, fact: str) -> str:
        """What Slurm says of a job, such as its `Restarts`."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return next(word for word in words if word.startswith(f"{fact}=")).partition("=")[2]

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.show(job, "JobState")

    def wait(self, job: str, seconds: float) -> str:
        """The state in which a job ended, or that it is still in after so long."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) in _RUNNING and time.monotonic() < deadline:
            time.sleep(0.5)
        return state

    def kill_node(self, name: str) -> None:
        """SIGKILL the daemon of a node and all that runs there, as if the machine had lost its power."""
        _kill([psutil.Process(self._pids[name]), *_processes_of(self._config, name)])

    def start_node(self, name: str) -> None:
        """Start the daemon of a node that was killed, and wait until jobs may run there."""
        self._ask(name)
        sinfo = ("sinfo", "-h", "-n", name, "-p", "low", "-o", "%T")
        _wait_for(lambda: self.run(*sinfo) == "idle", START_SECONDS)

    def _ask(self, word: str = "") -> None:
        """Have the keeper start what a word names, and note the processes that it reports."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        if word:
            self._keeper.stdin.write(f"{word}\n")
            self._keeper.stdin.flush()
        ready = wait([self._keeper.stdout.fileno()], 2 * START_SECONDS)
        answer = json.loads(self._keeper.stdout.readline() or "{}") if ready else {}
        if "pids" not in answer:
            raise SlurmError(answer.get("error", "the keeper of the cluster does not answer"))
        self._pids = answer["pids"]


def keep(folder: Path, nodes: int, cpus: int, mib: int) -> int:
    """The keeper: start the daemons, then again those that lines of standard input name, until that ends."""
    daemons = _Daemons(folder, nodes, cpus, mib)
    try:
        daemons.start()
        _report(daemons)
        for line in sys.stdin:
            daemons.start_node(line.strip())
            _report(daemons)
    except (SlurmError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201
    finally:
        daemons.stop()
    return 0


def _report(daemons: _Daemons) -> None:
    pids = {name: process.pid for name, process in daemons.processes.items()}
    print(json.dumps({"pids": pids}), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), *map(int, sys.argv[2:])))
