"""The crash matrix: every fault, engine and stage, as a list of entries to run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from crash.builds import STAGES, Cell, Crashes, Engine, Outcome
from crash.faults import DAMAGES, can_mount, cut_power, damage, fill_disk, kill_often, limit_files
from crash.points import Action, Moment

__all__ = ["Entry", "grid", "sample"]

MOMENTS: tuple[Moment, ...] = ("before", "uncommitted", "committed")
SIGNALS: dict[str, Action] = {
    "SIGTERM of the builder": "terminate_builder",
    "Ctrl-C": "interrupt_builder",
}
# The stage that reads what a stage wrote: the build is killed before it, so that it would read the damage.
# It removes runs after their last reader, which may be a stage that is not in STAGES.
READERS = dict(pairwise(STAGES)) | {"signatures": "equal", "line_losers": "lines_removed"}
READERS |= {"url": "url_removed", "exact": "exact_removed", "exact-2": "exact_removed-2"}
READERS |= {"candidates": "near_leaders", "near": "near_equal", "semantic_decide": "semantic_lost"}
READERS |= dict.fromkeys(("provenance", "join_annotations", "side_files"), "publish")
WRITES_NOTHING = ("tokenizer", "measure", "parity", "amounts_sums", "amounts_lasts")  # except their records


@dataclass(frozen=True)
class Entry:
    """One cell: its fault, engine and stage, and how to run it."""

    fault: str
    engine: str
    stage: str
    do: Callable[[Crashes], Outcome]


def grid(engines: Sequence[Engine], *, steps: int, all_steps: int, stride: int = 1) -> Iterator[Entry]:
    """All entries. `steps`: file operations of a publication, `all_steps`: of a build; of the latter, and of
    signals during publication, each `stride`-th is taken."""
    for engine in engines:
        yield from _points(engine)
    if "inline" in engines:
        yield from _publishing(steps, stride)
        yield from _anywhere(all_steps, 20 * stride)
        yield from _disks(steps, stride)
        yield from _damages()
        for seed in range(1, 11):
            do = partial(kill_often, seed=seed, replacing=seed % 2 == 0)
            yield Entry("kills in a row, random", "inline", "any", do)


def sample(entries: Sequence[Entry], seed: int, *, faults_each: int) -> list[Entry]:
    """Entries drawn from a seed: `faults_each` of each fault, and each stage at least once."""
    drawn = random.Random(seed)
    entries = drawn.sample(entries, len(entries))
    taken: list[Entry] = []
    for entry in entries:
        same = [other for other in taken if other.fault == entry.fault]
        if len(same) < faults_each or all(other.stage != entry.stage for other in taken):
            taken.append(entry)
    return taken


def _run(cell: Cell) -> Entry:
    return Entry(cell.fault, cell.engine, cell.stage, lambda crashes: crashes.run(cell))


def _points(engine: Engine) -> Iterator[Entry]:
    has_workers = engine in ("local", "s3-local", "ray")
    for stage in STAGES:
        cell = partial(Cell, engine=engine, stage=stage)
        for moment in MOMENTS:
            what = "SIGKILL of a worker" if has_workers else "SIGKILL"
            yield _run(cell(fault=what, moment=moment))
            if engine == "local":
                yield _run(cell(fault="SIGKILL of the builder", moment=moment, action="kill_builder"))
        if engine == "ray":
            yield _run(cell(fault="SIGKILL of a node", moment="uncommitted", action="kill_node"))
        if engine in ("inline", "local"):
            for fault in ("SIGTERM of the builder", "Ctrl-C"):
                yield _run(cell(fault=fault, moment="uncommitted", action=SIGNALS[fault]))


def _publishing(steps: int, stride: int) -> Iterator[Entry]:
    for replace in (False, True):
        name = ", replacing" if replace else ""
        for step in range(1, steps + (30 if replace else 0), stride):
            yield _run(Cell(fault=f"SIGKILL{name}", step=step, replace=replace))
        for step in range(1, steps + (30 if replace else 0), 4 * stride):
            for fault in ("SIGTERM of the builder", "Ctrl-C"):
                yield _run(Cell(fault=f"{fault}{name}", step=step, action=SIGNALS[fault], replace=replace))
    for way, action in _CUTS:
        for step in range(1, steps + 30, stride):
            cell = Cell(fault=f"power cut, {way}", step=step, action=action, replace=True)
            yield Entry(cell.fault, cell.engine, cell.stage, partial(cut_power, cell=cell))
        for stage in STAGES:
            for moment in MOMENTS:
                cell = Cell(fault=f"power cut, {way}", stage=stage, moment=moment, action=action)
                yield Entry(cell.fault, cell.engine, cell.stage, partial(cut_power, cell=cell))


_CUTS: tuple[tuple[str, Action], ...] = (
    ("all that was not synced lost", "cut_all"),
    ("some of it lost", "cut_some"),
    ("unsynced data lost", "cut_data"),
)


def _anywhere(steps: int, stride: int) -> Iterator[Entry]:
    for step in range(1, steps, stride):
        yield _run(Cell(fault="SIGKILL at any file operation", stage="any", step=step, area="."))
    for step in range(steps - 60, steps + 1, 5):
        yield _run(Cell(fault="SIGKILL while work is removed", stage="after", step=step, area="."))


def _disks(steps: int, stride: int) -> Iterator[Entry]:
    yield Entry("files that may not grow", "local", "clean", partial(limit_files, file_bytes=4096))
    if not can_mount():
        return
    for stage in STAGES:
        for spare in (0, 3):
            cell = Cell(fault="disk full", stage=stage, moment="before", action="fill")
            yield Entry(cell.fault, "inline", stage, partial(fill_disk, cell=cell, spare=spare))
    for step in range(1, steps, 3 * stride):
        for only_output in (False, True):
            fault = "disk of the output full" if only_output else "disk full"
            cell = Cell(fault=fault, step=step, action="fill")
            do = partial(fill_disk, cell=cell, spare=step % 3, only_output=only_output)
            yield Entry(fault, "inline", "publish", do)


def _damages() -> Iterator[Entry]:
    for stage, reader in READERS.items():
        if reader == "publish":
            cell = Cell(fault="", step=3)
        else:
            cell = Cell(fault="", stage=reader, moment="before")
        for kind in DAMAGES:
            if stage not in WRITES_NOTHING:
                do = partial(damage, cell=cell, kind=kind, file=f"{stage}/*/*")
                yield Entry(f"output: {kind}", "inline", stage, do)
            do = partial(damage, cell=cell, kind=kind, file=f"{stage}/*/commit.json")
            yield Entry(f"record: {kind}", "inline", stage, do)
