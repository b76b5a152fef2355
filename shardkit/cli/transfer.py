"""What `upload` and `download` share: flags, progress on stderr, and what was done on stdout."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypedDict

from shardkit.cli.common import add_storage_arguments, count_to, print_json, stdout_console, storage_options
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.progress import TransferListener
    from shardkit.publish import TransferReport
    from shardkit.storage.store import StorageOptions

__all__ = ["add_transfer_arguments", "progress_of", "show", "transfer_options"]


class TransferOptions(TypedDict):
    """What uploads and downloads are told alike."""

    storage: StorageOptions | None
    threads: int
    replace: bool
    dry_run: bool


def add_transfer_arguments(parser: argparse.ArgumentParser, done: str) -> None:
    """The flags that uploads and downloads share; `done` says what becomes of files ("sent")."""
    parser.add_argument(
        "--threads",
        type=count_to(256),
        default=8,
        metavar="N",
        help=f"files {done} at a time, at most 256 (default: 8)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="put this dataset in the place of another one (default: refuse)",
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would be done (default: do it)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr (default: show it)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (default: lines)")
    add_storage_arguments(parser)


def transfer_options(arguments: argparse.Namespace) -> TransferOptions:
    """What those flags say."""
    return {
        "storage": storage_options(arguments),
        "threads": arguments.threads,
        "replace": arguments.replace,
        "dry_run": arguments.dry_run,
    }


def progress_of(arguments: argparse.Namespace) -> bool | TransferListener:
    """Nothing if --quiet, lines if --json, else a bar on a terminal and lines elsewhere."""
    from shardkit.progress import Lines

    if arguments.quiet:
        return False
    return Lines() if arguments.json else True


def show(report: TransferReport, moved: str, *, json: bool) -> None:
    """Print a report; `moved` is what was done to a file: "sent", "fetched"."""
    if json:
        print_json(report.to_dict())
        return
    console = stdout_console()
    if report.dry_run:
        for verb, names in ((moved, report.sent), ("deleted", report.deleted)):
            for name in names:
                console.print(f"would be {verb}: {name}")
    for line in _lines(report, moved):
        console.print(line)


def _lines(report: TransferReport, verb: str) -> list[str]:
    whole = f"{report.files:,} files, {format_bytes(report.bytes)}"
    lines = []
    if report.up_to_date:
        lines.append(f"{report.target} is up to date: {whole}; nothing to do")
    else:
        size = format_bytes(report.sent_bytes)
        moved = f"{len(report.sent):,} {verb} ({size}), {report.skipped:,} there already"
        deleted = f", {len(report.deleted):,} of an earlier dataset deleted" if report.deleted else ""
        rate = "" if report.dry_run else f"; {report.seconds:.1f} s"
        if report.sent_bytes and report.seconds > 0 and not report.dry_run:
            rate += f", {format_bytes(report.sent_bytes / report.seconds)}/s"
        start = "nothing was written; it would be " if report.dry_run else ""
        lines.append(f"{report.target}: {start}{whole}: {moved}{deleted}{rate}")
    if report.verified:
        lines.append("every file was read back and has the right hash")
    if report.left_count:
        lines.append(
            f"{report.left_count:,} files in {report.source} are not named by the dataset and stay there "
            f"(first: {report.left[0]})"
        )
    if report.foreign:
        lines.append(f"{report.foreign:,} files at {report.target} are not named by the dataset")
    lines.append(f"fingerprint {report.fingerprint}")
    return lines
