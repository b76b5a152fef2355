"""From raw records to tokens in rows: the counts of all stages, and the law that they add up.

    read = kept + dropped (by rule) + quarantined (by error)      in documents and in bytes of text
    what one stage keeps is what the next one reads
    documents kept = documents written, of a dataset of text
    tokens encoded = tokens packed + cropped + joined;  rows * sequence_length = tokens + padding
    tokens to train on = those packed + cropped + masked as repetitions, of a dataset with loss masks
    every histogram holds all documents, or all rows, and adds up to what they come to

`Funnel.check` holds all of it over a whole build; a build that does not add up is not published.

`FilterCounts` is what the filters of a build did, beside the ledger: each rule in order and alone, cuts,
counts, excerpts. Each cleaned split has one in its commit; the sum of all is in the dataset's card. It does
not depend on how documents are divided among splits or workers: it is sums, and the excerpts of the lowest
hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from shardkit.card import Count, CounterFacts, EditFacts, ExcerptFacts, FilterFacts, Histogram, RuleFacts
from shardkit.errors import ConservationError
from shardkit.writers.rows.filtered import EXCERPTS, SAMPLE, Excerpt, Filtered
from shardkit.writers.rows.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Trained:
    """Tokens that a loss mask lets be trained on: as they were tokenized, packed, cropped, and those that
    repeat themselves, which packing masked before it cropped any."""

    tokenized: int
    packed: int
    cropped: int
    repeated: int


@dataclass(slots=True)
class Funnel:
    """The whole build's counts. Each of `stages` is one ledger a source of the recipe, in the order they ran.

    `removed` is what duplicate removal found, by the reason that the stages after it book. The `histograms`
    are "lengths" (`Tokenized`), "row_padding" and "row_pieces" (`Packed`); `source_languages` are
    documents and tokens of each source by language, if the recipe has a filter that knows. `trained` is of
    builds with a loss mask.
    """

    stages: Mapping[str, list[Ledger]]
    source_tokens: list[int]
    removed: Mapping[str, Count]
    sequence_length: int | None
    packed: dict[str, int] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    source_languages: list[dict[str, dict[str, int]]] | None = None
    trained: Trained | None = None

    @property
    def total(self) -> Ledger:
        """One ledger from reading to tokenizing over all sources."""
        return _joined([_sum(ledgers) for ledgers in self.stages.values()])

    @property
    def tokens(self) -> int:
        """Tokens of documents, their eos included."""
        return sum(self.source_tokens)

    @property
    def _left_out(self) -> int:
        """Tokens of documents that are in no row: cropped, or dropped where groups were joined."""
        return self.packed.get("cropped", 0) + self.packed.get("joined", 0)

    def source(self, number: int) -> Ledger:
        """One ledger from reading to tokenizing of one source."""
        return _joined([ledgers[number] for ledgers in self.stages.values()])

    def check(self) -> None:
        """Raise ConservationError unless everything adds up."""
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
        _same("documents to write", total.kept.documents, self.packed["documents"])
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
        """Plain data for the card: the total ledger."""
        return self.total.to_dict()


def _sum(ledgers: Sequence[Ledger]) -> Ledger:
    total = Ledger()
    for ledger in ledgers:
        total.merge(ledger)
    return total


def _joined(ledgers: Sequence[Ledger]) -> Ledger:
    """Join the ledgers of stages in a row: what the first read, the last kept and any of them lost."""
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
    """`reasons` and `edits` are all names in their order; the other keys are those of `Filtered`."""

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
        """Begin at nothing, for rules and edits by "<filter>/<name>", in the order of the recipe."""
        return cls(_distinct(reasons), _distinct(edits))

    def add(self, other: FilterCounts | Filtered) -> None:
        """Add what a batch, or another split, came to."""
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, Count()) + count
        for ours, theirs in ((self.cut, other.cut), (self.counts, other.counts), (self.alone, other.alone)):
            ours.update(theirs)  # adds, and keeps negative sums: texts may grow
        self.sampled += other.sampled
        for label, reasons in other.by_language.items():
            self.by_language.setdefault(label, Counter()).update(reasons)
        for reason, shown in other.excerpts.items():
            self.excerpts[reason] = sorted([*self.excerpts.get(reason, ()), *shown])[:EXCERPTS]


def filters_card(splits: Iterable[FilterCounts]) -> FilterFacts | None:
    """Sum the counts of all splits for the card; None for a recipe without filters."""
    total = FilterCounts()
    for counts in splits:
        total.reasons, total.edits = counts.reasons, counts.edits  # of one recipe: all alike
        total.add(counts)
    if not total.reasons and not total.edits:
        return None
    rules = []
    for reason in total.reasons:
        dropped = total.dropped.get(reason, Count())
        shown = [ExcerptFacts(x.file, x.record, x.text) for x in total.excerpts.get(reason, ())]
        rules.append(RuleFacts(rule=reason, alone=total.alone[reason], excerpts=shown, **asdict(dropped)))
    return FilterFacts(
        sampled=total.sampled,
        one_in=SAMPLE,
        rules=rules,
        cut=[EditFacts(edit, total.cut[edit]) for edit in total.edits],
        counts=[CounterFacts(name, total.counts[name]) for name in sorted(total.counts)],
        languages=_languages(total),
    )


def _languages(total: FilterCounts) -> dict[str, dict[str, int]]:
    """Most documents first; of a language first what stayed, then reasons in their order."""
    order = sorted(total.by_language.items(), key=lambda item: (-item[1].total(), item[0]))
    names = ("", *total.reasons)
    return {label: {name: counts[name] for name in names if counts[name]} for label, counts in order}


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    """A filter that a recipe names twice is counted once."""
    return tuple(dict.fromkeys(names))
