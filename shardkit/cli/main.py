"""The `shardkit` command: finds the verb, runs it, and turns errors into one line and an exit status.

`GROUPS` maps each verb to a module of this package that has two functions:

    add_parser(verbs)     add its parser to argparse's sub-parsers, with `set_defaults(run=run)`
    run(arguments) -> int run the verb and return the exit status

A verb's module imports other modules inside `run`, so that `shardkit --help` is immediate. Results go to
stdout, everything else to stderr. Exit status: 0 done, 1 failed, 2 misuse (bad arguments or a bad recipe),
130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any, NoReturn

import shardkit
from shardkit import synonyms
from shardkit.cli.common import escaped
from shardkit.cli.declared import Keys
from shardkit.errors import PathError, RecipeError, ShardkitError, naming_extras
from shardkit.files import local_path, not_for_everyone
from shardkit.hints import hint
from shardkit.lazy import collector_paused
from shardkit.progress import command_output, write_log
from shardkit.synonyms import OPTION_SENTENCES, OPTIONS, RENAMED

# The groups of `shardkit --help`, in the order in which a newcomer needs them.
GROUPS = {
    "start": {"init": "init", "build": "build", "demo": "demo"},
    "look": {"info": "info", "view": "view", "trace": "trace", "verify": "verify"},
    "move": {"convert": "convert", "upload": "transfer", "download": "transfer"},
    "train": {"plan": "plan", "audit": "audit"},
    "maintain": {"pack": "pack", "dedup-index": "dedup_index", "clean": "clean"},
}
VERBS = {verb: module for group in GROUPS.values() for verb, module in group.items()}
CONTINUING = ("build", "dedup-index", "download", "pack", "upload")
FAILED, MISUSE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that answers wrong arguments with one line and a hint, not with the usage of all options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; the options of every verb may stand anywhere, before the verb or behind it."""
        if self.prog == "shardkit" and self._subparsers is not None:
            namespace, args = shared_parser().parse_known_args(args, namespace)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print a message and exit with the status of misuse."""
        mistyped = re.match(
            r"argument (VERB|KIND): invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message
        )
        if mistyped:
            kind, word = mistyped[1], mistyped[2]
            known = [choice.strip("'") for choice in mistyped[3].split(", ")]
            said = hint(word, known, synonyms.VERBS)
            if not said and len(known) < len(VERBS):
                said = f"give {' or '.join(known)}"
            message = f"unknown {kind.lower()} {word!r}" + (f"; {said}" if said else "")
        if message.endswith("required: RECIPE"):
            message += "; `shardkit init DATA` writes one"
        self.exit(MISUSE, escaped(f"{self.prog}: error: {message}; see `{self.prog} --help`\n"))

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error about words that no option or argument takes."""
        word = next((word for word in words if word.startswith("-")), words[0])
        if not word.startswith("-"):
            meant = f"; did you mean --set {word}?" if "=" in word else "; the recipe names all data"
            self.error(f"unexpected argument {word!r}{meant if self._has('--set') else ''}")
        said = self._meant(word.partition("=")[0])
        self.error(f"unknown option {word.partition('=')[0]}" + (f"; {said}" if said else ""))

    def _meant(self, option: str) -> str:
        """Return what to write instead of an unknown option, or ""."""
        name = option.strip("-").replace("-", "_")
        for keys in self.key_options():
            key = RENAMED.get(name, name)
            if key.partition("=")[0] in keys.known:
                return f"give {keys.option_strings[0]} {key}" if "=" in key else f"give {keys.spelled(key)}"
        for ours in OPTIONS.get(name, "").split():
            if self._has(ours):
                return f"did you mean {ours}?"
        if (close := hint(option, [*self._option_string_actions, *shared_options()], OPTION_SENTENCES)) != "":
            return close
        if not self._has("--set"):
            return ""
        from shardkit.writers.recipe.problems import paths_below
        from shardkit.writers.recipe.recipe import Recipe

        paths = [name] if name in Recipe.model_fields else paths_below(Recipe, name)
        if not paths:
            sentence = synonyms.RECIPE[""].get(name, "")
            return f"in a recipe: {sentence}" if sentence else ""
        return f"a key of the recipe: --set {paths[0].replace('[]', '[0]')}=…"

    def _has(self, option: str) -> bool:
        return option in self._option_string_actions or option in shared_options()

    def key_options(self) -> list[Keys]:
        """Return the options that take KEY=VALUE."""
        return [action for action in self._actions if isinstance(action, Keys)]

    def format_help(self) -> str:
        """Return the help text, with verbs in groups, and with the keys of options that take KEY=VALUE."""
        formatter = self._get_formatter()
        verbs = next((one for one in self._actions if isinstance(one, argparse._SubParsersAction)), None)
        if verbs is not None and set(verbs.choices) == set(VERBS):
            return self._grouped_help(verbs)
        for keys in self.key_options():
            formatter.start_section(f"keys of {keys.option_strings[0]}")
            for key, setting in keys.known.items():
                spelled = f"{key}={setting.metavar}"
                formatter.add_argument(argparse.Action([], key, metavar=spelled, help=setting.help))
            formatter.end_section()
        if " " in self.prog:
            formatter.start_section("options of every verb")
            formatter.add_arguments(shared_parser()._actions)
            formatter.end_section()
        return "\n".join(part for part in (super().format_help(), formatter.format_help()) if part)

    def _grouped_help(self, verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        listed = {action.dest: action for action in verbs._choices_actions}
        for title, group in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([listed[verb] for verb in group])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action is not verbs])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _PrintCompletion(argparse.Action):
    """Prints a script that completes the verbs, options and choices of all parsers, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        from shardkit.cli.completion import script

        sys.stdout.write(script(given[1], make_parser(), shared_parser()))
        parser.exit()


@functools.cache
def shared_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that every verb takes, before or after the verb."""
    shared = Parser(prog="shardkit", add_help=False, allow_abbrev=False)
    shared.add_argument(
        "--quiet", action="store_true", help="suppress progress output (default: print it to stderr)"
    )
    shared.add_argument(
        "--log-file",
        metavar="FILE",
        help="append progress, messages and errors to FILE, each line with the time (default: none)",
    )
    shared.add_argument(
        "--debug", action="store_true", help="show the traceback of an error (default: one line)"
    )
    return shared


def shared_options() -> list[str]:
    """Return the options that every verb takes."""
    return [option for action in shared_parser()._actions for option in action.option_strings]


def make_parser(verb: str | None = None) -> Parser:
    """Return the parser with all verbs, or with only `verb`, which is faster."""
    parser = Parser(
        prog="shardkit",
        description="Build deterministic pretraining shards and stream them to GPUs with exact resume.",
        epilog="Exit status: 0 done, 1 failed, 2 misuse, 130 interrupted. See `shardkit VERB --help`.",
        allow_abbrev=False,
        parents=[shared_parser()],
    )
    parser.add_argument("--version", action="version", version=f"shardkit {shardkit.__version__}")
    parser.add_argument(
        "--completion",
        choices=("bash", "zsh", "fish"),
        action=_PrintCompletion,
        help="print a script that completes commands in this shell, such as for `eval` in ~/.bashrc",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    with collector_paused():
        for module in dict.fromkeys(VERBS.values() if verb is None else [VERBS[verb]]):
            importlib.import_module(f"shardkit.cli.{module}").add_parser(verbs)
    for verb_parser in verbs.choices.values():
        verb_parser.set_defaults(parser=verb_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    arguments = _parse(words)
    shown = warnings.showwarning
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        with ExitStack() as stack:
            log = None if arguments.log_file is None else stack.enter_context(_open_log(arguments.log_file))
            stack.enter_context(command_output(quiet=arguments.quiet, log=log))
            write_log(escaped(f"shardkit {shardkit.__version__}: {shlex.join(words)}"))
            status = _run(arguments)
            write_log(f"exit status {status}")
            return status
    finally:  # restore for a Python program that calls `main` and shows warnings in its own way
        warnings.showwarning = shown


def _open_log(name: str) -> IO[str]:
    try:
        return local_path(name, "--log-file").open("a", encoding="utf-8")
    except (OSError, PathError) as error:
        problem = error.strerror if isinstance(error, OSError) else None
        _say(f"error: --log-file {name}: {problem}" if problem else f"error: {error}")
        raise SystemExit(MISUSE) from None


def _run(arguments: argparse.Namespace) -> int:
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    words = shared_parser().parse_known_args(argv)[1]
    parser = make_parser(words[0] if words and words[0] in VERBS else None)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(MISUSE)
    arguments: argparse.Namespace
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
    write_log(escaped(message))
