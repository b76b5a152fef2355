"""The settings of filters by lists of words."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.settings import FieldName, FilterSettings, Ratio

__all__ = ["BadWordsConfig", "StopWordsConfig"]


class BadWordsConfig(FilterSettings):
    """A list of words and phrases that documents should not have, such as LDNOOBW's."""

    lists: tuple[FieldName, ...] = Field(
        strict=False, min_length=1, description="Files of one word or phrase a line."
    )
    separated: bool = Field(
        default=True, description="Only as whole words; false for scripts without spaces."
    )
    min_matches: int = Field(default=1, ge=1, description="From so many occurrences on a document is bad.")
    keep_fraction: Ratio = Field(default=0, description="Part of the bad documents that stays, by a hash.")
    seed: int = Field(default=0, ge=0, description="Seed of the hash.")

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return self.lists


class StopWordsConfig(FilterSettings):
    """Frequent words of languages; a document needs enough of those of one language."""

    languages: dict[FieldName, FieldName | tuple[FieldName, ...]] = Field(
        strict=False,
        min_length=1,
        description="By name: the list of words, or a file of one a line.",
    )
    separated: bool = Field(
        default=True, description="Only as whole words; false for scripts without spaces."
    )
    min_stop_words: int = Field(default=2, ge=0, description="Fewest occurrences.")
    min_stop_word_ratio: Ratio = Field(default=0, description="Fewest occurrences per white-space word.")

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(words for words in self.languages.values() if isinstance(words, str))
