"""The options of every verb that takes URLs: how a store is reached."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkit.storage.store import StorageOptions

__all__ = ["add_storage_arguments", "storage_options"]


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
