"""datasketch with xxh32 instead of its SHA-1, batches of n-grams vectorised by NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peer_side import BANDS, ROWS, Request, serve, word_ngrams


def sketches(texts: list[str], permutations: int) -> Iterator[Any]:
    import xxhash
    from datasketch import MinHash

    ngrams = ([ngram.encode() for ngram in word_ngrams(text)] for text in texts)
    return MinHash.generator(ngrams, num_perm=permutations, hashfunc=xxhash.xxh32_intdigest)  # type: ignore[no-any-return,unused-ignore]


def signatures(texts: list[str], request: Request) -> int:
    return sum(1 for _ in sketches(texts, request["permutations"]))


def near(texts: list[str], _: Request) -> list[int]:
    """Query, and insert what is like nothing before it: fewer insertions than inserting all."""
    from datasketch import MinHashLSH

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    removed = []
    for row, sketch in enumerate(sketches(texts, BANDS * ROWS)):
        if index.query(sketch):
            removed.append(row)
        else:
            index.insert(row, sketch, check_duplication=False)
    return removed


if __name__ == "__main__":
    serve({"signatures": signatures, "near": near})
