"""Several machines on this one: the bytes of one machine whatever fails, and nothing is left behind.

Tests that start machines take minutes and both cores, so they run only if $SHARDKIT_CLUSTER_LAB is set.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from cluster.__main__ import inventory
from cluster.machines import why_not
from servers.rgw import INSTALL, missing_programs

ROOT = Path(__file__).resolve().parents[2]
MISSING = "$SHARDKIT_CLUSTER_LAB is not set" if "SHARDKIT_CLUSTER_LAB" not in os.environ else why_not()
if not MISSING and missing_programs():
    MISSING = f"no {missing_programs()[0]}: {INSTALL}"
pytestmark = pytest.mark.timeout(600)
starts_machines = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
SHORT = (
    "--nodes",
    "2",
    "--mbit",
    "1000",
    "--outage",
    "3",
    "--files",
    "4",
    "--file-mb",
    "0.2",
    "--steps",
    "12",
)


def lab(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "cluster", *SHORT, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def left_behind(folder: Path) -> list[str]:
    """Return the processes and mounts whose command, environment or place names a lab's folder."""
    processes = [
        f"{process.info['cmdline']} {process.info['environ']}"
        for process in psutil.process_iter(["cmdline", "environ"])
        if process.pid != os.getpid()
    ]
    return [
        line for line in [*processes, *Path("/proc/mounts").read_text().splitlines()] if str(folder) in line
    ]


def cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@starts_machines
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'shardkit[ray]'")
def test_builds_and_training_on_two_machines_give_one_machines_bytes_and_leave_nothing(
    tmp_path: Path,
) -> None:
    cases = ["one machine", "the store gone for a while", "training", "training, a partition"]
    folder = tmp_path / "lab"
    command = lab("--folder", str(folder), "--cases", *cases)
    table, _ = command.communicate(timeout=500)
    rows = {cells(line)[0]: cells(line) for line in table.splitlines() if line.startswith("|")}
    assert command.returncode == 0, table
    assert [rows[name][3] for name in cases] == ["-", "yes", "yes", "yes"], table
    assert "read amplification 1.00" in rows["training"][-1]
    assert left_behind(folder) == []


@starts_machines
@pytest.mark.skipif(not shutil.which("sshd"), reason="no sshd on this machine (Debian's openssh-server)")
def test_machines_that_ssh_reaches_are_cut_off_and_killed_and_left_as_they_were(tmp_path: Path) -> None:
    cases = ["one machine", "upload, the store gone for a while"]
    folder = tmp_path / "lab"
    command = lab("--ssh", "--folder", str(folder), "--cases", *cases)
    table, _ = command.communicate(timeout=300)
    assert command.returncode == 0, table
    assert [cells(line)[3] for line in table.splitlines() if line.startswith("|")][2:] == ["-", "yes"], table
    assert left_behind(folder) == []


def test_the_file_of_rented_machines_has_known_keys_only(tmp_path: Path) -> None:
    assert len(inventory(Path(__file__).with_name("rented.yaml"))["machines"]) == 8
    (tmp_path / "rented.yaml").write_text("machines: []\nnvme: /\npython: p\ncheckout: c\nstores: s")
    with pytest.raises(SystemExit, match="missing or unknown keys: stores"):
        inventory(tmp_path / "rented.yaml")


@starts_machines
@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "lab"
    command = lab("--folder", str(folder))
    assert command.stdout is not None
    assert command.stdout.readline().startswith("| case")  # the store runs, and Ray starts
    assert left_behind(folder)
    command.send_signal(number)
    command.wait(60)
    deadline = time.monotonic() + 30
    while left := left_behind(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
