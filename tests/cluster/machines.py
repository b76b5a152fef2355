"""The machines of the lab: network namespaces of this one, or rented ones that ssh reaches.

A machine runs commands, loses power, loses its link, and gets a slower one. `NamespaceMachine` has network,
processes, host name and an NVMe folder of its own. All of them live in the namespaces of one process
(`in_a_room`), so the kernel ends every process, interface and mount when that process ends, however it ends.
`SshMachine` does the same on a rented machine, as root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "NVME",
    "LabError",
    "Machine",
    "NamespaceMachine",
    "SshMachine",
    "in_a_room",
    "make_bridge",
    "serve_ssh",
    "why_not",
]

NVME = "/mnt/nvme"  # where each namespace has its own folder
CONTROLLER = "10.77.0.1"  # the lab's own address on the bridge of namespaces
STEP_SECONDS = 60.0
_NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")
_ROOM = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
_TOKEN = "SHARDKIT_LAB"  # in the environment of all that the lab starts: `kill` finds it by that
_KILL = f"""for at in /proc/[0-9]*; do
  tr '\\0' '\\n' 2> /dev/null < $at/environ | grep -q '^{_TOKEN}=' && kill -KILL ${{at#/proc/}}
done; true"""
_END = 'until [ -s "$0" ]; do sleep 0.1; done; kill -KILL -- "-$(cat "$0")" || true'
# Notes the number of a process, which leads a group of its own, and becomes the command.
_NOTED = 'mkdir -p "${0%/*}"; echo $$ > "$0"; exec "$@"'


def why_not() -> str:
    """Return what keeps this machine from having namespaces of its own, or ""."""
    if missing := [name for name in ("unshare", "nsenter", "setpriv", "ip", "tc") if not shutil.which(name)]:
        return f"no {', '.join(missing)} on this machine"
    probe = [*_ROOM, "sh", "-c", "mount -t tmpfs tmpfs /mnt && ip link add br0 type bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


def in_a_room(command: Sequence[str]) -> list[str]:
    """Return the command as one whose processes, interfaces and mounts all end with it or with its caller."""
    return ["setpriv", "--pdeathsig", "KILL", *_ROOM, *command]


def make_bridge() -> None:
    """In a room: make the switch that machines are plugged into, and their host names."""
    for command in (
        "ip link set lo up",
        "ip link add br0 type bridge",
        f"ip addr add {CONTROLLER}/24 dev br0",
        "ip link set br0 up",
        "mount -t tmpfs tmpfs /mnt",
        f"mkdir {NVME}",
    ):
        subprocess.run(shlex.split(command), check=True)
    hosts = [
        f"{_address(number)} {name}"
        for number, name in enumerate(["store", *map("m{}".format, range(1, 65))])
    ]
    Path("/mnt/hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    subprocess.run(["mount", "--bind", "/mnt/hosts", "/etc/hosts"], check=True)


def _address(number: int) -> str:
    return f"10.77.0.{10 + number}"


class LabError(Exception):
    """Something did not happen within its time, or a command failed; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Running:
    """A command that was started on a machine, and the file that has what it prints."""

    process: subprocess.Popen[bytes]
    log: Path
    pid_file: str

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Machine(ABC):
    """A computer with an address and a folder on its own disk (`nvme`)."""

    def __init__(self, name: str, address: str, nvme: str, logs: Path, mbit: float) -> None:
        self.name, self.address, self.nvme, self.mbit = name, address, nvme, mbit
        self._logs, self._count, self.is_gone, self.device = logs, 0, False, "eth0"

    @abstractmethod
    def _reach(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on the machine."""

    @abstractmethod
    def boot(self) -> None:
        """Start a machine that is gone, without any process of the lab, and with its link up."""

    @abstractmethod
    def kill(self) -> None:
        """Cut the link and SIGKILL all that runs there, as a loss of power does."""

    @abstractmethod
    def link(self, up: bool) -> None:
        """Connect the machine with the others, or let what it sends and what is sent to it vanish."""

    @abstractmethod
    def rate(self, mbit: float) -> None:
        """Limit the link to so many Mbit/s."""

    @abstractmethod
    def leave(self) -> None:
        """End all that the lab has started there, and undo what it has changed."""

    @abstractmethod
    def moved(self) -> tuple[int, int]:
        """Return the bytes that its interface has received and sent since the machine was first booted."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Start a command there; its processes are a group of their own."""
        self._count += 1
        pid_file = f"{self.nvme}/run/{self._count}.pid"
        log = self._logs / f"{self.name}-{self._count}.log"
        settings = [f"{name}={value}" for name, value in {**environment, _TOKEN: str(self._logs)}.items()]
        whole = ["env", *settings, "setsid", "--wait", "sh", "-c", _NOTED, pid_file, *command]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                self._reach(whole), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
        return Running(process, log, pid_file)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a short command there and return what it prints; LabError if it fails."""
        settings = [f"{name}={value}" for name, value in (environment or {}).items()]
        settings += [f"{_TOKEN}={self._logs}"] if environment else []  # daemons may start what it asks for
        whole = self._reach(["env", *settings, *command])
        done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=STEP_SECONDS)
        if done.returncode:
            raise LabError(f"{self.name}: {shlex.join(command)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def put(self, path: str, data: bytes) -> None:
        """Write a file there."""
        subprocess.run(
            self._reach(["sh", "-c", 'cat > "$0"', path]), input=data, check=True, timeout=STEP_SECONDS
        )

    def end_all(self) -> None:
        """SIGKILL all that the lab has started there; its link stays up."""
        self.run(["sh", "-c", _KILL])

    def end(self, running: Running) -> None:
        """SIGKILL a command that was started there, with its group."""
        if running.code is None:
            self.run(["sh", "-c", _END, running.pid_file])
            running.process.wait(STEP_SECONDS)


def _shape(device: str, mbit: float) -> list[str]:
    """Return the command that limits what an interface sends; a tenth of a second may wait in its queue."""
    burst = max(16_000, int(mbit * 1e6 / 8 / 100))
    return shlex.split(
        f"tc qdisc replace dev {device} root tbf rate {int(mbit * 1e6)}bit burst {burst}b latency 100ms"
    )


def _counters(table: str, device: str) -> tuple[int, int]:
    """Return the bytes that an interface has received and sent, from /proc/net/dev."""
    [words] = [
        line.split() for line in table.replace(":", ": ").splitlines() if line.split()[0] == f"{device}:"
    ]
    return int(words[1]), int(words[9])


class NamespaceMachine(Machine):
    """Namespaces of this machine, plugged into `make_bridge`'s switch; they end with whoever made them."""

    def __init__(self, name: str, number: int, folder: Path, logs: Path, mbit: float) -> None:
        super().__init__(name, _address(number), NVME, logs, mbit)
        self._folder, self._port = folder / name, f"to-{name}"
        needed = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2], folder}
        self._shown = [place for place in needed if place.is_relative_to("/tmp")]
        self._before = (0, 0)
        self._init: subprocess.Popen[bytes] | None = None
        self._folder.mkdir(parents=True)
        self.boot()

    def _reach(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", self._child(), "--all", "--", *command]

    def boot(self) -> None:
        assert self._init is None
        tmp = self._folder / "tmp"
        steps = [f"mkdir -p {tmp}", f"mount --bind {self._folder} {NVME}"]
        for place in self._shown:  # what is needed of the /tmp that its own hides
            below = tmp / place.relative_to("/tmp")
            steps += [f"mkdir -p {below}", f"mount --bind {place} {below}"]
        steps += [f"mount --rbind {tmp} /tmp", f"hostname {self.name}", "ip link set lo up", "echo"]
        program = f"{' && '.join(steps)}; sleep infinity & while :; do wait; done"
        self._init = subprocess.Popen(
            [*_ROOM, "bash", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare would tell of a signal that it cannot repeat
            start_new_session=True,
        )
        assert self._init.stdout is not None
        self._init.stdout.readline()
        pid = self._child()
        for command in (
            f"ip link add {self._port} type veth peer name eth0 netns {pid}",
            f"ip link set {self._port} master br0",
        ):
            subprocess.run(shlex.split(command), check=True)
        self.run(["ip", "addr", "add", f"{self.address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])
        self.run(["ip", "route", "add", "default", "via", CONTROLLER])  # Ray asks which address leads out
        self.rate(self.mbit)
        self.link(True)
        self.is_gone = False

    def leave(self) -> None:
        if not self.is_gone:
            self.kill()

    def _child(self) -> str:
        """Return the number of the process that is 1 there."""
        assert self._init is not None, f"{self.name} is gone"
        pid = self._init.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]

    def kill(self) -> None:
        assert self._init is not None
        self.link(False)
        self._before = self.moved()
        os.kill(int(self._child()), signal.SIGKILL)  # and with it all others
        self._init.wait(STEP_SECONDS)
        self._init, self.is_gone = None, True
        # Of itself it would go with the last socket, which still tries to reach the other end for minutes.
        # Or at once: then there is nothing to delete.
        subprocess.run(["ip", "link", "delete", self._port], check=False, stderr=subprocess.DEVNULL)

    def link(self, up: bool) -> None:
        subprocess.run(["ip", "link", "set", self._port, "up" if up else "down"], check=True)

    def rate(self, mbit: float) -> None:
        subprocess.run(_shape(self._port, mbit), check=True)
        self.run(_shape("eth0", mbit))

    def moved(self) -> tuple[int, int]:
        sent, received = 0, 0
        if self._init is not None:  # what the switch's end has sent, the machine has received
            sent, received = _counters(Path("/proc/net/dev").read_text(), self._port)
        return self._before[0] + received, self._before[1] + sent


def serve_ssh(machines: Sequence[NamespaceMachine], folder: Path) -> list[str]:
    """Start sshd on namespaces and return the command that reaches them with a key made for them."""
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = [
        f"HostKey={key}",
        f"AuthorizedKeysFile={key}.pub",
        "StrictModes=no",
        "UsePAM=no",
        "PidFile=none",
    ]
    options = [part for setting in settings for part in ("-o", setting)]
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    for machine in machines:
        machine.start(["env", f"--unset={_TOKEN}", program, "-D", "-e", *options], {})
    quiet = [part for name in ("StrictHostKeyChecking=no", "LogLevel=ERROR") for part in ("-o", name)]
    known = ["-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectionAttempts=10"]
    return ["ssh", "-l", "root", "-i", str(key), *quiet, *known]


_WAYS = ("INPUT --source", "OUTPUT --destination")


class SshMachine(Machine):
    """A machine of somebody else, on which ssh makes us root; `peers` are the addresses of the others."""

    def __init__(
        self, name: str, address: str, nvme: str, logs: Path, mbit: float, ssh: Sequence[str]
    ) -> None:
        super().__init__(name, address, nvme, logs, mbit)
        self._ssh, self.peers = [*ssh, address], list[str]()
        self.device = self.run(["ip", "-o", "addr", "show", "to", address]).split()[1]
        self._start = (0, 0)
        self._start = self.moved()

    def _reach(self, command: Sequence[str]) -> list[str]:
        return [*self._ssh, shlex.join(command)]

    def boot(self) -> None:
        self.link(True)
        self.is_gone = False

    def kill(self) -> None:
        self.link(False)
        self.end_all()
        self.is_gone = True

    def link(self, up: bool) -> None:
        """Drop packets from and to the other machines; ssh from elsewhere goes on."""
        rules = [f"{way} {peer} --jump DROP" for peer in self.peers for way in _WAYS]
        remove = [f"while iptables --delete {rule} 2> /dev/null; do :; done" for rule in rules]
        add = [] if up else [f"iptables --insert {rule} || exit" for rule in rules]
        self.run(["sh", "-c", "\n".join([*remove, *add])])

    def rate(self, mbit: float) -> None:
        """Limit what it sends; what it receives is limited at its senders."""
        self.run(_shape(self.device, mbit))

    def leave(self) -> None:
        self.end_all()
        self.link(True)
        self.run(["sh", "-c", 'tc qdisc del dev "$0" root || true', self.device])

    def moved(self) -> tuple[int, int]:
        received, sent = _counters(self.run(["cat", "/proc/net/dev"]), self.device)
        return received - self._start[0], sent - self._start[1]
