"""What filters count, in plain Python, one text at a time: what the kernels are tested against."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from statistics import median

from shardkit.kernels.utf8 import PUNCTUATION, TERMINAL, characters_with
from shardkit.writers.kernels.dolma_statistics import LONGEST
from shardkit.writers.kernels.lines import ALL_LINES, PARAGRAPHS, LineStatistics
from shardkit.writers.kernels.ngrams import COPIES, TOP
from shardkit.writers.kernels.shingles import text_units
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


def reference_question_score(
    text: str,
    items: Sequence[tuple[str, str | None, str | None]],
    *,
    unit: str = "words",
    ngram: int,
    min_item_words: int,
    max_misses: int,
    long_question: int | None,
    answer_window: int,
    threshold: float,
) -> float:
    """The best score of (question, answer, passage) items in a text, step by step; 0 below the threshold."""
    items = [
        item
        for item in items
        if len(_words_of(item[0], unit)) >= ngram
        and sum(len(_words_of(part, unit)) for part in item) >= min_item_words
    ]
    parts: list[dict[tuple[str, ...], float]] = []
    for which, size in ((0, ngram), (1, 3), (2, 4)):
        distinct = {tuple(_words_of(item[which], unit)) for item in items if item[which] is not None}
        grams = [_grams_of(words, size) for words in distinct]
        seen = Counter(gram for some in grams for gram in some)
        parts.append({gram: math.log((len(distinct) + 1) / count) for gram, count in seen.items()})
    words, best = _words_of(text, unit), 0.0
    for item in items:
        theirs = _grams_of(tuple(_words_of(item[0], unit)), ngram)
        at = [n for n in range(len(words) - ngram + 1) if tuple(words[n : n + ngram]) in theirs]
        breaks = [n for n in range(1, len(at)) if at[n] - at[n - 1] > max_misses + 1]
        for first, last in zip([0, *breaks], [*breaks, len(at)], strict=True):
            cluster = at[first:last]
            if not cluster:
                continue
            begin, end = cluster[0], cluster[-1] + ngram
            sure = 1 / 2 + min(len(theirs), 20) / 40
            q = _share([words[n : n + ngram] for n in cluster], theirs, parts[0])
            a, p, a_words, p_words = None, None, _words_of(item[1], unit), _words_of(item[2], unit)
            if item[1] is not None:
                size = min(3, len(a_words))
                after = words[end : end + max(answer_window, 2 * len(a_words))]
                a = _share(_runs(after, size), _grams_of(tuple(a_words), 3), parts[1])
            if item[2] is not None:
                size, reach = min(4, len(p_words)), len(p_words) + 100
                around = [words[max(0, begin - reach) : begin], words[end : end + reach]]
                runs = [run for some in around for run in _runs(some, size)]
                p = _share(runs, _grams_of(tuple(p_words), 4), parts[2])
            score = q
            if a is not None and p is None:
                score = 0.75 * sure * q + (1 - 0.75 * sure) * a
            elif a is None and p is not None:
                score = 0.85 * sure * q + (1 - 0.85 * sure) * p
            elif a is not None and p is not None:
                given = 0.7 * (1 - sure)
                of_answer = (0.2 + given / 2) * (1 / 2 + min(len(a_words), 4) / 8)
                score = 0.7 * sure * q + of_answer * a + (0.3 + given - of_answer) * p
            length = len(_words_of(item[0], unit)) + len(a_words) + len(p_words)
            if long_question is not None and len(_words_of(item[0], unit)) >= long_question:
                score = max(score, q)
            if score < 1 - 1e-12:
                score *= threshold / (1 - (1 - threshold) * min(1, max(0, (length - 15) / 25)))
            score = round(score, 6)
            if q >= 0.5 and score >= threshold:
                best = max(best, score)
    return best


def _words_of(text: str | None, unit: str) -> list[str]:
    return text_units(text or "", unit)


def _runs(words: Sequence[str], size: int) -> list[Sequence[str]]:
    return [words[n : n + size] for n in range(len(words) - size + 1)] if size else []


def _grams_of(words: tuple[str, ...], size: int) -> set[tuple[str, ...]]:
    return {words[n : n + size] for n in range(max(1, len(words) - size + 1))} if words else set()


def _share(
    runs: Sequence[Sequence[str]], theirs: set[tuple[str, ...]], weights: dict[tuple[str, ...], float]
) -> float:
    """What n-grams of an item are among the runs, by weight."""
    found = {tuple(run) for run in runs} & theirs
    if not found:
        return 0.0
    return round(math.fsum(weights[g] for g in found) / math.fsum(weights[g] for g in theirs), 6)
