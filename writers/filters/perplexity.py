"""Filters by how likely a text is: its perplexity in a KenLM model, or the mean log-probability of its words.

`perplexity` follows CCNet: every line with a word is a sentence, and the perplexity is 10 ** -(sum of the
log10 probabilities / (words + sentences)). A document without a word has the value 0 and passes. Words must
be split as for the model's training: normalized (`kernels/words.py`) or at white space. SentencePiece models
are not supported. The model is a binary KenLM file, which all processes of a machine share in memory, or an
ARPA file, from which each process makes its own tables. Probabilities equal KenLM's (`kernels/kenlm.py`).

`unigram_log_prob` is datatrove's UnigramLogProbFilter with a list of frequencies. The probability of a word
is its share of all counts, or 1e-9 if it is not in the list; a document stays if the mean of the natural
logarithms is above the threshold. datatrove splits text with spaCy, so punctuation counts as unknown words.
Here words are normalized, as in such lists, so values are higher. Words are identified by 64-bit hashes,
which are exact for words of up to eight bytes.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
import zstandard
from pydantic import Field

from shardkit.errors import RecipeError
from shardkit.files import FileVersion
from shardkit.settings import FieldName
from shardkit.writers.filters.base import FilterSettings, Rule, above, version_of

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch
    from shardkit.writers.kernels.kenlm import KenlmScorer


_UNKNOWN = 1e-9  # probability of a word that is not in the list, as in datatrove
_MOST_LOG10 = 300  # limit of log10(perplexity), so that the perplexity fits in a float64
_HEAD_BYTES, _PIECE_BYTES = 64, 1 << 22  # bytes read to recognize the format; bytes read at a time
_ZSTD_WINDOW_BYTES = 1 << 27  # maximum window of a zstd file, which the decompressor allocates


class PerplexityConfig(FilterSettings):
    """Settings of `perplexity`: bounds on a document's perplexity in a KenLM model of your own."""

    model: FieldName = Field(description="A KenLM file, binary or ARPA; an ARPA file may be compressed.")
    words: Literal["normalized", "white_space"] = Field(
        default="normalized",
        description="The model's words: in lower case without punctuation, or as split at white space.",
    )
    min_perplexity: float | None = Field(default=None, ge=0, description="Minimum perplexity.")
    max_perplexity: float | None = Field(default=None, ge=0, description="Maximum perplexity.")

    @property
    def can_wait(self) -> bool:
        """See FilterSettings.can_wait."""
        return True

    def build(self, folder: Path) -> PerplexityFilter:
        """See FilterSettings.build."""
        return PerplexityFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.model,)


class PerplexityFilter:
    """Drops documents whose perplexity is out of bounds. Raises RecipeError for a bad model."""

    reasons = ("too_low", "too_high")

    def __init__(self, config: PerplexityConfig, folder: Path) -> None:
        path = folder / config.model
        self._config = config
        self._scorer = load_model(path, normalized=config.words == "normalized")

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        from shardkit.kernels.text_arrays import text_bytes, text_offsets
        from shardkit.writers.kernels.words import composed

        data, offsets = batch.data, batch.offsets
        if self._config.words == "normalized":
            texts = composed(batch.texts)
            data, offsets = text_bytes(texts), text_offsets(texts)
        totals, lengths = self._scorer.scores(data, offsets, batch.wanted)
        values = np.zeros(len(batch))
        for number in np.flatnonzero(lengths).tolist():
            values[number] = 10 ** min(-float(totals[number]) / int(lengths[number]), _MOST_LOG10)
        low = self._config.min_perplexity
        return [
            Rule("too_low", None if low is None else (values < low) & (values > 0), values, low),
            above("too_high", values, self._config.max_perplexity),
        ]


def load_model(path: Path, *, normalized: bool) -> KenlmScorer:
    """Load a KenLM model of words, normalized or not. Raises RecipeError if the file is not such a model."""
    return _load(path, version_of(path, "perplexity.model"), normalized)


@lru_cache(maxsize=2)
def _load(path: Path, _version: FileVersion, normalized: bool) -> KenlmScorer:
    """Load a model; the process's next task reuses it if the file has not changed."""
    from shardkit.writers.kernels.kenlm import KenlmScorer
    from shardkit.writers.kernels.kenlm_arpa import read_arpa
    from shardkit.writers.kernels.kenlm_binary import is_binary, map_binary

    where = f"perplexity.model: {path}"
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if is_binary(head):
            model = map_binary(path)
        else:
            with _opened(path, head) as file:
                model = read_arpa(iter(lambda: file.read(_PIECE_BYTES), b""))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise RecipeError(
            f"{where}: the file is damaged or is not a KenLM model (binary or ARPA): {error}"
        ) from None
    return KenlmScorer(model, where, normalized=normalized)


def _opened(path: Path, head: bytes) -> BinaryIO:
    """Open a file; decompress it if `head`, its first bytes, are the magic bytes of a compressed format."""
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if head.startswith(b"\xfd7zXZ"):
        return cast(BinaryIO, lzma.open(path))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        return cast(BinaryIO, decoder.stream_reader(path.open("rb"), read_across_frames=True))
    return path.open("rb")


class UnigramLogProbConfig(FilterSettings):
    """Settings of `unigram_log_prob`: datatrove's UnigramLogProbFilter with your own list of frequencies."""

    frequencies: FieldName = Field(description="CSV with the columns word and count, plain or .gz.")
    logprobs_threshold: float = Field(
        default=-10, le=0, description="Keep documents whose mean log-probability is above this."
    )

    @property
    def can_wait(self) -> bool:
        """See FilterSettings.can_wait."""
        return True

    def build(self, folder: Path) -> UnigramLogProbFilter:
        """See FilterSettings.build."""
        return UnigramLogProbFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.frequencies,)


class UnigramLogProbFilter:
    """Drops documents whose words are too rare on average. Raises RecipeError for a bad list."""

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
    """Return a hash table as (hash, log-probability of the word) arrays by slot; 1 marks an empty slot."""
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
    """Return the probability of each normalized word; entries of several words only add to the total."""
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
                raise ValueError(f"the count of {row['word']!r} is {count}; counts must be positive")
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
