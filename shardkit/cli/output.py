"""What verbs share: counts as arguments; results on stdout, everything else on stderr.

Documents, URLs and file names may hold escape sequences, which a terminal obeys: they change its title, hide
lines or fill the clipboard. So whatever a verb prints goes through `escaped`: by a console of this module, by
`print_json` and `print_columns`, or as an error or warning in `shardkit.cli.main`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["count", "count_to", "escaped", "print_json", "stderr_console", "stdout_console"]

# C0 but tab and newline, DEL and C1, which terminals obey; and lone surrogates, which cannot be written.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with characters that control a terminal spelled out, such as \\x1b; tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
