"""Step: removes near-duplicates (dedup/near.py has the stages)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardkit.card import NearFacts
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.bands import partitions_for as band_partitions
from shardkit.writers.dedup.blocks import (
    BLOCKS,
    FOLLOWERS,
    LABELING,
    LABELS,
    LEADERS,
    LOWEST,
    PAIRS_OF_BLOCK,
    PLACES,
    block_bits,
    number_ranges,
)
from shardkit.writers.dedup.candidates import CANDIDATES
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.dedup.known import FIND_KNOWN, HASH_WORDS, KNOWN_REMOVED, WORD_KEYS
from shardkit.writers.dedup.near import EQUAL_WORDS, NEAR_REMOVED, NearResult, remove_near
from shardkit.writers.dedup.outcomes import OUTCOMES
from shardkit.writers.dedup.pairs import PAIRS
from shardkit.writers.dedup.population import PAIR, PARTS
from shardkit.writers.dedup.resolve import BEATEN, EQUALS, NEAR, NEAR_EQUAL, NEAR_KEPT, NEAR_LOST, range_count
from shardkit.writers.dedup.shingle_store import SHINGLES, TEXTS
from shardkit.writers.dedup.signatures import EQUAL_KEYS, LOST, MAKE_BANDS, SIGN, bands_and_rows
from shardkit.writers.dedup.verify import VERIFY
from shardkit.writers.execution.stage import Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.needs import DOCUMENTS, LOSERS, Needs

NEAR_DUPLICATE = "near_duplicate"  # reason in ledgers


def drop_near_duplicates(config: NearDedupConfig, documents: Documents, build: Build) -> Documents:
    """Remove documents that are verified near-duplicates of a kept document, or of a document of an index."""
    indexes = [one for path, one in build.inputs.indexes.items() if path in config.against]
    found = remove_near(
        build.run,
        documents.described(languages=config.scope == "language"),
        documents.removals,
        config,
        build.memory_bytes,
        indexes=indexes,
        limits=build.limits,
        to_index=build.to_index,
    )
    return replace(
        documents.without(NEAR_DUPLICATE, found.removed),
        near=found,
        near_facts=[*documents.near_facts, _facts(config, found, indexes)],
        groups=found.decided.groups,
        largest_group=found.decided.largest_group,
    )


def _facts(config: NearDedupConfig, found: NearResult, indexes: Sequence[DedupIndex]) -> NearFacts:
    bands, rows = bands_and_rows(config)
    return NearFacts(
        similarity=config.similarity,
        containment=config.containment,
        unit=config.minhash.unit,
        ngram=config.minhash.ngram,
        permutations=config.minhash.permutations,
        bands=bands,
        rows=rows,
        scope=config.scope_name,
        against=list(config.against),
        indexes=[index.digest for index in indexes],
        counts=dict(found.counts),
    )


_PRINT_BYTES = 112
_SIGNED_BYTES = 36 + _PRINT_BYTES  # bytes per document for the key of its words and its print
_BAND_BYTES = 8
_PAIRS = 0.6  # candidate pairs per document (shares of web text; families that grow have more)
_PAIR_BYTES = 4.0  # bytes per pair in files, without the fields of a document's row
_PAIRED = 0.2  # documents in pairs; each is sent to one block, with few exceptions
_SECONDS = 0.13  # documents with earlier partners


def needs(n: Needs) -> None:
    """Add the requests and bytes of all stages, from signatures to decisions."""
    c = n.corpus
    text, stored = c.text_bytes * DOCUMENTS, c.documents * c.bands * _BAND_BYTES
    readers = c.limits.partitions(c.documents, EQUAL_KEYS.dtype)
    if c.shape.has_indexes:
        n.add(HASH_WORDS, c.gathered, *n.scans(text, c.gathered), files=1)
        ranges = c.limits.partitions(c.documents, WORD_KEYS.dtype)
        words = n.exchange(FIND_KNOWN, WORD_KEYS, c.gathered, c.documents, ranges)
        n.add(FIND_KNOWN, ranges, *n.slices(words, ranges), files=2)
        n.by_split(KNOWN_REMOVED, OUTCOMES, ranges, c.documents * LOSERS)
    n.add(SIGN, c.gathered, *n.scans(text, c.gathered), files=4, written=c.documents * _SIGNED_BYTES + stored)
    n.add(PARTS, 1, 0, files=2)
    keys = n.exchange(EQUAL_WORDS, EQUAL_KEYS, c.gathered, c.documents, readers)
    n.add(EQUAL_WORDS, readers, *n.slices(keys, readers), files=2)
    lost = n.exchange(MAKE_BANDS, LOST, readers, c.documents * LOSERS, c.gathered)
    gets, read = n.scans(stored, c.gathered)
    more, also = n.slices(lost, c.gathered)
    entries = c.documents * c.bands
    size = entries * BANDS.row_bytes
    n.last_reader(MAKE_BANDS, stored, c.gathered)
    n.add(MAKE_BANDS, c.gathered, gets + more, read + also, files=1, written=size)
    candidates = band_partitions(entries, c.task_memory)
    bands = n.exchange(CANDIDATES, BANDS, c.gathered, entries, candidates)
    written = c.documents * _PAIRS * _PAIR_BYTES
    n.last_reader(CANDIDATES, c.documents * _PRINT_BYTES, 1)
    n.add(CANDIDATES, candidates, *n.slices(bands, candidates), files=1, written=written)
    _add_verified(n, text, candidates)


def _add_verified(n: Needs, text: float, candidates: int) -> None:
    c = n.corpus
    pairs, seconds, sent = (c.documents * share for share in (_PAIRS, _SECONDS, _PAIRED))
    blocks, coded, texts = 1 << block_bits(int(text), c.task_memory), pairs * _PAIR_BYTES, text * _PAIRED
    ranges, payload = number_ranges(int(coded), c.limits), coded / max(1.0, seconds)
    found = n.slices(n.exchange(LEADERS, PAIRS, candidates, seconds, ranges, payload, last=BLOCKS), ranges)
    n.add(LEADERS, ranges, *found, files=2, written=seconds * 2 * FOLLOWERS.row_bytes)
    followers = n.slices(n.exchange(LABELING, FOLLOWERS, ranges, seconds, ranges), ranges)
    lowest = n.slices(n.exchange(LABELING, LOWEST, ranges, seconds, ranges), ranges)
    n.add(LABELING, ranges, *_sum(followers, lowest), files=1, written=seconds * LABELS.row_bytes)
    labels = n.slices(n.exchange(BLOCKS, LABELS, ranges, seconds, ranges), ranges)
    n.add(BLOCKS, ranges, *_sum(found, labels), files=2, written=coded + sent * PLACES.row_bytes)
    places = n.slices(n.exchange(SHINGLES, PLACES, ranges, sent, c.gathered), c.gathered)
    n.add(SHINGLES, c.gathered, *_sum(n.scans(text, c.gathered), places), files=1, written=texts)
    assigned = n.exchange(VERIFY, PAIRS_OF_BLOCK, ranges, seconds, blocks, payload)
    moved = n.exchange(VERIFY, TEXTS, c.gathered, sent, blocks, texts / max(1.0, sent))
    n.add(VERIFY, blocks, *_sum(n.slices(assigned, blocks), n.slices(moved, blocks)), files=2)
    n.add(NEAR, 1, 2 * blocks, pairs * PAIR.itemsize, files=1)
    equals = range_count(int(c.documents * LOSERS * BEATEN.dtype.itemsize), c.documents, c.task_memory)
    n.add(NEAR_EQUAL, equals, 2 * equals, c.documents * LOSERS * EQUALS.row_bytes, files=1)
    n.add(NEAR_LOST, c.gathered, 4 * c.gathered, c.documents * 24, files=3)
    n.add(NEAR_KEPT, c.gathered, 5 * c.gathered, c.documents * 24, files=2)
    n.by_split(NEAR_REMOVED, OUTCOMES, 2 * c.gathered, c.documents * 2 * LOSERS)


def _sum(*parts: tuple[float, float]) -> tuple[float, float]:
    """Return the sums of requests and of bytes."""
    return sum(gets for gets, _ in parts), sum(read for _, read in parts)


_OF_INDEXES = (HASH_WORDS, FIND_KNOWN, KNOWN_REMOVED)

STAGES = (
    *(SIGN, PARTS, EQUAL_WORDS, MAKE_BANDS, CANDIDATES),
    *(LEADERS, LABELING, BLOCKS, SHINGLES, VERIFY),
    *(NEAR, NEAR_EQUAL, NEAR_LOST, NEAR_KEPT, NEAR_REMOVED),
)


def step_of(move: GlobalStep) -> Step:
    """Return a step over near-duplicates."""

    def stages(_: Recipe) -> Sequence[Stage[..., Any]]:
        return (*_OF_INDEXES, *STAGES) if move.settings.against else STAGES

    return Step(stages, partial(drop_near_duplicates, move.settings), needs)
