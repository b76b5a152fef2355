"""What verbs share: counts as arguments; results on stdout, everything else on stderr.

Documents, URLs and file names may hold escape sequences, which a terminal obeys: they change its title, hide
lines or fill the clipboard. So whatever a verb prints goes through `escaped`: by a console of this module, by
`print_json` and `print_columns`, or as an error or warning in `shardkit.cli.main`.

Plain tables on stdout that keep their lines whole, on terminals and in files alike.

The options of every verb that takes URLs: how a store is reached.

Arguments that all commands which run a recipe share.

Quantities on the command line: how they are read, what they are unless given, and where each came from.

A plan is as good as its assumptions: every quantity is shown with its value and whether it was given,
measured or assumed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardkit.storage.store import StorageOptions

__all__ = [
    "Quantity",
    "add_quantities",
    "add_recipe_arguments",
    "add_storage_arguments",
    "argument",
    "count",
    "count_to",
    "escaped",
    "origins_of",
    "print_columns",
    "print_json",
    "stderr_console",
    "stdout_console",
    "storage_options",
    "values_of",
]

# C0 but tab and newline, DEL and C1, which terminals obey; and lone surrogates, which cannot be written.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with characters that control a terminal spelled out, such as \\x1b; tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def count(text: str) -> int:
    """argparse type: a number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def count_to(limit: int) -> Callable[[str], int]:
    """argparse type: a number from 1 to `limit`."""

    def limited(text: str) -> int:
        if count(text) > limit:
            raise argparse.ArgumentTypeError(f"{text} is more than {limit}")
        return int(text)

    return limited


def print_json(result: Mapping[str, Any]) -> None:
    """Print plain data on stdout."""
    text = json.dumps(result, indent=2, ensure_ascii=False)  # escapes C0, and leaves DEL, C1 and surrogates
    sys.stdout.write(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def stdout_console() -> Console:
    """Where a verb's result goes when it is for people."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Where messages go."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class EscapingConsole(Console):
        def render_str(self, text: str, *args: Any, **options: Any) -> Text:  # lines and cells of tables
            return super().render_str(escaped(text), *args, **options)

    # No mark-up: names of files and sources may hold brackets. Lines are not cut: they may be piped.
    return EscapingConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def print_columns(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """A title, a line of column names (none if all are empty) and rows; `left` are the columns set left."""
    shown = [*([columns] if any(columns) else []), *rows]
    lines = [[escaped(cell) for cell in line] for line in shown]
    widths = [max((len(line[number]) for line in lines), default=0) for number in range(len(columns))]
    text = [escaped(title)] if title else []
    for line in lines:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    sys.stdout.write("\n".join(text) + "\n")


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    """Register them; what is left out comes from the AWS environment and its configuration files."""
    group = parser.add_argument_group("S3 and servers like it")
    group.add_argument(
        "--endpoint-url",
        metavar="URL",
        help="of a server like S3 (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then AWS itself)",
    )
    group.add_argument(
        "--region", metavar="NAME", help="of the bucket (default: as the AWS configuration says)"
    )
    group.add_argument(
        "--profile", metavar="NAME", help="profile of the AWS configuration (default: AWS_PROFILE)"
    )
    style = group.add_mutually_exclusive_group()
    style.add_argument(
        "--path-style",
        action="store_true",
        default=None,
        dest="path_style",
        help="put the bucket in the path (the default when an endpoint is set)",
    )
    style.add_argument(
        "--virtual-style",
        action="store_false",
        default=None,
        dest="path_style",
        help="put the bucket in the host name (the default of AWS itself)",
    )
    group.add_argument(
        "--checksums",
        choices=["when_supported", "when_required"],
        help="S3's flexible checksums (default: when_required if an endpoint is set, else as configured)",
    )


def storage_options(arguments: argparse.Namespace) -> StorageOptions:
    """What the command line says of the store."""
    from shardkit.storage.store import StorageOptions

    return StorageOptions(
        endpoint_url=arguments.endpoint_url,
        region=arguments.region,
        profile=arguments.profile,
        path_style=arguments.path_style,
        checksums=arguments.checksums,
    )


def add_recipe_arguments(parser: argparse.ArgumentParser, *, example: str) -> None:
    """--workers, --engine, --ray-address, --set (`example` is a KEY=VALUE for its help) and --quiet."""
    parser.add_argument(
        "--workers", type=count, metavar="N", help="processes (default: one a core, as far as memory allows)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"replace a key of the recipe, such as {example}; may be repeated",
    )
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="what runs the tasks: processes of this machine, or a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the Ray cluster, such as auto or ray://host:10001 (default: $RAY_ADDRESS, else one is started "
        "on this machine)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr (default: show it)")


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
