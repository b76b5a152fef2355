"""datatrove's signature stage without its files; nearly all of its time is spaCy's word splitting."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

from peer_side import NGRAM, Request, serve

ROWS = 8


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


if __name__ == "__main__":
    serve({"signatures": signatures})
