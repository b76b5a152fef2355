"""What filters count, in plain Python, one text at a time: what the kernels are tested against."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from statistics import median

from shardkit.writers.kernels.dolma_statistics import LONGEST
from shardkit.writers.kernels.lines import ALL_LINES, PARAGRAPHS, LineStatistics
from shardkit.writers.kernels.ngrams import COPIES, TOP
from shardkit.writers.kernels.utf8 import PUNCTUATION, TERMINAL, characters_with
from shardkit.writers.kernels.word_statistics import WordStatistics
from shardkit.writers.kernels.words import normalized_words

_UNKNOWN = 1e-9  # the probability of a word that the list does not have


def as_rows(statistics: WordStatistics | LineStatistics) -> list[tuple[int, ...]]:
    """One tuple per document, to compare with the references."""
    return [tuple(map(int, row)) for row in zip(*astuple(statistics), strict=True)]


def reference_word_statistics(text: str, stop_words: Sequence[str] = ()) -> tuple[int, ...]:
    """The counts of one text in the order of WordStatistics, in plain Python."""
    punctuation = characters_with(PUNCTUATION)
    words, lines = text.split(), text.splitlines()
    plain = [word for word in words if any(character not in punctuation for character in word)]
    return (
        len(text),
        len(words),
        len(plain),
        sum(map(len, plain)),
        sum(any(character.isalpha() for character in word) for word in words),
        text.count("#"),
        text.count("...") + text.count("…"),
        text.count("\n"),
        len(lines),
        sum(line.lstrip().startswith(("•", "-")) for line in lines),
        sum(line.rstrip().endswith(("...", "…")) for line in lines),
        len(set(stop_words) & set(words)),
    )


def reference_line_statistics(text: str, *, short_line_length: int) -> tuple[int, ...]:
    """The counts of one text in the order of LineStatistics, in plain Python."""
    terminal = characters_with(TERMINAL)
    lines = [line for line in text.split("\n") if line.strip()]
    seen: set[str] = set()
    repeated = 0
    for line in lines:
        repeated += len(line) if line in seen else 0
        seen.add(line)
    return (
        len(lines),
        sum(line[-1] in terminal for line in lines),
        sum(len(line) <= short_line_length for line in lines),
        repeated,
    )


def reference_ngrams(text: str, n: int, kind: int) -> tuple[int, int]:
    """One job on one text in plain Python: (first, second)."""
    words = text.split()
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    counts = Counter(grams)
    if not grams:
        return 0, 0
    if kind == TOP:
        gram, occurrences = counts.most_common(1)[0]
        return occurrences, sum(map(len, gram))
    if kind == COPIES:
        sizes = {gram: times * sum(map(len, gram)) for gram, times in counts.items()}
        return sum(size for gram, size in sizes.items() if counts[gram] > 1), sum(sizes.values())
    seen: set[str] = set()
    at = repeated = 0
    while at < len(grams):
        joined = "".join(grams[at])
        if joined in seen:
            repeated += len(joined)
            at += n
        else:
            seen.add(joined)
            at += 1
    return repeated, 0


def reference_repetition(text: str, kind: int) -> tuple[int, int, int]:
    """The counts of one text in the order of Repetition, in plain Python."""
    if kind == ALL_LINES:
        lines = text.split("\n")
        twice = {line: times for line, times in Counter(lines).items() if times > 1}
        return len(lines), sum(twice.values()), sum(len(line) * times for line, times in twice.items())
    elements = re.split("\n{2,}", text.strip()) if kind == PARAGRAPHS else re.split("\n+", text)
    repeated = [element for at, element in enumerate(elements) if element in set(elements[:at])]
    return len(elements), len(repeated), sum(map(len, repeated))


def reference_dolma_statistics(text: str, required: Sequence[str]) -> tuple[int, ...]:
    """The counts of one text in the order of DolmaStatistics, in plain Python."""
    words, lines = text.split(), text.split("\n")
    return (
        len(words),
        int(2 * median([min(len(word), LONGEST) for word in words])) if words else 0,
        sum("#" in word or "…" in word for word in words),
        sum(any(map(str.isalpha, word)) for word in words),
        sum(word in required for word in words),
        len(lines),
        sum(line.startswith(("*", "-")) for line in lines),
        sum(line.endswith("…") for line in lines),
    )


def reference_count(phrases: Iterable[str], text: str, *, separated: bool = True) -> int:
    """The same count in plain Python, of phrases and a text in lower case."""
    found = "|".join(re.escape(phrase) for phrase in sorted(phrases, key=len) if phrase)
    if not found:
        return 0
    return len(re.findall(rf"(?<!\w)(?=(?:{found})(?!\w))" if separated else f"(?={found})", text))


def reference_kinds(text: str) -> tuple[float, ...]:
    """The five ratios of a text in the order of the rules, in plain Python."""

    def part(count: int, whole: int) -> float:
        return count / whole if whole else 0.0

    letters, space = sum(map(str.isalpha, text)), sum(map(str.isspace, text))
    symbols = sum(unicodedata.category(c)[0] in "PS" and not c.isspace() for c in text)
    upper = sum(c.isalpha() and c.isupper() for c in text)
    return (
        part(symbols, len(text)),
        part(sum(map(str.isdigit, text)), len(text)),
        part(upper, letters),
        part(space, len(text)),
        part(letters, len(text) - space),
    )


def reference_log_prob(text: str, probabilities: Mapping[str, float]) -> float:
    """The value of one text, in plain Python."""
    words = normalized_words(text)
    return sum(math.log(probabilities.get(word, _UNKNOWN)) for word in words) / len(words) if words else 0.0


def reference_overlaps(text: str, items: Sequence[str], *, ngram: int, min_item_words: int) -> set[int]:
    """Words of `text` at which an n-gram of an item, or the whole of a short one, begins, in plain Python."""
    words, found = normalized_words(text), set()
    for item in map(normalized_words, items):
        size = min(ngram, len(item))
        if len(item) < min_item_words:
            continue
        theirs = {tuple(item[at : at + size]) for at in range(len(item) - size + 1)}
        found |= {at for at in range(len(words) - size + 1) if tuple(words[at : at + size]) in theirs}
    return found
