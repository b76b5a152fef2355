"""The memory and the cores that this process may use: all of the machine, or less in a container.

Containers and batch systems set limits by control groups. `/proc/self/cgroup` names the group of the process
in each hierarchy; every group above it may set a lower limit, so all of them are read. If a group's folder is
not visible, as in a container with its own namespace, the group at the mount point is read instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_GROUPS = "sys/fs/cgroup"
_MEMORY_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")  # cgroup versions 2, 2 and 1


def memory_bytes(system: Path = ROOT) -> int:
    """Return the machine's memory or a lower control group limit, in bytes. `system`: folder of proc, sys."""
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _text(system / "proc/meminfo"), re.MULTILINE)
    whole = int(found[1]) << 10 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *_memory_limits(system)])


def available_bytes(system: Path = ROOT) -> int:
    """Return the machine's free or reclaimable memory in bytes, at most the lowest control group limit."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(system / "proc/meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_memory_limits(system)])


def gpus(system: Path = ROOT) -> list[str]:
    """Return the names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get(GPUS_VARIABLE)
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate((system / "dev").glob("nvidia[0-9]*"))]


def usable_cores(system: Path = ROOT) -> int:
    """Return the number of cores that this process may run on, at most the lowest control group quota."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS does not have it
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(system)]))


def _memory_limits(system: Path) -> Iterator[int]:
    for group in _groups(system, "memory"):
        for name in _MEMORY_FILES:
            limit = _text(group / name).strip()
            if limit.isdecimal() and int(limit):
                yield int(limit)


def _quotas(system: Path) -> Iterator[int]:
    """Yield the cores of each CPU quota, rounded up; "max" (version 2) and -1 (version 1) mean no quota."""
    for group in _groups(system, "cpu"):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = (_text(group / f"cpu.cfs_{one}_us").strip() for one in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            yield -(-int(quota) // int(period))


def _groups(system: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control groups for a controller, and of all groups above them."""
    top = system / _GROUPS
    mounts = {top, top / "unified", top / controller, top / "cpu,cpuacct", top / "cpuacct,cpu"}
    paths = {""}
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (not names or controller in names.split(",")) and ".." not in path.split("/"):
            paths.add(path.strip("/"))
    for mount in sorted(mounts):
        for path in sorted(paths):
            folder = mount / path
            while folder != mount.parent and folder != top.parent:
                yield folder
                folder = folder.parent


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
