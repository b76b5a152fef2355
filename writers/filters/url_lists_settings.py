"""The settings of lists of web addresses."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shardkit.writers.filters.settings import FieldName, FilterSettings

__all__ = ["UrlListsConfig"]

Files = tuple[FieldName, ...]


class UrlListsConfig(FilterSettings):
    """Files of one entry a line, and how many soft words are too many."""

    domains: Files = Field(default=(), strict=False, description="Files of hosts that go with subdomains.")
    hosts: Files = Field(
        default=(), strict=False, description="Files of hosts that go, not their subdomains."
    )
    urls: Files = Field(default=(), strict=False, description="Files of whole addresses.")
    banned_words: Files = Field(default=(), strict=False, description="Files of words of an address.")
    soft_banned_words: Files = Field(default=(), strict=False, description="Files of words, if several.")
    soft_word_threshold: int = Field(default=2, ge=1, description="From so many distinct ones on it goes.")
    banned_subwords: Files = Field(
        default=(), strict=False, description="Files of parts of the address without punctuation."
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.files():
            raise ValueError("url_lists needs a file: domains, hosts, urls, banned_words, …")
        return self

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        words = (*self.banned_words, *self.soft_banned_words, *self.banned_subwords)
        return (*self.domains, *self.hosts, *self.urls, *words)
