"""The mean log-probability of a document's words by a list of frequencies: datatrove's UnigramLogProbFilter.

A word's probability is its part of all counts, 1e-9 if it is not in the list, and a document stays if the
mean of the natural logarithms is above the threshold. datatrove splits by spaCy, so that punctuation counts
as unknown words; here words are normalized ones (`dedup/normalization.py`), which such lists hold, and values
are higher. Words are told apart by 64-bit hashes, those of up to eight bytes exactly.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import RecipeError
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.filters.perplexity_settings import UnigramLogProbConfig
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.words import normalized_words

__all__ = ["UnigramLogProbFilter", "read_frequencies"]

_UNKNOWN = 1e-9  # datatrove's
_WORDS = MinHashConfig(ngram=1)


class UnigramLogProbFilter:
    """Drops documents of rare words. Raises RecipeError for a bad list."""

    reasons = ("unigram_log_prob",)

    def __init__(self, config: UnigramLogProbConfig, folder: Path | None = None) -> None:
        path = (folder or Path()) / config.frequencies
        try:
            state = path.stat()
        except OSError as error:
            raise RecipeError(f"unigram_log_prob.frequencies: {path}: {error.strerror or error}") from None
        self._threshold = config.logprobs_threshold
        self._table = _table(path, state.st_size, state.st_mtime_ns)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Documents without words have the value 0, as in datatrove."""
        numbers = np.flatnonzero(batch.wanted)
        texts = batch.texts if len(numbers) == len(batch) else batch.texts.take(pa.array(numbers))
        hashes, offsets = shingle_batch(texts, _WORDS)
        means = np.zeros(len(texts), np.float64)
        _mean(hashes, offsets, *self._table, math.log(_UNKNOWN), means)
        values = np.zeros(len(batch), np.float64)
        values[numbers] = means
        return [Rule("unigram_log_prob", ~(values > self._threshold), values)]


@lru_cache(maxsize=2)
def _table(path: Path, _size: int, _time: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """(hashes in slots, log-probabilities, 1 where a slot is empty)."""
    known = read_frequencies(path)
    hashes, _ = shingle_batch(pa.array(known, pa.large_string()), _WORDS)
    logs = np.log(np.fromiter(known.values(), np.float64, len(known)))
    slots = 1 << (2 * len(known)).bit_length()
    keys, values = np.zeros(slots, np.uint64), np.ones(slots, np.float64)
    _fill(hashes, logs, keys, values)
    return keys, values


def read_frequencies(path: Path) -> dict[str, float]:
    """Probability by normalized word; entries that are not one word are part of the sum only."""
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


@numba.njit(nogil=True, cache=True)
def _fill(hashes, logs, keys, values):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(keys) - 1)
    for number in range(len(hashes)):
        slot = hashes[number] & mask
        while values[slot] <= 0:
            slot = (slot + np.uint64(1)) & mask
        keys[slot], values[slot] = hashes[number], min(logs[number], 0.0)


@numba.njit(nogil=True, cache=True)
def _mean(hashes, offsets, keys, values, unknown, means):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(keys) - 1)
    for text in range(len(means)):
        total = 0.0
        for at in range(offsets[text], offsets[text + 1]):
            slot = hashes[at] & mask
            while values[slot] <= 0 and keys[slot] != hashes[at]:
                slot = (slot + np.uint64(1)) & mask
            total += values[slot] if values[slot] <= 0 else unknown
        if offsets[text + 1] > offsets[text]:
            means[text] = total / (offsets[text + 1] - offsets[text])
