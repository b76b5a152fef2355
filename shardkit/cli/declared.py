"""Makes command-line options from declarations: fields of a dataclass, or arguments of a function.

Names, types, defaults and docstrings are read from the source file without importing it, so that `--help`
waits neither for NumPy nor for pydantic. A new field of `StorageOptions` becomes a key of `--storage` without
a change here.

`add_options` makes one option per name: a value such as `--task-seconds SECONDS`, a switch for a bool, or
choices for a `Literal`. `add_keys` makes one repeatable option KEY=VALUE for many names; `--help` lists its
keys at the end. An option that is not given is None, and `given` leaves it out, so that the default is
defined only in the declaration.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import shardkit
from shardkit.hints import hint
from shardkit.synonyms import STORAGE

_ROOT = Path(shardkit.__file__).parent
_SWITCH = {"true": True, "false": False}
_NUMBER = re.compile(r"Fraction\((.*)\)")
_SHOWN = {"False": "no", "True": "yes", "None": "none"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A field or argument as declared in the source code."""

    name: str
    type: str
    """The annotation, without `| None`."""
    choices: tuple[str, ...]
    """The allowed values if the type is a `Literal`, else ()."""
    default: str
    """Source text of the default; "" if there is none."""
    doc: str
    """First paragraph of the field's docstring; "" for an argument."""

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help texts."""
        if self.choices or self.type == "bool":
            return "|".join(self.choices or _SWITCH)
        return "N" if self.type in ("int", "Fraction") else self.name.rpartition("_")[2].upper()

    @property
    def help(self) -> str:
        """The docstring as a help text that ends with the default."""
        text = self.doc.rstrip(".").replace("`", "").replace("%", "%%")
        if text[1:2].islower() or text[1:2] == " ":
            text = text[0].lower() + text[1:]
        if "default" in text:
            return text
        shown = _NUMBER.sub(r"\1", self.default).strip("\"'")
        return f"{text} (default: {_SHOWN.get(shown, shown)})"

    def parse(self, text: str) -> Any:
        """Return `text` as a value of this type; raise ValueError if it is invalid."""
        words = self.choices or (tuple(_SWITCH) if self.type == "bool" else ())
        if words and text not in words:
            raise ValueError(f"{self.name} must be {' or '.join(words)}, not {text!r}")
        try:
            match self.type:
                case "bool":
                    return _SWITCH[text]
                case "int":
                    return int(text if text.isdecimal() else "")
                case "float":
                    return float(text)
        except ValueError:
            raise ValueError(f"{self.name} must be a number, not {text!r}") from None
        return text


@cache
def settings(served: str) -> Mapping[str, Setting]:
    """Return {name: setting} for the fields or keyword arguments of `served` ("module:name"), in order.

    The fields of a class include inherited ones.
    """
    module, _, name = served.partition(":")
    [node] = [one for one in _parsed(module).body if getattr(one, "name", None) == name]
    made_by = [one for one in getattr(node, "body", ()) if getattr(one, "name", None) == "__init__"]
    is_plain = isinstance(node, ast.ClassDef) and not made_by
    found = _fields(node) if is_plain else _arguments(*made_by or [node])
    here = {getattr(one, "name", None) for one in _parsed(module).body}
    known: dict[str, Setting] = {}
    for base in getattr(node, "bases", ()):
        known |= settings(f"{module}:{ast.unparse(base)}") if ast.unparse(base) in here else {}
    for name, kind, default, doc in found:
        written = "" if default is None else ast.unparse(default)
        type_ = ast.unparse(kind).removesuffix(" | None")
        known[name] = Setting(name, type_, _words(kind, module), written, doc)
    return known


@cache
def _parsed(module: str) -> ast.Module:
    file = _ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _fields(node: ast.stmt) -> Iterator[tuple[str, ast.expr, ast.expr | None, str]]:
    assert isinstance(node, ast.ClassDef)
    for number, field in enumerate(node.body):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            doc = ""
            match node.body[number + 1 : number + 2]:
                case [ast.Expr(ast.Constant(str(text)))]:
                    doc = " ".join(text.split("\n\n")[0].split())
            yield ast.unparse(field.target), field.annotation, field.value, doc


def _arguments(node: ast.stmt) -> Iterator[tuple[str, ast.expr, ast.expr | None, str]]:
    assert isinstance(node, ast.FunctionDef)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        assert argument.annotation is not None
        yield argument.arg, argument.annotation, default, ""


def _words(kind: ast.expr, module: str) -> tuple[str, ...]:
    """Return the values of an annotation that is a `Literal` or a module's name for one; () for others."""
    if isinstance(kind, ast.BinOp):  # a union with None
        return _words(kind.left, module)
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        words = ast.literal_eval(kind.slice)
        return words if isinstance(words, tuple) else (words,)
    found = _named(module).get(kind.id) if isinstance(kind, ast.Name) else None
    if isinstance(found, str):
        return _words(kind, found)
    return () if found is None else _words(found, module)


@cache
def _named(module: str) -> Mapping[str, ast.expr | str]:
    """Return {name in the module: expression assigned to it, or shardkit module it is imported from}."""
    found: dict[str, ast.expr | str] = {}
    conditional = [node for one in _parsed(module).body if isinstance(one, ast.If) for node in one.body]
    for node in (*_parsed(module).body, *conditional):
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardkit."):
            found |= dict.fromkeys((alias.name for alias in node.names), node.module or "")
    return found


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` as an argparse type, so that argparse shows the message of a ValueError to the user."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def add_options(
    parser: argparse._ActionsContainer,
    served: str,
    *names: str,
    number: Callable[[str], int] | None = None,
    **texts: str,
) -> None:
    """Register an option for each of `names` and each key of `texts`; values of `texts` are help texts.

    The help of other options is their docstring. `number` parses whole numbers (None: any of at least 0).
    """
    for name in (*names, *texts):
        setting = settings(served)[name]
        setting = replace(setting, doc=texts.get(name, setting.doc))
        flag = f"--{name.replace('_', '-')}"
        if setting.type == "bool":
            action = argparse.BooleanOptionalAction if setting.default == "True" else "store_true"
            parser.add_argument(flag, action=action, default=None, help=setting.help)
        elif setting.choices:
            parser.add_argument(flag, choices=setting.choices, help=setting.help)
        else:
            parse = number if number is not None and setting.type == "int" else argument(setting.parse)
            parser.add_argument(flag, type=parse, metavar=setting.metavar, help=setting.help)


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the named options that were given on the command line, with their values."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


class Keys(argparse.Action):
    """A repeatable option KEY=VALUE with the keys `known`. Its value is a dict, or None if not given."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        known: Mapping[str, Setting],
        parse: Callable[[str], Any] | None,
        help: str,
    ) -> None:
        self.known, self._parse = known, parse
        text = f"{help}; may be repeated; its keys are listed below (default: none)"
        super().__init__(option_strings, dest, metavar="KEY=VALUE", help=text)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, value: object, option: str | None = None
    ) -> None:
        key, mark, text = str(value).partition("=")
        if (setting := self.known.get(key)) is None:
            table = STORAGE if self.dest == "storage" else None
            said = hint(key, self.known, table) or f"the keys are {', '.join(self.known)}"
            raise argparse.ArgumentError(self, f"unknown key {key!r}; {said}")
        if not mark:
            raise argparse.ArgumentError(self, f"{key} needs a value: give {self.spelled(key)}")
        try:
            parsed = (self._parse or setting.parse)(text)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), key: parsed})

    def spelled(self, key: str) -> str:
        """Return how to give the key on the command line, such as "--storage region=REGION"."""
        return f"{self.option_strings[0]} {key}={self.known[key].metavar}"


def add_keys(
    parser: argparse._ActionsContainer,
    flag: str,
    help: str,
    served: str,
    names: Sequence[str],
    *,
    parse: Callable[[str], Any] | None = None,
    **texts: str,
) -> None:
    """Register the option `flag KEY=VALUE`, whose keys are settings `names` of `served`.

    `texts` is {key: help text}; the help of other keys is their docstring. `parse` parses the values of all
    keys (None: by their types).
    """
    declared = settings(served)
    known = {name: replace(declared[name], doc=texts.get(name, declared[name].doc)) for name in names}
    parser.add_argument(flag, action=Keys, known=known, parse=parse, help=help)
