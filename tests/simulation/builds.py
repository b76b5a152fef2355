"""Builds of drivers whose work folder and output are in one bucket or folder, and what befalls them.

Each run draws from its seed how many drivers were started, one or, by accident, more. They run two
stages of small tasks through the real journal, runner, leases, segments and commits, and publish the shards
by the real publication. Somebody else may replace these (`--replace`). Machines are killed, suspended beyond
their leases and woken again, and answers of the bucket are lost. A machine that was killed, or that got a
documented error, runs the same command again. Then all faults end, and every machine must finish.

Checked after each write: a commit is only there with all of its files, and never changes; an index is only
there with all files of its dataset, byte for byte those of a build by one process. In the end the output is
complete, nothing is claimed, and nobody holds the lease.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardkit.card import CARD_NAME, DatasetCard
from shardkit.errors import ShardkitError
from shardkit.formats import mds
from shardkit.manifest import Manifest, ShardInfo
from shardkit.progress import make_listener
from shardkit.publish.contents import INDEX_NAMES
from shardkit.storage.resilient import connect
from shardkit.writers.execution import checked_ranges, scratch
from shardkit.writers.execution import work as work_module
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work
from shardkit.writers.stages.publish import RemoteOutput, global_shards, publish
from simulation.machine import Disk, Machine, machine
from simulation.scheduler import Event, Process, Scheduler
from simulation.threads import PerProcess, ProcessDict
from simulation.world import (
    URL,
    BrokenPromiseError,
    Bucket,
    Faults,
    Outcome,
    folder_in_memory,
    run_world,
)

__all__ = ["simulate_build"]

WORK, OUTPUT = f"{URL}/work", f"{URL}/output"
NUMBERS, SHARDS = 7, 4
REFUSED = (
    "exists with other content", "took over this target", "came first", "was published first",
    "was removed during the transfer", "was changed by others", "just finished", "is being written here",
    "holds another dataset", "holds an unfinished transfer", "has version",
)  # fmt: skip
"""What a publisher may say where another dataset is published."""
STEPS = (1, 10, 100, 1000)  # of a machine, until something befalls it
ROWS = 6


def draw_numbers(folder: Path, number: int) -> None:
    """A task of the first stage."""
    _work()
    np.random.default_rng(number).integers(0, 9999, (ROWS, 4)).astype(np.uint16).tofile(
        folder / "numbers.bin"
    )


def pack_numbers(folder: Path, part: int, sources: list[Artifact]) -> None:
    """A task of the second stage: a shard of what others have drawn."""
    rows = [np.frombuffer(source.read_bytes(), np.uint16).reshape(ROWS, 4) for source in sources]
    _work()
    mds.write_rows_shard(folder, _shard_name(part), np.concatenate(rows), hashes=["xxh64"])


DRAW, PACK = Stage("draw", "draw", draw_numbers), Stage("pack", "pack", pack_numbers)


def _work() -> None:
    """Take as long as a task does."""
    if (found := machine()) is not None:
        found.scheduler.sleep(found.chance.choice((0.1, 5.0, 60.0)) * found.chance.random())


def _shard_name(part: int) -> str:
    return f"part-{part:05d}.00000.mds"


def _sources(part: int) -> list[int]:
    return [part, (part + 2) % NUMBERS, (3 * part + 1) % NUMBERS]


@lru_cache(maxsize=2)
def _plain_build(first: int) -> tuple[tuple[ShardInfo, ...], dict[str, bytes], Path]:
    """The shards of the numbers from `first` on, all files of the output as one process makes them without
    any of this, and the folder with the shards.
    """
    code_version()  # reads all sources, once
    kept = tempfile.TemporaryDirectory(prefix="shardkit-simulation-")
    _kept.append(kept)
    folder, shards = Path(kept.name), []
    for number in range(NUMBERS):
        (folder / str(number)).mkdir()
        draw_numbers(folder / str(number), first + number)
    for part in range(SHARDS):
        sources = [Artifact(folder / f"{number}" / "numbers.bin") for number in _sources(part)]
        rows = [np.frombuffer(source.read_bytes(), np.uint16).reshape(ROWS, 4) for source in sources]
        shards.append(mds.write_rows_shard(folder, _shard_name(part), np.concatenate(rows), hashes=["xxh64"]))
    publish(folder / "out", *_contents(shards, [Artifact(folder)] * SHARDS), replace=False)
    return tuple(shards), _files_in(folder / "out"), folder


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _files_in(folder: Path) -> dict[str, bytes]:
    """The files below a folder; no call of the simulated machine."""
    found = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return {file.relative_to(folder).as_posix(): _read(file) for file in found}


def _read(file: Path) -> bytes:
    with open(file, "rb") as handle:  # noqa: PTH123
        return handle.read()


def _contents(
    shards: list[ShardInfo], folders: list[Artifact]
) -> tuple[Manifest, dict[str, Artifact], dict[str, bytes]]:
    """What is published."""
    named = global_shards([(folder, [shard]) for folder, shard in zip(folders, shards, strict=True)])
    manifest = Manifest("mds", [shard for _, shard in named])
    card = {"fingerprint": manifest.fingerprint, "samples": manifest.samples, "files": {}}
    links = {shard.stored.basename: file for file, shard in named}
    return manifest, links, {CARD_NAME: DatasetCard(card).to_bytes()}


class BuildWorld:
    """One run: machines, their bucket, and its faults."""

    samples = NUMBERS + SHARDS
    """Tasks."""

    def __init__(self, seed: int, folder: Path, *, rivals: bool) -> None:
        self.scheduler = Scheduler(seed)
        self.chance = random.Random(f"{seed} build")
        self.folder = folder
        self.machine = Machine(self.scheduler, Disk(folder, 1 << 30), random.Random(f"{seed} machine"))
        self.bucket = Bucket(self.scheduler, random.Random(f"{seed} store"))
        self.bucket.on_write = self._check_write
        self.drivers = self.chance.choice((1, 2, 2, 3))
        """Of several, one waits for another or is refused."""
        self.segment_records = self.chance.choice((1, 3, 1000))
        self.is_local = self.chance.random() < 0.3
        """Whether work folder and output are on one machine, which all processes run on."""
        self.has_rival = self.chance.random() < 0.4 and (self.is_local or rivals)
        """Whether somebody puts another dataset into the place of this one, with `--replace`."""
        self._known_errors = ["failed after", *(REFUSED if self.has_rival else ())]
        if self.drivers > 1:
            self._known_errors += [
                "runs a build in this work folder",
                "has taken over this work folder",
                "another build uses this work folder",
                "another transfer has just finished",
            ]
        if self.is_local:
            self._known_errors.append("another process is writing a dataset into this folder")
            self.machine.after_call = self._check_call
        self.is_calm = False
        self.kills = self.starts = 0
        self.errors: dict[str, int] = {}
        self.running: dict[int, Process] = {}
        self._all: list[Process] = []
        self._commits: dict[str, bytes] = {}
        self._publishes = Event()
        """Set when a machine begins to publish."""
        self.shards, expected, _ = _plain_build(0)
        self.expected = [expected]
        if self.has_rival:
            self.expected.append(_plain_build(NUMBERS)[1])

    def direct(self) -> None:
        """The main task of the director."""
        if self.chance.random() < 0.5:  # leases are taken first of all
            self._draw_faults()
        ended = [Event() for _ in range(self.drivers + self.has_rival)]
        for index, event in enumerate(ended):
            is_rival = self.has_rival and event is ended[-1]
            launch = partial(self._keep_running, index, event, self._replace if is_rival else self._run)
            self.scheduler.spawn(launch, "rival" if is_rival else f"launcher{index}")
        for _ in range(self.chance.choice((0, 5, 20))):
            self.scheduler.sleep(self.chance.choice((1.0, 30.0, 100.0)) * self.chance.random())
            self._cause_fault()
        self.scheduler.note("calm")
        self.scheduler.spare()
        self.bucket.faults = Faults()
        for process in self.running.values():
            self.scheduler.resume(process)
        self.is_calm = True
        for event in ended:
            event.wait()
        self._check_end()

    def _cause_fault(self) -> None:
        chance = self.chance
        kind = chance.choice(("kill", "suspend", "store", "store"))
        alive = [
            process for process in self.running.values() if process.is_alive and not process.ended.is_set()
        ]
        self.scheduler.note(f"fault {kind}")
        if kind == "store":
            self._draw_faults()
        elif kind == "kill" and alive:
            self.kills += 1
            self.scheduler.after_steps(chance.choice(alive), chance.choice(STEPS), self.scheduler.kill)
        elif alive:
            seconds = chance.choice((1.0, 50.0, 100.0, 1000.0)) * chance.random()
            suspend = partial(self.scheduler.suspend, seconds=seconds)
            self.scheduler.after_steps(chance.choice(alive), chance.choice(STEPS), suspend)

    def _draw_faults(self) -> None:
        self.bucket.faults = Faults.drawn(self.chance)
        self.bucket.faults.corrupt_share = 0.0

    def _keep_running(self, index: int, ended: Event, run: Callable[[int], None]) -> None:
        """Start a machine's build again until it finishes, or another dataset has taken its place."""
        if run == self._replace:
            if self.chance.random() < 0.8:
                self._publishes.wait()
            self.scheduler.sleep(self.chance.choice((0.1, 1.0, 100.0)) * self.chance.random())
        while True:
            was_calm = self.is_calm
            failed: list[Exception] = []
            self.starts += 1
            name = f"machine{index}.{self.starts}"
            process = self.scheduler.process(name, partial(self._build, index, run, failed))
            self.running[index] = process
            self._all.append(process)
            process.ended.wait()
            if process.is_alive and not failed:
                break
            if run != self._replace and any("holds" in str(error) for error in failed):
                break  # another dataset
            if was_calm and failed and self.drivers == 1 and not self.has_rival:
                raise failed[0]
            self.scheduler.sleep(self.chance.choice((0.1, 10.0, 100.0)))
        ended.set()

    def _build(self, index: int, run: Callable[[int], None], failed: list[Exception]) -> None:
        """The main task of a machine."""
        try:
            run(index)
        except ShardkitError as error:
            self.scheduler.note(f"error {type(error).__name__}: {error}")
            if not any(known in str(error) for known in self._known_errors):
                raise
            self.errors[type(error).__name__] = self.errors.get(type(error).__name__, 0) + 1
            failed.append(error)

    def _run(self, index: int) -> None:
        folder = self.folder / f"machine{index if self.drivers < 3 else index // 2}"
        work = Work(WORK, folder, segment_records=self.segment_records)
        if self.is_local:
            work = Work.at(self.folder / "work")
        with Journal(work) as journal:
            runner = Runner(journal, InlineEngine(), make_listener(False))
            [drawn] = runner.run([DRAW.task(str(n), 0, n) for n in range(NUMBERS)])
            [packed] = runner.run([self._pack_task(part, drawn) for part in range(SHARDS)])
            manifest, links, texts = _contents(list(self.shards), [commit.files for commit in packed])
            journal.check_lease()
            self._disturb_publisher()
            publish(self._output, manifest, links, texts, replace=False)

    def _disturb_publisher(self) -> None:
        """Suspend the running process somewhere while it publishes; meanwhile that is replaced."""
        self._publishes.set()
        task, chance = self.scheduler.current, self.chance
        assert task is not None
        if self.has_rival and not self.is_calm:
            suspend = partial(self.scheduler.suspend, seconds=chance.choice((1.0, 10.0, 1000.0)))
            self.scheduler.after_steps(task.process, chance.randrange(1, 400), suspend)

    def _replace(self, index: int) -> None:
        """The build of another dataset, at its end."""
        shards, _, folder = _plain_build(NUMBERS)
        publish(self._output, *_contents(list(shards), [Artifact(folder)] * SHARDS), replace=True)

    @property
    def _output(self) -> Path | RemoteOutput:
        return self.folder / "output" if self.is_local else RemoteOutput(OUTPUT)

    def _pack_task(self, part: int, drawn: list[Commit]) -> Task:
        sources = [drawn[number].file("numbers.bin") for number in _sources(part)]
        return PACK.task(str(part), part, part, sources)

    def _check_write(self, name: str) -> None:
        """What must hold whenever the bucket has changed."""
        objects = self.bucket.objects
        if name.startswith("work/") and name.endswith(f"/{COMMIT_NAME}") and name in objects:
            record = objects[name][1]
            if self._commits.setdefault(name, record) != record:
                raise BrokenPromiseError(f"{name} has changed")
        for commit, record in self._commits.items():
            if commit in objects:
                self._check_commit(commit, record)
        self._check_output()

    def _check_call(self, call: str) -> None:
        """What must hold whenever a local folder has changed."""
        for folder, _, names in os.walk(self.folder / "work"):
            if COMMIT_NAME in names and "unfinished" not in folder:
                record = json.loads(_read(Path(folder, COMMIT_NAME)))
                for file, output in record["outputs"].items():
                    if xxhash.xxh3_128_hexdigest(_read(Path(folder, file))) != output["xxh3_128"]:
                        raise BrokenPromiseError(f"{folder} is committed, and {file} is another")
        self._check_output()

    def _check_commit(self, name: str, record: bytes) -> None:
        folder = name.removesuffix(COMMIT_NAME)
        for file, output in json.loads(record)["outputs"].items():
            found = self.bucket.objects.get(f"{folder}{file}")
            if found is None or xxhash.xxh3_128_hexdigest(found[1]) != output["xxh3_128"]:
                raise BrokenPromiseError(f"{name} is there, and {file} is not, or is another")

    def _published(self) -> dict[str, bytes]:
        """The files of the output."""
        if self.is_local:
            return _files_in(self.folder / "output")
        return {
            name.removeprefix("output/"): data
            for name, (_, data) in self.bucket.objects.items()
            if name.startswith("output/")
        }

    def _check_output(self) -> dict[str, bytes]:
        """All files of the dataset whose index is there, if there is one."""
        files = self._published()
        [index] = self.expected[0].keys() & {*INDEX_NAMES}
        if index not in files:
            return {}
        expected = next((each for each in self.expected if each[index] == files[index]), {})
        for file in [index, *expected]:
            if files.get(file) != expected.get(file):
                raise BrokenPromiseError(f"the output has an index, and not the right {file}")
        return expected

    def _check_end(self) -> None:
        files, expected = self._published(), self._check_output()
        if files != expected:
            names = sorted(files.keys() - expected.keys())
            raise BrokenPromiseError(f"the output is not a dataset, or has more than its files: {names}")
        if left := [name for name, data in self._leases() if self._is_held(data)]:
            raise BrokenPromiseError(f"held in the end: {left}")

    def _leases(self) -> list[tuple[str, bytes]]:
        objects = self.bucket.objects.items()
        return [(name, data) for name, (_, data) in objects if name.startswith("work/lease/")]

    def _is_held(self, lease: bytes) -> bool:
        """Whether a lease is of a process that could give it back: that of one that was killed expires."""
        number = int(lease.decode().partition(" ")[0].split("-")[1])
        return not any(process.number == number and not process.is_alive for process in self._all)


def simulate_build(
    seed: int,
    *,
    watch: Callable[[Scheduler], None] | None = None,
    lines: bool = False,
    rivals: bool = False,
) -> Outcome:
    """One run of builds. Raises what went wrong.

    `rivals`: another dataset may replace this one in the bucket, too, whose files nothing locks. That finds
    what docs/limits.md says: a file that is being put while its dataset is replaced.
    """
    work_module._outputs.cache_clear()

    def connected(url: str, storage: Any, around: Any) -> Any:
        """`work_module._connect`, with a store for each process."""
        if (url, storage) not in stores:
            stores[url, storage] = connect(url, storage)
        return stores[url, storage]

    stores = ProcessDict()
    seen = (
        (scratch, "_locks", ProcessDict()),
        (work_module, "_connect", connected),
        (checked_ranges, "_cache", PerProcess(checked_ranges._cache, checked_ranges._Cache)),
    )
    with folder_in_memory() as folder:
        return run_world(BuildWorld(seed, folder, rivals=rivals), *seen, watch=watch, lines=lines)
