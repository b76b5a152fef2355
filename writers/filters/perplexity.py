"""Filters by how likely a text is: its perplexity to a KenLM model, or the mean log-probability of its words.

`perplexity` follows CCNet: every line with a word is a sentence, and the perplexity is 10 ** -(sum of the
log10 probabilities / (words + sentences)). A document without a word has the value 0 and passes. Words are
those the model was trained on: normalized ones (`kernels/words.py`) or split at white space; models of
sentence pieces are not supported. KenLM takes one sentence per call, so this is one of the slow filters.

`unigram_log_prob` is datatrove's UnigramLogProbFilter with a list of frequencies. The probability of a word
is its share of all counts, or 1e-9 if it is not in the list; a document stays if the mean of the natural
logarithms is above the threshold. datatrove splits with spaCy, so punctuation counts as unknown words; here
words are normalized ones, which such lists contain, and values are higher. Words are identified by 64-bit
hashes, which are exact for words of up to eight bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.files import FileVersion
from shardkit.writers.filters.base import FilterSettings, Rule, above, version_of
from shardkit.writers.settings import FieldName

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch

__all__ = [
    "PerplexityConfig",
    "PerplexityFilter",
    "UnigramLogProbConfig",
    "UnigramLogProbFilter",
    "read_frequencies",
]

_UNKNOWN = 1e-9  # datatrove's


class PerplexityConfig(FilterSettings):
    """Bounds on the perplexity of a document to a KenLM model of your own."""

    model: FieldName = Field(description="A KenLM file, binary or ARPA.")
    words: Literal["normalized", "white_space"] = Field(
        default="normalized",
        description="Words of the model: in lower case without punctuation, or not.",
    )
    min_perplexity: float | None = Field(default=None, ge=0, description="Least perplexity.")
    max_perplexity: float | None = Field(default=None, ge=0, description="Greatest perplexity.")

    def build(self, folder: Path) -> PerplexityFilter:
        """See FilterSettings.build."""
        return PerplexityFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.model,)


class PerplexityFilter:
    """Drops documents that are too predictable or not predictable enough. RecipeError for a bad model."""

    reasons = ("too_low", "too_high")

    def __init__(self, config: PerplexityConfig, folder: Path) -> None:
        from shardkit.writers.kernels.words import normalized_words

        path = folder / config.model
        self._config = config
        self._model = _load(path, version_of(path, "perplexity.model"))
        self._split = normalized_words if config.words == "normalized" else str.split

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        values = np.zeros(len(batch), np.float64)
        for number in np.flatnonzero(batch.wanted).tolist():
            values[number] = self._perplexity(batch.texts[number].as_py())
        low = self._config.min_perplexity
        return [
            Rule("too_low", None if low is None else (values < low) & (values > 0), values, low),
            above("too_high", values, self._config.max_perplexity),
        ]

    def _perplexity(self, text: str) -> float:
        total, length = 0.0, 0
        for line in text.splitlines():
            words = self._split(line)
            if words:
                total += self._model.score(" ".join(words))
                length += len(words) + 1
        return float(10 ** min(-total / length, 300)) if length else 0.0


@lru_cache(maxsize=2)
def _load(path: Path, _version: FileVersion) -> Any:
    """Load the model, and cache it for the process's next task while the file stays the same."""
    try:
        import kenlm
    except ImportError as error:
        raise MissingExtraError("kenlm", "perplexity", "the perplexity filter") from error
    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        return kenlm.Model(str(path), config)
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"perplexity.model: {path} is not a KenLM model: {error}") from error


class UnigramLogProbConfig(FilterSettings):
    """datatrove's UnigramLogProbFilter with a list of frequencies of your own."""

    frequencies: FieldName = Field(description="CSV with the columns word and count, plain or .gz.")
    logprobs_threshold: float = Field(
        default=-10, le=0, description="Keep documents whose mean log-probability is above it."
    )

    def build(self, folder: Path) -> UnigramLogProbFilter:
        """See FilterSettings.build."""
        return UnigramLogProbFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.frequencies,)


class UnigramLogProbFilter:
    """Drops documents of rare words. Raises RecipeError for a bad list."""

    reasons = ("unigram_log_prob",)

    def __init__(self, config: UnigramLogProbConfig, folder: Path) -> None:
        path = folder / config.frequencies
        self._threshold = config.logprobs_threshold
        self._table = _table(path, version_of(path, "unigram_log_prob.frequencies"))

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Documents without words have the value 0, as in datatrove."""
        from shardkit.writers.kernels.hash_tables import mean_values
        from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

        rows, texts = batch.wanted_texts()
        hashes, offsets = shingle_batch(texts, Ngrams(1))
        values = np.zeros(len(batch), np.float64)
        values[rows] = mean_values(hashes, offsets, *self._table, math.log(_UNKNOWN))
        return [Rule("unigram_log_prob", ~(values > self._threshold), values, self._threshold)]


@lru_cache(maxsize=2)
def _table(path: Path, _version: FileVersion) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """(hashes in slots, log-probabilities, 1 where a slot is empty)."""
    import pyarrow as pa

    from shardkit.writers.kernels.hash_tables import fill_values
    from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

    known = read_frequencies(path)
    hashes, _ = shingle_batch(pa.array(known, pa.large_string()), Ngrams(1))
    logs = np.log(np.fromiter(known.values(), np.float64, len(known)))
    slots = 1 << (2 * len(known)).bit_length()
    keys, values = np.zeros(slots, np.uint64), np.ones(slots, np.float64)
    fill_values(hashes, logs, keys, values)
    return keys, values


def read_frequencies(path: Path) -> dict[str, float]:
    """Probability by normalized word; entries that are not one word are part of the sum only."""
    from shardkit.writers.kernels.words import normalized_words

    counts: dict[str, int] = {}
    total = 0
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        for row in rows:
            count = int(row["count"])
            words = normalized_words(row["word"])
            if count <= 0:
                raise ValueError(f"the count of {row['word']!r} is {count}")
            total += count
            if len(words) == 1:
                counts[words[0]] = counts.get(words[0], 0) + count
    except (OSError, EOFError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RecipeError(
            f"unigram_log_prob.frequencies: {path}: {type(error).__name__}: {error}; give a CSV file with "
            "the columns word and count"
        ) from None
    if not counts:
        raise RecipeError(f"unigram_log_prob.frequencies: {path} has no words")
    return {word: count / total for word, count in counts.items()}
