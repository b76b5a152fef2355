"""Counts of all stages, from raw records to tokens in rows, and the check that they add up.

    read = kept + dropped (by rule) + quarantined (by error)      in documents and in bytes of text
    documents kept by one stage = documents read by the next
    documents kept = documents written, for a dataset of text;  + copies of repeated ones, for rows of tokens
    tokens encoded = tokens packed + cropped + joined;  rows * sequence_length = tokens + padding
    tokens to train on = packed + cropped + masked as repetitions, for a dataset with loss masks
    the count and the sum of every histogram = the number of documents or rows, and their total

`Funnel.check` checks all of these for a whole build; a build that does not add up is not published.

`FilterCounts` has the results of a build's filters: how many documents each rule dropped, how many it would
drop alone, bytes cut by edits, statistics and excerpts. The commit of each cleaned split has one, and the
card has the sum of all. The sum does not depend on how documents are divided among splits or workers, because
it consists of sums and of excerpts chosen by the lowest hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from shardkit.card import (
    Count,
    CounterFacts,
    EditFacts,
    ExcerptFacts,
    FilterFacts,
    Histogram,
    RepeatFacts,
    RuleFacts,
)
from shardkit.errors import ConservationError
from shardkit.writers.rows.filtered import EXCERPTS, SAMPLE, Excerpt, Filtered
from shardkit.writers.rows.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Trained:
    """Counts of tokens that a loss mask selects for training: all (`tokenized`), those in rows (`packed`),
    and those lost: `cropped`, or masked as repetitions (`repeated`). Packing masks before it crops."""

    tokenized: int
    packed: int
    cropped: int
    repeated: int


@dataclass(slots=True)
class Funnel:
    """Counts of the whole build. `stages` has, for each stage in order, one ledger per source.

    `removed` has counts of duplicates by reason; ledgers must have as many dropped documents. `packed`
    has counts of rows, such as "tokens" and "padding". `histograms` are "lengths" (of documents),
    "row_padding" and "row_pieces". `source_languages` has documents and tokens of each source by language, if
    the recipe has a language filter. `repeated` has an entry per source, or none. `trained` is set for builds
    with a loss mask.
    """

    stages: Mapping[str, list[Ledger]]
    source_tokens: list[int]
    removed: Mapping[str, Count]
    sequence_length: int | None
    packed: dict[str, int] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    source_languages: list[dict[str, dict[str, int]]] | None = None
    trained: Trained | None = None
    repeated: Sequence[RepeatFacts] = ()

    @property
    def total(self) -> Ledger:
        """One ledger for all sources, from reading to tokenizing."""
        return _joined([_sum(ledgers) for ledgers in self.stages.values()])

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents, including eos tokens."""
        return sum(self.source_tokens)

    @property
    def _left_out(self) -> int:
        """The number of tokens that are in no row: they were cropped, or removed when groups were joined."""
        return self.packed.get("cropped", 0) + self.packed.get("joined", 0)

    def source(self, number: int) -> Ledger:
        """Return one ledger for a source, from reading to tokenizing."""
        return _joined([ledgers[number] for ledgers in self.stages.values()])

    def check(self) -> None:
        """Raise ConservationError unless all counts add up."""
        for stage, ledgers in self.stages.items():
            for number, ledger in enumerate(ledgers):
                ledger.check(f"source {number}, {stage}")
        for (_, before), (stage, after) in pairwise(self.stages.items()):
            for number, (kept, read) in enumerate(zip(before, after, strict=True)):
                _same(f"source {number}: documents for {stage}", kept.kept, read.read)
        total = self.total
        total.check("the whole build")
        for reason, count in self.removed.items():
            _same(reason, count, total.dropped.get(reason, Count()))
        copies = sum(one.documents for one in self.repeated)
        _same("documents to write", total.kept.documents + copies, self.packed["documents"])
        if "tokens" in self.packed:
            _same("tokens to pack", self.tokens, self.packed["tokens"] + self._left_out)
        if self.sequence_length is not None:
            cells = self.packed["rows"] * self.sequence_length
            filled = self.packed["tokens"] + self.packed.get("repeated_bos", 0)
            _same("tokens in rows", cells, filled + self.packed["padding"])
        if self.trained is not None:
            found = self.trained
            _same("tokens to train on", found.tokenized, found.packed + found.cropped + found.repeated)
        self._check_histograms()
        for number, languages in enumerate(self.source_languages or ()):
            documents = sum(counts["documents"] for counts in languages.values())
            tokens = sum(counts["tokens"] for counts in languages.values())
            _same(f"source {number}: documents by language", self.source(number).kept.documents, documents)
            _same(f"source {number}: tokens by language", self.source_tokens[number], tokens)

    def _check_histograms(self) -> None:
        whole = {
            "lengths": ("documents", "tokens"),
            "row_padding": ("rows", "padding"),
            "row_pieces": ("rows", "pieces"),
        }
        for name, histogram in self.histograms.items():
            left_out = self._left_out if name == "lengths" else 0
            for packed, found in zip(whole[name], (histogram.count, histogram.sum - left_out), strict=True):
                _same(f"{packed} of the histogram {name}", self.packed[packed], found)

    def to_dict(self) -> dict[str, Any]:
        """Return the total ledger as plain data for the card."""
        return self.total.to_dict()


def _sum(ledgers: Sequence[Ledger]) -> Ledger:
    total = Ledger()
    for ledger in ledgers:
        total.merge(ledger)
    return total


def _joined(ledgers: Sequence[Ledger]) -> Ledger:
    """Combine ledgers of consecutive stages: `read` of the first, `kept` of the last, losses of all."""
    joined = Ledger(read=ledgers[0].read, kept=ledgers[-1].kept)
    for ledger in ledgers:
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


@dataclass
class FilterCounts:
    """Sums of the counts in `Filtered`. `reasons` and `edits` name all rules and edits, in recipe order."""

    reasons: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    dropped: dict[str, Count] = field(default_factory=dict)
    cut: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    sampled: int = 0
    excerpts: dict[str, list[Excerpt]] = field(default_factory=dict)
    by_language: dict[str, Counter[str]] = field(default_factory=dict)

    @classmethod
    def of_rules(cls, reasons: Iterable[str], edits: Iterable[str]) -> FilterCounts:
        """Create zero counts for rules and edits; names are "<filter>/<name>", in the order of the recipe."""
        return cls(_distinct(reasons), _distinct(edits))

    def add(self, other: FilterCounts | Filtered) -> None:
        """Add the counts of a batch or of another split."""
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, Count()) + count
        for ours, theirs in ((self.cut, other.cut), (self.counts, other.counts), (self.alone, other.alone)):
            ours.update(theirs)  # unlike +=, keeps negative sums: an edit may make texts longer
        self.sampled += other.sampled
        for label, reasons in other.by_language.items():
            self.by_language.setdefault(label, Counter()).update(reasons)
        for reason, shown in other.excerpts.items():
            self.excerpts[reason] = sorted([*self.excerpts.get(reason, ()), *shown])[:EXCERPTS]


def filters_card(passes: Iterable[Sequence[FilterCounts]]) -> FilterFacts | None:
    """Return the card's entry about filters; None without filters. `passes` has counts per pass and split."""
    totals = [total for splits in passes if (total := _total(splits)).reasons or total.edits]
    if not totals:
        return None
    whole = FilterCounts()
    for total in totals:
        whole.add(total)
    return FilterFacts(
        sampled=totals[0].sampled,
        one_in=SAMPLE,
        rules=[rule for total in totals for rule in _rules(total)],
        cut=[EditFacts(edit, total.cut[edit]) for total in totals for edit in total.edits],
        counts=[CounterFacts(name, whole.counts[name]) for name in sorted(whole.counts)],
        languages=_languages(whole, _distinct(reason for total in totals for reason in total.reasons)),
    )


def _total(splits: Sequence[FilterCounts]) -> FilterCounts:
    total = FilterCounts()
    for counts in splits:
        total.reasons, total.edits = counts.reasons, counts.edits  # the same for all splits of a recipe
        total.add(counts)
    return total


def _rules(total: FilterCounts) -> Iterator[RuleFacts]:
    for reason in total.reasons:
        dropped = total.dropped.get(reason, Count())
        shown = [ExcerptFacts(x.file, x.record, x.text) for x in total.excerpts.get(reason, ())]
        yield RuleFacts(rule=reason, alone=total.alone[reason], excerpts=shown, **asdict(dropped))


def _languages(total: FilterCounts, reasons: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return counts of documents by language, largest first: the kept ones under "", then each reason."""
    order = sorted(total.by_language.items(), key=lambda item: (-item[1].total(), item[0]))
    names = ("", *reasons)
    return {label: {name: counts[name] for name in names if counts[name]} for label, counts in order}


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions, because a filter that a recipe uses twice is counted once."""
    return tuple(dict.fromkeys(names))
