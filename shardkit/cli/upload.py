"""`shardkit upload`: a dataset's folder to a bucket or any other store."""

from __future__ import annotations

import argparse

from shardkit.cli.output import count_to
from shardkit.cli.storage_arguments import add_storage_arguments, storage_options
from shardkit.cli.transfer_output import progress_of, show

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "upload",
        help="a dataset's folder to S3; sends what is missing, the index last",
        description="Send a dataset to s3://bucket/prefix, another folder, or any URL that fsspec knows. "
        "Every file is checked against the index while it is read, what is there already is not sent again, "
        "and the index comes last, so the same command continues after an interruption and readers never see "
        "half a dataset. Files that the dataset does not name stay where they are. Tars without a list get "
        "one at the target.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="folder of the dataset")
    parser.add_argument(
        "target", metavar="URL", help="where the dataset's files go, such as s3://bucket/prefix"
    )
    parser.add_argument(
        "--threads",
        type=count_to(256),
        default=8,
        metavar="N",
        help="files sent at a time, at most 256 (default: 8)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="put this dataset in the place of another one (default: refuse)",
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would be done (default: do it)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read everything back before the index is put (default: trust the store's answers and listing)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr (default: show it)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (default: lines)")
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Upload, and print what was done."""
    from shardkit.upload import upload

    report = upload(
        arguments.source,
        arguments.target,
        storage=storage_options(arguments),
        threads=arguments.threads,
        replace=arguments.replace,
        dry_run=arguments.dry_run,
        verify=arguments.verify,
        progress=progress_of(arguments),
    )
    show(report, "sent", json=arguments.json)
    return 0
