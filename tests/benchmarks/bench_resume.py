"""Twelve ways to stop and go on, for every loader: which samples are lost, which come twice, what is refused.

    python tests/benchmarks/bench_resume.py [--libraries shardkit,streaming,…] [--cases "more ranks",…]
                                             [--venvs DIR] [--json] [--save PREFIX]

512 rows, shuffled, global batches of 8 rows on 2 ranks, DataLoader workers where a library has them. A run
stops after 24 batches of each rank; new processes go on from its state to the end of the epoch. Rows lost are
those of the epoch that neither run delivered, rows repeated those that came twice: both should be 0. Each
rank is a process, all on one node. The libraries are used as their documentation says
(`resume_sides.py`); each has an environment of its own under --venvs, made by pip, except those of
shardkit[dev]. One that cannot run is left out with the reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from figures import Heads, give
from peer_processes import SideError, environment, peer_parser
from resume_sides import LIBRARIES, rows_of
from shardkit.formats import mds, tar

SCRIPT = str(Path(__file__).with_name("resume_sides.py"))
ROWS, SHARD_ROWS, STEPS = 512, 32, 24
REMOVED = [number for number in range(ROWS) if number % 10 == 3]
OWN_WRITERS = ("litdata", "datasets", "lancedb")
PEERS = ("litdata", "datasets", "grain", "lancedb")
"""That have environments of their own."""
WITH_WORKERS = {"streaming": 2, "litdata": 2, "torchdata": 2, "webdataset": 2, "lancedb": 2}
"""DataLoader workers as training uses them. Others read in threads of the process; the state of a shuffled
dataset of Hugging Face's fails to load in workers."""
ACCIDENTS = ("AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError", "UnicodeDecodeError")
"""Errors that do not say what is wrong with a state."""
SELECTS_ROWS = ("shardkit", "lancedb")
"""That leave rows out of a dataset as it is; for others it is written again without them."""
SECONDS = 120  # for a phase: a library that hangs is stopped

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a run: what its ranks read, and how."""

    folders: tuple[str, ...] = ("rows",)
    schedule: tuple[tuple[int, tuple[int, ...]], ...] = ((0, (1,)),)
    """Weights of the folders from these positions, in rows over all ranks, on."""
    world_size: int = 2
    workers: int | None = None
    """None: as many as the library usually has."""
    batch: int = 4
    steps: int | None = STEPS
    """Batches of each rank until the state is saved; None: the rest of the epoch."""
    further: int = 0
    """Batches after that, before kill -9."""
    cached: bool = False
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run's phases; each goes on from the state of the one before."""

    name: str
    phases: tuple[Phase, ...]
    expected: frozenset[int] = frozenset(range(ROWS))
    """Rows that all phases together should deliver, each once."""
    counted_from: int = 0
    """The first phase whose rows count."""
    only_repeats: bool = False
    """Not all rows are delivered, whatever a library does."""
    damage: bool = False
    """Change a byte in each file of the cache before the last phase."""


FIRST, REST = Phase(), Phase(steps=None)
MIXED = replace(FIRST, folders=("rows", "more"), schedule=((0, (1, 1)),))
CHANGED = (*MIXED.schedule, (8 * STEPS, (3, 1)))
CASES = (
    Case(name="same ranks", phases=(FIRST, REST)),
    Case(name="more ranks", phases=(FIRST, replace(REST, world_size=4, batch=2))),
    Case(name="fewer ranks", phases=(replace(FIRST, world_size=4, batch=2), REST)),
    Case(name="workers changed", phases=(replace(FIRST, workers=2), replace(REST, workers=1))),
    Case(name="batch changed", phases=(FIRST, replace(REST, batch=8))),
    Case(name="end of an epoch", phases=(REST, REST), counted_from=1),
    Case(name="second resume", phases=(FIRST, replace(FIRST, steps=11), REST)),
    Case(name="other data", phases=(FIRST, replace(REST, folders=("other",)))),
    Case(
        name="rows removed",
        phases=(FIRST, replace(REST, excluded=tuple(REMOVED))),
        expected=frozenset(range(ROWS)) - set(REMOVED),
    ),
    Case(
        name="mixture changed",
        phases=(MIXED, replace(MIXED, schedule=CHANGED, steps=20)),
        only_repeats=True,
    ),
    Case(name="kill -9", phases=(replace(FIRST, further=5), REST)),
    Case(name="damaged cache", phases=(replace(FIRST, cached=True), replace(REST, cached=True)), damage=True),
)


def write_rows(folder: Path, numbers: Sequence[int]) -> None:
    """The rows as one file, MDS and tars; peers write their own formats of the file."""
    folder.mkdir()
    rows = rows_of(numbers)
    np.save(folder / "rows.npy", rows)
    for kind in ("mds", "tar"):
        (folder / kind).mkdir()
    lists: dict[str, list[Any]] = {"mds": [], "tar": []}
    for number, start in enumerate(range(0, len(rows), SHARD_ROWS)):
        part = rows[start : start + SHARD_ROWS].astype(np.uint32)
        lists["mds"].append(
            mds.write_rows_shard(folder / "mds", f"shard.{number:05d}.mds", part, hashes=("xxh64",))
        )
        lists["tar"].append(
            tar.write_rows_shard(folder / "tar", f"shard-{number:05d}.tar", part, key_start=start)
        )
    mds.write_index(folder / "mds", lists["mds"])
    tar.write_shard_list(folder / "tar", lists["tar"])


def read_answers(process: subprocess.Popen[str], kill_after: int | None) -> list[Answer]:
    """The lines of a rank; after so many batches it is killed, as a machine out of memory does it."""
    found = []
    assert process.stdout is not None
    for line in process.stdout:
        found.append(json.loads(line))
        if kill_after is not None and sum("ids" in answer for answer in found) >= kill_after:
            process.kill()
            break
    return found


class Runner:
    """Runs the phases of one library."""

    def __init__(self, library: str, python: str, data: Path) -> None:
        self.library, self.python, self.data = library, python, data

    def phase(self, phase: Phase, states: list[str], cache: Path) -> list[list[Answer]]:
        """What each rank answers."""
        workers = WITH_WORKERS.get(self.library, 0) if phase.workers is None else phase.workers
        removes = bool(phase.excluded) and self.library not in SELECTS_ROWS
        names = ["fewer"] if removes else phase.folders
        request = {
            "folders": [str(self.data / name) for name in names],
            "schedule": phase.schedule,
            "world_size": phase.world_size,
            "workers": workers,
            "batch": phase.batch,
            "states": states,
            "cache": str(cache) if phase.cached else None,
            "excluded": [] if removes else list(phase.excluded),
            "steps": phase.steps,
            "further": 1000 * phase.further,  # it does not end before it is killed
        }
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [
            subprocess.Popen(
                [self.python, SCRIPT, self.library, json.dumps({**request, "rank": rank})],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env={**os.environ, **address, "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            )
            for rank in range(phase.world_size)
        ]
        kill_after = (phase.steps or 0) + phase.further if phase.further else None
        with ThreadPoolExecutor(len(processes)) as pool:
            answers = [pool.submit(read_answers, process, kill_after) for process in processes]
            deadline = time.monotonic() + SECONDS
            while not all(answer.done() for answer in answers) and time.monotonic() < deadline:
                time.sleep(0.02)
            hung = not all(answer.done() for answer in answers)
            if phase.further and not hung:
                time.sleep(2)  # children of a killed process notice, or stay
            self.left = sum(left_over(process.pid) for process in processes) if phase.further else 0
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            found = [answer.result() for answer in answers]
        return [[*lines, {"error": f"no answer in {SECONDS} s"}] for lines in found] if hung else found

    def case(self, case: Case) -> Result:
        """All phases, one after another, and what came of them."""
        states: list[str] = []
        counted: Counter[int] = Counter()
        latest: set[int] = set()
        result = Result()
        with tempfile.TemporaryDirectory() as cache:
            for number, phase in enumerate(case.phases):
                if case.damage and number == len(case.phases) - 1:
                    result.damaged = damage(Path(cache))
                answers = self.phase(phase, states, Path(cache))
                lines = [line for of_rank in answers for line in of_rank]
                result.left = max(result.left, self.left)
                for key in ("unsupported", "error"):
                    if texts := [line[key] for line in lines if key in line]:
                        result.stopped = (key, number, texts[0])
                        return result
                if number >= case.counted_from:
                    rows = [
                        row for own in answers for row in ids_of(own, phase.steps if phase.further else None)
                    ]
                    counted.update(rows)
                    latest = set(rows)
                result.wrong += sum(line.get("wrong", 0) for line in lines)
                states = [line["state"] for line in lines if "state" in line]
                if len(states) != phase.world_size:
                    result.stopped = ("error", number, "it ended without a state")
                    return result
        result.repeated = sum(count - 1 for count in counted.values())
        result.lost = 0 if case.only_repeats else len(case.expected - counted.keys())
        result.other = 0 if case.only_repeats else len(latest - case.expected)
        return result


def ids_of(answers: Sequence[Answer], steps: int | None) -> Iterator[int]:
    """The rows of a rank's batches; of a run that was killed, those of the first `steps`."""
    batches = [answer["ids"] for answer in answers if "ids" in answer]
    for batch in batches[:steps]:
        yield from batch


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def left_over(group: int) -> int:
    """Processes of a session whose first one was killed."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            found += int(session) == group and state != "Z"
    return found


def damage(cache: Path) -> int:
    """Change the byte in the middle of every shard in a cache; returns how many files."""
    files = [file for file in cache.rglob("*") if file.is_file() and file.stat().st_size > 4096]
    for file in files:
        mode = file.stat().st_mode
        file.chmod(mode | 0o200)
        with file.open("r+b") as opened:
            middle = file.stat().st_size // 2
            opened.seek(middle)
            byte = opened.read(1)[0]
            opened.seek(middle)
            opened.write(bytes([byte ^ 0xFF]))
        file.chmod(mode)
    return len(files)


@dataclass
class Result:
    """What came of a case."""

    lost: int = 0
    repeated: int = 0
    other: int = 0
    """Rows in the last phase that its data does not have."""
    wrong: int = 0
    left: int = 0
    damaged: int | None = None
    stopped: tuple[str, int, str] | None = field(default=None)
    """("unsupported" or "error", phase, text)"""

    def reason(self) -> str:
        """What the library said when it stopped."""
        return "" if self.stopped is None else f"({self.stopped[2][:300]})"

    def shown(self) -> str:
        """A cell of the table."""
        if self.stopped is not None:
            kind, phase, text = self.stopped
            if kind == "unsupported":
                return "none"
            return "refused" if phase and not text.startswith(ACCIDENTS) else text.partition(":")[0]
        if self.damaged == 0:
            return "no cache file"
        parts = [f"{self.lost} lost"] * bool(self.lost) + [f"{self.repeated} twice"] * bool(self.repeated)
        parts += [f"{self.other} of other data"] * bool(self.other) + [f"{self.wrong} wrong"] * bool(
            self.wrong
        )
        parts += [f"{self.left} processes left"] * bool(self.left)
        return ", ".join(parts) or "exact"


def pythons(names: Sequence[str], venvs: Path) -> dict[str, str]:
    """The Python of each library; those that cannot be installed are left out."""
    found = {}
    for name in names:
        try:
            found[name] = environment(name, venvs) if name in PEERS else sys.executable
        except SideError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
    return found


def version_of(library: str, python: str) -> str:
    package = {"streaming": "mosaicml-streaming"}.get(library, library)
    if python == sys.executable:
        return importlib.metadata.version(package)
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def write_all(data: Path, runs: dict[str, str]) -> None:
    """Every dataset of the cases in every library's format."""
    kept = sorted(set(range(ROWS)) - set(REMOVED))
    numbers = {"rows": range(ROWS), "other": range(1000, 1000 + ROWS), "more": range(2000, 2000 + ROWS)}
    for name, chosen in {**numbers, "fewer": kept}.items():
        write_rows(data / name, chosen)
        for library in runs.keys() & set(OWN_WRITERS):
            command = [runs[library], SCRIPT, library, str(data / name)]
            done = subprocess.run(command, capture_output=True, text=True)
            if "error" in done.stdout or done.returncode:
                raise SystemExit(f"{library} cannot write its rows: {done.stdout or done.stderr}")


def main() -> None:
    parser = peer_parser(__doc__, runs=1, corpus=False)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    arguments = parser.parse_args()
    runs = pythons(arguments.libraries.split(","), arguments.venvs)
    chosen = [case for case in CASES if case.name in arguments.cases.split(",")]
    table: list[dict[str, Any]] = [{"case": case.name, "details": {}} for case in chosen]
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        write_all(data, runs)
        for library, python in runs.items():
            for case, line in zip(chosen, table, strict=True):
                result = Runner(library, python, data).case(case)
                line[library], line["details"][library] = result.shown(), vars(result)
                print(
                    f"{library}: {case.name}: {result.shown()} {result.reason()}", file=sys.stderr, flush=True
                )
    heads: Heads = {"case": ("run goes on with", "")}
    heads = {**heads, **{name: (f"{name} {version_of(name, python)}", "") for name, python in runs.items()}}
    give(arguments, table, heads, title="Rows lost and repeated by runs that stop and go on")


if __name__ == "__main__":
    main()
