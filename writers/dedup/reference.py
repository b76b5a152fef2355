"""All of near-duplicate removal in plain Python: what the stages on disk are tested against.

It holds every document, and every pair of a bucket, and knows no numbers, parts, partitions or blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from shardkit.writers.dedup.candidates import reference_candidates
from shardkit.writers.dedup.compare import reference_compare
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.hub_reference import ReferenceDocument
from shardkit.writers.dedup.hubs import HubLimits
from shardkit.writers.dedup.minhash import reference_band_keys, reference_signature
from shardkit.writers.dedup.parts import bands_and_rows
from shardkit.writers.dedup.population import Kind
from shardkit.writers.dedup.shingles import reference_shingle_hashes, reference_units

__all__ = ["ReferenceResult", "Text", "reference_near", "reference_resolve"]


class Text(NamedTuple):
    """A document: where it comes from, and its text."""

    kind: Kind
    source: int
    id: bytes
    text: str

    @property
    def rank(self) -> bytes:
        """The content rank."""
        return xxhash.xxh3_128_digest(self.text.encode())[:8] + self.id[:8]

    @property
    def priority(self) -> tuple[int, int, bytes]:
        """Ascends as `population.priority` does."""
        first = {"index": -1, "input": self.source, "planted": 1 << 30}[self.kind]
        return first, -len(self.text.encode()), self.rank


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Positions of documents: who is removed and on whom it is booked; whom a kept input stands for."""

    removed: dict[int, int]
    copies: dict[int, int]  # documents of inputs, itself included; more than one only


def reference_near(
    documents: Sequence[Text],
    config: NearDedupConfig,
    *,
    limits: HubLimits | None = None,
    sketch: int | None = None,
) -> ReferenceResult:
    """The result for all documents. `sketch`: of index documents only so many hashes are known."""
    units = [reference_units(document.text, config.minhash.unit) for document in documents]
    worded = [at for at, own in enumerate(units) if own]
    equal = _equal([(documents[at], tuple(units[at]), at) for at in worded], config)
    compared = [at for at in worded if at not in equal]

    sets = {}
    for at in compared:
        hashes = reference_shingle_hashes(documents[at].text, config.minhash)
        stored = sorted(set(hashes))[: sketch if documents[at].kind == "index" else None]
        sets[at] = stored, len(set(hashes)), len(hashes)
    edges = []
    for pair in _candidates([documents[at] for at in compared], config, limits or HubLimits()):
        first, second = sorted((compared[place] for place in pair), key=lambda at: documents[at].priority)
        if reference_compare(sets[first], sets[second], config):
            edges.append((first, second))

    removed = reference_resolve({at: documents[at].priority for at in compared}, edges)
    removed |= {loser: removed.get(winner, winner) for loser, winner in equal.items()}
    copies = {at: 1 for at, document in enumerate(documents) if document.kind == "input"}
    for loser, winner in removed.items():
        if winner in copies and documents[loser].kind == "input":
            copies[winner] += 1
    return ReferenceResult(removed, {at: count for at, count in copies.items() if count > 1})


def reference_resolve(
    priorities: dict[int, tuple[int, int, bytes]], edges: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """{removed: the kept one of highest priority that beats it}, one document after the other by priority."""
    winners: dict[int, list[int]] = {}
    for winner, loser in edges:
        winners.setdefault(loser, []).append(winner)
    removed: dict[int, int] = {}
    for document in sorted(priorities, key=lambda at: priorities[at]):
        standing = [winner for winner in winners.get(document, []) if winner not in removed]
        if standing:
            removed[document] = min(standing, key=lambda at: priorities[at])
    return removed


def _equal(documents: Iterable[tuple[Text, tuple[str, ...], int]], config: NearDedupConfig) -> dict[int, int]:
    """{loser: winner} among documents of equal units."""
    groups: dict[Hashable, list[tuple[tuple[int, int, bytes], int]]] = {}
    for document, units, at in documents:
        source = document.source if config.scope == "source" else None
        groups.setdefault((source, units), []).append((document.priority, at))
    return {at: min(group)[1] for group in groups.values() for _, at in sorted(group)[1:]}


def _candidates(
    documents: Sequence[Text], config: NearDedupConfig, limits: HubLimits
) -> set[tuple[int, int]]:
    bands, rows = bands_and_rows(config)
    described = []
    for document in documents:
        signature = reference_signature(document.text, config.minhash)
        source = document.source if config.scope == "source" else None
        keys = reference_band_keys(signature, bands, rows, source)
        first, length, id = document.priority
        priority = (first, length, int.from_bytes(id, "big"))
        described.append(ReferenceDocument(signature, priority, document.kind, keys))
    return reference_candidates(described, config.similarity, limits)[0]
