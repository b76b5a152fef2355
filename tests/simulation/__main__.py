"""Run simulations by seed: `PYTHONPATH=tests python -m simulation --seed 17`, or many of them for a time."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from simulation.builds import simulate_build
from simulation.planted import PLANTED, PLANTED_IN_BUILDS, planted
from simulation.scheduler import Scheduler
from simulation.training import simulate
from simulation.world import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--builds", action="store_true", help="simulate builds in place of loaders")
    parser.add_argument(
        "--rivals",
        action="store_true",
        help="with --builds: others may replace what is published in the bucket; finds a known limit",
    )
    parser.add_argument(
        "--lines", action="store_true", help="interrupt threads between any two lines, too: slow"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--seconds", type=float, help="run seeds until this time is over, instead of --runs")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failure")
    parser.add_argument(
        "--plant",
        choices=PLANTED | PLANTED_IN_BUILDS,
        help="with this fault in the package: shows that it is found",
    )
    parser.add_argument("--verbose", action="store_true", help="print the last events of a failure")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, seed, steps, failures = time.monotonic(), arguments.seed, 0, []
    run: Callable[..., Outcome] = simulate
    if arguments.builds:
        run = partial(simulate_build, rivals=arguments.rivals)
    while True:
        watched: list[Scheduler] = []
        try:
            with planted(arguments.plant) if arguments.plant else nullcontext():
                outcome = run(seed, watch=watched.append, lines=arguments.lines)
            steps += outcome.steps
            if arguments.verbose:
                print(outcome)
                print(
                    "\n".join(event for event in watched[0].events if "error " in event or "fault" in event)
                )
        except Exception as error:
            failures.append(seed)
            steps += sum(scheduler.steps for scheduler in watched)
            print(f"seed {seed}, commit {_commit()}: {type(error).__name__}: {error}")
            if arguments.verbose:
                traceback.print_exc(file=sys.stdout)
                print("\n".join(watched[0].events if watched else []))
            options = ("builds", "rivals", "lines")
            more = "".join(f"--{option} " for option in options if getattr(arguments, option))
            more += f"--plant {arguments.plant} " if arguments.plant else ""
            print(f"replay: PYTHONPATH=tests python -m simulation {more}--seed {seed} --verbose", flush=True)
            if not arguments.keep_going:
                return 1
        seed += 1
        is_over = seed - arguments.seed >= arguments.runs
        if arguments.seconds is not None:
            is_over = time.monotonic() - began > arguments.seconds
        if is_over:
            break
    seconds = time.monotonic() - began
    print(
        f"{seed - arguments.seed} seeds, {steps:,} steps in {seconds:.1f} s, failures: {failures or 'none'}"
    )
    return 1 if failures else 0


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
