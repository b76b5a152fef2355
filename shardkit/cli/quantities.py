"""Quantities on the command line: how they are read, what they are unless given, and where each came from.

A plan is as good as its assumptions: every quantity is shown with its value and whether it was given,
measured or assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Quantity", "add_quantities", "argument", "origins_of", "values_of"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """An option. `default` is what stands in for it, as text; None: it must be given, or is worked out."""

    flag: str
    name: str
    """Of the field that takes it."""
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    help: str
    metavar: str
    default: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """argparse's name of it."""
        return self.flag.strip("-").replace("-", "_")


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type: its ValueError is what the user is told."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_quantities(parser: argparse._ActionsContainer, quantities: Sequence[Quantity]) -> None:
    """Register them; what is not given stays None."""
    for quantity in quantities:
        parser.add_argument(
            quantity.flag,
            type=argument(quantity.parse),
            metavar=quantity.metavar,
            required=quantity.required,
            help=quantity.help + (f" (default: {quantity.default})" if quantity.default else ""),
        )


def values_of(
    arguments: argparse.Namespace, quantities: Sequence[Quantity], measured: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Each field's value: as given, else as measured, else the default; those without any are left out."""
    found = {}
    for quantity in quantities:
        value = getattr(arguments, quantity.key)
        if value is None and measured is not None:
            value = measured.get(quantity.name)
        if value is None and quantity.default is not None:
            value = quantity.parse(quantity.default)
        if value is not None:
            found[quantity.name] = value
    return found


def origins_of(
    arguments: argparse.Namespace, quantities: Sequence[Quantity], measured: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """ "given", "measured" or "assumed", by field."""
    origins = {}
    for quantity in quantities:
        if getattr(arguments, quantity.key) is not None:
            origins[quantity.name] = "given"
        elif measured is not None and measured.get(quantity.name) is not None:
            origins[quantity.name] = "measured"
        elif quantity.default is not None:
            origins[quantity.name] = "assumed"
    return origins
