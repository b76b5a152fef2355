"""`split` by its definition: which documents are similar, and which families a part takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def text_ngrams(text: str, n: int) -> list[str]:
    """The n-grams of a text of plain words, in order; of fewer words, all of them."""
    words = text.split()
    return [" ".join(words[at : at + n]) for at in range(max(1, len(words) - n + 1))]


def alike(a: list[str], b: list[str], similarity: float) -> bool:
    """The rule by its definition, on n-grams in order."""
    first, second = set(a), set(b)
    shared = len(first & second)
    if shared and shared >= similarity * min(len(first), len(second)):
        return True
    inside = sum(one in second for one in a), sum(one in first for one in b)
    return any(found and found >= similarity * len(c) for found, c in zip(inside, (a, b), strict=True))


def select_families(
    families: Mapping[str, Sequence[int]], ngrams: Sequence[list[str]], hashes: Mapping[str, int], wanted: int
) -> set[int]:
    """The documents of one part of `wanted` documents.

    `families` has the documents of each family by name, and `ngrams` the n-grams of each document.
    """
    taken: set[int] = set()
    for name in sorted(families, key=hashes.__getitem__):
        own = families[name]
        others = {*range(len(ngrams))} - {*own}
        is_unique = not any(alike(ngrams[one], ngrams[other], 0.8) for one in own for other in others)
        if len(taken) < wanted and len(own) <= wanted and is_unique:
            taken |= {*own}
    return taken
