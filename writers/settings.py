"""What every section of a recipe is made of: a strict model and the constrained types that sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FieldName", "Ratio", "StrictModel"]

FieldName = Annotated[str, Field(min_length=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class StrictModel(BaseModel):
    """A frozen section of a recipe: unknown keys are errors and values are never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
