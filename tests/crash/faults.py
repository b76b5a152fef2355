"""Faults that take more than one signal: full disks, damaged files, many kills in a row.

Each function runs one build by the means of builds.py and returns an `Outcome`.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from crash.builds import STAGES, Cell, Crashes, Outcome, said, wrong_end
from crash.reader import look
from shardkit.writers.execution.work import COMMIT_NAME

__all__ = ["DAMAGES", "can_mount", "cut_power", "damage", "fill_disk", "kill_often", "limit_files"]

_DISK_BYTES = 64 << 20
_MOST_KILLS = 40


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Mount a small file system at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={_DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@cache
def can_mount() -> bool:
    """Whether this process may mount a file system: root may, except in most containers."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory() as folder, mounted(Path(folder) / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def fill_disk(crashes: Crashes, cell: Cell, *, spare: int, only_output: bool = False) -> Outcome:
    """At the cell's moment, fill the disk of all files, or of the output only, except for `spare` pages.

    The file system is real. Its error comes where the build next needs a page, or not at all.
    """
    outcome = Outcome(cell)
    base = crashes.fresh(with_old=False)
    disk = base / "out" if only_output else base
    with mounted(disk):
        if not only_output:
            crashes.lay_out(base)
        with crashes.watching(outcome, base):
            point = replace(crashes.point(cell, base), filled=str(disk), spare=spare)
            command = crashes.command(cell, base)
            ended = crashes.victims.run(command, cwd=base, engine=cell.engine, point=point)
            outcome.runs, outcome.error = 1, said(ended)
            outcome.struck = Path(point.struck).exists()
            outcome.problems += wrong_end(cell.action, ended, struck=outcome.struck)
            if ended.status and "No space left on device" not in outcome.error:
                outcome.problems.append(f"does not say what is wrong: {outcome.error}")
            (disk / ".filler").unlink(missing_ok=True)
            crashes.finish(outcome, base)
    with suppress(OSError):
        shutil.rmtree(base)
    return outcome


def limit_files(crashes: Crashes, file_bytes: int) -> Outcome:
    """In the first run no file may grow above `file_bytes` (RLIMIT_FSIZE)."""
    cell = Cell(fault=f"no file above {file_bytes} bytes", engine="local")
    outcome = Outcome(cell, struck=True)
    base = crashes.fresh()
    with crashes.watching(outcome, base):
        command = crashes.command(cell, base)
        ended = crashes.victims.run(command, cwd=base, engine="local", limits={"FSIZE": file_bytes})
        outcome.runs, outcome.error = 1, said(ended)
        if ended.status != 1 or "too large" not in outcome.error:
            outcome.problems.append(f"status {ended.status}: {outcome.error}")
        crashes.finish(outcome, base)
    return outcome


def kill_often(crashes: Crashes, seed: int, *, replacing: bool = False) -> Outcome:
    """Kill run after run at file operations drawn from a seed, until a run finishes first."""
    cell = Cell(fault=f"kills in a row, seed {seed}", stage="any", area=".", replace=replacing)
    outcome = Outcome(cell)
    drawn = random.Random(seed)
    base = crashes.fresh(with_old=replacing)
    command = crashes.command(cell, base)
    with crashes.watching(outcome, base):
        for _ in range(_MOST_KILLS):
            point = crashes.point(replace(cell, step=drawn.randrange(1, 700)), base)
            ended = crashes.victims.run(command, cwd=base, engine=cell.engine, point=point)
            outcome.runs += 1
            struck = Path(point.struck).exists()
            outcome.struck |= struck
            Path(point.struck).unlink(missing_ok=True)
            outcome.problems += wrong_end("kill", ended, struck=struck)
            if not struck:
                break
        crashes.finish(outcome, base)
    return outcome


def cut_power(crashes: Crashes, cell: Cell) -> Outcome:
    """At the cell's moment, lose everything that was not synced (power_cut.py)."""
    outcome = Outcome(cell)
    base = crashes.fresh(with_old=cell.replace)
    crashes.strike(outcome, base)
    found, problem = look(base / "out")
    if found and problem:
        outcome.problems.append(f"after the cut: {problem}")
    if cell.moment == "before" and (lost := _lost(base / "out.work", cell.stage)):
        outcome.problems.append(f"after the cut, stages without a finished task: {lost}")
    with crashes.watching(outcome, base):
        crashes.finish(outcome, base)
    shutil.rmtree(base.with_suffix(".kept"), ignore_errors=True)
    return outcome


def _lost(work: Path, stage: str) -> list[str]:
    """Stages before `stage` that have no finished task left."""
    before = STAGES[: STAGES.index(stage)]
    return [name for name in before if not list(work.glob(f"{name}/*/commit.json"))]


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    """One bit, in the middle: the size stays, and so do formats' magic numbers at both ends."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _scribble(path: Path) -> None:
    path.write_bytes(b'{"format": 2, "outputs": []}')


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": _empty,
    "cut": _cut,
    "flipped bit": _flip,
    "zeros": _blank,
    "other JSON": _scribble,
    "removed": Path.unlink,
}


def damage(crashes: Crashes, cell: Cell, kind: str, file: str) -> Outcome:
    """Kill the build at the cell's moment, then damage the files of a glob in the work folder."""
    outcome = Outcome(cell)
    base = crashes.fresh()
    with crashes.watching(outcome, base):
        crashes.strike(outcome, base)
        files = (
            path
            for path in (base / "out.work").glob(file)
            if path.name != COMMIT_NAME or file.endswith(COMMIT_NAME)
        )
        found = sorted(path for path in files if path.stat().st_size)
        for path in found:
            DAMAGES[kind](path)
        if not found:
            outcome.problems.append(f"nothing to damage: {file}")
        crashes.finish(outcome, base)
    return outcome
