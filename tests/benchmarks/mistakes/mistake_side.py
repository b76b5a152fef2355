"""The table of a library's mistakes and tasks, and the process that runs one of them.

`LIBRARY_mistakes.py NAME` runs one function in the current folder, which `prepare` has filled before, and
answers with a line of JSON. Functions import their library themselves, so that any Python can count lines.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "SAMPLES",
    "Snippet",
    "absent",
    "before",
    "cut",
    "ids_of",
    "mistake",
    "prepare",
    "resumed",
    "serve",
    "snippets",
    "task",
]

SAMPLES = 64  # of each dataset that `prepare` writes; their `id` counts up

Code = Callable[[], object]
_MOST_CHARACTERS = 4000  # of a message


def _lines(code: Callable[..., object]) -> int:
    """Lines of a function's body with code: no docstring, no comment, no empty line."""
    source = textwrap.dedent(inspect.getsource(code))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = source.splitlines()[body[0].lineno - 1 : function.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


@dataclass(frozen=True)
class Snippet:
    """Code that a user writes; `names` must appear in what the library answers to a mistake."""

    code: Code
    names: str = ""
    helpers: tuple[Callable[..., object], ...] = ()

    @property
    def lines(self) -> int:
        """Count lines of code: helpers whole, and the body of the function."""
        return _lines(self.code) + sum(1 + _lines(helper) for helper in self.helpers)


@dataclass
class _Table:
    before: list[Code] = field(default_factory=list)
    prepare: list[Code] = field(default_factory=list)
    mistakes: dict[str, Snippet] = field(default_factory=dict)
    tasks: dict[str, Snippet] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


_TABLES: dict[str, _Table] = {}


def _table(module: str) -> _Table:
    return _TABLES.setdefault(module, _Table())


def prepare(code: Code) -> Code:
    """Fills the folder in which all others run."""
    _table(code.__module__).prepare.append(code)
    return code


def before(code: Code) -> Code:
    """Runs at the start of every process, and is nobody's code: not counted, not timed."""
    _table(code.__module__).before.append(code)
    return code


def mistake(names: str) -> Callable[[Code], Code]:
    """A mistake. It returns a sentence if the library does what its user wants, and None if it is silent."""

    def listed(code: Code) -> Code:
        _table(code.__module__).mistakes[code.__name__] = Snippet(code, names)
        return code

    return listed


def task(*helpers: Callable[..., object]) -> Callable[[Code], Code]:
    """A common task, whose lines are counted with those of its helpers."""

    def listed(code: Code) -> Code:
        _table(code.__module__).tasks[code.__name__] = Snippet(code, helpers=helpers)
        return code

    return listed


def absent(module: str, reasons: Mapping[str, str]) -> None:
    """Mistakes and tasks that the library has no place for, each with the reason."""
    _table(module).absent.update(reasons)


def snippets(module: ModuleType) -> tuple[dict[str, Snippet], dict[str, Snippet], dict[str, str]]:
    """(mistakes, tasks, reasons of those left out) of a library."""
    table = _table(module.__name__)
    return table.mistakes, table.tasks, table.absent


def cut(file: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(file, file.stat().st_size // 2)


def ids_of(batches: Iterable[Any]) -> list[int]:
    """The ids in batches {"id": …}, in their order."""
    return [int(number) for batch in batches for number in batch["id"]]


def resumed(seen: Sequence[int], rest: Sequence[int]) -> str | None:
    """A sentence if `rest` has each sample that was not seen, once; None if it has others."""
    exact = sorted([*seen, *rest]) == list(range(SAMPLES))
    return "delivers each of the other samples once" if exact else None


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those that a traceback shows before it, the first one first."""
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found[::-1]


def _message(error: BaseException) -> str:
    """The texts of a chain of errors, without the frames of tracebacks that workers put into them."""
    shown = []
    for one in _chain(error):
        lines = f"{type(one).__name__}: {one}".splitlines()
        kept, in_frame = [], False
        for line in lines:
            if line.lstrip().startswith(("Traceback (most recent", "Original Traceback", 'File "', "│", "^")):
                in_frame = True
            elif not (in_frame and line.startswith((" ", "\t"))):
                in_frame = False
                kept.append(line)
        shown.append("\n".join(kept))
    return "\n".join(shown)[-_MOST_CHARACTERS:]


def _ran(code: Code) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        value = code()
    except BaseException as error:
        last = [line for line in str(error).splitlines() if line.strip()] or [""]
        answer = {"outcome": "error", "type": type(error).__name__, "message": _message(error)}
        answer["last"] = last[-1].strip()
    else:
        answer = {"outcome": "no error" if value is None else "handled", "message": str(value or "")}
    return answer | {"seconds": time.perf_counter() - began}


def serve() -> None:
    """Run the function that the command line names: `prepare`, a mistake or a task."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, and so may their workers
    table, name = _table("__main__"), sys.argv[1]
    for code in table.before:
        code()
    if name == "prepare":
        for code in table.prepare:
            code()
        answer: dict[str, Any] = {}
    else:
        answer = _ran((table.mistakes | table.tasks)[name].code)
    print(json.dumps(answer), file=answers, flush=True)
