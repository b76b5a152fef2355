"""From raw records to tokens in rows: the counts of all stages, and the law that they add up.

    read = kept + dropped (by rule) + quarantined (by error)      in documents and in bytes of text
    what one stage keeps is what the next one reads
    tokens encoded = tokens packed;  rows * sequence_length = tokens + padding

`Funnel.check` holds all of it over a whole build; a build that does not add up is not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkit.errors import ConservationError
from shardkit.writers.journal import Commit
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.scan import Split

__all__ = ["Funnel", "collect_funnel"]

PACKED = ("shards", "documents", "rows", "tokens", "padding", "cut_documents", "needless_cuts")


@dataclass(slots=True)
class Funnel:
    """The whole build's counts. `cleaned` and `tokenized` are one ledger a source of the recipe."""

    cleaned: list[Ledger]
    tokenized: list[Ledger]
    source_tokens: list[int]
    losers: Count
    sequence_length: int
    packed: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> Ledger:
        """One ledger from reading to tokenizing over all sources."""
        return _joined(_sum(self.cleaned), _sum(self.tokenized))

    @property
    def tokens(self) -> int:
        """Tokens of documents, their eos included."""
        return sum(self.source_tokens)

    def source(self, number: int) -> Ledger:
        """One ledger from reading to tokenizing of one source."""
        return _joined(self.cleaned[number], self.tokenized[number])

    def check(self) -> None:
        """Raise ConservationError unless everything adds up."""
        for number in range(len(self.cleaned)):
            _same(
                f"source {number}: documents to tokenize",
                self.cleaned[number].kept,
                self.tokenized[number].read,
            )
            self.cleaned[number].check(f"source {number}, cleaning")
            self.tokenized[number].check(f"source {number}, tokenizing")
        total = self.total
        total.check("the whole build")
        _same("exact duplicates", self.losers, total.dropped.get("exact_duplicate", Count()))
        _same("documents to pack", total.kept.documents, self.packed["documents"])
        _same("tokens to pack", self.tokens, self.packed["tokens"])
        cells = self.packed["rows"] * self.sequence_length
        _same("tokens in rows", cells, self.packed["tokens"] + self.packed["padding"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the card: the total ledger."""
        return self.total.to_dict()


def collect_funnel(
    splits: Sequence[Split],
    sources: int,
    *,
    cleaned: Sequence[Commit],
    exact: Sequence[Commit],
    tokenized: Sequence[Commit],
    packed: Sequence[Commit],
    sequence_length: int,
) -> Funnel:
    """The counts that all commits hold."""
    losers = sum((Count(c.counts["losers"], c.counts["bytes"]) for c in exact), Count())
    funnel = Funnel(
        [Ledger() for _ in range(sources)],
        [Ledger() for _ in range(sources)],
        [0] * sources,
        losers,
        sequence_length,
    )
    for split, clean, tokens in zip(splits, cleaned, tokenized, strict=True):
        funnel.cleaned[split.source].merge(clean.ledger())
        funnel.tokenized[split.source].merge(tokens.ledger())
        funnel.source_tokens[split.source] += tokens.counts["tokens"]
    funnel.packed = {name: sum(c.counts["packed"][name] for c in packed) for name in PACKED}
    return funnel


def _sum(ledgers: Sequence[Ledger]) -> Ledger:
    total = Ledger()
    for ledger in ledgers:
        total.merge(ledger)
    return total


def _joined(first: Ledger, second: Ledger) -> Ledger:
    """What two stages in a row did to what the first one read."""
    joined = Ledger(read=first.read, kept=second.kept)
    for ledger in (first, second):
        for reason, lost in ledger.dropped.items():
            joined.drop(reason, lost.documents, lost.bytes)
        for reason, lost in ledger.quarantined.items():
            joined.quarantine(reason, lost.documents, lost.bytes)
    return joined


def _same(what: str, before: object, after: object) -> None:
    if before != after:
        raise ConservationError(
            f"{what}: {before} before, {after} after; this is a bug in shardkit, please report it"
        )
