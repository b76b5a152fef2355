"""The n-grams of texts as bytes, for hash functions that want to see them: the scheme "datasketch".

An n-gram is its words joined by single spaces, or its characters, in UTF-8; all n-grams of a text are
ranges of one buffer, the normalized text.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.datasketch_minhash import (
    Scheme,
    datasketch_permutations,
    signatures_datasketch,
    xxh32_ranges,
)
from shardkit.writers.dedup.normalization import WORD, character_tables, composed, text_bytes
from shardkit.writers.documents import text_offsets
from shardkit.writers.utf8 import next_character, utf8_bytes

__all__ = ["NgramText", "ngram_text", "sign_as_datasketch"]

_SCHEMES: dict[str, Scheme] = {"datasketch": "affine32", "datasketch-legacy": "legacy"}


class NgramText(NamedTuple):
    """N-gram i of text t is data[starts[j]:stops[j]], j = offsets[t] + i."""

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def sign_as_datasketch(texts: pa.LargeStringArray, config: MinHashConfig) -> npt.NDArray[np.uint32]:
    """uint32[n, permutations]: hashvalues of datasketch.MinHash with xxh32, fed with each text's n-grams."""
    ngrams = ngram_text(texts, config)
    hashes = xxh32_ranges(ngrams.data, ngrams.starts, ngrams.stops)
    functions = datasketch_permutations(config.permutations, config.seed, _SCHEMES[config.scheme])
    return signatures_datasketch(hashes, ngrams.offsets, *functions)


def ngram_text(texts: pa.LargeStringArray, config: MinHashConfig) -> NgramText:
    """All n-grams of each text, in order and with repetitions."""
    texts = composed(texts)
    data, edges = text_bytes(texts), text_offsets(texts)
    size = int(edges[-1] - edges[0])
    # Lower case may take more bytes than upper: at most 3 for 2.
    out = np.zeros(size + size // 2 + len(texts) + 16, np.uint8)
    units = np.zeros((2, size + 1), np.int64)
    offsets = np.zeros(len(texts) + 1, np.int64)
    starts, stops = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    used = _write_ngrams(
        data,
        edges,
        config.ngram,
        config.unit == "characters",
        character_tables(),
        (out, units, starts, stops, offsets),
    )
    return NgramText(out[:used], starts[: offsets[-1]], stops[: offsets[-1]], offsets)


@numba.njit(nogil=True, cache=True)
def _write_ngrams(data, edges, ngram, characters, tables, results):  # type: ignore[no-untyped-def]
    out, units, starts, stops, offsets = results
    used = total = 0
    for text in range(len(edges) - 1):
        begin = used
        used, count = _write_units(data, edges[text], edges[text + 1], characters, tables, out, used, units)
        if count:
            for first in range(max(1, count - ngram + 1)):
                starts[total] = units[0, first]
                stops[total] = units[1, min(first + ngram, count) - 1]
                total += 1
        else:
            used = begin
        offsets[text + 1] = total
    return used


@numba.njit(nogil=True, cache=True)
def _write_units(data, at, stop, characters, tables, out, used, units):  # type: ignore[no-untyped-def]
    """Append a normalized text to `out`; where its units begin and end."""
    flags, lower = tables
    count, inside, any_before = 0, False, False
    while at < stop:
        code, at = next_character(data, at)
        if not flags[code] & WORD:
            inside = False
            continue
        if not inside:
            if any_before:
                out[used] = 32
                if characters:
                    units[0, count], units[1, count] = used, used + 1
                    count += 1
                used += 1
            if not characters:
                units[0, count] = used
                count += 1
        inside = any_before = True
        value, size = utf8_bytes(lower[code])
        if characters:
            units[0, count], units[1, count] = used, used + size
            count += 1
        for _ in range(size):
            out[used] = value & np.uint64(0xFF)
            value >>= np.uint64(8)
            used += 1
        if not characters:
            units[1, count - 1] = used
    return used, count
