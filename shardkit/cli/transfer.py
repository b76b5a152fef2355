"""`shardkit upload` and `shardkit download`: copy a dataset to or from a store, the index last."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    add_quiet_argument,
    add_storage_arguments,
    print_json,
    progress_of,
    stdout_console,
    storage_options,
    whole,
)
from shardkit.cli.declared import add_options, given
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.publish import TransferReport


_API = "shardkit.publish.api:"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register both verbs."""
    upload = verbs.add_parser(
        "upload",
        help="upload a dataset's folder to S3 or the Hugging Face Hub: only missing files, the index last",
        description="Send a dataset to s3://bucket/prefix, hf://datasets/org/name, another folder, or any "
        "URL that fsspec supports. Every file is checked against the index while it is read, files that the "
        "target has are not sent again, and the index comes last, so that readers never see an incomplete "
        "dataset. To continue after an interruption, run the same command again. Other files at the target "
        "are not changed. For tars without an index, an index is written at the target.",
        allow_abbrev=False,
    )
    upload.add_argument("source", metavar="SRC", help="folder of the dataset")
    upload.add_argument("target", metavar="URL", help="destination, such as s3://bucket/prefix")
    add_options(upload, _API + "upload", verify="read all files back before writing the index")
    download = verbs.add_parser(
        "download",
        help="download a dataset from S3 or the Hugging Face Hub into a folder: only missing files",
        description="Fetch a dataset from s3://bucket/prefix, hf://datasets/org/name, another folder, or "
        "any URL that fsspec supports. Every file is checked while it is received, existing files are not "
        "fetched again, and the index comes last. To continue after an interruption, run the same command "
        "again. Training needs no download: the loader reads s3:// and hf:// itself.",
        allow_abbrev=False,
    )
    download.add_argument("source", metavar="URL", help="the dataset, such as s3://bucket/prefix")
    download.add_argument("target", metavar="DST", help="folder for the dataset; created if missing")
    for parser, moved in ((upload, "sent"), (download, "fetched")):
        add_options(
            parser,
            _API + "upload",
            number=whole(1, 256),
            threads=f"number of files {moved} at a time, at most 256",
            replace="replace another dataset at the target",
            dry_run="print what would be done, without doing it",
        )
        add_quiet_argument(parser)
        add_json_argument(parser)
        add_storage_arguments(parser)
        parser.set_defaults(run=run, moved=moved)


def run(arguments: argparse.Namespace) -> int:
    """Upload or download, and print a report."""
    from shardkit.publish import download, upload

    options: dict[str, Any] = {
        "storage": storage_options(arguments, is_job=True),
        "progress": progress_of(arguments),
        **given(arguments, "threads", "replace", "dry_run"),
    }
    if arguments.verb == "upload":
        report = upload(arguments.source, arguments.target, **options, **given(arguments, "verify"))
    else:
        report = download(arguments.source, arguments.target, **options)
    _show(report, arguments.moved, json=arguments.json)
    return 0


def _show(report: TransferReport, moved: str, *, json: bool) -> None:
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
        moved = f"{len(report.sent):,} {verb} ({size}), {report.skipped:,} already present"
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
