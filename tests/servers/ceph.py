"""The daemons of a small Ceph on loopback: one monitor, one OSD that keeps objects in memory, one S3 gateway.

Whoever calls owns them: the kernel ends them when that process (its thread that called) ends. They need no
systemd and no particular user; ports are free ones, and everything lies in one folder. Memory is used only as
objects are stored.
"""

from __future__ import annotations

import base64
import ctypes
import http.client
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["ACCESS_KEY", "KMS_KEY", "PROGRAMS", "SECRET_KEY", "STEP_SECONDS", "Daemons", "RgwError"]

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "shardkit-test", "shardkit-test-secret"
KMS_KEY = "key-of-tests"
STEP_SECONDS = 30.0  # for one program to do its part; the slowest takes 0.5 s on an idle machine
STORE_GIB = 3  # the store calls itself full, and answers no more puts, at 95 % of this
_LOG_LINES = 12  # of each daemon, shown when a start fails
_PR_SET_PDEATHSIG = 1

# Cephx stays on: radosgw hangs without authentication. Intervals are short because one monitor agrees with
# itself. Gateways tell each other of changes to buckets; one that was killed must soon be given up, or its
# successor waits for it. Bytes of replaced objects live on for a while, so that reads in progress end well.
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
osd_client_watch_timeout = 3
objecter_tick_interval = 0.5
[mon]
mon_data = {folder}/mon
mon_data_avail_crit = 0
mon_data_avail_warn = 0
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
rgw_crypt_require_ssl = false
rgw_crypt_s3_kms_backend = testing
rgw_crypt_s3_kms_encryption_keys = {kms_key}={kms_secret}
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

    def __init__(self, folder: Path, port: int | None, store_gib: int = STORE_GIB) -> None:
        self.folder = folder
        self._store_bytes = store_gib << 30
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
                fsid=fsid,
                monitor=monitor,
                folder=self.folder,
                port=self.port,
                store_bytes=self._store_bytes,
                kms_key=KMS_KEY,
                kms_secret=base64.b64encode(secrets.token_bytes(32)).decode(),
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
            old.wait(STEP_SECONDS)
        gateway = self._daemon("rgw", "radosgw", "-n", "client.rgw")
        deadline = time.monotonic() + STEP_SECONDS
        while not answers(self.port):
            if gateway.poll() is not None or time.monotonic() > deadline:
                raise RgwError(f"radosgw does not answer at port {self.port}\n{self.logs()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End every process and remove the folder."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(STEP_SECONDS)
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
                    env=environment(), check=True, timeout=STEP_SECONDS, preexec_fn=self._die_with_us,
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
