"""rensa: signatures of full sets by its batch call; `"rho"` is its sampling sketch, which is no MinHash."""

from __future__ import annotations

from peer_side import Request, serve, word_ngrams

BATCH_DOCUMENTS = 1024


def signatures(texts: list[str], request: Request) -> int:
    from rensa import RMinHash

    sketch = RMinHash.digest_matrix_from_token_sets
    if request.get("rho"):
        sketch = RMinHash.digest_matrix_from_token_sets_rho
    done = 0
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        ngrams = [word_ngrams(text) for text in texts[start : start + BATCH_DOCUMENTS]]
        done += sketch(ngrams, request["permutations"], 42).len()
    return done


if __name__ == "__main__":
    serve({"signatures": signatures})
