"""Filters by lists of words: what documents should not have, and what a language cannot do without.

Bad words are datatrove's C4BadWordsFilter with lists given as files: which documents stay for `keep_fraction`
is a hash of their id, so that the result does not depend on order. Phrases are found as `phrases.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.writers.documents import keyed_hashes
from shardkit.writers.filters.list_files import load_list
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.filters.word_lists_settings import BadWordsConfig, StopWordsConfig
from shardkit.writers.kernels.phrases import Phrases, lower

__all__ = ["BadWordsFilter", "StopWordsFilter"]


class BadWordsFilter:
    """Drops documents with words of a list."""

    reasons = ("document_removed_with_badwords",)

    def __init__(self, config: BadWordsConfig, folder: Path) -> None:
        self._config = config
        self._phrases = load_list(folder, config.lists, _whole if config.separated else _anywhere)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. The value is the number of occurrences."""
        found = self._phrases.count(lower(batch.texts), batch.wanted)
        bad = found >= self._config.min_matches
        return [Rule(self.reasons[0], bad & ~self._stays(batch, bad), found)]

    def _stays(self, batch: TextBatch, bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of the bad documents are in the fraction that stays; without ids none is."""
        stays = np.zeros(len(batch), np.bool_)
        if self._config.keep_fraction and bad.any():
            ids = batch.column("document_id")
            chosen = [number for number in np.flatnonzero(bad).tolist() if ids[number] is not None]
            hashes = keyed_hashes([ids[number] for number in chosen], self._config.seed, "bad words")
            stays[chosen] = hashes / 2.0**64 < self._config.keep_fraction
        return stays


class StopWordsFilter:
    """Drops documents with too few of the stop words of every language."""

    reasons = ("too_few_stop_words", "stop_word_ratio")

    def __init__(self, config: StopWordsConfig, folder: Path) -> None:
        self._config = config
        make = _whole if config.separated else _anywhere
        self._lists = [
            load_list(folder, [words], make) if isinstance(words, str) else make(words)
            for words in config.languages.values()
        ]

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Values are those of the language with the most."""
        lowered = lower(batch.texts)
        found = np.max([words.count(lowered, batch.wanted) for words in self._lists], axis=0)
        part = ratio(found, batch.words().words)
        least = self._config.min_stop_words
        rules = ((found < least, found), (part < self._config.min_stop_word_ratio, part))
        return [Rule(name, *judged) for name, judged in zip(self.reasons, rules, strict=True)]


def _whole(phrases: Iterable[str]) -> Phrases:
    return Phrases(phrases)


def _anywhere(phrases: Iterable[str]) -> Phrases:
    return Phrases(phrases, separated=False)
