"""A real S3 server on loopback, for tests: Ceph's gateway and what it needs, of which `ceph` tells more.

    python tests/servers/rgw.py start|stop|status [--port PORT] [--dir FOLDER]

`RgwServer` does the same as a context manager. tests/servers/install_rgw.sh installs what it needs.
A keeper process owns the daemons: it ends them and removes their folder when its standard input closes, so
also when whoever started it is killed, and the kernel ends them when the keeper itself is killed. Any number
may run side by side. Starting takes about 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from servers.ceph import ACCESS_KEY, PROGRAMS, SECRET_KEY, STEP_SECONDS, STORE_GIB, Daemons, RgwError

__all__ = ["INSTALL", "RgwError", "RgwServer", "missing_programs"]

INSTALL = "bash tests/servers/install_rgw.sh installs it (Debian)"
START_SECONDS = 180.0  # 2 s on an idle machine; its steps have limits of their own, and name what failed
_ATTEMPTS = 3  # another process may take a port between its choice and its use
_STATE_NAME = "state.json"


def missing_programs() -> list[str]:
    """The programs of Ceph that are not on this machine."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def keep(folder: Path, port: int | None, stay: bool, store_gib: int) -> None:
    """The keeper: start the daemons, report on standard output, do as standard input says until it ends.

    With `stay` until a signal instead. A line "gateway" asks for a new gateway in place of the present one.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    daemons = Daemons(folder, port, store_gib)
    try:
        for attempt in range(_ATTEMPTS):
            try:
                daemons.start()
                break
            except RgwError:
                daemons.stop()
                if attempt == _ATTEMPTS - 1:
                    raise
                daemons = Daemons(folder, port, store_gib)
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
    state = {"port": daemons.port, "pids": pids, "keeper": os.getpid(), "folder": str(daemons.folder)}
    (daemons.folder / _STATE_NAME).write_text(json.dumps(state))
    say(state)


class RgwServer:
    """A running server, as a context manager; `start` and `stop` do it by hand."""

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY
    region = "us-east-1"

    def __init__(self, *, port: int | None = None, store_gib: int = STORE_GIB) -> None:
        self._wanted_port = port
        self._store_gib = store_gib
        self._keeper: subprocess.Popen[str] | None = None
        self.state: dict[str, Any] = {}
        """Port, folder and processes, once it runs."""
        self._folder: Path | None = None

    @property
    def port(self) -> int:
        return int(self.state["port"])

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateway_pid(self) -> int:
        """Of radosgw, for tests that kill or stop it."""
        return int(self.state["pids"]["rgw"])

    def start(self) -> None:
        """RgwError if it does not answer within START_SECONDS."""
        if missing := missing_programs():
            raise RgwError(f"no {', '.join(missing)} on this machine: {INSTALL}")
        # A short path: names of Unix sockets end at 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="rgw-", dir="/tmp"))
        options = [] if self._wanted_port is None else ["--port", str(self._wanted_port)]
        options += ["--store-gib", str(self._store_gib)]
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, "keep", "--dir", str(self._folder), *options],
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
                keeper.wait(STEP_SECONDS)
            except subprocess.TimeoutExpired:
                keeper.kill()  # and the kernel kills its daemons
                keeper.wait(STEP_SECONDS)
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
        ready = wait([self._keeper.stdout.fileno()], START_SECONDS)
        line = self._keeper.stdout.readline() if ready else ""
        if not line:
            raise RgwError(f"the server said nothing for {START_SECONDS:.0f} s, or its keeper died")
        answer = json.loads(line)
        if "error" in answer:
            raise RgwError(answer["error"])
        self.state = answer

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
    deadline = time.monotonic() + STEP_SECONDS
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
    parser.add_argument("--store-gib", type=int, default=STORE_GIB, help="in memory (default: %(default)s)")
    parser.add_argument("--stay", action="store_true", help="keep: until a signal, not the end of stdin")
    options = parser.parse_args()
    folder = options.dir.absolute()
    try:
        match options.verb:
            case "keep":
                keep(folder, options.port, options.stay, options.store_gib)
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
