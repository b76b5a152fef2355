"""Settings of the `classifier` filter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardkit.writers.filters.settings import FieldName, FilterSettings, Ratio

__all__ = ["ClassifierConfig"]


class ClassifierConfig(FilterSettings):
    """A fastText model of your own, and what the probability of one of its labels means."""

    model: FieldName = Field(description="A fastText model file, .bin or .ftz.")
    label: FieldName = Field(description="The label, without __label__.")
    threshold: Ratio = Field(default=0.5, description="From which probability on a document has the label.")
    action: Literal["keep", "remove"] = Field(
        default="keep", description="What is done with documents that have the label; the others go or stay."
    )
    characters: int | None = Field(
        default=None, ge=1, description="Look at so many characters from the beginning; null: at all."
    )

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.model,)
