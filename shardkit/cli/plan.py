"""`shardkit plan`: what a build or a training run will need, before it costs anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardkit.cli import plan_build, plan_train
from shardkit.cli.common import Quantity, print_columns, print_json

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "plan",
        help="what a build or a training run will need: raw input, cores, disk, bandwidth, cache, cost",
        description="Arithmetic from tokens to what they take. `plan train`: tokens, days and GPUs to "
        "tokens/s, bytes/s, cache, prefetch, requests. `plan build`: tokens and what each stage keeps, "
        "assumed or measured on a part of the real input, to raw text, cores, disk, requests, cost. Every "
        "assumption is printed with its default and can be given.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: tables)")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for module in (plan_train, plan_build):
        kind = module.add_parser(kinds)
        # Before and behind the kind; not set here, so that it does not undo what stands before.
        kind.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON (default: tables)"
        )
        kind.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error (default: one line)",
        )
        kind.set_defaults(make=module.make, quantities=module.QUANTITIES, parser=kind)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    try:
        plan: plan_train.Plan = arguments.make(arguments)
    except ValueError as error:  # quantities that do not go together
        arguments.parser.error(str(error))
    if arguments.json:
        print_json(_plain(plan, arguments.quantities))
    else:
        _show(plan, arguments.quantities)
    return 0


def _plain(plan: plan_train.Plan, quantities: Sequence[Quantity]) -> dict[str, Any]:
    assumptions = {
        quantity.name: {"value": _number(plan.values[quantity.name]), "origin": plan.origins[quantity.name]}
        for quantity in quantities
        if quantity.name in plan.values
    }
    results = {name: _number(value) for name, value in plan.results.items()}
    return {"inputs": assumptions, **results, "notes": list(plan.notes)}


def _number(value: Any) -> Any:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, Mapping):
        return {name: _number(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_number(each) for each in value]
    return value


def _show(plan: plan_train.Plan, quantities: Sequence[Quantity]) -> None:
    for title, columns, rows in plan.tables:
        left = [number for number, name in enumerate(columns) if number == 0 or name == "how"]
        print_columns(title, columns, rows, left=left)
        sys.stdout.write("\n")
    rows = [
        [
            plan.origins[quantity.name],
            quantity.flag,
            quantity.show(plan.values[quantity.name]),
            quantity.help.partition(";")[0],
        ]
        for quantity in quantities
        if quantity.name in plan.values
    ]
    print_columns("From", [""] * 4, rows, left=range(4))
    sys.stdout.flush()
    for note in plan.notes:
        sys.stderr.write(f"shardkit: note: {note}\n")
