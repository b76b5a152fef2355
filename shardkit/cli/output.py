"""What verbs share: counts as arguments; results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["count", "count_to", "print_json", "stderr_console", "stdout_console"]


def count(text: str) -> int:
    """argparse type: a number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def count_to(limit: int) -> Callable[[str], int]:
    """argparse type: a number from 1 to `limit`."""

    def limited(text: str) -> int:
        if count(text) > limit:
            raise argparse.ArgumentTypeError(f"{text} is more than {limit}")
        return int(text)

    return limited


def print_json(result: Mapping[str, Any]) -> None:
    """Print plain data on stdout."""
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def stdout_console() -> Console:
    """Where a verb's result goes when it is for people."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Where messages go."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    # No mark-up: names of files and sources may hold brackets. Lines are not cut: they may be piped.
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
