"""Gopher's repetition rules: datatrove's GopherRepetitionFilter, decision for decision, on str.split() words.

Source: Rae et al. 2021, table A1, as implemented by datatrove (`gopher_repetition_filter.py`): only excess
copies count, and characters are divided by those of the whole text, white space too. As there, a bound of
null or 0 switches a rule about lines or paragraphs off, but not one about n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.writers.filters.gopher_repetition_settings import GopherRepetitionConfig
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.lines import LINES, PARAGRAPHS, line_repetition
from shardkit.writers.kernels.ngrams import EXCESS, TOP, ngram_statistics

__all__ = ["GopherRepetitionFilter"]


class GopherRepetitionFilter:
    """Drops documents that say the same again and again."""

    def __init__(self, config: GopherRepetitionConfig, folder: Path | None = None) -> None:
        self._config = config
        self.reasons = (
            "empty",
            "dup_para_frac",
            "dup_para_char_frac",
            "dup_line_frac",
            "dup_line_char_frac",
            *(f"top_{n}_gram" for n, _ in config.top_n_grams),
            *(f"duplicated_{n}_n_grams" for n, _ in config.dup_n_grams),
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        where = (batch.data, batch.offsets, batch.wanted)
        jobs = [(n, TOP) for n, _ in config.top_n_grams] + [(n, EXCESS) for n, _ in config.dup_n_grams]
        counts = ngram_statistics(*where, jobs)
        lines, paragraphs = line_repetition(*where, LINES), line_repetition(*where, PARAGRAPHS)
        values = [
            (config.dup_para_frac, ratio(paragraphs.repeated, paragraphs.elements)),
            (config.dup_para_char_frac, ratio(paragraphs.characters, counts.characters)),
            (config.dup_line_frac, ratio(lines.repeated, lines.elements)),
            (config.dup_line_char_frac, ratio(lines.characters, counts.characters)),
        ]
        judged = [Rule(self.reasons[0], batch.sizes == 0, counts.characters)]
        for name, (most, value) in zip(self.reasons[1:5], values, strict=True):
            judged.append(Rule(name, value > most if most else None, value))
        tops = len(config.top_n_grams)
        bounds = config.top_n_grams + config.dup_n_grams
        for row, (name, (n, most)) in enumerate(zip(self.reasons[5:], bounds, strict=True)):
            characters = counts.first[row]
            if row < tops:  # an n-gram's words are joined by single spaces
                characters = counts.first[row] * (counts.second[row] + n - 1)
            value = ratio(characters, counts.characters)
            judged.append(Rule(name, value > most, value))
        return judged
