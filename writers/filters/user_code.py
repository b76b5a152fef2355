"""Code of users that a recipe names: a function or class, in a Python file or an installed module."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator, Field, JsonValue, model_validator

from shardkit.errors import RecipeError
from shardkit.settings import FieldName, StrictModel
from shardkit.writers.kernels.numba_support import load_extensions


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

    function: FunctionName = Field(
        description="package.module:function; with `file`, the module is only a name for messages.",
        examples=["my_filters:keep"],
    )
    file: FieldName | None = Field(
        default=None, description="Python file that defines the function, instead of an installed module."
    )
    parameters: dict[str, JsonValue] = Field(default={}, description="Keyword arguments of the function.")

    @model_validator(mode="before")
    @classmethod
    def _named_after_the_file(cls, data: Any) -> Any:
        return named_after_the_file(data)

    def source_file(self, key: str) -> str:
        """Return the path of the file with the code, whose digest is part of the identity of a task.

        Raises RecipeError with the recipe's `key` if an installed module has no such file.
        """
        if self.file is not None:
            return self.file
        module = self.function.partition(":")[0]
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:  # a parent package is missing or fails
            raise RecipeError(f"{key}: {self.function}: {error}") from None
        if found is None or not found.has_location or found.origin is None:
            raise RecipeError(f"{key}: {self.function}: no module {module} with a source file")
        return found.origin

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


def _from_file(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
