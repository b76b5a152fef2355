"""Kill ranks of training runs at random steps, go on with a random number of ranks; print what became of it.

    python tests/benchmarks/soak_training.py --kills 50 [--seed SEED]

The same as tests/frameworks/test_training_runs.py for as long as one likes: the DDP and the FSDP2 example
over a mixture whose weights change every few steps, each one run that is killed again and again, compared
with a run on two ranks that never was. Ends with status 1 if a step was trained on other samples, or a loss
is not the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from frameworks.test_training_runs import BATCH, IMPORTS, MOST_DIFFERENCE
from support.script_server import ScriptServer
from support.train_harness import CHECKPOINT_EVERY, Training, make_dataset, script_server

SCRIPTS = ["train_ddp.py", "train_fsdp.py"]
WORLDS = [1, 2, 3, 4]
CHANGES = 40  # of the weights


def soak(script: str, kills: int, chance: random.Random, folder: Path, server: ScriptServer) -> bool:
    """Print the figures of one script; whether all was well."""
    began = time.monotonic()
    data = [str(make_dataset(folder / name, seed=seed)) for seed, name in enumerate(["web", "code"])]
    schedule = [f"{step}={chance.randint(0, 9)},{chance.randint(1, 9)}" for step in range(7, 7 * CHANGES, 7)]
    arguments = ["--global-batch-size", str(BATCH), "--data", f"{data[0]}=3", f"{data[1]}=1"]
    arguments += ["--schedule", *schedule]
    killed = Training(script, folder / "killed", arguments, server=server)
    worlds: list[int] = []
    killed_ranks: list[int] = []
    for _ in range(kills):
        worlds.append(chance.choice(WORLDS))
        killed_ranks.append(chance.randrange(worlds[-1]))
        step = killed.last_step() + chance.randint(1, 2 * CHECKPOINT_EVERY)
        replace(killed, ranks=worlds[-1]).run_until_killed(step, killed_ranks[-1])
    records = killed.records()
    whole = Training(script, folder / "whole", arguments, 2, server)
    whole.run(killed.last_step())
    expected = {record["step"]: record for record in whole.records()}

    wrong = [
        r["step"] for r in records if sorted(r["sample_ids"]) != sorted(expected[r["step"]]["sample_ids"])
    ]
    differences = [abs(r["loss"] / expected[r["step"]]["loss"] - 1) for r in records]
    missing = set(expected) - {record["step"] for record in records}
    fine = not wrong and not missing and max(differences) < MOST_DIFFERENCE
    pairs = set(pairwise(worlds))
    for name, value in {
        "kills": f"{kills:,}",
        "of rank 0": f"{killed_ranks.count(0):,}",
        "changes of the number of ranks, kinds of": f"{len(pairs)} of {len(WORLDS) ** 2}",
        "steps": f"{len(expected):,}",
        "of them run again after a kill": f"{len(records) - len(expected):,}",
        "steps missing": f"{len(missing):,}",
        "steps on other samples": f"{len(wrong):,}",
        "largest relative difference of a loss": f"{max(differences):.1e}",
        "seconds": f"{time.monotonic() - began:.0f}",
    }.items():
        print(f"{script:<15} {name:<42} {value:>12}", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill ranks of training runs at random steps.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    fine = True
    with script_server(*IMPORTS) as server:
        for script in SCRIPTS:
            chance = random.Random(f"{options.seed} {script}")
            with tempfile.TemporaryDirectory() as folder:
                fine &= soak(script, options.kills, chance, Path(folder), server)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
