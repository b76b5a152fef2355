"""Arguments that all commands which run a recipe share."""

from __future__ import annotations

import argparse

from shardkit.cli.output import count

__all__ = ["add_recipe_arguments"]


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
