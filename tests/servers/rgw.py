"""A real S3 server on loopback, for tests: one monitor, one memory-backed OSD and one gateway of Ceph.

    python tests/servers/rgw.py start|stop|status [--port PORT] [--dir FOLDER]

`RgwServer` does the same as a context manager. Needs Debian's radosgw, ceph-mon, ceph-osd and ceph-common; no
systemd, no container, no particular user. A keeper process owns the daemons: it ends them and removes their
folder when its standard input closes, so also when whoever started it is killed, and the kernel ends them
when the keeper itself is killed. Ports are free ones and everything lies in one folder, so any number may run
side by side. Starting takes about 2 s. Memory is used only as objects are stored.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

__all__ = ["PACKAGES", "RgwError", "RgwServer", "missing_programs"]

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "shardkit-test", "shardkit-test-secret"
START_SECONDS = 60.0  # 2 s on an idle machine
_STEP_SECONDS = 30.0
_ATTEMPTS = 3  # another process may take a port between its choice and its use
_STORE_BYTES = 3 << 30  # the store calls itself full at 95 % of this
_LOG_LINES = 12  # of each daemon, shown when a start fails
_PR_SET_PDEATHSIG = 1
_STATE_NAME = "state.json"

# Cephx stays on: radosgw hangs without authentication. Intervals are short because one monitor agrees with
# itself. Bytes of replaced objects live on for a while, so that reads in progress end well.
_CONFIG = """\
[global]
fsid = {fsid}
mon_host = {monitor}
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {folder}/keyring
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
log_file = {folder}/$name.log
crash_dir = {folder}
debug_ms = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[mon]
mon_data = {folder}/mon
mon_data_avail_crit = 1
mon_data_avail_warn = 2
[osd]
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = {store_bytes}
[client.rgw]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_thread_pool_size = 64
rgw_enable_usage_log = false
rgw_enable_ops_log = false
rgw_gc_obj_min_wait = 20
rgw_gc_processor_period = 10
rgw_gc_processor_max_time = 10
rgw_dns_name = localhost
"""

_KEYRING = """\
[mon.]
key = {mon}
caps mon = "allow *"
[client.admin]
key = {admin}
caps mon = "allow *"
caps osd = "allow *"
[osd.0]
key = {osd}
caps mon = "allow profile osd"
caps osd = "allow *"
[client.rgw]
key = {rgw}
caps mon = "allow rw"
caps osd = "allow rwx"
"""


class RgwError(Exception):
    """The server could not be started or reached; the message has the ends of its logs."""


def missing_programs() -> list[str]:
    """The programs of Ceph that are not on this machine."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def new_key() -> str:
    """A cephx secret: type AES, time of creation, length, 16 random bytes."""
    return base64.b64encode(
        struct.pack("<HIIH", 1, int(time.time()), 0, 16) + secrets.token_bytes(16)
    ).decode()


def environment() -> dict[str, str]:
    """Ours without what would reach into Ceph's own Python or configuration."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CEPH"))}


class Daemons:
    """The processes of one server, in the process that owns them (the keeper)."""

    def __init__(self, folder: Path, port: int | None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl

    def start(self) -> None:
        """All of it, from nothing to a gateway that answers; RgwError, with nothing left running."""
        for name in ("mon", "osd", "rgw", "run"):
            (self.folder / name).mkdir(parents=True)
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        monitor = f"[v2:127.0.0.1:{free_port()}/0,v1:127.0.0.1:{free_port()}/0]"
        (self.folder / "ceph.conf").write_text(
            _CONFIG.format(
                fsid=fsid, monitor=monitor, folder=self.folder, port=self.port, store_bytes=_STORE_BYTES
            )
        )
        keyring = self.folder / "keyring"
        keyring.touch(mode=0o600)
        keyring.write_text(_KEYRING.format(mon=new_key(), admin=new_key(), osd=new_key(), rgw=new_key()))
        monmap = str(self.folder / "monmap")
        self._step("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, monmap)
        self._step("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", str(keyring))
        self._daemon("mon", "ceph-mon", "-i", "a")
        self._step("ceph", "--connect-timeout", "20", "osd", "new", osd_id)
        self._step("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        self._daemon("osd", "ceph-osd", "-i", "0")
        user = ("--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")
        self._step("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        self.start_gateway()

    def start_gateway(self) -> None:
        """A new gateway in place of the one before, whatever became of that one; returns once it answers."""
        old = self.processes.pop("rgw", None)
        if old is not None:
            old.kill()
            old.wait(_STEP_SECONDS)
        gateway = self._daemon("rgw", "radosgw", "-n", "client.rgw")
        deadline = time.monotonic() + _STEP_SECONDS
        while not answers(self.port):
            if gateway.poll() is not None or time.monotonic() > deadline:
                raise RgwError(f"radosgw does not answer at port {self.port}\n{self.logs()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End every process and remove the folder."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(_STEP_SECONDS)
        self.processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        """The last lines of what each program wrote."""
        ends = []
        for file in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
            lines = file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            ends.append("\n".join([f"{file.name}:", *lines]) if lines else f"{file.name}: empty")
        return "\n".join(ends)

    def _command(self, program: str, *arguments: str) -> list[str]:
        configuration = () if program == "monmaptool" else ("-c", str(self.folder / "ceph.conf"))
        return [program, *configuration, *arguments]

    def _step(self, program: str, *arguments: str) -> None:
        output = self.folder / f"{program}.out"
        try:
            with output.open("ab") as sink:
                subprocess.run(
                    self._command(program, *arguments), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                    env=environment(), check=True, timeout=_STEP_SECONDS, preexec_fn=self._die_with_us,
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise RgwError(f"{program} failed: {error}\n{self.logs()}") from error

    def _daemon(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as sink:
            process = subprocess.Popen(
                self._command(program, "-f", *arguments), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                env=environment(), preexec_fn=self._die_with_us,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def _die_with_us(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answers(port: int) -> bool:
    """Whether the gateway answers an anonymous listing of buckets."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def keep(folder: Path, port: int | None, stay: bool) -> None:
    """The keeper: start the daemons, report on standard output, do as standard input says until it ends.

    With `stay` until a signal instead. A line "gateway" asks for a new gateway in place of the present one.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    daemons = Daemons(folder, port)
    try:
        for attempt in range(_ATTEMPTS):
            try:
                daemons.start()
                break
            except RgwError:
                daemons.stop()
                if attempt == _ATTEMPTS - 1:
                    raise
                daemons = Daemons(folder, port)
        report(daemons)
        while stay:
            signal.pause()
        for line in sys.stdin:
            assert line == "gateway\n"
            daemons.start_gateway()
            report(daemons)
    except RgwError as error:
        say({"error": str(error)})
        raise SystemExit(1) from error
    finally:
        daemons.stop()


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def report(daemons: Daemons) -> None:
    pids = {name: process.pid for name, process in daemons.processes.items()}
    state = {"port": daemons.port, "pids": pids, "keeper": os.getpid()}
    (daemons.folder / _STATE_NAME).write_text(json.dumps(state))
    say(state)


class RgwServer:
    """A running server, as a context manager; `start` and `stop` do it by hand."""

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY
    region = "us-east-1"

    def __init__(self, *, port: int | None = None) -> None:
        self._wanted_port = port
        self._keeper: subprocess.Popen[str] | None = None
        self._state: dict[str, Any] = {}
        self._folder: Path | None = None

    @property
    def port(self) -> int:
        return int(self._state["port"])

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateway_pid(self) -> int:
        """Of radosgw, for tests that kill or stop it."""
        return int(self._state["pids"]["rgw"])

    def start(self) -> None:
        """RgwError if it does not answer within START_SECONDS."""
        if missing := missing_programs():
            raise RgwError(
                f"{', '.join(missing)} not found: apt-get install --no-install-recommends {PACKAGES}"
            )
        # A short path: names of Unix sockets end at 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="rgw-", dir="/tmp"))
        port = [] if self._wanted_port is None else ["--port", str(self._wanted_port)]
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, "keep", "--dir", str(self._folder), *port],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._receive()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it for certain; may be called again."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            with contextlib.suppress(OSError):
                keeper.stdin.close()
            try:
                keeper.wait(_STEP_SECONDS)
            except subprocess.TimeoutExpired:
                keeper.kill()  # and the kernel kills its daemons
                keeper.wait(_STEP_SECONDS)
            keeper.stdout.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def restart_gateway(self) -> None:
        """A new radosgw at the same port over the same objects; whatever the present one is doing."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("gateway\n")
        self._keeper.stdin.flush()
        self._receive()

    def signal_gateway(self, number: signal.Signals) -> None:
        """SIGKILL, SIGSTOP or SIGCONT to radosgw."""
        os.kill(self.gateway_pid, number)

    def _receive(self) -> None:
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], START_SECONDS)
        line = self._keeper.stdout.readline() if ready else ""
        if not line:
            raise RgwError(f"the server said nothing for {START_SECONDS:.0f} s, or its keeper died")
        answer = json.loads(line)
        if "error" in answer:
            raise RgwError(answer["error"])
        self._state = answer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def running_keeper(folder: Path) -> dict[str, Any] | None:
    """The state of the server that `start` left in `folder`, if its keeper lives."""
    try:
        state = json.loads((folder / _STATE_NAME).read_bytes())
        command = Path(f"/proc/{state['keeper']}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return state if str(folder).encode() in command and isinstance(state, dict) else None


def start_detached(folder: Path, port: int | None) -> None:
    """Leave a server running that outlives us, and say how to reach it."""
    if folder.exists():
        raise RgwError(f"{folder} exists already: stop the server in it, or remove it")
    output = folder.with_suffix(".out")
    output.parent.mkdir(parents=True, exist_ok=True)
    chosen = [] if port is None else ["--port", str(port)]
    with output.open("w") as sink:
        keeper = subprocess.Popen(
            [sys.executable, __file__, "keep", "--stay", "--dir", str(folder), *chosen],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not output.read_text().endswith("\n"):
        if time.monotonic() > deadline or keeper.poll() is not None:
            keeper.terminate()
            raise RgwError(f"the server did not start\n{output.read_text()}")
        time.sleep(0.05)
    state = running_keeper(folder)
    if state is None:
        raise RgwError(output.read_text())
    output.unlink()
    show(state)


def show(state: dict[str, Any]) -> None:
    """As lines that a shell may `export`."""
    sys.stdout.write(f"AWS_ENDPOINT_URL=http://127.0.0.1:{state['port']}\n")
    sys.stdout.write(f"AWS_ACCESS_KEY_ID={ACCESS_KEY}\nAWS_SECRET_ACCESS_KEY={SECRET_KEY}\n")
    sys.stdout.write(f"AWS_DEFAULT_REGION={RgwServer.region}\n")


def stop_detached(folder: Path) -> None:
    """Ends the server and waits until its folder is gone."""
    state = running_keeper(folder)
    if state is None:
        raise RgwError(f"no server runs in {folder}")
    os.kill(state["keeper"], signal.SIGTERM)
    deadline = time.monotonic() + _STEP_SECONDS
    while folder.exists():
        if time.monotonic() > deadline:
            raise RgwError(f"process {state['keeper']} does not end")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description="A real S3 server (Ceph RGW) on loopback, for tests.")
    parser.add_argument("verb", choices=["start", "stop", "status", "keep"], help="keep: stay in front")
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument(
        "--dir", type=Path, default=Path(f"/tmp/shardkit-rgw-{os.getuid()}"), help="default: %(default)s"
    )
    parser.add_argument("--stay", action="store_true", help="keep: until a signal, not the end of stdin")
    options = parser.parse_args()
    folder = options.dir.absolute()
    try:
        match options.verb:
            case "keep":
                keep(folder, options.port, options.stay)
            case "start":
                start_detached(folder, options.port)
            case "stop":
                stop_detached(folder)
            case "status":
                state = running_keeper(folder)
                if state is None:
                    raise RgwError(f"no server runs in {folder}")
                show(state)
    except RgwError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
