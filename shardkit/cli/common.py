"""Options, quantities and output that the verbs share.

Results go to stdout, everything else to stderr. Documents, URLs and file names may hold escape sequences that
control a terminal: they change its title, hide lines or fill the clipboard. Everything that a verb prints
therefore goes through `escaped`: by a console of this module, by `print_json` and `print_columns`, or as an
error or warning in `shardkit.cli.main`.

An option that several verbs have is registered here once; `shardkit.cli.declared` takes its help, type and
default from the class or function that the option is for. A `Quantity` is an option whose value is shown to
users: parsed from text such as "10Gbit/s", printed with its unit and its origin (given, measured or assumed).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.declared import add_keys, add_options, argument, given, settings
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardkit.progress import TransferListener
    from shardkit.storage.store import StorageOptions

_FIRST_CONTACT_SECONDS = 5.0  # timeout for a store's first answer in commands that are not long jobs
_STORAGE = "shardkit.storage.store:StorageOptions"
_EXECUTION = "shardkit.writers.executors:Execution"
_CONFIG = "shardkit.loaders.config:LoaderConfig"
_OF_RUNS = ("lanes", "window", "balance", "eos_id", "bos_id", "pad_id")  # --loader's keys in every verb

PATH_HELP = "folder, index file, tar, pattern or URL"

# Control characters (C0 except tab and newline, DEL, C1), and lone surrogates, which cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return `text` with control characters replaced by escapes such as \\x1b; keep tabs and newlines."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` to `most` (None: no upper limit)."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if most is not None and int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is above the limit of {most}")
        return int(text)

    return parsed


def file_path(text: str) -> Path:
    """Parse an argparse value as a path on this machine; errors of `local_path` become argparse errors."""
    from shardkit.files import local_path

    return argument(local_path)(text)  # type: ignore[no-any-return]


count = whole(1)
natural = whole(0)


def print_json(result: Mapping[str, Any]) -> None:
    """Print plain data as JSON on stdout."""
    text = json.dumps(result, indent=2, ensure_ascii=False)  # does not escape DEL, C1 and lone surrogates
    sys.stdout.write(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def stdout_console() -> Console:
    """Return the console for a verb's result as text."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Return the console for messages on stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    from shardkit.progress import write_log

    class EscapingConsole(Console):
        def render_str(self, text: str, *args: Any, **options: Any) -> Text:  # renders all lines and cells
            return super().render_str(escaped(text), *args, **options)

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*objects, **options)
            if self.stderr:
                write_log(escaped(" ".join(map(str, objects))))

    # No markup, because file names may contain brackets. Lines are not wrapped, because output may be piped.
    return EscapingConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def print_columns(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    stderr: bool = False,
) -> None:
    """Print a table: a title, a line of column names (left out if all are empty), rows.

    Columns in `left` are aligned left, others right. Lines are never cut or folded, as output may be piped.
    """
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
    (sys.stderr if stderr else sys.stdout).write("\n".join(text) + "\n")


def add_json_argument(parser: argparse.ArgumentParser, default: Any = False) -> None:
    """Register --json."""
    parser.add_argument(
        "--json", action="store_true", default=default, help="print the result as JSON (default: text)"
    )


def print_message(arguments: argparse.Namespace, text: str) -> None:
    """Print what a verb that writes files has done to stderr, or with --quiet only to the log file."""
    from shardkit.progress import write_log

    if arguments.quiet:
        write_log(escaped(text))
    else:
        stderr_console().print(text)


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    """Register --tokenizer, for verbs that show text."""
    parser.add_argument(
        "--tokenizer",
        type=file_path,
        metavar="FILE",
        help="tokenizer.json for decoding text (default: the file named in the dataset's card, if it exists)",
    )


def progress_of(arguments: argparse.Namespace) -> bool | TransferListener:
    """Return a transfer's argument `progress`: False for --quiet, lines for --json, else True (a bar)."""
    from shardkit.progress import Lines

    if arguments.quiet:
        return False
    return Lines() if arguments.json else True


def add_override_argument(parser: argparse.ArgumentParser, example: str) -> None:
    """Register --set; `example` is the KEY=VALUE that its help text shows."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"override a key of the recipe, such as {example}; may be repeated (default: none)",
    )


OF_FILES = ("columns", "sequence_length", "token_dtype", "per_file", "tokenizer", "pack")
"""Keys of --loader that say what the rows of files are which are read in place."""


def add_loader_arguments(group: argparse._ActionsContainer, *keys: str) -> None:
    """Register --seed, --shuffle, --tail and --loader; `keys` are keys of --loader in this verb only."""
    add_options(
        group,
        "shardkit.loaders.loader:StreamingLoader",
        number=int,
        seed="seed of the shuffle",
        shuffle="order of the samples",
        tail="what to do with an incomplete batch at the end of an epoch",
    )
    add_keys(
        group,
        "--loader",
        "another option of the loader",
        _CONFIG,
        (*_OF_RUNS, *keys),
        balance="assign the rows of a global batch to ranks by their cost: attention, or LINEAR:QUADRATIC of "
        "a CostModel",
    )


def file_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of --loader that say what the rows of files are which are read in place."""
    options = {name: value for name, value in (arguments.loader or {}).items() if name in OF_FILES}
    if "columns" in options:
        options["columns"] = options["columns"].split(",")
    return options


def loader_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of --loader for `LoaderConfig`; raise ValueError for an invalid balance."""
    from shardkit.order.balance import CostModel

    options = dict(arguments.loader or {}) | file_options(arguments)
    if (balance := options.get("balance", "attention")) != "attention":
        linear, mark, quadratic = balance.partition(":")
        if not (mark and linear.isdecimal() and quadratic.isdecimal()):
            raise ValueError(
                f"--loader balance must be attention or LINEAR:QUADRATIC, two whole numbers, not {balance!r}"
            )
        options["balance"] = CostModel(int(linear), int(quadratic))
    return options


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    """Register --endpoint-url, --profile and --storage, which set `StorageOptions`."""
    group = parser.add_argument_group("object stores")
    plain = ("endpoint_url", "profile")
    add_options(group, _STORAGE, *plain)
    others = [name for name in settings(_STORAGE) if name not in plain]
    add_keys(group, "--storage", "another option of the store, such as region=eu-west-1", _STORAGE, others)


def storage_options(arguments: argparse.Namespace, *, is_job: bool = False) -> StorageOptions:
    """Return the command line's storage options; a job (`is_job`) waits longer for a store to answer."""
    from shardkit.storage.store import StorageOptions

    waits: dict[str, Any] = {} if is_job else {"first_contact_seconds": _FIRST_CONTACT_SECONDS}
    plain = given(arguments, "endpoint_url", "profile")
    try:
        options = StorageOptions(**waits | plain | (arguments.storage or {}))
    except ValueError as error:
        arguments.parser.error(str(error))
    return options


def add_recipe_arguments(parser: argparse.ArgumentParser, *, example: str) -> None:
    """Register --set, --workers, --engine and --ray-address; --set's help shows `example`."""
    add_override_argument(parser, example)
    add_options(parser, _EXECUTION, "workers", number=count)
    add_options(parser, _EXECUTION, "engine", "ray_address")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An option whose value is shown to users; `default` is its text, None if it is required or computed."""

    flag: str
    """The option, or an option and a key, such as "--price get_1000"."""
    name: str
    """Name of the plan's input that gets the value."""
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    help: str
    metavar: str
    default: str | None = None
    required: bool = False

    def given(self, arguments: argparse.Namespace) -> Any:
        """Return the value given on the command line, or None."""
        flag, _, key = self.flag.partition(" ")
        value = getattr(arguments, flag.strip("-").replace("-", "_"))
        return (value or {}).get(key) if key else value


def format_rate(value: Any) -> str:
    """Return a rate in bytes per second as text, such as "1.25 GB/s"."""
    return f"{format_bytes(float(value))}/s"


def add_quantities(parser: argparse._ActionsContainer, quantities: Sequence[Quantity]) -> None:
    """Register an option for each quantity; the value of an option that is not given is None."""
    for quantity in quantities:
        parser.add_argument(
            quantity.flag,
            type=argument(quantity.parse),
            metavar=quantity.metavar,
            required=quantity.required,
            help=quantity.help + (f" (default: {quantity.default})" if quantity.default else ""),
        )


def read_quantities(
    arguments: argparse.Namespace, quantities: Sequence[Quantity], measured: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values and their origins by field: given on the command line, else measured, else assumed.

    Quantities that are neither given nor measured and have no default are left out.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for quantity in quantities:
        assumed = None if quantity.default is None else quantity.parse(quantity.default)
        for value, origin in (
            (quantity.given(arguments), "given"),
            ((measured or {}).get(quantity.name), "measured"),
            (assumed, "assumed"),
        ):
            if value is not None:
                values[quantity.name], origins[quantity.name] = value, origin
                break
    return values, origins
