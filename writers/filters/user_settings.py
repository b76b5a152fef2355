"""The settings of a filter that the user wrote."""

from __future__ import annotations

import importlib.util
from typing import Any, Self

from pydantic import Field, JsonValue, model_validator

from shardkit.errors import RecipeError
from shardkit.writers.filters.settings import FieldName, FilterSettings

__all__ = ["PythonConfig"]


class PythonConfig(FilterSettings):
    """A function that judges Arrow batches, and what it is called with."""

    function: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="package.module:function; with file, the module is a name for messages.",
    )
    file: FieldName | None = Field(
        default=None, description="Python file that holds it, in the place of an installed module."
    )
    parameters: dict[str, JsonValue] = Field(default={}, description="Keyword arguments of the function.")
    reasons: tuple[FieldName, ...] = Field(
        default=(), strict=False, description="The reasons it may return; none: it returns what to keep."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.reasons)) < len(self.reasons):
            raise ValueError(f"a reason is listed twice: {', '.join(self.reasons)}")
        return self

    def files(self) -> tuple[str, ...]:
        """The function's source file: its digest is part of the identity of what was made with it."""
        return (self.file if self.file is not None else self._installed(),)

    def _installed(self) -> str:
        module: Any = self.function.partition(":")[0]
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:  # a parent package is missing or fails
            raise RecipeError(f"filters: python: {self.function}: {error}") from None
        if found is None or not found.has_location or found.origin is None:
            raise RecipeError(f"filters: python: {self.function}: no module {module} with a source file")
        return found.origin
