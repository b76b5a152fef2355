"""All of near-duplicate removal in plain Python: what kernels and the stages on disk are tested against.

It holds every document, and every pair of a bucket, and knows no numbers, parts, partitions or blocks. Slow,
and easy to see to be right. From the text up: hashes of words and n-grams, signatures, band keys, candidates
of buckets and hubs, the comparison of two sets, and the rule.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import xxhash

from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.hubs import HubLimits, sub_rows, thresholds
from shardkit.writers.dedup.population import Kind
from shardkit.writers.dedup.signatures import bands_and_rows, permutations
from shardkit.writers.kernels.shingles import text_units

_MASK = (1 << 64) - 1
_SEED, _FACTOR = 0x243F6A8885A308D3, 0x9E3779B97F4A7C15
_BASE, _SCATTER, _CHARACTER = 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xC2B2AE3D27D4EB4F
_BAND_SEED = 0x452821E638D01377


def reference_word_hash(word: str) -> int:
    """The hash of one normalized word, in plain Python."""
    data, value = word.encode(), _SEED
    for begin in range(0, len(data), 8):
        value = (value ^ int.from_bytes(data[begin : begin + 8], "little")) * _FACTOR & _MASK
        value ^= value >> 32
    return value


def reference_shingles(text: str, config: MinHashConfig) -> set[str]:
    """The set of n-grams of a text as strings: units joined by spaces, or as they stand if characters."""
    units = text_units(text, config.unit)
    joint = "" if config.unit == "characters" else " "
    count = max(1, len(units) - config.ngram + 1) if units else 0
    return {joint.join(units[at : at + config.ngram]) for at in range(count)}


def reference_shingle_hashes(text: str, config: MinHashConfig) -> list[int]:
    """What `shingle_batch` gives for one text, in plain Python."""
    hashes = [_reference_unit_hash(unit, config.unit) for unit in text_units(text, config.unit)]
    count = max(1, len(hashes) - config.ngram + 1) if hashes else 0
    return [_reference_shingle_hash(hashes[at : at + config.ngram]) for at in range(count)]


def reference_key(text: str, config: MinHashConfig) -> bytes:
    """The 16 bytes of the key of a text's n-grams, in plain Python."""
    hashes = reference_shingle_hashes(text, config)
    first, second = sum(hashes), sum(value * (2 * at + 1) for at, value in enumerate(hashes))
    return (first & _MASK).to_bytes(8, "little") + (second & _MASK).to_bytes(8, "little")


def is_alone(unit: str) -> bool:
    """Whether a unit is a character of a script that is written without spaces."""
    name = unicodedata.name(unit[0], "")
    scripts = ("CJK ", "HIRAGANA ", "KATAKANA", "HALFWIDTH KATAKANA", "THAI ", "LAO ", "MYANMAR ", "KHMER ")
    return len(unit) == 1 and (name.startswith(scripts) or unit in "\u3005\u3006\u3007")


def _reference_unit_hash(unit: str, kind: str) -> int:
    if kind == "words":
        return reference_word_hash(unit)
    if kind == "auto" and not is_alone(unit):
        value = 32
        for character in unit:
            value = (value ^ ord(character) + 1) * _CHARACTER & _MASK
            value ^= value >> 32
        return value
    value = (ord(unit) + 1) * _CHARACTER & _MASK
    return value ^ value >> 32


def _reference_shingle_hash(units: list[int]) -> int:
    value = 0
    for unit in units:
        value = (value * _BASE + unit) & _MASK
    value ^= value >> 32
    value = value * _SCATTER & _MASK
    return value ^ value >> 29


def reference_signature(text: str, config: MinHashConfig) -> list[int]:
    """The signature of one text in plain Python; empty if it has no word."""
    numbers = [value >> 32 for value in reference_shingle_hashes(text, config)]
    if not numbers:
        return []
    factors = permutations(config.permutations, config.seed).tolist()
    return [min(factor * x % (1 << 32) for x in numbers) for factor in factors]


def reference_band_keys(
    signature: Sequence[int], bands: int, rows: int, group: int | None = None
) -> list[int]:
    """The band keys of one signature, in plain Python."""
    keys = []
    for band in range(bands):
        value = _BAND_SEED ^ band
        value = (value ^ (-1 if group is None else group) & _MASK) * _FACTOR & _MASK
        for number in signature[band * rows : (band + 1) * rows]:
            value ^= value >> 32
            value = (value ^ number) * _FACTOR & _MASK
        value ^= value >> 32
        value = value * _FACTOR & _MASK
        keys.append(value ^ value >> 29)
    return keys


def reference_compare(
    a: tuple[list[int], int, int], b: tuple[list[int], int, int], config: NearDedupConfig
) -> tuple[Fraction, Fraction] | None:
    """(Jaccard similarity, containment) in rationals if the pair verifies, else None.

    A document is (stored hashes, distinct n-grams, n-grams with repetitions).
    """
    if not a[0] or not b[0]:
        return None
    limits = [max(hashes) for hashes, distinct, _ in (a, b) if len(hashes) < distinct]
    first, second = ({h for h in hashes if not limits or h < min(limits)} for hashes, _, _ in (a, b))
    if not first & second:
        return None
    is_sketch = len(a[0]) < a[1]
    smaller = len(first) if a[1] < b[1] or (a[1] == b[1] and is_sketch) else len(second)
    jaccard = Fraction(len(first & second), len(first | second))
    containment = Fraction(len(first & second), smaller)
    small = any(
        distinct < config.small_shingles
        or Fraction(total, distinct) >= Fraction(str(config.small_repetition))
        for _, distinct, total in (a, b)
    )
    if jaccard >= Fraction(str(config.small_similarity if small else config.similarity)):
        return jaccard, containment
    if config.containment and not small and containment >= Fraction(str(config.containment)):
        return jaccard, containment
    return None


@dataclass(frozen=True, slots=True)
class ReferenceDocument:
    """A document as the plain-Python references take it; equal priorities do not occur."""

    signature: Sequence[int]
    priority: tuple[int, ...]
    kind: Kind = "input"
    keys: Sequence[int] = ()  # of its bands


def reference_hub_pairs(
    documents: Sequence[ReferenceDocument], similarity: float, limits: HubLimits
) -> tuple[set[tuple[int, int]], int]:
    """(pairs of positions, lower first; `bounded`) of one hub."""
    hub = _ReferenceHub(documents, similarity, limits)
    by_priority = sorted(range(len(documents)), key=lambda at: documents[at].priority)
    hub.split(by_priority, sub_rows(similarity, hub.permutations), True)
    return {(min(pair), max(pair)) for pair in hub.pairs}, hub.bounded


class _ReferenceHub:
    def __init__(self, documents: Sequence[ReferenceDocument], similarity: float, limits: HubLimits) -> None:
        self.pairs: set[tuple[int, int]] = set()
        self.bounded = 0
        self.permutations = len(documents[0].signature)
        self.kinds = [document.kind for document in documents]
        self.prints = [[value * 0x9E3779B1 % (1 << 32) >> 24 for value in one.signature] for one in documents]
        self.limits = limits
        filling = -self.permutations % 8
        least = [equal - filling for equal in thresholds(similarity, self.permutations)]
        self.floor, self.similar, self.cover = least

    def split(self, members: list[int], rows: int, again: bool) -> None:
        firsts = list(range(0, self.permutations - rows + 1, rows))
        prints = [self.prints[member] for member in members]
        shared = [first for first in firsts if len({tuple(one[first : first + rows]) for one in prints}) == 1]
        if again and len(shared) == 1 < len(firsts):
            firsts.remove(shared[0])
        for first in firsts:
            buckets: dict[tuple[int, ...], list[int]] = {}
            for member in members:
                buckets.setdefault(tuple(self.prints[member][first : first + rows]), []).append(member)
            for bucket in buckets.values():
                if all(self.kinds[member] != "input" for member in bucket):
                    continue
                most = min(self.limits.sub_documents, self.limits.documents)
                if len(bucket) <= most:
                    self.pair_all(bucket)
                    continue
                left = self.pair_with_leaders(bucket)
                if len(left) > 1 and again and 2 * rows <= self.permutations:
                    self.split(left, 2 * rows, False)

    def equal(self, one: int, other: int) -> int:
        return sum(a == b for a, b in zip(self.prints[one], self.prints[other], strict=True))

    def hits(self, member: int, others: Sequence[int]) -> list[int]:
        if self.kinds[member] == "index":
            return []
        return [other for other in others if self.equal(member, other) >= self.floor]

    def pair_all(self, bucket: Sequence[int]) -> None:
        for at, member in enumerate(bucket):
            self.pairs.update((other, member) for other in self.hits(member, bucket[:at]))

    def pair_with_leaders(self, bucket: Sequence[int]) -> list[int]:
        """Returns the members that were to lead and could not."""
        leaders: list[int] = []
        firm: set[int] = set()
        left = []
        for member in bucket:
            kind, most = self.kinds[member], self.limits.pairs
            equal = [self.equal(member, leader) for leader in firm]
            alike = sum(values >= self.similar for values in equal)
            covered = max(equal, default=-1) >= self.cover or alike >= self.limits.covering
            hits = self.hits(member, leaders)
            met = len(hits) > most and not covered
            if len(hits) > most:
                first, others = hits[: most // 2], hits[most // 2 :]
                others.sort(key=lambda leader: -self.equal(member, leader))
                hits = first + others[: most - most // 2]
            self.pairs.update((leader, member) for leader in hits)
            if not covered:
                if len(leaders) == self.limits.leaders:
                    left.append(member)
                    met = True
                else:
                    leaders.append(member)
                    firm |= {member} if kind == "index" or not alike else set()
            self.bounded += met
        return left


def reference_candidates(
    documents: Sequence[ReferenceDocument], similarity: float, limits: HubLimits
) -> tuple[set[tuple[int, int]], int]:
    """(pairs of positions in `documents`, lower first; bounded) over all partitions, in plain Python."""
    buckets: dict[int, set[int]] = {}
    for position, document in enumerate(documents):
        for key in document.keys:
            buckets.setdefault(key, set()).add(position)
    pairs: set[tuple[int, int]] = set()
    bounded = 0
    for members in buckets.values():
        bucket = sorted(members)
        kinds = [documents[member].kind for member in bucket]
        if "input" not in kinds:
            continue
        if len(bucket) > limits.documents:
            found, met = reference_hub_pairs([documents[member] for member in bucket], similarity, limits)
            pairs |= {(bucket[one], bucket[other]) for one, other in found}
            bounded += met
            continue
        for one, other in combinations(bucket, 2):
            if "input" in (documents[one].kind, documents[other].kind):
                pairs.add((one, other))
    return pairs, bounded


class Text(NamedTuple):
    """A document: where it comes from, and its text."""

    kind: Kind
    source: int
    id: bytes
    text: str
    value: str | None = None  # of the field that a scope names

    @property
    def rank(self) -> bytes:
        """The content rank."""
        return xxhash.xxh3_128_digest(self.text.encode())[:8] + self.id[:8]

    @property
    def priority(self) -> tuple[int, int, bytes]:
        """Ascends as `population.priority` does."""
        first = -1 if self.kind == "index" else self.source
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
    units = [text_units(document.text, config.minhash.unit) for document in documents]
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
        groups.setdefault((_group(document, config), units), []).append((document.priority, at))
    return {at: min(group)[1] for group in groups.values() for _, at in sorted(group)[1:]}


def _group(document: Text, config: NearDedupConfig) -> int | None:
    """Only documents of the same group are compared."""
    if config.scope == "global":
        return None
    if config.scope == "source":
        return document.source
    return xxhash.xxh3_64_intdigest(json.dumps(document.value, ensure_ascii=False).encode())


def _candidates(
    documents: Sequence[Text], config: NearDedupConfig, limits: HubLimits
) -> set[tuple[int, int]]:
    bands, rows = bands_and_rows(config)
    described = []
    for document in documents:
        signature = reference_signature(document.text, config.minhash)
        keys = reference_band_keys(signature, bands, rows, _group(document, config))
        first, length, id = document.priority
        priority = (first, length, int.from_bytes(id, "big"))
        described.append(ReferenceDocument(signature, priority, document.kind, keys))
    return reference_candidates(described, config.similarity, limits)[0]
