"""What verbs share: options, quantities, and output.

Results go to stdout, everything else to stderr. Documents, URLs and file names may hold escape sequences that
control a terminal: they change its title, hide lines or fill the clipboard. Everything that a verb prints
therefore goes through `escaped`: by a console of this module, by `print_json` and `print_columns`, or as an
error or warning in `shardkit.cli.main`.

An option that several verbs have is declared here once. A `Quantity` is an option with a value that is shown
to users: parsed from text such as "10Gbit/s", printed with its unit, and given, measured or assumed.
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

from shardkit.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardkit.progress import TransferListener
    from shardkit.storage.store import StorageOptions

_FIRST_CONTACT_SECONDS = 5.0  # that a person waits for a store at a wrong address

__all__ = [
    "PATH_HELP",
    "Quantity",
    "add_json_argument",
    "add_order_arguments",
    "add_override_argument",
    "add_quantities",
    "add_quiet_argument",
    "add_recipe_arguments",
    "add_storage_arguments",
    "add_tokenizer_argument",
    "argument",
    "count",
    "escaped",
    "file_path",
    "format_rate",
    "natural",
    "print_columns",
    "print_json",
    "progress_of",
    "read_quantities",
    "stderr_console",
    "stdout_console",
    "storage_options",
    "whole",
]

PATH_HELP = "folder, index file, tar, pattern or URL"

# C0 but tab and newline, DEL and C1, which terminals obey; and lone surrogates, which cannot be written.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with characters that control a terminal spelled out, such as \\x1b; tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """argparse type: a whole number of at least `least` and at most `most`."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {least} or more")
        if most is not None and int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return int(text)

    return parsed


def file_path(text: str) -> Path:
    """argparse type: a path on this machine, as `local_path` reads it."""
    from shardkit.files import local_path

    return argument(local_path)(text)  # type: ignore[no-any-return]


count = whole(1)
natural = whole(0)


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
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    stderr: bool = False,
) -> None:
    """Print a table: a title, a line of column names (none if all are empty), rows.

    Columns in `left` are aligned left, others right. Lines are never cut or folded: they may be piped.
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
    """--json."""
    parser.add_argument(
        "--json", action="store_true", default=default, help="print the result as JSON (default: text)"
    )


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """--quiet."""
    parser.add_argument(
        "--quiet", action="store_true", help="suppress progress output (default: print it to stderr)"
    )


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    """--tokenizer of verbs that show text."""
    parser.add_argument(
        "--tokenizer",
        type=file_path,
        metavar="FILE",
        help="tokenizer.json to decode text with (default: the file that the card names, if it exists)",
    )


def progress_of(arguments: argparse.Namespace) -> bool | TransferListener:
    """The `progress` of a transfer: none if --quiet, lines if --json, else a bar on a terminal."""
    from shardkit.progress import Lines

    if arguments.quiet:
        return False
    return Lines() if arguments.json else True


def add_override_argument(parser: argparse.ArgumentParser, example: str) -> None:
    """--set; `example` is a KEY=VALUE for its help."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"override a key of the recipe, such as {example}; may be repeated (default: none)",
    )


def add_order_arguments(group: argparse._ArgumentGroup) -> None:
    """--seed, --shuffle, --lanes, --window and --tail of a loader; those not given are None."""
    group.add_argument("--seed", type=int, metavar="N", help="seed of the shuffle (default: 17)")
    group.add_argument(
        "--shuffle", choices=["window", "global", "none"], help="order of the samples (default: window)"
    )
    group.add_argument(
        "--lanes", type=count, metavar="N", help="lanes of the window shuffle (default: the loader's choice)"
    )
    group.add_argument(
        "--window", type=count, metavar="N", help="samples in a window (default: the loader's choice)"
    )
    group.add_argument(
        "--tail",
        choices=["carry", "drop", "pad"],
        help="what to do with an incomplete batch at the end of an epoch (default: carry)",
    )


def add_balance_arguments(group: argparse._ArgumentGroup) -> None:
    """--balance of a loader, and the ids by which it finds documents."""
    group.add_argument(
        "--balance",
        metavar="MODEL",
        help="the loader's balance: attention, or LINEAR:QUADRATIC of its CostModel (default: none)",
    )
    add_document_arguments(group)


def add_document_arguments(group: argparse._ActionsContainer) -> None:
    """--eos, --bos and --pad: the ids by which documents are found in rows."""
    group.add_argument(
        "--eos", type=natural, metavar="ID", help="id that ends documents (default: as the card states)"
    )
    group.add_argument("--bos", type=natural, metavar="ID", help="id that begins documents, instead of --eos")
    group.add_argument("--pad", type=natural, metavar="ID", help="id of padding (default: the one of --eos)")


def balance_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `LoaderConfig` from --balance and the ids; ValueError for a balance that there is not."""
    from shardkit.order.balance import CostModel

    balance = arguments.balance
    if balance not in (None, "attention"):
        linear, mark, quadratic = balance.partition(":")
        if not (mark and linear.isdecimal() and quadratic.isdecimal()):
            raise ValueError(
                f"--balance is attention or LINEAR:QUADRATIC, two whole numbers, not {balance!r}"
            )
        balance = CostModel(int(linear), int(quadratic))
    ids = {"eos_id": arguments.eos, "bos_id": arguments.bos, "pad_id": arguments.pad}
    return {"balance": balance, **ids}


# Fields of `StorageOptions` that are options: (field; metavar, choices, or None for a switch; help). They are
# stated here because `--help` does not wait for the import of that class.
_STORAGE = (
    ("endpoint_url", "URL", "URL of an S3-compatible server (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, "
     "S3_ENDPOINT_URL, then AWS)"),
    ("region", "NAME", "region of the bucket (default: from the AWS configuration)"),
    ("profile", "NAME", "profile of the AWS configuration (default: AWS_PROFILE)"),
    ("path_style", None, "put the bucket in the path (the default when an endpoint is set)"),
    ("checksums", ("when_supported", "when_required"),
     "S3's flexible checksums (default: when_required with an endpoint, else as configured)"),
    ("anonymous", None, "read a public bucket without credentials (default: sign)"),
    ("requester_pays", None, "pay for requests (default: the bucket's owner does)"),
    ("encryption", ("AES256", "aws:kms", "aws:kms:dsse"),
     "server-side encryption to ask for with each write (default: the bucket's own)"),
    ("kms_key_id", "KEY", "key of --encryption aws:kms (default: the bucket's)"),
    ("follow_urls", None,
     "let a list of tars name places other than its own folder or bucket (default: refuse)"),
)  # fmt: skip


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of S3; those not given come from the AWS environment and its configuration files."""
    group = parser.add_argument_group("S3 and compatible servers")
    style = group.add_mutually_exclusive_group()
    for name, value, text in _STORAGE:
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            place = style if name == "path_style" else group
            place.add_argument(flag, action="store_true", default=None, help=text)
        elif isinstance(value, str):
            group.add_argument(flag, metavar=value, help=text)
        else:
            group.add_argument(flag, choices=value, help=text)
        if name == "path_style":
            text = "put the bucket in the host name (the default of AWS itself)"
            style.add_argument("--virtual-style", action="store_false", default=None, dest=name, help=text)


def storage_options(arguments: argparse.Namespace, *, is_job: bool = False) -> StorageOptions:
    """Return the storage options of a command line; only a job waits for a store that is not there yet."""
    from shardkit.storage.store import StorageOptions

    given: dict[str, Any] = {} if is_job else {"first_contact_seconds": _FIRST_CONTACT_SECONDS}
    given |= {name: value for name, *_ in _STORAGE if (value := getattr(arguments, name)) is not None}
    return StorageOptions(**given)


def add_recipe_arguments(parser: argparse.ArgumentParser, *, example: str) -> None:
    """Options of commands that run a recipe; `example` is a KEY=VALUE for the help of --set."""
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="number of worker processes (default: one per core, fewer for little text or memory)",
    )
    add_override_argument(parser, example)
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="where tasks run: processes on this machine, or a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the Ray cluster, such as auto or ray://host:10001 (default: $RAY_ADDRESS, else a cluster "
        "started on this machine)",
    )
    add_quiet_argument(parser)


@dataclass(frozen=True, slots=True)
class Quantity:
    """An option with a value. `default` is text; None: the value is required or worked out."""

    flag: str
    name: str
    """Of the field that the value is for."""
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    help: str
    metavar: str
    default: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """Its name in argparse's namespace."""
        return self.flag.strip("-").replace("-", "_")


def format_rate(value: Any) -> str:
    """ "1.25 GB/s"."""
    return f"{format_bytes(float(value))}/s"


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type: its ValueError becomes the message to the user."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_quantities(parser: argparse._ActionsContainer, quantities: Sequence[Quantity]) -> None:
    """Register the options; those not given are None."""
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
    """(values, origins) by field: given on the command line, else measured, else assumed.

    Quantities that are neither given nor measured and have no default are left out.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for quantity in quantities:
        assumed = None if quantity.default is None else quantity.parse(quantity.default)
        for value, origin in (
            (getattr(arguments, quantity.key), "given"),
            ((measured or {}).get(quantity.name), "measured"),
            (assumed, "assumed"),
        ):
            if value is not None:
                values[quantity.name], origins[quantity.name] = value, origin
                break
    return values, origins
