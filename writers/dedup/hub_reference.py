"""What `shardkit.writers.dedup.hubs` finds, in plain Python over sets: slow, and easy to see to be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.writers.dedup.hubs import HubLimits, sub_rows, thresholds
from shardkit.writers.dedup.population import Kind

__all__ = ["ReferenceDocument", "reference_hub_pairs"]

_ALLOWED: dict[Kind, tuple[Kind, ...]] = {"index": (), "input": ("index", "input"), "planted": ("input",)}


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
        real = [self.prints[member] for member in members if self.kinds[member] != "planted"]
        shared = [first for first in firsts if len({tuple(one[first : first + rows]) for one in real}) == 1]
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
                if sum(self.kinds[member] != "planted" for member in bucket) <= most:
                    self.pair_all(bucket)
                    continue
                left = self.pair_with_leaders(bucket)
                if len(left) > 1 and again and 2 * rows <= self.permutations:
                    self.split(left, 2 * rows, False)

    def equal(self, one: int, other: int) -> int:
        return sum(a == b for a, b in zip(self.prints[one], self.prints[other], strict=True))

    def hits(self, member: int, others: Sequence[int]) -> list[int]:
        allowed = _ALLOWED[self.kinds[member]]
        alike = [other for other in others if self.equal(member, other) >= self.floor]
        return [other for other in alike if self.kinds[other] in allowed]

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
                elif kind != "planted":
                    leaders.append(member)
                    firm |= {member} if kind == "index" or not alike else set()
            self.bounded += met and kind != "planted"
        return left
