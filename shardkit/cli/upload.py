"""`shardkit upload`: a dataset's folder to a bucket or any other store."""

from __future__ import annotations

import argparse

from shardkit.cli.transfer import add_transfer_arguments, progress_of, show, transfer_options

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
        "--verify",
        action="store_true",
        help="read everything back before the index is put (default: trust the store's answers and listing)",
    )
    add_transfer_arguments(parser, "sent")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Upload, and print what was done."""
    from shardkit.publish import upload

    report = upload(
        arguments.source,
        arguments.target,
        verify=arguments.verify,
        progress=progress_of(arguments),
        **transfer_options(arguments),
    )
    show(report, "sent", json=arguments.json)
    return 0
