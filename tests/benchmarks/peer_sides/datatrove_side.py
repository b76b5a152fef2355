"""datatrove: its signature stage without its files, and its own filters on its own documents.

Nearly all of the time of signatures is spaCy's word splitting; filters get words by str.split, or by their
default splitter, which is spaCy too.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

from peer_side import FILTERS, NGRAM, ROWS, Request, serve


@cache
def stage(permutations: int) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(
        n_grams=NGRAM,
        num_buckets=permutations // ROWS,
        hashes_per_bucket=ROWS,
        hash_config=HashConfig(precision=32, hash_fc="xxhash"),
    )
    return MinhashDedupSignature(tempfile.gettempdir(), config)


def signatures(texts: list[str], request: Request) -> int:
    made = stage(request["permutations"])
    done = 0
    for text in texts:
        shingles = made.get_shingles(text)
        done += shingles.size != 0 and len(made.get_signature(shingles)) > 0
    return done


def split(text: str, language: str) -> list[str]:
    return text.split()


@cache
def filters(task: str, words: str) -> list[Any]:
    from datatrove.pipeline import filters as made
    from datatrove.pipeline.filters import (
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    if words == "split":
        for module in (gopher_repetition_filter, gopher_quality_filter, fineweb_quality_filter):
            module.split_into_words = split
    gopher = [made.GopherRepetitionFilter(), made.GopherQualityFilter()]
    web = [made.C4QualityFilter(filter_no_terminal_punct=False), made.FineWebQualityFilter()]
    return {"repetition": gopher[:1], "gopher": gopher, "fineweb": [*gopher, *web]}[task]


def passing(texts: list[str], request: Request) -> int:
    """Number of documents that pass."""
    from datatrove.data import Document

    steps = filters(request["task"], request["words"])
    kept = 0
    for text in texts:
        document = Document(text=text, id="x")  # C4's filter writes its edited text into it
        kept += all(step.filter(document) is True for step in steps)
    return kept


if __name__ == "__main__":
    serve({"signatures": signatures, **dict.fromkeys(FILTERS, passing)})
