"""`train_perplexity`: trains a language model on texts, for the `perplexity` filter, without a compiler.

It is a model of word n-grams with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998), written
as an ARPA file. It has the same n-grams as a model of KenLM's lmplz, and its log10 probabilities to 1e-5.
Texts are split into words and sentences as in the filter. The count of an n-gram is the number of its
occurrences if it is of the highest order or begins a sentence, else the number of different words before it.
If a text is too small to estimate the discounts of an order, lmplz's fallback discounts are used.

All n-grams of the text are kept in memory: with order 5, about 200 bytes per word of text. For larger texts
use lmplz, which sorts on disk; a model for a filter does not need larger texts.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.files import local_path
from shardkit.writers.kernels.words import normalized_words

_SPECIAL = ("<unk>", "<s>", "</s>")
_UNKNOWN, _BEGIN, _END = range(3)
_FALLBACK = (0.5, 1.0, 1.5)
_MAX_ORDER = 10  # far above any useful order
_MAX_WORD = 1000  # longer words (in characters) are data, and too long for readers of ARPA files: skipped
_CHUNK = 1 << 16

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainedPerplexity:
    """A trained model and its counts; `fallback` lists the orders whose discounts could not be estimated."""

    path: str
    bytes: int
    sentences: int
    words: int
    ngrams: tuple[int, ...]
    fallback: tuple[int, ...]


class _Ngrams(NamedTuple):
    """The n-grams of one order n. For each: the indices of its first and of its last n-1 words among the
    (n-1)-grams, its last word, its number of occurrences, and whether it begins a sentence."""

    prefixes: _Ints
    suffixes: _Ints
    words: _Ints
    counts: _Ints
    opens: npt.NDArray[np.bool_]


def train_perplexity(
    texts: Iterable[str],
    output: Path | str,
    *,
    order: int = 5,
    words: Literal["normalized", "white_space"] = "normalized",
) -> TrainedPerplexity:
    """Train on texts, in which each line is a sentence, and write the model to `output` as an ARPA file.

    `words` is the `perplexity` filter's setting of that name. Raises BuildError if the texts have no words.
    """
    if not 2 <= order <= _MAX_ORDER:
        raise ValueError(f"order is {order}; it must be from 2 to {_MAX_ORDER}")
    output = local_path(output)
    tokens, vocabulary = _tokens(texts, normalized_words if words == "normalized" else str.split)
    sentences = tokens.count(_BEGIN)
    if not sentences:
        raise BuildError(f"{output}: the texts have no word to train on")
    levels = _count(np.array(tokens, np.int64), len(vocabulary), order)
    counts = [np.bincount(levels[0].suffixes, minlength=len(vocabulary)), *_adjusted(levels)]
    found = [_discounts(one) for one in counts]
    discounts = [np.array([0.0, *(one or _FALLBACK)]) for one in found]
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        part = Path(folder, "model.arpa")
        with part.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.writelines(_arpa(vocabulary, levels, counts, discounts))
        part.replace(output)
    return TrainedPerplexity(
        path=str(output),
        bytes=output.stat().st_size,
        sentences=sentences,
        words=len(tokens) - 2 * sentences,
        ngrams=tuple(map(len, counts)),
        fallback=tuple(size for size, one in enumerate(found, start=1) if one is None),
    )


def _tokens(texts: Iterable[str], split: Callable[[str], list[str]]) -> tuple[array[int], list[str]]:
    """Split texts; return the ids of all words, with marks around each sentence, and the vocabulary."""
    numbers = {word: number for number, word in enumerate(_SPECIAL)}
    tokens = array("i")
    for text in texts:
        for line in text.splitlines():
            found = (numbers.setdefault(word, len(numbers)) for word in split(line) if len(word) <= _MAX_WORD)
            kept = [number for number in found if number > _END]
            if kept:
                tokens.append(_BEGIN)
                tokens.extend(kept)
                tokens.append(_END)
    return tokens, list(numbers)


def _count(tokens: _Ints, words: int, order: int) -> list[_Ngrams]:
    """Find and count the n-grams of each order from 2 to `order`; `words` is the size of the vocabulary."""
    begins = np.flatnonzero(tokens == _BEGIN)
    lengths = np.diff(np.append(begins, len(tokens)))
    offsets = np.arange(len(tokens)) - np.repeat(begins, lengths)  # offset of each token in its sentence
    numbers, levels = tokens, []  # `numbers` has, for each token, the index of the n-gram that ends with it
    for size in range(2, order + 1):
        ends = np.flatnonzero(offsets >= size - 1)
        keys = numbers[ends - 1] * words + tokens[ends]
        keys, first, number, counts = np.unique(keys, True, True, True)
        prefixes, last = np.divmod(keys, words)
        places = ends[first]
        levels.append(_Ngrams(prefixes, numbers[places], last, counts, offsets[places] == size - 1))
        numbers = np.zeros(len(tokens), np.int64)
        numbers[ends] = number
    return levels


def _adjusted(levels: list[_Ngrams]) -> Iterator[_Ints]:
    """Yield, for each order, the count of each n-gram that Kneser-Ney smoothing uses.

    It is the number of occurrences for an n-gram that begins a sentence or is of the highest order, else the
    number of different words before the n-gram.
    """
    for level, longer in zip(levels, [*levels[1:], None], strict=True):
        if longer is None:
            yield level.counts
        else:
            before = np.bincount(longer.suffixes, minlength=len(level.counts))
            yield np.where(level.opens, level.counts, before)


def _discounts(counts: _Ints) -> tuple[float, float, float] | None:
    """Estimate the discounts for counts of 1, of 2, and of 3 or more. Returns None if too few are known."""
    seen = [int((counts == count).sum()) for count in range(5)]
    if not all(seen[1:4]):
        return None
    share = seen[1] / (seen[1] + 2 * seen[2])
    one, two, more = (count - (count + 1) * share * seen[count + 1] / seen[count] for count in (1, 2, 3))
    return (one, two, more) if 0 <= one <= 1 and 0 <= two <= 2 and 0 <= more <= 3 else None


def _arpa(
    vocabulary: list[str], levels: list[_Ngrams], counts: list[_Ints], discounts: list[_Floats]
) -> Iterator[str]:
    """Yield the text of the ARPA file in pieces."""
    yield "\\data\\\n" + "".join(f"ngram {size}={len(one)}\n" for size, one in enumerate(counts, 1))
    taken = discounts[0][np.minimum(counts[0], 3)]
    # The probability that discounts free is distributed over all words, including <unk> but not <s>.
    probs = (counts[0] - taken + taken.sum() / (len(vocabulary) - 1)) / counts[0].sum()
    probs[_BEGIN] = 1
    for place, level in enumerate(levels):
        taken = discounts[place + 1][np.minimum(counts[place + 1], 3)]
        totals = np.bincount(level.prefixes, counts[place + 1], minlength=len(probs))
        backoffs = np.ones(len(probs))
        left = np.bincount(level.prefixes, taken, minlength=len(probs))
        np.divide(left, totals, out=backoffs, where=totals > 0)
        yield from _section(vocabulary, levels[:place], probs, backoffs)
        longer = (counts[place + 1] - taken) / totals[level.prefixes]
        probs = longer + backoffs[level.prefixes] * probs[level.suffixes]
    yield from _section(vocabulary, levels, probs, None)
    yield "\n\\end\\\n"


def _section(
    vocabulary: list[str], levels: list[_Ngrams], probs: _Floats, backoffs: _Floats | None
) -> Iterator[str]:
    """Yield the section of one order in pieces; `levels` has the n-grams of orders 2 up to this order."""
    yield f"\n\\{len(levels) + 1}-grams:\n"
    for first in range(0, len(probs), _CHUNK):
        part = slice(first, first + _CHUNK)
        numbers = np.arange(len(probs))[part]
        columns: list[list[int]] = []
        for level in reversed(levels):
            columns.append(level.words[numbers].tolist())
            numbers = level.prefixes[numbers]
        columns.append(numbers.tolist())
        spelled = ([vocabulary[word] for word in column] for column in reversed(columns))
        names = map(" ".join, zip(*spelled, strict=True))
        logs = np.minimum(np.log10(probs[part]), 0).tolist()
        if backoffs is None:
            yield "".join(f"{log:.7g}\t{name}\n" for log, name in zip(logs, names, strict=True))
        else:
            rows = zip(logs, names, np.log10(backoffs[part]).tolist(), strict=True)
            yield "".join(f"{log:.7g}\t{name}\t{backoff:.7g}\n" for log, name, backoff in rows)
