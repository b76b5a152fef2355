"""`shardkit download`: a dataset from a bucket or any other store into a folder."""

from __future__ import annotations

import argparse

from shardkit.cli.transfer import add_transfer_arguments, progress_of, show, transfer_options

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
    add_transfer_arguments(parser, "fetched")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Download, and print what was done."""
    from shardkit.publish import download

    report = download(
        arguments.source,
        arguments.target,
        progress=progress_of(arguments),
        **transfer_options(arguments),
    )
    show(report, "fetched", json=arguments.json)
    return 0
