"""Mutation scores: `PYTHONPATH=tests python -m mutation shardkit/order/permutation.py [--sample 80]`."""

from __future__ import annotations

import argparse
import sys
import time

from mutation.runner import score, targets

LEAST = 0.9  # of the mutants that are not listed as harmless


def main() -> int:
    known = targets()
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("module", choices=known, help="path of a module that targets.toml lists")
    parser.add_argument("--sample", type=int, help="only so many of its mutants, chosen by the seed")
    parser.add_argument("--only", default="", help="only mutants with this text in their names")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    print("survivors:", flush=True)
    found = score(
        known[arguments.module],
        only=arguments.only,
        sample=arguments.sample,
        seed=arguments.seed,
        report=lambda line: print(f"  {line}", flush=True),
    )
    for name in found.stale:
        print(f"  stale in targets.toml (gone, or killed): {name}")
    print(
        f"{arguments.module}: {len(found.killed)} killed, {len(found.survived)} survived, "
        f"{len(found.harmless)} listed as harmless: {found.fraction:.1%} ({time.monotonic() - began:.0f} s)"
    )
    return 0 if found.fraction >= LEAST and not found.stale else 1


if __name__ == "__main__":
    sys.exit(main())
