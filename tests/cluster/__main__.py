"""Builds, uploads and training on several machines with faults, as a table.

    PYTHONPATH=.:tests python -m cluster                         # eight namespaces of this machine, as root
    PYTHONPATH=.:tests python -m cluster --machines rented.yaml  # machines that ssh reaches
    PYTHONPATH=.:tests python -m cluster --nodes 2 --outage 5 --cases "one machine" "all machines" training

docs/guides/cluster_lab.md explains the table and the file of rented machines. Everything that is started ends
with this command, however it ends. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from cluster.cases import CASES, Plan, Row, run_case
from cluster.data import corpus, recipe, tokenizer
from cluster.lab import Lab
from cluster.machines import (
    NVME,
    Machine,
    NamespaceMachine,
    SshMachine,
    in_a_room,
    make_bridge,
    serve_ssh,
    why_not,
)

_IN_ROOM = "SHARDKIT_LAB_ROOM"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cluster",
        description="A lab of several machines: builds, uploads and training, with faults.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--machines", type=Path, help="YAML file of rented machines, instead of namespaces of this one")
    add("--ssh", action="store_true", help="reach the namespaces by ssh, as rented machines")
    add("--nodes", type=int, default=8, help="number of machines")
    add("--mbit", type=float, default=50.0, help="width of a machine's link, in Mbit/s")
    add("--delay", type=float, default=0.0, help="seconds that bytes take to the store, each way")
    add("--files", type=int, default=24, help="files of the corpus")
    add("--file-mb", type=float, default=1.0, help="MB of text in each")
    add("--outage", type=float, default=60.0, help="seconds of a partition or an outage of the store")
    add("--steps", type=int, default=60, help="of training")
    add("--limit", type=float, default=900.0, help="seconds after which a case has failed")
    add(
        "--cases",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        metavar="CASE",
        help="the cases to run",
    )
    add("--folder", type=Path, help="keep what the machines wrote here; otherwise it is removed at the end")
    return parser.parse_args(arguments)


def inventory(file: Path) -> dict[str, Any]:
    """Return what a file of rented machines says, checked for keys that are missing or unknown."""
    told: dict[str, Any] = yaml.safe_load(file.read_text())
    optional = {"store", "endpoint", "bucket", "ssh", "mbit"}
    needed = {"machines", "nvme", "python", "checkout"}
    if wrong := (needed - set(told)) | (set(told) - needed - optional):
        raise SystemExit(f"{file}: missing or unknown keys: {', '.join(sorted(wrong))}")
    if ("store" in told) == ("endpoint" in told):
        raise SystemExit(f"{file}: give either `store`, a machine, or `endpoint`, the URL of a store")
    return told


def rented(told: dict[str, Any], logs: Path, folder: Path) -> Lab:
    """Return the lab of the machines in an inventory."""
    mbit, count = float(told.get("mbit", 1000)), len(told["machines"])

    def machine(name: str, address: str, width: float) -> SshMachine:
        return SshMachine(name, address, told["nvme"], logs, width, told.get("ssh", ["ssh", "-l", "root"]))

    machines = [machine(f"m{n + 1}", address, mbit) for n, address in enumerate(told["machines"])]
    store = machine("store", told["store"], mbit * count) if "store" in told else None
    everyone = [*machines, *([store] if store else [])]
    for one in everyone:
        one.peers = [other.address for other in everyone if other is not one]
        one.boot()
        one.rate(one.mbit)
    return Lab(
        list[Machine](machines), folder, store, told.get("endpoint", ""), told.get("bucket", "lab"),
        told["python"], Path(told["checkout"]),
    )  # fmt: skip


def namespaces(options: argparse.Namespace, logs: Path, folder: Path) -> Lab:
    """Return the lab of machines that are namespaces of this process."""
    make_bridge()
    machines = [
        NamespaceMachine(f"m{number}", number, folder, logs, options.mbit)
        for number in range(1, options.nodes + 1)
    ]
    store = NamespaceMachine("store", 0, folder, logs, options.mbit * options.nodes)
    if not options.ssh:
        return Lab(list[Machine](machines), folder, store, delay=options.delay)
    told = {"machines": [machine.address for machine in machines], "store": store.address, "nvme": NVME}
    told |= {"ssh": serve_ssh([*machines, store], folder), "python": sys.executable, "mbit": options.mbit}
    (logs / "ssh").mkdir()
    return rented(told | {"checkout": str(Path(__file__).resolve().parents[2])}, logs / "ssh", folder)


def run(options: argparse.Namespace) -> int:
    """Run the cases and print the table; the exit status."""
    folder = options.folder
    logs = folder / "logs"
    logs.mkdir(parents=True)
    if options.machines is None:
        lab = namespaces(options, logs, folder)
    else:
        lab = rented(inventory(options.machines), logs, folder)
    try:
        lab.start_store()
        for name, data in corpus(options.files, int(options.file_mb * 1e6)):
            lab.put(f"raw/{name}", data)
        lab.head.put(f"{lab.head.nvme}/tokenizer.json", tokenizer().encode())
        lab.head.put(f"{lab.head.nvme}/recipe.yaml", recipe(lab.bucket).encode())
        plan = Plan(
            f"{lab.head.nvme}/recipe.yaml",
            outage_seconds=options.outage,
            case_seconds=options.limit,
            steps=options.steps,
            peer_seconds=max(30.0, 2 * options.outage),
        )
        rows = []
        say(HEADER)
        for name in CASES:
            if name in options.cases:
                rows.append(run_case(name, lab, plan))
                say(line_of(rows[-1], lab.head.mbit))
        say(f"\nLoad of this machine at the end (1, 5, 15 minutes): {', '.join(map(str, os.getloadavg()))}")
    finally:
        lab.leave()
    return 0 if all(row.is_good for row in rows) else 1


_COLUMNS = (
    *("case", "seconds", "of which the links take", "same bytes", "again"),
    "MB of each machine: least, mean, most",
    *("MB between machines", "share", "notes"),
)
HEADER = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def line_of(row: Row, mbit: float) -> str:
    same = {True: "yes", False: "**no**", None: "-"}[row.same]
    links, sizes, between, share = "-", "-", "-", "-"
    if row.moved is not None:
        nodes = [size / 1e6 for size in row.moved.nodes]
        links = f"{row.moved.link_seconds(mbit):.1f}"
        sizes = f"{min(nodes):.1f}, {sum(nodes) / len(nodes):.1f}, {max(nodes):.1f}"
        between, share = f"{row.moved.between / 1e6:.1f}", f"{row.moved.between_share:.0%}"
    notes = "; ".join(row.notes).replace("\n", " / ").replace("|", "/")
    again = "-" if row.again is None else str(row.again)
    values = (row.case, f"{row.seconds:.0f}", links, same, again, sizes, between, share, notes)
    return f"| {' | '.join(values)} |"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, leave)
    if os.environ.get(_IN_ROOM):
        return run(options)
    kept = options.folder
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    try:
        return run(options) if options.machines is not None else run_in_a_room(options.folder, arguments)
    finally:
        if kept is None:
            shutil.rmtree(options.folder, ignore_errors=True)


def run_in_a_room(folder: Path, arguments: Sequence[str] | None) -> int:
    """Run this command again where all that it starts ends with it; its exit status."""
    if problem := why_not():
        sys.stderr.write(f"{problem}\n")
        return 2
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = [sys.executable, "-m", "cluster", *given, "--folder", str(folder)]
    room = subprocess.Popen(in_a_room(command), env=os.environ | {_IN_ROOM: "1"})
    try:
        return room.wait()
    finally:
        room.kill()  # and the kernel ends all that runs in it
        room.wait()


if __name__ == "__main__":
    sys.exit(main())
