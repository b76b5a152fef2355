"""The `shardkit` command: finds the verb, runs it, and turns errors into one line and an exit status.

`VERBS` maps each verb to a module of this package that has two functions:

    add_parser(verbs)     add its parser to argparse's sub-parsers, with `set_defaults(run=run)`
    run(arguments) -> int run the verb and return the exit status

A verb's module imports other modules inside `run`, so that `shardkit --help` is immediate. Results go to
stdout, everything else to stderr. Exit status: 0 done, 1 failed, 2 misuse (bad arguments or a bad recipe),
130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

import shardkit
from shardkit.cli.common import escaped
from shardkit.cli.declared import Keys
from shardkit.errors import RecipeError, ShardkitError, naming_extras
from shardkit.files import not_for_everyone
from shardkit.lazy import collector_paused

VERBS = {
    "audit": "audit", "build": "build", "clean": "clean", "convert": "convert",
    "dedup-index": "dedup_index", "demo": "demo", "download": "transfer", "info": "info",
    "init": "init", "pack": "pack", "plan": "plan",
    "trace": "trace", "upload": "transfer", "verify": "verify",
    "view": "view",
}  # fmt: skip
# Options of earlier versions, for hints in errors: {option: key that replaces it}, {option: what to do now}.
RENAMED = {
    "--virtual-style": "path_style=false", "--eos": "eos_id", "--bos": "bos_id", "--pad": "pad_id",
    "--price-core-hour": "core_hour", "--price-get": "get_1000", "--price-put": "put_1000",
    "--price-gb-month": "gb_month", "--price-egress-gb": "egress_gb",
}  # fmt: skip
ANSWERED = {"rewind": "give `shardkit trace PATH --losses FILE`"}  # {no verb: what answers it}
REMOVED = {"--keep": "the folder is kept unless --clean is given"}
CONTINUING = ("build", "dedup-index", "download", "pack", "upload")
FAILED, MISUSE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that answers wrong arguments with one line and a hint, not with the usage of all options."""

    def error(self, message: str) -> NoReturn:
        """Print a message and exit with the status of misuse."""
        mistyped = re.match(r"argument VERB: invalid choice: '?([^' ]*)'? ", message)
        if mistyped:
            hint = f"; {ANSWERED[word]}" if (word := mistyped[1]) in ANSWERED else _suggestion(word, VERBS)
            message = f"unknown verb {word!r}{hint}"
        self.exit(MISUSE, escaped(f"{self.prog}: error: {message}; see `{self.prog} --help`\n"))

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error about words that no option or argument takes."""
        word = next((word for word in words if word.startswith("-")), words[0])
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        for keys in self.key_options():
            key = RENAMED.get(name, name.strip("-").replace("-", "_"))
            if key.partition("=")[0] in keys.known:
                spelled = f"{keys.option_strings[0]} {key}" if "=" in key else keys.spelled(key)
                self.error(f"unknown option {name}; give {spelled}")
        hint = _suggestion(name, self._option_string_actions)
        self.error(f"unknown option {name}{f'; {REMOVED[name]}' if name in REMOVED else hint}")

    def key_options(self) -> list[Keys]:
        """Return the options that take KEY=VALUE."""
        return [action for action in self._actions if isinstance(action, Keys)]

    def format_help(self) -> str:
        """Return the help text, followed by the keys of options that take KEY=VALUE."""
        formatter = self._get_formatter()
        for keys in self.key_options():
            formatter.start_section(f"keys of {keys.option_strings[0]}")
            for key, setting in keys.known.items():
                spelled = f"{key}={setting.metavar}"
                formatter.add_argument(argparse.Action([], key, metavar=spelled, help=setting.help))
            formatter.end_section()
        return "\n".join(part for part in (super().format_help(), formatter.format_help()) if part)


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def make_parser(verb: str | None = None) -> Parser:
    """Return the parser with all verbs, or with only `verb`, which is faster."""
    parser = Parser(
        prog="shardkit",
        description="Build deterministic pretraining shards and stream them to GPUs with exact resume.",
        epilog="Exit status: 0 done, 1 failed, 2 misuse, 130 interrupted. See `shardkit VERB --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardkit {shardkit.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    with collector_paused():
        for module in dict.fromkeys(VERBS.values() if verb is None else [VERBS[verb]]):
            importlib.import_module(f"shardkit.cli.{module}").add_parser(verbs)
    for verb_parser in verbs.choices.values():
        verb_parser.set_defaults(parser=verb_parser)
        verb_parser.add_argument(
            "--debug", action="store_true", help="show the traceback of an error (default: one line)"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    shown = warnings.showwarning
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        with not_for_everyone(), naming_extras(f"`shardkit {arguments.verb}`"):
            return int(arguments.run(arguments))
    except BrokenPipeError:  # the program that read the output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt as interrupt:
        continues = ["run the same command again to continue"] if arguments.verb in CONTINUING else []
        _say("; ".join(["interrupted", *_notes(interrupt), *continues]))
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            sys.stderr.write(escaped(traceback.format_exc()))
            return MISUSE if isinstance(error, RecipeError) else FAILED
        return _explain(error)
    finally:  # restore for a Python program that calls `main` and shows warnings in its own way
        warnings.showwarning = shown


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(argv[0] if argv and argv[0] in VERBS else None)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(MISUSE)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.refuse_unknown(unknown)
    return arguments


def _explain(error: Exception) -> int:
    if isinstance(error, RecipeError):
        _say(f"error: {error}")
        return MISUSE
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, ShardkitError):
        _say(f"error: {error}; install the package that provides it")
    elif isinstance(error, ShardkitError | OSError):
        _say("; ".join([f"error: {error}", *_notes(error)]))
    elif isinstance(error, UnicodeEncodeError) and not sys.getfilesystemencoding().lower().startswith("utf"):
        encoding = sys.getfilesystemencoding()
        _say(
            f"error: {error.object!a:.200} cannot be a file name in this locale's encoding, {encoding}; "
            "set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
        )
    else:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        _say(f"error: {problem}; this is a bug in shardkit: please report it with the output of --debug")
    return FAILED


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _say(message: str) -> None:
    sys.stderr.write(f"shardkit: {escaped(message)}\n")
