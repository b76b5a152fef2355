"""The cases of the lab: a build, an upload, a training run, each with a fault, and what came of it.

Each case has a limit of time, after which it counts as failed. A build's and an upload's output is compared
byte for byte with that of one machine, a training run's rows with those of an undisturbed run.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.lab import Lab, Moved, end_of, faketime_library, within
from cluster.machines import LabError, Machine, Running
from cluster.slurm import LabSlurm

__all__ = ["CASES", "Plan", "Row", "run_case"]

_UNDER_WAY = "read and filter"  # the first stage of a build that reads all inputs
_AGAIN = re.compile("it runs again|a second attempt starts")
_SBATCH = "recipes/clusters/ray-on-slurm.sbatch"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long faults last, and what a run is limited to."""

    recipe: str
    outage_seconds: float = 60.0
    case_seconds: float = 600.0
    steps: int = 60
    step_seconds: float = 0.2
    peer_seconds: float = 120.0


@dataclass(slots=True)
class Row:
    """Holds what a case came to, as a line of the table."""

    case: str
    seconds: float = 0.0
    same: bool | None = None  # None: there is nothing to compare with
    again: int | None = None  # tasks or steps that ran again
    moved: Moved | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.same is not False


Case = Callable[[Lab, Plan, Row], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def run_case(name: str, lab: Lab, plan: Plan) -> Row:
    """Run a case; what goes wrong is what its row says, and does not reach the next case."""
    row = Row(name)
    began = time.monotonic()
    try:
        CASES[name](lab, plan, row)
    except (LabError, OSError, subprocess.SubprocessError) as error:
        row.same, row.seconds = False, time.monotonic() - began
        row.notes.append(str(error))
        lab.end_ray()
        lab.mend()
    return row


@contextmanager
def _measured(lab: Lab, row: Row) -> Iterator[None]:
    """Have the row say how long the block took, and what moved meanwhile."""
    began, moved = time.monotonic(), lab.meter()
    yield
    row.seconds, row.moved = time.monotonic() - began, moved()


# Builds


Fault = Callable[[Lab, Plan, Running], Running]  # does its harm; returns the command that ends the build


def _build(lab: Lab, plan: Plan, row: Row, fault: Fault | None = None) -> None:
    """Build with a fault once inputs are read, and compare with one machine's build."""
    output = re.sub(r"\W+", "-", row.case)
    if not lab.ray_runs:
        lab.start_ray()
    with _measured(lab, row):
        first = command = lab.build(plan.recipe, output)
        if fault is not None:
            lab.wait_for(command, _UNDER_WAY, plan.case_seconds)
            command = fault(lab, plan, command)
        code = lab.finish(command, plan.case_seconds)
    texts = command.text() + (first.text() if first is not command else "")
    row.again = len(_AGAIN.findall(texts))
    if code:
        raise LabError(f"the build ended with {code}: {end_of(command)}")
    lab.mend()
    _compare(lab, row, output)


def _compare(lab: Lab, row: Row, output: str) -> None:
    """Compare the objects of a dataset with those of the one that one machine has built."""
    if not (expected := lab.tree("one")):
        raise LabError('nothing to compare with: the case "one machine" comes first')
    row.same = lab.tree(output) == expected


@case("one machine")
def one_machine(lab: Lab, plan: Plan, row: Row) -> None:
    with _measured(lab, row):
        command = lab.build(plan.recipe, "one", ray=False)
        code = lab.finish(command, plan.case_seconds)
    if code:
        raise LabError(f"the build ended with {code}: {end_of(command)}")


@case("all machines")
def all_machines(lab: Lab, plan: Plan, row: Row) -> None:
    _build(lab, plan, row)


@case("a machine gone")
def machine_gone(lab: Lab, plan: Plan, row: Row) -> None:
    def fault(lab: Lab, plan: Plan, build: Running) -> Running:
        lab.machines[1].kill()
        return build

    _build(lab, plan, row, fault)


@case("a partition")
def partition(lab: Lab, plan: Plan, row: Row) -> None:
    def fault(lab: Lab, plan: Plan, build: Running) -> Running:
        _cut_off(lab.machines[1], plan)
        return build

    _build(lab, plan, row, fault)


@case("the store gone for a while")
def store_gone(lab: Lab, plan: Plan, row: Row) -> None:
    def fault(lab: Lab, plan: Plan, build: Running) -> Running:
        _cut_off(_store_of(lab), plan)
        return build

    _build(lab, plan, row, fault)


def _store_of(lab: Lab) -> Machine:
    if lab.store is None:
        raise LabError("the store is not a machine of the lab")
    return lab.store


def _cut_off(machine: Machine, plan: Plan) -> None:
    """Take the link of a machine down for a while."""
    machine.link(False)
    time.sleep(plan.outage_seconds)
    machine.link(True)


@case("a slow link")
def slow_link(lab: Lab, plan: Plan, row: Row) -> None:
    def fault(lab: Lab, plan: Plan, build: Running) -> Running:
        lab.machines[1].rate(lab.machines[1].mbit / 20)
        return build

    _build(lab, plan, row, fault)


@case("the head gone")
def head_gone(lab: Lab, plan: Plan, row: Row) -> None:
    def fault(lab: Lab, plan: Plan, build: Running) -> Running:
        lab.head.kill()
        within(plan.case_seconds, "the command is gone with its machine", lambda: build.code is not None)
        lab.head.boot()
        lab.end_ray()
        lab.start_ray()
        return lab.build(plan.recipe, re.sub(r"\W+", "-", row.case))

    _build(lab, plan, row, fault)


@case("clocks 10 minutes apart")
def clocks_apart(lab: Lab, plan: Plan, row: Row) -> None:
    if faketime_library() is None:
        row.notes.append("skipped: no libfaketime on this machine (Debian's package libfaketime)")
        return
    lab.end_ray()
    lab.start_ray(1)
    for number, machine in enumerate(lab.machines[1:]):
        lab.join_ray(machine, ("+10m", "-10m")[number % 2])
    lab.wait_for_nodes()
    _build(lab, plan, row)
    lab.end_ray()


@case("Slurm, a machine gone")
def slurm_machine_gone(lab: Lab, plan: Plan, row: Row) -> None:
    lab.end_ray()
    slurm = LabSlurm(lab)
    try:
        _build_by_slurm(lab, slurm, plan, row)
    finally:
        lab.mend()
        for machine in lab.machines:
            machine.end_all()


def _build_by_slurm(lab: Lab, slurm: LabSlurm, plan: Plan, row: Row) -> None:
    size = [f"--nodes={len(lab.machines)}", "--cpus-per-task=1", "--mem-per-cpu=2000M", "--time=50"]
    build = [plan.recipe, *lab.places("slurm")]
    with _measured(lab, row):
        job = slurm.submit([*size, f"{lab.checkout}/{_SBATCH}", *build])
        within(plan.case_seconds, f"job {job} builds", lambda: _UNDER_WAY in slurm.log(job))
        lab.machines[-1].kill()
        state = slurm.wait(job, plan.case_seconds)
    row.again = len(_AGAIN.findall(slurm.log(job)))
    if state != "COMPLETED":
        raise LabError(f"the job is {state}: {slurm.log(job)[-2000:]}")
    _compare(lab, row, "slurm")


# Uploads


@case("upload, the store gone for a while")
def upload(lab: Lab, plan: Plan, row: Row) -> None:
    machine, store = lab.machines[-1], _store_of(lab)
    folder, verb = f"{machine.nvme}/dataset", [lab.python, "-m", "shardkit"]
    get = machine.start([*verb, "download", f"s3://{lab.bucket}/one", folder], lab.environment)
    if code := lab.finish(get, plan.case_seconds):
        raise LabError(f"the download ended with {code}: {end_of(get)}")
    with _measured(lab, row):
        put = machine.start([*verb, "upload", folder, f"s3://{lab.bucket}/uploaded"], lab.environment)
        began = partial(lab.sizes, "uploaded")
        within(plan.case_seconds, "the first file is sent", lambda: bool(began()) or put.code is not None)
        _cut_off(store, plan)
        code = lab.finish(put, plan.case_seconds)
    if code:
        raise LabError(f"the upload ended with {code}: {end_of(put)}")
    _compare(lab, row, "uploaded")


# Training


@dataclass(slots=True)
class Run:
    """A training run: the steps that rank 0 told of, in the order in which they came."""

    steps: list[tuple[int, str]] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)  # seconds that each rank waited for its first batch
    fetched: dict[str, float] = field(default_factory=dict)  # bytes, by machine

    @property
    def rows(self) -> dict[int, str]:
        return dict(self.steps)

    @property
    def lost(self) -> int:
        """Steps that were done more than once."""
        return len(self.steps) - len(self.rows)


_PORT = 29_500


class Training:
    """Two ranks on each machine, started again without machines that are gone whenever one fails."""

    def __init__(self, lab: Lab, plan: Plan, name: str) -> None:
        self._lab, self._plan, self._name = lab, plan, name
        self._ranks: list[tuple[Machine, Running]] = []
        self._starts = 0
        self._logs: list[list[tuple[Machine, Running]]] = []

    def start(self) -> None:
        """Start all ranks on the machines that are there."""
        self._starts += 1
        lab, plan = self._lab, self._plan
        machines = [machine for machine in lab.machines if not machine.is_gone]
        program = [
            lab.python, "-m", "cluster.rank", "--data", f"s3://{lab.bucket}/one",
            "--cache", f"{lab.head.nvme}/cache-{self._name}",
            "--checkpoint", f"s3://{lab.bucket}/checkpoints/{self._name}", "--steps", str(plan.steps),
            "--global-batch", str(_global_batch(len(lab.machines))),
            "--step-seconds", str(plan.step_seconds), "--peer-seconds", str(plan.peer_seconds),
        ]  # fmt: skip
        place = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(_PORT + self._starts)}
        self._ranks = []
        for number, machine in enumerate(machines):
            for local in (0, 1):
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
                values = map(str, (2 * number + local, local, 2 * len(machines), 2))
                told = dict(zip(names, values, strict=True)) | {"GLOO_SOCKET_IFNAME": machine.device}
                self._ranks.append((machine, machine.start(program, lab.environment | place | told)))
        self._logs.append(self._ranks)

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has told of a step; LabError if a rank ends before."""

        def is_done() -> bool:
            if any(rank.code is not None for _, rank in self._ranks):
                raise LabError(f"a rank ended before step {step}: {self._ends()}")
            return step in self.told().rows

        within(self._plan.case_seconds, f"step {step}: {self._ends()}", is_done)

    def finish(self) -> Run:
        """Wait until all ranks have ended, starting all again whenever one fails; what they told."""
        deadline = time.monotonic() + self._plan.case_seconds
        while not all(rank.code == 0 for _, rank in self._ranks):
            if any(rank.code for _, rank in self._ranks):
                ends = self._ends()
                self.end()
                if self._starts > 3:
                    raise LabError(f"training failed {self._starts} times: {ends}")
                self.start()
            if time.monotonic() > deadline:
                self.end()
                raise LabError(f"training takes over {self._plan.case_seconds:.0f} s: {self._ends()}")
            time.sleep(0.2)
        return self.told()

    def end(self) -> None:
        for machine, rank in self._ranks:
            if not machine.is_gone:
                machine.end(rank)

    def _ends(self) -> str:
        return "\n".join(f"{m.name}: {end_of(rank, 3)}" for m, rank in self._ranks if rank.code)

    def told(self) -> Run:
        run = Run()
        for machine, rank in (rank for ranks in self._logs for rank in ranks):
            counted: dict[str, Any] = {}
            for line in rank.text().splitlines():
                fact: dict[str, Any] = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
                if "step" in fact:
                    run.steps.append((fact["step"], fact["rows"]))
                counted = fact if "fetched" in fact else counted
            if counted:
                run.firsts.append(counted["first"])
                run.fetched[machine.name] = run.fetched.get(machine.name, 0.0) + counted["fetched"]
        return run


def _global_batch(machines: int) -> int:
    """Return a batch that the ranks of all machines, and of one fewer, can share."""
    return 2 * machines * max(1, machines - 1)


def _train(lab: Lab, plan: Plan, row: Row, fault: Callable[[], None] | None = None) -> None:
    """Train, with a fault at a third of the steps, and compare the rows of each step with the first run's."""
    lab.end_ray()
    if fault is not None and not lab.rows:
        raise LabError('nothing to compare with: the case "training" comes first')
    training = Training(lab, plan, re.sub(r"\W+", "-", row.case))
    try:
        with _measured(lab, row):
            training.start()
            if fault is not None:
                training.wait_for_step(plan.steps // 30 * 10 + 5)  # between two checkpoints
                fault()
            run = training.finish()
    finally:
        training.end()
        lab.mend()
    if fault is None:
        lab.rows = run.rows
    row.same = len(lab.rows) == plan.steps and run.rows == lab.rows and _is_consistent(run)
    row.again = run.lost
    shards = sum(size for name, size in lab.sizes("one").items() if name.endswith(".mds"))
    share = sum(run.fetched.values()) / (shards * len(run.fetched))
    row.notes.append(f"read amplification {share:.2f}; first batch {max(run.firsts):.1f} s")


def _is_consistent(run: Run) -> bool:
    """Return whether steps that were done again had the same rows as before."""
    return all(run.rows[step] == rows for step, rows in run.steps)


@case("training")
def training(lab: Lab, plan: Plan, row: Row) -> None:
    _train(lab, plan, row)


@case("training, a machine gone")
def training_machine_gone(lab: Lab, plan: Plan, row: Row) -> None:
    _train(lab, plan, row, lab.machines[1].kill)


@case("training, a partition")
def training_partition(lab: Lab, plan: Plan, row: Row) -> None:
    _train(lab, plan, row, lambda: _cut_off(lab.machines[1], plan))


@case("training, a slow link")
def training_slow_link(lab: Lab, plan: Plan, row: Row) -> None:
    _train(lab, plan, row, lambda: lab.machines[1].rate(lab.machines[1].mbit / 20))


@case("training, the store gone for a while")
def training_store_gone(lab: Lab, plan: Plan, row: Row) -> None:
    _train(lab, plan, row, lambda: _cut_off(_store_of(lab), plan))
