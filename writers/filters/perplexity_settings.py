"""Settings of the `perplexity` and `unigram_log_prob` filters."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shardkit.writers.filters.settings import FieldName, FilterSettings

__all__ = ["PerplexityConfig", "UnigramLogProbConfig"]


class PerplexityConfig(FilterSettings):
    """Bounds on the perplexity of a document to a KenLM model of your own."""

    model: FieldName = Field(description="A KenLM file, binary or ARPA.")
    words: Literal["normalized", "white_space"] = Field(
        default="normalized",
        description="What the model was trained on: lower case without punctuation, or not.",
    )
    min_perplexity: float | None = Field(default=None, ge=0, description="Least perplexity.")
    max_perplexity: float | None = Field(default=None, ge=0, description="Greatest perplexity.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.min_perplexity, self.max_perplexity
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_perplexity {low} is above max_perplexity {high}, so nothing would stay")
        return self

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.model,)


class UnigramLogProbConfig(FilterSettings):
    """datatrove's UnigramLogProbFilter with a list of frequencies of your own."""

    frequencies: FieldName = Field(description="CSV with the columns word and count, plain or .gz.")
    logprobs_threshold: float = Field(
        default=-10, le=0, description="Documents whose mean log-probability is not above it go."
    )

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.frequencies,)
