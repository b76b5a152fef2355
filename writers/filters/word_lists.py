"""Filters by lists of words: words that documents must not contain, and stop words that they must contain.

`bad_words` is datatrove's C4BadWordsFilter with the lists given as files. `keep_fraction` selects documents
by a hash of their id, so the result does not depend on their order. `kernels/phrases.py` describes how words
are matched.
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
    """Settings of `bad_words`: words and phrases that documents must not contain, such as LDNOOBW's list."""

    lists: Listed[FieldName] = Field(min_length=1, description="Files with one word or phrase per line.")
    separated: bool = Field(
        default=True, description="Match whole words only; set false for scripts without spaces."
    )
    min_matches: int = Field(default=1, ge=1, description="Minimum number of occurrences in a bad document.")
    keep_fraction: Ratio = Field(default=0, description="Fraction of bad documents to keep, chosen by hash.")
    seed: int = Field(default=0, ge=0, description="Seed of the hash for keep_fraction.")

    def build(self, folder: Path) -> BadWordsFilter:
        """See FilterSettings.build."""
        return BadWordsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return self.lists


class BadWordsFilter:
    """Drops documents that contain words of a list."""

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
        """Return bool[n]: whether a document is bad but belongs to the fraction that is kept."""
        from shardkit.hashing import keyed_hashes

        stays = np.zeros(len(batch), np.bool_)
        if self._config.keep_fraction and bad.any():
            ids = batch.column("document_id")
            chosen = [ids[number] for number in np.flatnonzero(bad)]
            hashes = keyed_hashes(chosen, self._config.seed, "bad words")
            stays[bad] = hashes / 2.0**64 < self._config.keep_fraction
        return stays


class StopWordsConfig(FilterSettings):
    """Settings of `stop_words`: a document needs enough of the frequent words of one language."""

    languages: dict[FieldName, FieldName | Annotated[tuple[FieldName, ...], Field(strict=False)]] = Field(
        strict=False,
        min_length=1,
        description="Stop words by language name: a list of words, or a file with one word per line.",
    )
    separated: bool = Field(
        default=True, description="Match whole words only; set false for scripts without spaces."
    )
    min_stop_words: int = Field(default=2, ge=0, description="Minimum number of occurrences.")
    min_stop_word_ratio: Ratio = Field(
        default=0, description="Minimum occurrences per word, split at white space."
    )

    def build(self, folder: Path) -> StopWordsFilter:
        """See FilterSettings.build."""
        return StopWordsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(words for words in self.languages.values() if isinstance(words, str))


class StopWordsFilter:
    """Drops documents that do not have enough stop words of any one language."""

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
        """See Filter.judge. The values are for the language with the most stop words in a document."""
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
