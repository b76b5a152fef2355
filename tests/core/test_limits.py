"""Default workers and caches take what a container may use, whatever version of control groups limits it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.limits import available_bytes, memory_bytes, usable_cores
from shardkit.writers.execution.engine import default_workers

GIB = 1 << 30


def machine(folder: Path, files: dict[str, object]) -> Path:
    """A machine of 512 GiB with such files below /sys/fs/cgroup, or below / where they begin with proc."""
    memory = {"proc/meminfo": f"MemTotal: {512 * GIB >> 10} kB\nMemAvailable: {400 * GIB >> 10} kB\n"}
    for name, text in (memory | files).items():
        file = folder / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 512),
        ({"memory.max": "max"}, 512),
        ({"memory.max": 8 * GIB}, 8),
        ({"memory.max": "max", "memory.high": 6 * GIB}, 6),
        ({"memory/memory.limit_in_bytes": 8 * GIB}, 8),
        ({"memory/memory.limit_in_bytes": 9223372036854771712}, 512),
        ({"memory.max": 900 * GIB}, 512),
        ({"proc/self/cgroup": "0::/slurm/job_7/step_0", "slurm/job_7/memory.max": 16 * GIB,
          "slurm/job_7/step_0/memory.max": "max", "slurm/memory.max": 64 * GIB}, 16),
        ({"proc/self/cgroup": "0::/../other", "memory.max": 3 * GIB}, 3),
        ({"proc/self/cgroup": "4:memory:/a/b\n1:cpu:/c", "memory/a/memory.limit_in_bytes": 4 * GIB,
          "memory/c/memory.limit_in_bytes": GIB}, 4),
        ({"proc/self/cgroup": "0::/x\n", "unified/x/memory.max": 5 * GIB}, 5),
        ({"memory.max": "nonsense", "memory/memory.limit_in_bytes": -1}, 512),
        ({"memory.max": 0}, 512),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_machine_or_the_least_limit_of_a_group(
    files: dict[str, object], gib: int, tmp_path: Path
) -> None:
    system = machine(tmp_path, files)
    assert memory_bytes(system) == gib * GIB
    assert available_bytes(system) == min(gib, 400) * GIB
    assert default_workers(GIB // 1024, system) >= 1
    assert default_workers(gib * GIB, system) == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3),
        ({"cpu,cpuacct/cpu.cfs_quota_us": 300000, "cpu,cpuacct/cpu.cfs_period_us": 50000}, 6),
        ({"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 64),
        ({"proc/self/cgroup": "0::/a/b", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/a/b", "cpu,cpuacct/a/cpu.cfs_quota_us": 700000,
          "cpu,cpuacct/a/cpu.cfs_period_us": 100000}, 7),
        ({"cpu.max": "100000"}, 64),
        ({"cpu.max": "100000 0"}, 64),
    ],
)  # fmt: skip
def test_cores_are_those_of_the_process_or_the_least_quota_of_a_group(
    files: dict[str, object], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    system = machine(tmp_path, files)
    assert usable_cores(system) == cores
    assert default_workers(1, system) == cores


def test_a_real_control_group_limits_the_cores_of_a_process_in_it() -> None:
    """Only as root and where a group of version 1 or 2 with the controller of CPUs can be made."""
    for top, limit in (("cpu", None), (".", "50000 100000")):
        group = Path("/sys/fs/cgroup", top, f"shardkit-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if limit is None:
                (group / "cpu.cfs_quota_us").write_text("50000")
            else:
                (group / "cpu.max").write_text(limit)
            code = (
                f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
                "from shardkit.limits import usable_cores; print(usable_cores())"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout.strip() == "1"
            return
        except (OSError, subprocess.CalledProcessError):
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")
