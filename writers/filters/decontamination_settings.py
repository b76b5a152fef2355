"""Settings of the `decontamination` filter."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shardkit.writers.filters.settings import FieldName, FilterSettings, StrictModel

__all__ = ["DecontaminationConfig", "EvaluationConfig"]


class EvaluationConfig(StrictModel):
    """One file of evaluation items."""

    path: FieldName = Field(description="JSONL, or text with an item a line; plain or .gz.")
    name: str | None = Field(default=None, description="What reports call it; null: the file's name.")
    fields: tuple[FieldName, ...] = Field(
        default=("text",), strict=False, min_length=1, description="JSONL: fields whose texts make an item."
    )


class DecontaminationConfig(FilterSettings):
    """Which evaluation sets documents must not hold, and what counts as holding one."""

    evaluations: tuple[EvaluationConfig, ...] = Field(
        strict=False, min_length=1, description="Files of evaluation items."
    )
    ngram: int = Field(default=13, ge=1, le=64, description="Words in a row that make an overlap.")
    min_item_words: int = Field(
        default=8, ge=1, description="Shorter items are left out; those up to ngram are found as a whole."
    )
    min_matches: int = Field(default=1, ge=1, description="From so many n-grams on a document is dropped.")
    action: Literal["drop", "mark"] = Field(default="drop", description="mark: only tell which.")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [one.name or one.path for one in self.evaluations]
        if len(set(names)) < len(names):
            raise ValueError(f"two evaluations have the same name among {', '.join(names)}; set name")
        return self

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(one.path for one in self.evaluations)
