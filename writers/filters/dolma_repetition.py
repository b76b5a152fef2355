"""Gopher's repetition rules as dolma has them, decision for decision.

Source: dolma's `gopher_v1` tagger, and bounds and order of Dolma v1.5's `mixing/cc-head.yaml`. Other than in
datatrove's reading: every copy counts, the first one too; characters are those of words, and of all n-grams
for repeated n-grams; there is no rule about paragraphs. (That configuration names the most common n-grams as
"…2gram", the tagger writes "…2grams", so those three rules may never have dropped a document there; to leave
them out, `most_common_ngrams: []`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardkit.writers.filters.dolma_settings import DolmaRepetitionConfig
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.lines import ALL_LINES, line_repetition
from shardkit.writers.kernels.ngrams import COPIES, TOP, ngram_statistics

__all__ = ["DolmaRepetitionFilter"]


class DolmaRepetitionFilter:
    """Drops documents that say the same again and again."""

    def __init__(self, config: DolmaRepetitionConfig, folder: Path | None = None) -> None:
        self._config = config
        self.reasons = (
            "duplicate_lines",
            "characters_in_duplicate_lines",
            *(f"characters_in_most_common_{n}grams" for n, _ in config.most_common_ngrams),
            *(f"characters_in_duplicate_{n}grams" for n, _ in config.duplicate_ngrams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        where = (batch.data, batch.offsets, batch.wanted)
        jobs = [(n, TOP) for n, _ in config.most_common_ngrams]
        jobs += [(n, COPIES) for n, _ in config.duplicate_ngrams]
        counts = ngram_statistics(*where, jobs)
        lines = line_repetition(*where, ALL_LINES)
        bounds: list[float | None] = [
            config.max_duplicate_line_fraction,
            config.max_duplicate_line_character_fraction,
            *(most for _, most in config.most_common_ngrams + config.duplicate_ngrams),
        ]
        characters = np.maximum(counts.word_characters, 1)
        values = [ratio(lines.repeated, lines.elements), ratio(lines.characters, characters)]
        for row, (_, kind) in enumerate(jobs):
            if kind == TOP:
                values.append(ratio(counts.first[row] * counts.second[row], characters))
            else:
                values.append(ratio(counts.first[row], counts.second[row]))
        return [
            Rule(name, None if most is None else value > most, value)
            for name, most, value in zip(self.reasons, bounds, values, strict=True)
        ]
