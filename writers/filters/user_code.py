"""Code of users that a recipe names: a function or class, in a Python file or an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from shardkit.errors import RecipeError
from shardkit.files import FileVersion
from shardkit.kernels.numba_support import load_extensions
from shardkit.settings import FieldName, StrictModel
from shardkit.writers.filters.base import version_of

_KEPT = 16  # maximum number of loaded functions and instances that a process keeps


def _function_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name):
        raise ValueError(f"write module:function, such as my_filters:{_identifier(name)}, got {name!r}")
    return name


def _identifier(name: str) -> str:
    last = re.split(r"\W+", name)[-1]
    return last if last.isidentifier() else "keep"


FunctionName = Annotated[str, AfterValidator(_function_name)]


def named_after_the_file(data: Any) -> Any:
    """Prefix a bare function name, such as `function: keep`, with a module name made from `file`."""
    if isinstance(data, dict):
        function, file = data.get("function"), data.get("file")
        if isinstance(function, str) and isinstance(file, str) and function.isidentifier():
            module = Path(file).stem
            return data | {"function": f"{module if module.isidentifier() else 'filter'}:{function}"}
    return data


class UserCode(StrictModel):
    """The settings that name a function or class of the user, and its arguments."""

    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"data"})

    function: FunctionName = Field(
        description="package.module:function; with `file`, the module is only a name for messages.",
        examples=["my_filters:keep"],
    )
    file: FieldName | None = Field(
        default=None, description="Python file that defines the function, instead of an installed module."
    )
    parameters: dict[str, JsonValue] = Field(default={}, description="Keyword arguments of the function.")
    data: dict[FieldName, FieldName] = Field(
        default={},
        description="Files that the code reads, such as a model: keyword arguments that get their paths. "
        "Changing such a file runs the tasks again, as changing the code does.",
        examples=[{"model": "topics.npz"}],
    )

    @model_validator(mode="before")
    @classmethod
    def _named_after_the_file(cls, data: Any) -> Any:
        return named_after_the_file(data)

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if twice := sorted(self.parameters.keys() & self.data.keys()):
            raise ValueError(f"{twice[0]} is in both `parameters` and `data`; rename one argument")
        return self

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Return the keyword arguments; `folder` is the base of relative paths in `data`."""
        return self.parameters | {name: str(folder / path) for name, path in self.data.items()}

    def code_files(self, key: str) -> tuple[str, ...]:
        """Return the paths of the code and its data, whose digests are part of the identity of a task.

        Raises RecipeError with the recipe's `key` if an installed module has no such file.
        """
        return self.file or self._installed(key), *self.data.values()

    def _installed(self, key: str) -> str:
        module = self.function.partition(":")[0]
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:  # a parent package is missing or fails
            raise RecipeError(f"{key}: {self.function}: {error}") from None
        if found is None or not found.has_location or found.origin is None:
            raise RecipeError(
                f"{key}: {self.function}: no module {module} with a source file is installed; `file` names a "
                "Python file beside the recipe"
            )
        return found.origin

    def make(self, key: str, folder: Path) -> Callable[..., Any]:
        """Return the function with its keyword arguments, or an instance of the class, after its `setup`.

        The process keeps it; changed files are loaded again. `folder` is the base of relative paths. Raises
        RecipeError with the recipe's `key` if that fails.
        """
        versions = tuple(version_of(folder / path, key) for path in self.code_files(key))
        return _made(self.model_dump_json(include={*UserCode.model_fields}), key, folder, versions)

    def _make(self, key: str, folder: Path) -> Callable[..., Any]:
        made: Any = self.load(key, folder)
        arguments = self.arguments(folder)
        if not isinstance(made, type):
            return partial(made, **arguments) if arguments else made
        try:
            made = made(**arguments)
            if callable(setup := getattr(made, "setup", None)):
                setup()
        except Exception as error:  # the user's code may raise anything
            raise RecipeError(f"{key}: {self.function}: {type(error).__name__}: {error}") from error
        called: Callable[..., Any] = made
        return called

    def load(self, key: str, folder: Path) -> Callable[..., Any]:
        """Import the code and return the function or class; `folder` is the base of a relative `file`.

        Raises RecipeError with the recipe's `key` if that fails.
        """
        module, _, name = self.function.partition(":")
        load_extensions()
        try:
            made = _from_file(module, folder / self.file) if self.file else importlib.import_module(module)
        except Exception as error:  # importing the user's code may raise anything
            raise RecipeError(f"{key}: {self.function}: {type(error).__name__}: {error}") from error
        function = getattr(made, name, None)
        if not callable(function):
            raise RecipeError(f"{key}: {self.function}: {made.__file__} has no function {name}")
        called: Callable[..., Any] = function
        return called


@lru_cache(maxsize=_KEPT)
def _made(code: str, key: str, folder: Path, versions: tuple[FileVersion, ...]) -> Callable[..., Any]:
    return UserCode.model_validate_json(code)._make(key, folder)


def _from_file(name: str, path: Path) -> ModuleType:
    name = f"{name} ({path})"  # no installed module has this name
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look up their module
    found.loader.exec_module(module)
    return module
