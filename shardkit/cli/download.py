"""`shardkit download`: a dataset from a bucket or any other store into a folder."""

from __future__ import annotations

import argparse

from shardkit.cli.output import count_to
from shardkit.cli.storage_arguments import add_storage_arguments, storage_options
from shardkit.cli.transfer_output import progress_of, show

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "download",
        help="a dataset from S3 into a folder; fetches what is missing, the index last",
        description="Fetch a dataset from s3://bucket/prefix, another folder, or any URL that fsspec knows. "
        "Every file is checked while it arrives, what is there already is not fetched again, and the index "
        "comes last, so the same command continues after an interruption. Training needs no download: the "
        "loader reads s3:// itself.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="URL", help="where the dataset is, such as s3://bucket/prefix")
    parser.add_argument("target", metavar="DST", help="folder for the dataset; it is made if it is not there")
    parser.add_argument(
        "--threads",
        type=count_to(256),
        default=8,
        metavar="N",
        help="files fetched at a time, at most 256 (default: 8)",
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Download, and print what was done."""
    from shardkit.upload import download

    report = download(
        arguments.source,
        arguments.target,
        storage=storage_options(arguments),
        threads=arguments.threads,
        replace=arguments.replace,
        dry_run=arguments.dry_run,
        progress=progress_of(arguments),
    )
    show(report, "fetched", json=arguments.json)
    return 0
