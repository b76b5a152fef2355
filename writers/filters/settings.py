"""What the settings of every filter, and of every other part of a recipe, are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FieldName", "FilterSettings", "Ratio", "StrictModel"]

FieldName = Annotated[str, Field(min_length=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class StrictModel(BaseModel):
    """What every part of a recipe is: frozen, without unknown keys, without silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FilterSettings(StrictModel):
    """The settings of one filter."""

    def files(self) -> tuple[str, ...]:
        """Paths, from the recipe's folder, of files that decide what the filter does: lists, models."""
        return ()
