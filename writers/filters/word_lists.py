"""Filters by lists of words: words that documents must not contain, and stop words that they must.

`bad_words` is datatrove's C4BadWordsFilter with the lists given as files. Which documents `keep_fraction`
lets through depends on a hash of their id, so the result does not depend on their order. Matching is
described in `kernels/phrases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.settings import FieldName, Listed, Ratio
from shardkit.writers.filters.base import FilterSettings, Rule, below, load_list, ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch
    from shardkit.writers.kernels.phrases import Phrases


class BadWordsConfig(FilterSettings):
    """A list of words and phrases that documents should not have, such as LDNOOBW's."""

    lists: Listed[FieldName] = Field(min_length=1, description="Files with one word or phrase per line.")
    separated: bool = Field(
        default=True, description="Only as whole words; false for scripts without spaces."
    )
    min_matches: int = Field(default=1, ge=1, description="Occurrences that make a document bad.")
    keep_fraction: Ratio = Field(default=0, description="Fraction of the bad documents to keep, by a hash.")
    seed: int = Field(default=0, ge=0, description="Seed of the hash.")

    def build(self, folder: Path) -> BadWordsFilter:
        """See FilterSettings.build."""
        return BadWordsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return self.lists


class BadWordsFilter:
    """Drops documents with words of a list."""

    reasons = ("document_removed_with_badwords",)

    def __init__(self, config: BadWordsConfig, folder: Path) -> None:
        self._config = config
        self._phrases = load_list("bad_words.lists", folder, config.lists, _maker(config.separated))

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. The value is the number of occurrences."""
        from shardkit.writers.kernels.phrases import lower

        found = self._phrases.count(lower(batch.texts), batch.wanted)
        bad = found >= self._config.min_matches
        return [Rule(self.reasons[0], bad & ~self._stays(batch, bad), found)]

    def _stays(self, batch: TextBatch, bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Mask of the bad documents in the fraction that stays."""
        from shardkit.hashing import keyed_hashes

        stays = np.zeros(len(batch), np.bool_)
        if self._config.keep_fraction and bad.any():
            ids = batch.column("document_id")
            chosen = [ids[number] for number in np.flatnonzero(bad)]
            hashes = keyed_hashes(chosen, self._config.seed, "bad words")
            stays[bad] = hashes / 2.0**64 < self._config.keep_fraction
        return stays


class StopWordsConfig(FilterSettings):
    """Frequent words of languages; a document needs enough of those of one language."""

    languages: dict[FieldName, FieldName | Annotated[tuple[FieldName, ...], Field(strict=False)]] = Field(
        strict=False,
        min_length=1,
        description="By name: the list of words, or a file with one per line.",
    )
    separated: bool = Field(
        default=True, description="Only as whole words; false for scripts without spaces."
    )
    min_stop_words: int = Field(default=2, ge=0, description="Fewest occurrences.")
    min_stop_word_ratio: Ratio = Field(default=0, description="Fewest occurrences per white-space word.")

    def build(self, folder: Path) -> StopWordsFilter:
        """See FilterSettings.build."""
        return StopWordsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(words for words in self.languages.values() if isinstance(words, str))


class StopWordsFilter:
    """Drops documents with too few of the stop words of every language."""

    reasons = ("too_few_stop_words", "stop_word_ratio")

    def __init__(self, config: StopWordsConfig, folder: Path) -> None:
        self._config = config
        make = _maker(config.separated)
        self._lists = [
            load_list(f"stop_words.languages.{language}", folder, [words], make)
            if isinstance(words, str)
            else make(words)
            for language, words in config.languages.items()
        ]

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Values are those of the language with the most."""
        from shardkit.writers.kernels.phrases import lower

        lowered = lower(batch.texts)
        found = np.max([words.count(lowered, batch.wanted) for words in self._lists], axis=0)
        part = ratio(found, batch.words().words)
        return [
            below("too_few_stop_words", found, self._config.min_stop_words),
            below("stop_word_ratio", part, self._config.min_stop_word_ratio),
        ]


def _maker(separated: bool) -> Callable[[Iterable[str]], Phrases]:
    return _whole if separated else _anywhere


def _whole(phrases: Iterable[str]) -> Phrases:
    from shardkit.writers.kernels.phrases import Phrases

    return Phrases(phrases)


def _anywhere(phrases: Iterable[str]) -> Phrases:
    from shardkit.writers.kernels.phrases import Phrases

    return Phrases(phrases, separated=False)
