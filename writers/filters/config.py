"""The settings of every filter, and the entry of a recipe that holds one of them.

Names and defaults are datatrove's where the rule is datatrove's, so that a published configuration can be
copied over as it is.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from shardkit.writers.filters.c4_paragraph_settings import C4ParagraphConfig
from shardkit.writers.filters.c4_settings import C4QualityConfig
from shardkit.writers.filters.classifier_settings import ClassifierConfig
from shardkit.writers.filters.decontamination_settings import DecontaminationConfig
from shardkit.writers.filters.dolma_settings import DolmaQualityConfig, DolmaRepetitionConfig
from shardkit.writers.filters.gopher_repetition_settings import GopherRepetitionConfig
from shardkit.writers.filters.language_settings import LanguageConfig
from shardkit.writers.filters.perplexity_settings import PerplexityConfig, UnigramLogProbConfig
from shardkit.writers.filters.pii_settings import PiiConfig
from shardkit.writers.filters.profiles import PROFILES
from shardkit.writers.filters.ratios_settings import RatiosConfig
from shardkit.writers.filters.repeated_lines_settings import RepeatedLinesConfig
from shardkit.writers.filters.settings import FieldName, FilterSettings, Ratio, StrictModel
from shardkit.writers.filters.url_lists_settings import UrlListsConfig
from shardkit.writers.filters.user_settings import PythonConfig
from shardkit.writers.filters.word_lists_settings import BadWordsConfig, StopWordsConfig

__all__ = [
    "FilterConfig",
    "FilterEntry",
    "FinewebQualityConfig",
    "GopherQualityConfig",
    "LengthConfig",
]


class LengthConfig(FilterSettings):
    """Bounds on a document's length; null means no bound. Words are separated by white space."""

    min_words: int | None = Field(default=None, ge=0, description="Fewest words.")
    max_words: int | None = Field(default=None, ge=0, description="Most words.")
    min_chars: int | None = Field(default=None, ge=0, description="Fewest characters (code points).")
    max_chars: int | None = Field(default=None, ge=0, description="Most characters (code points).")


class GopherQualityConfig(FilterSettings):
    """Gopher's quality rules as datatrove counts them, on white-space words. null: no rule."""

    min_doc_words: int | None = Field(
        default=50, ge=0, description="Fewest words that are not only punctuation."
    )
    max_doc_words: int | None = Field(
        default=100_000, ge=0, description="Most words that are not only punctuation."
    )
    min_avg_word_length: float | None = Field(
        default=3, ge=0, description="Least mean length of those words."
    )
    max_avg_word_length: float | None = Field(
        default=10, ge=0, description="Greatest mean length of those words."
    )
    max_symbol_word_ratio: float | None = Field(
        default=0.1, ge=0, description="Most # per word; most ... and … per word."
    )
    max_bullet_lines_ratio: Ratio | None = Field(
        default=0.9, description="Most lines that start with • or -."
    )
    max_ellipsis_lines_ratio: Ratio | None = Field(
        default=0.3, description="Most lines that end with ... or …."
    )
    max_non_alpha_words_ratio: Ratio | None = Field(
        default=0.8, description="Least part of words with a letter (datatrove's name; it is a minimum)."
    )
    min_stop_words: int | None = Field(default=2, ge=0, description="Fewest distinct stop words.")
    stop_words: tuple[FieldName, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        strict=False,
        max_length=64,
        description="The stop words, compared exactly.",
    )


class FinewebQualityConfig(FilterSettings):
    """FineWeb's own line rules as datatrove counts them, on white-space words."""

    line_punct_thr: Ratio = Field(
        default=0.12, description="Least part of lines that end in terminal punctuation."
    )
    line_punct_exclude_zero: bool = Field(
        default=False, description="Pass documents that have no such line at all."
    )
    short_line_thr: Ratio = Field(
        default=0.67, description="Most lines of at most short_line_length characters."
    )
    short_line_length: int = Field(default=30, ge=0, description="Characters up to which a line is short.")
    char_duplicates_ratio: Ratio = Field(default=0.01, description="Most characters in repeated lines.")
    new_line_ratio: float = Field(default=0.3, ge=0, description="Most newlines per word.")


FilterConfig = FilterSettings


class FilterEntry(StrictModel):
    """One step of filtering: exactly one key, the filter's name with its settings, or `profile`."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    length: LengthConfig | None = Field(default=None, description="Bounds on words and characters.")
    gopher_quality: GopherQualityConfig | None = Field(default=None, description="Quality rules of Gopher.")
    fineweb_quality: FinewebQualityConfig | None = Field(default=None, description="Line rules of FineWeb.")
    gopher_repetition: GopherRepetitionConfig | None = Field(
        default=None, description="Repetition rules of Gopher."
    )
    c4_paragraph: C4ParagraphConfig | None = Field(default=None, description="Long lines, as mC4 asks.")
    dolma_quality: DolmaQualityConfig | None = Field(default=None, description="Quality rules of dolma.")
    dolma_repetition: DolmaRepetitionConfig | None = Field(
        default=None, description="Repetition rules of dolma."
    )
    c4_quality: C4QualityConfig | None = Field(default=None, description="Line rules of C4.")
    ratios: RatiosConfig | None = Field(default=None, description="Bounds on kinds of characters.")
    repeated_lines: RepeatedLinesConfig | None = Field(
        default=None, description="Cut lines that stood before in the document."
    )
    url_lists: UrlListsConfig | None = Field(default=None, description="Lists of hosts, URLs, their words.")
    bad_words: BadWordsConfig | None = Field(default=None, description="Lists of words that must not be.")
    stop_words: StopWordsConfig | None = Field(default=None, description="Stop words of languages.")
    python: PythonConfig | None = Field(default=None, description="A function of your own.")
    pii: PiiConfig | None = Field(default=None, description="Redact addresses and phone numbers.")
    language: LanguageConfig | None = Field(default=None, description="Languages that stay, by fastText.")
    classifier: ClassifierConfig | None = Field(default=None, description="A fastText model of your own.")
    decontamination: DecontaminationConfig | None = Field(default=None, description="Overlap with test sets.")
    perplexity: PerplexityConfig | None = Field(default=None, description="A KenLM model of your own.")
    unigram_log_prob: UnigramLogProbConfig | None = Field(
        default=None, description="Mean log-probability of words."
    )
    # One line here and one in chain.STEPS make a filter known; its settings live in a module of their own.
    profile: Literal["c4", "dolma", "fineweb", "fineweb_rules", "gopher", "minimal"] | None = Field(
        default=None, description="A named list of filters: profiles.py has them as a recipe would."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """`- gopher_quality:` means its defaults."""
        if isinstance(data, dict):
            return {
                k: {} if v is None and k in cls.model_fields and k != "profile" else v
                for k, v in data.items()
            }
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an entry holds exactly one filter, this one has {', '.join(given) or 'none'}; "
                f"one of {', '.join(type(self).model_fields)}"
            )
        return self

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    def filters(self) -> tuple[tuple[str, FilterConfig], ...]:
        """(name, settings) of the filters this entry stands for, in order."""
        if self.profile is not None:
            entries = [FilterEntry.model_validate(entry) for entry in PROFILES[self.profile]]
            return tuple(step for entry in entries for step in entry.filters())
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return tuple((name, config) for name, config in named if config is not None)
