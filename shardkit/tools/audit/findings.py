"""What an audit has found wrong: all counted, the first of each kind kept with where it is.

Which samples were counted, as three sums that do not depend on the order: how two multisets are compared.

    count;  sum of ids mod 2**64;  sum of H(id) mod 2**64, for each of two 64-bit halves of a keyed H

Memory is constant, and adding costs about 15 ns a sample. Two multisets in which no sample's multiplicity
differs by 2**13 or more have equal sums with probability at most 2**-100: if the smallest power of two in
the difference is 2**k, k < 13, each half's sum of differences is uniform over 2**(64 - k) values for an H
that is random, and the key is drawn anew for each audit, so that no data can have been made to fit it. H is
SplitMix64's finaliser, keyed and applied three times; the order of samples is made by another function,
fmix64.

How often each shard was used, against what its rows and the epochs make of it.

Of a shard with k kept rows, E whole epochs use E * k samples, and each epoch that was not delivered whole
between none and k more. What the tail "drop" leaves out is no use, but counts towards what a shard owes.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.tools.audit.expectation import Expectation

__all__ = [
    "FALSE_ACCEPTANCE",
    "KINDS",
    "Finding",
    "Findings",
    "SampleHash",
    "ShardCounts",
    "Tally",
    "check_shards",
]

KINDS = {
    # Causes first, what follows from them behind.
    "settings": "ranks or runs with other data or another order",
    "log": "damaged log files",
    "rank": "ranks without a log, or whose log ends early",
    "resume": "ranks that began elsewhere than their state said",
    "gap": "ranges of positions that no run delivered",
    "steps": "ranks at another step than is due",
    "part": "parts that went to the wrong rank or step, in the first faulty steps",
    "world": "walks whose steps depend on the world size",
    "lost": "samples never delivered in an epoch",
    "repeated": "samples delivered more than once in an epoch",
    "moved": "samples delivered at another step than the order says",
    "excluded": "excluded rows delivered",
    "foreign": "steps with ids that the dataset does not have",
    "padding": "steps with padding where samples belong, or the reverse",
    "epoch": "epochs whose sums differ from the index",
    "shard": "shards used more or less than they should be",
}

"""What an audit may find, and what its counts count."""

_MOST_KEPT = 100  # of a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong; numbers that are None are not known or do not apply."""

    kind: str
    problem: str
    epoch: int | None = None
    position: int | None = None
    step: int | None = None
    rank: int | None = None
    stream: str | None = None
    shard: str | None = None
    row: int | None = None
    sample: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        facts = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
            for name, value in self.to_dict().items()
            if name not in ("kind", "problem")
        ]
        return f"{self.kind}: {self.problem}" + (f" [{', '.join(facts)}]" if facts else "")


@dataclass(slots=True)
class Findings:
    """All findings of an audit: how many of each kind, and the first ones."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What is worth knowing and no fault."""

    def add(self, finding: Finding, count: int = 1) -> None:
        """Count `count` of its kind; keep it if it is among the first."""
        if self.counts[finding.kind] < _MOST_KEPT:
            self.kept.append(finding)
        self.counts[finding.kind] += count

    def wants(self, kind: str) -> bool:
        """Whether one more of the kind would be kept: else it need not be described."""
        return self.counts[kind] < _MOST_KEPT

    @property
    def ok(self) -> bool:
        return not self.counts


FALSE_ACCEPTANCE = "2**-100"

"""Bound on the probability that wrong multiplicities (by less than 2**13 each) go unseen."""

_WORD = (1 << 64) - 1

_CHUNK = 1 << 14  # ids worked on at once: the temporaries stay in a core's second-level cache

_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)

_Ints = npt.NDArray[np.int64]

_Words = npt.NDArray[np.uint64]


class SampleHash:
    """H: two 64-bit words of a sample id, under a key of 24 bytes (default: drawn anew)."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = secrets.token_bytes(24) if key is None else key
        if len(self.key) != 24:
            raise ValueError(f"the key has 24 bytes, not {len(self.key)}")
        self._keys = [np.uint64(word) for word in np.frombuffer(self.key, dtype="<u8").tolist()]

    def __call__(self, ids: _Ints) -> tuple[_Words, _Words]:
        """The two words of each id, in their shape."""
        flat = np.ascontiguousarray(ids).ravel().view(np.uint64)
        low, high = np.empty_like(flat), np.empty_like(flat)
        scratch = np.empty(min(len(flat), _CHUNK), dtype=np.uint64)
        for begin in range(0, len(flat), _CHUNK):
            piece = slice(begin, begin + _CHUNK)
            one, two = low[piece], high[piece]
            part = scratch[: len(one)]
            np.add(flat[piece], self._keys[0], out=one)
            _mix(one, part)
            np.bitwise_xor(one, self._keys[1], out=one)
            _mix(one, part)
            np.add(one, self._keys[2], out=two)
            _mix(two, part)
        return low.reshape(ids.shape), high.reshape(ids.shape)


def _mix(words: _Words, scratch: _Words) -> None:
    """SplitMix64's finaliser (Stafford's variant 13), in place."""
    np.right_shift(words, _30, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX1, out=words)
    np.right_shift(words, _27, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX2, out=words)
    np.right_shift(words, _31, out=scratch)
    np.bitwise_xor(words, scratch, out=words)


@dataclass(slots=True)
class Tally:
    """The sums of a multiset of samples. Equal multisets have equal tallies under one key."""

    count: int = 0
    ids: int = 0
    low: int = 0
    high: int = 0

    def add(self, ids: _Ints, words: tuple[_Words, _Words]) -> None:
        """Count these samples, whose words are H of them."""
        low, high = words
        self.count += ids.size
        self.ids = (self.ids + _sum(ids.view(np.uint64))) & _WORD
        self.low = (self.low + _sum(low)) & _WORD
        self.high = (self.high + _sum(high)) & _WORD

    @property
    def fingerprint(self) -> str:
        """The 128-bit sum, in hex."""
        return f"{self.high:016x}{self.low:016x}"


def _sum(words: _Words) -> int:
    return int(words.sum(dtype=np.uint64)) if words.size else 0


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """int64[shards of all streams]: samples delivered, dropped; the least and the most expected of both."""

    delivered: _Ints
    dropped: _Ints
    least: _Ints
    most: _Ints

    @classmethod
    def of(
        cls,
        expected: Expectation,
        delivered: _Ints,
        dropped: _Ints,
        whole_epochs: Sequence[int],
        part_epochs: Sequence[int],
    ) -> ShardCounts:
        """`whole_epochs`, `part_epochs`: of each stream, those delivered whole and those in part."""
        kept = [expected.kept_of_shards(stream) for stream in range(len(expected.streams))]
        least = np.concatenate([rows * whole for rows, whole in zip(kept, whole_epochs, strict=True)])
        more = np.concatenate([rows * part for rows, part in zip(kept, part_epochs, strict=True)])
        return cls(delivered, dropped, least, least + more)

    @property
    def wrong(self) -> npt.NDArray[np.intp]:
        """The shards that were used less or more than expected."""
        used = self.delivered + self.dropped
        return np.flatnonzero((used < self.least) | (used > self.most))


def check_shards(counts: ShardCounts, expected: Expectation, findings: Findings) -> None:
    """A finding for each shard that is wrong."""
    for shard in counts.wrong.tolist():
        if not findings.wants("shard"):
            findings.counts["shard"] += 1
            continue
        least, most = int(counts.least[shard]), int(counts.most[shard])
        due = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        problem = f"{counts.delivered[shard]:,} samples delivered, {due} expected"
        findings.add(Finding(kind="shard", problem=problem, shard=expected.shard_name(shard)))
