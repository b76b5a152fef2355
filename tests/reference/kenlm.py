"""What KenLM's probabilities are, in plain Python, by the definition of n-gram models with backoff."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arpa", "log10_of", "parse_arpa", "reference_murmur", "reference_score", "reference_text"]

_MULTIPLIER, _MASK = 0xC6A4A7935BD1E995, (1 << 64) - 1


@dataclass(frozen=True)
class Arpa:
    """(log10 probability, log10 backoff) of each n-gram."""

    order: int
    ngrams: dict[tuple[str, ...], tuple[float, float]]


def parse_arpa(text: str) -> Arpa:
    """Read an ARPA file that is right."""
    ngrams: dict[tuple[str, ...], tuple[float, float]] = {}
    order = 0
    for line in text.split("\n"):
        if line.startswith("\\") and line.endswith("-grams:"):
            order = int(line[1:].partition("-")[0])
        elif order and "\t" in line:
            prob, words, *backoff = line.split("\t")
            ngrams[tuple(words.split(" "))] = float(prob), float(backoff[0]) if backoff else 0.0
    return Arpa(order, {("<unk>",): (-100.0, 0.0), **ngrams})


def reference_score(arpa: Arpa, words: list[str]) -> float:
    """Return the log10 probability of a sentence and its end."""
    known = [word if (word,) in arpa.ngrams else "<unk>" for word in ["<s>", *words, "</s>"]]
    return sum(
        log10_of(arpa, tuple(known[max(0, at - arpa.order + 1) : at + 1])) for at in range(1, len(known))
    )


def log10_of(arpa: Arpa, ngram: tuple[str, ...]) -> float:
    """Return the log10 probability of the last word after the others, by backing off."""
    if ngram in arpa.ngrams:
        return arpa.ngrams[ngram][0]
    return arpa.ngrams.get(ngram[:-1], (0.0, 0.0))[1] + log10_of(arpa, ngram[1:])


def reference_text(arpa: Arpa, sentences: list[list[str]]) -> tuple[float, int]:
    """Return (log10 probability, words and sentences) of a text whose sentences have words."""
    return sum(reference_score(arpa, words) for words in sentences), sum(
        len(words) + 1 for words in sentences
    )


def reference_murmur(data: bytes) -> int:
    """Compute MurmurHash64A with the seed 0."""
    value = len(data) * _MULTIPLIER & _MASK
    for at in range(0, len(data), 8):
        eight = int.from_bytes(data[at : at + 8], "little")
        if at + 8 <= len(data):
            eight = eight * _MULTIPLIER & _MASK
            eight = (eight ^ eight >> 47) * _MULTIPLIER & _MASK
        value = (value ^ eight) * _MULTIPLIER & _MASK
    value = (value ^ value >> 47) * _MULTIPLIER & _MASK
    return value ^ value >> 47
