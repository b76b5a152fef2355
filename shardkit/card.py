"""The card of a dataset, `dataset.json`: how the dataset was built and what it contains.

Only `DatasetCard` reads it. Opening a dataset parses the JSON and checks nothing else: cards written by
conversions, other versions and other tools have only some of the keys that builds write, and unknown keys
stay in `data`. Values are read in two ways:

    lenient   `tokenizer`, `source_labels`, `is_shuffled`: None, empty or false where a value is missing or
              has the wrong type, so that any dataset can be opened and trained on
    checked   `tokens`, `funnel`, `inputs` and all other keys that builds write: pydantic validates each when
              it is read; ShardError names the wrong key, and code that does not read the key is unaffected

Builds write JSON with sorted keys, so equal cards have equal bytes. The card lists all files other than
shards; if there are more than MOST_LISTED, files.json lists them, and the card lists only files.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.hashing import hash_bytes
from shardkit.manifest import BLOCKS_NAME, FileInfo, Manifest, stated_file

CARD_NAME = "dataset.json"
FILES_NAME = "files.json"
MAX_CARD_BYTES = 64 << 20  # maximum size of dataset.json; older versions listed up to 500,000 files in it
MAX_FILES_BYTES = 1 << 30  # maximum size of files.json, enough for about eight million files
MOST_LISTED = 1000  # maximum number of files that the card lists; files.json can list more
_OTHERS = ("split", "output")  # drop reasons of documents that went to other datasets of the same build
_DUPLICATES = ("url_duplicate", "exact_duplicate", "duplicate_lines", "near_duplicate", "semantic_duplicate")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Count:
    """A number of documents, and the size of their text in bytes."""

    documents: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.documents + other.documents, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer of a dataset; `path` is its location as the recipe gives it."""

    file: str | None = None
    digest: str | None = None
    eos: str | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class FunnelCounts:
    """Counts of records by result: read = kept + dropped (by rule) + quarantined (by error)."""

    read: Count
    kept: Count
    dropped: dict[str, Count]
    quarantined: dict[str, Count]


@dataclass(frozen=True, slots=True)
class LanguageCounts:
    """The number of kept documents in one language, and the number of their tokens."""

    documents: int = 0
    tokens: int = 0

    def __add__(self, other: LanguageCounts) -> LanguageCounts:
        return LanguageCounts(self.documents + other.documents, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatFacts(Count):
    """Copies of documents beyond the first copy of each, and the number of their tokens."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class InputFacts:
    """Facts about one input of the recipe; `languages` is None if no filter determines languages.

    `tokens` and the tokens of `languages` include those of the copies in `repeated`; documents do not.
    """

    source: str
    files: int
    bytes: int
    digest: str
    funnel: FunnelCounts
    tokens: int = 0  # cards of the earliest versions have neither this key nor `languages`
    languages: dict[str, LanguageCounts] | None = None
    repeated: RepeatFacts = RepeatFacts()


@dataclass(frozen=True, slots=True)
class ExcerptFacts:
    """The beginning of a dropped document's text, after the edits of the filters before the rule."""

    file: str
    record: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts(Count):
    """Documents that the rule "<filter>/<rule>" dropped, being the first rule that they failed.

    `alone` counts all documents of the sample that fail the rule, also after failing earlier rules.
    """

    rule: str
    alone: int
    excerpts: list[ExcerptFacts]


@dataclass(frozen=True, slots=True)
class EditFacts:
    """Bytes that the edit "<filter>/<edit>" removed from texts; negative if the texts grew."""

    edit: str
    bytes: int


@dataclass(frozen=True, slots=True)
class CounterFacts:
    """A counter of a filter, "<filter>/<name>", such as the number of redacted addresses."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class FilterFacts:
    """Filter rules in the order in which they were applied, and statistics about them.

    Every rule also judged a sample of `sampled` documents, one in `one_in`. `languages` counts documents by
    language and by the rule that dropped them ("" for kept documents); {} unless the recipe has settings by
    language.
    """

    sampled: int
    one_in: int
    rules: list[RuleFacts]
    cut: list[EditFacts]
    counts: list[CounterFacts]
    languages: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NearFacts:
    """Settings of near-duplicate removal; `against` names dedup indexes, `indexes` holds their digests."""

    similarity: float
    containment: float | None
    unit: str
    ngram: int
    permutations: int
    bands: int
    rows: int
    scope: str
    against: list[str]
    indexes: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SemanticFacts:
    """Settings of semantic duplicate removal; `vectors` says what made them, of `dimensions` values each."""

    similarity: float
    vectors: str
    dimensions: int
    probes: int
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoss(Count):
    """Documents that one stage of duplicate removal removed."""

    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoss(Count):
    """Documents of one input that entered duplicate removal; `removed` counts removed ones by reason."""

    source: str
    removed: dict[str, Count]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The number of groups of near-duplicates whose size is in the range `copies`: "1", "2", "3-10" ..."""

    copies: str
    groups: int


@dataclass(frozen=True, slots=True)
class DedupFacts:
    """Results of duplicate removal; stages are in the order in which they ran.

    `near` are the facts of the last step over near-duplicates, `earlier_near` those of the steps before it.
    """

    near: NearFacts | None
    stages: list[StageLoss]
    sources: list[SourceLoss]
    groups: list[GroupFacts]
    largest_group: int
    semantic: SemanticFacts | None = None
    earlier_near: list[NearFacts] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """How scores became labels, which documents carry in the metadata field `field`.

    The bin of a score is the number of `edges` that it reaches; bins of several scores are combined by
    `combine`, "max" or "mean". `labels` maps each label to its least combined bin; null: the bin itself is
    the label. The edges were computed from `sampled` of `documents` documents; both are 0 if the recipe gives
    them.
    """

    field: str
    combine: str
    labels: dict[str, float] | None
    edges: dict[str, list[float]]
    sampled: int
    documents: int


@dataclass(frozen=True, slots=True)
class AmountFacts:
    """How much of a source was used: of the documents `found` after all steps, those `taken`.

    With `sample`, it was the step `sample` of this number, and `found` are the documents before it. If values
    of a field were counted, `values` has how many documents each had, and how many were taken.
    """

    source: str
    found: Count
    taken: Count
    values: dict[str, list[int]] = field(default_factory=dict)
    sample: int = 0

    @property
    def left_out(self) -> Count:
        """The documents that were not taken."""
        return Count(self.found.documents - self.taken.documents, self.found.bytes - self.taken.bytes)


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """The parts of a split; this dataset is `part`. "train" holds all documents that no other part took.

    `documents` counts the documents of each part, `proposed` those proposed for it, and `alike` the proposed
    ones that resemble another document and therefore stay in train. `by` is the field whose documents with
    one value are in one part, or None.
    """

    part: str
    documents: dict[str, int]
    proposed: dict[str, int]
    alike: dict[str, int]
    similarity: float
    by: str | None = None


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One step of the funnel: documents and bytes of text that it lost, and those that remain after it.

    `kind` is "read", "quarantined", "dropped" or "kept". Filters that edit texts lose bytes of kept
    documents; if they add text, `lost_bytes` is negative.
    """

    kind: str
    label: str
    lost_documents: int
    lost_bytes: int
    documents: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of values from `low` to `high` (inclusive), and their sum."""

    low: int
    high: int
    count: int
    sum: int

    @property
    def label(self) -> str:
        """The range as text: "0", "1", "2-3", "1,024-2,047"."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


@dataclass(slots=True)
class Histogram:
    """A histogram of integers by bit length: `counts[b]` values of b bits, whose sum is `sums[b]`.

    Neither list ends with an empty bin. Bin 0 holds the value 0, bin b the values from 2^(b-1) to 2^b - 1. So
    the range need not be known in advance, 64 bins suffice, counts and sums are exact, and histograms can be
    added.
    """

    counts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> Histogram:
        """Return the histogram of `values`, integers [n] of at least 0 whose sum is below 2^53."""
        bits = np.frexp(values.astype(np.float64))[1]  # frexp's exponent of an integer is its bit length
        sums = np.bincount(bits, values).astype(np.int64)
        return cls(np.bincount(bits).tolist(), sums.tolist())

    def add(self, other: Histogram) -> None:
        """Add the counts and sums of another histogram."""
        self.counts = [a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0)]
        self.sums = [a + b for a, b in zip_longest(self.sums, other.sums, fillvalue=0)]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def sum(self) -> int:
        """The sum of all values."""
        return sum(self.sums)

    def bins(self) -> list[Bin]:
        """Return the bins from the first to the last one that holds a value."""
        first = next((number for number, count in enumerate(self.counts) if count), 0)
        pairs = list(enumerate(zip(self.counts, self.sums, strict=True)))[first:]
        return [Bin(1 << b - 1 if b else 0, (1 << b) - 1, count, total) for b, (count, total) in pairs]

    def to_dict(self) -> dict[str, list[int]]:
        """Return the histogram as plain data for JSON."""
        return {"counts": self.counts, "sums": self.sums}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """Make a histogram from the data that `to_dict` returns."""
        return cls(list(data["counts"]), list(data["sums"]))


class _Stated(Generic[_T]):
    """Descriptor that reads the card's key of the same name, which builds write, and validates its value."""

    def __init__(self, kind: type[_T] | UnionType) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, card: DatasetCard, owner: type) -> _T:
        if self._name not in card.data:
            raise ShardError(card.where, f"has no {self._name!r}, a key that `shardkit build` writes")
        found: _T = _checked(self._kind, card.data[self._name], self._name, card.where)
        return found


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """The content of a card: `data` is the parsed JSON, `where` the name of the file for error messages."""

    data: Mapping[str, Any]
    where: str = field(default=CARD_NAME, compare=False)

    fingerprint = _Stated(str)
    shardkit_version = _Stated(str)
    format = _Stated(str)
    shards = _Stated(int)
    samples = _Stated(int)
    stored_bytes = _Stated(int)
    dtype = _Stated(str)
    sequence_length = _Stated(int)
    tokens = _Stated(int)
    padding = _Stated(int)
    recipe = _Stated(dict[str, Any])  # without keys that do not affect the dataset's bytes
    recipe_digest = _Stated(str)
    inputs = _Stated(list[InputFacts])
    funnel = _Stated(FunnelCounts)
    dedup = _Stated[DedupFacts | None](DedupFacts | None)
    filters = _Stated[FilterFacts | None](FilterFacts | None)
    filter_files = _Stated(dict[str, str])  # digests of word lists and models
    packing = _Stated(dict[str, int])
    histograms = _Stated(dict[str, Histogram])  # keys: "lengths" (of documents), "row_padding", "row_pieces"
    amounts = _Stated(list[AmountFacts])
    split = _Stated(SplitFacts)
    buckets = _Stated(BucketFacts)

    @classmethod
    def read(cls, file: Path) -> DatasetCard | None:
        """Read the card in `file`. Returns None if there is no such file; raises ShardError if unreadable."""
        if not file.is_file():
            return None
        try:
            with file.open("rb") as opened:
                return cls.parse(str(file), opened.read(MAX_CARD_BYTES + 1))
        except OSError as error:
            raise ShardError(file, f"cannot be read: {error}") from error

    @classmethod
    def parse(cls, where: str, text: bytes) -> DatasetCard:
        """Parse the bytes of a card. Raises ShardError unless they are a JSON object of a permitted size."""
        if len(text) > MAX_CARD_BYTES:
            raise ShardError(where, f"is larger than {MAX_CARD_BYTES:,} bytes, the limit of a card")
        try:
            data = load_json(text)
        except (ValueError, RecursionError) as error:
            raise ShardError(where, f"cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise ShardError(where, "a dataset's card must be a JSON object")
        return cls(data, where)

    def to_bytes(self) -> bytes:
        """Return the card's JSON as builds store it."""
        return json.dumps(self.data, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    def has(self, *keys: str) -> bool:
        """Return whether the card has all of these keys with values that are neither null nor empty."""
        return all(self.data.get(key) not in (None, "", [], {}) for key in keys)

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raise ShardError if the card's fingerprint differs: then the card describes other shards."""
        stated = self.data.get("fingerprint", fingerprint)
        if stated != fingerprint:
            problem = f"is the card of another dataset: fingerprint {stated}, the index has {fingerprint}"
            raise ShardError(self.where, problem)

    @property
    def is_shuffled(self) -> bool:
        """Whether samples were shuffled over all shards: as `shuffled` says, and in all builds of tokens."""
        stated = self.data.get("shuffled")
        return stated if isinstance(stated, bool) else isinstance(self.data.get("packing"), Mapping)

    @property
    def tokenizer(self) -> TokenizerFacts:
        """The tokenizer; a fact is None where the card lacks it or has a value of the wrong type."""
        kinds = {"file": str, "digest": str, "eos": str, "eos_id": int, "bos_id": int}
        stated, recipe = _mapping(self.data.get("tokenizer")), _mapping(self.data.get("recipe"))
        facts: dict[str, Any] = {k: stated[k] for k, kind in kinds.items() if type(stated.get(k)) is kind}
        path = _mapping(recipe.get("tokenizer")).get("path")
        return TokenizerFacts(**facts, path=path if isinstance(path, str) else None)

    @property
    def source_labels(self) -> list[str]:
        """The labels of the recipe's inputs, by input number."""
        inputs = self.data.get("inputs")
        return [
            str(_mapping(entry).get("source", number))
            for number, entry in enumerate(inputs if isinstance(inputs, list) else ())
        ]

    @property
    def files_table(self) -> FileInfo | None:
        """The size and hashes of files.json; None if the card lists all files itself."""
        return self.file(FILES_NAME) if FILES_NAME in self.file_names else None

    def with_files(self, table: bytes) -> DatasetCard:
        """Add the files that `table` (files.json) lists to a copy of the card. Raises ShardError if bad."""
        stated = self.files_table
        where = f"{self.where.removesuffix(CARD_NAME)}{FILES_NAME}"
        if stated is None or (stated.bytes, stated.hashes) != (len(table), hash_bytes(table, stated.hashes)):
            raise ShardError(where, "is damaged, or of another dataset: its hash differs from the card's")
        try:
            listed = load_json(table)
        except (ValueError, RecursionError) as error:
            raise ShardError(where, f"cannot be read: {error}") from error
        if not isinstance(listed, dict) or not listed.keys().isdisjoint(self.file_names):
            raise ShardError(where, "must map names of files that are not in the card to sizes and hashes")
        return DatasetCard({**self.data, "files": {**self.data["files"], **listed}}, self.where)

    @property
    def file_names(self) -> list[str]:
        """The names of all files other than shards, such as provenance, report and quarantine."""
        files = self.data.get("files", {})
        if not isinstance(files, Mapping):
            raise ShardError(self.where, "`files` must map names to sizes and hashes")
        return list(files)

    def file(self, name: str) -> FileInfo:
        """Return the size and hashes of one of `file_names`. Raises ShardError if they are not valid."""
        return stated_file(name, self.data["files"][name], self.where)

    def languages(self) -> dict[str, LanguageCounts]:
        """Return the counts of all inputs by language, most tokens first; {} if no filter found languages."""
        total: dict[str, LanguageCounts] = {}
        for each in self.inputs:
            for label, counts in (each.languages or {}).items():
                total[label] = total.get(label, LanguageCounts()) + counts
        return dict(sorted(total.items(), key=lambda item: (-item[1].tokens, item[0])))

    def funnel_steps(self) -> list[FunnelStep]:
        """Return the funnel as steps in the order of the build; steps that lost nothing are left out.

            read -> quarantined -> lost while reading -> each filter -> duplicates by kind
                 -> beyond the amount of a source -> other parts of the split -> empty -> kept

        All rules of one filter form one step; `filters` has the counts by rule.
        """
        funnel = self.funnel
        dropped: dict[str, Count] = {}
        for reason, lost in funnel.dropped.items():
            step = reason.partition("/")[0]
            dropped[step] = dropped.get(step, Count()) + lost
        entries = self.data.get("recipe") and self.recipe.get("filters", [])
        filters = _checked(list[dict[str, Any]], entries or [], "recipe.filters", self.where)
        order = [
            *dict.fromkeys(name for entry in filters for name in entry),
            *_DUPLICATES,
            "not_sampled",
            "amount",
            "split",
            "output",
            "empty",
        ]
        ranks = {name: rank for rank, name in reversed([*enumerate(order)])}
        losses = [("quarantined", *item) for item in sorted(funnel.quarantined.items())]
        losses += [
            ("dropped", name, dropped[name]) for name in sorted(dropped, key=lambda n: (ranks.get(n, -1), n))
        ]
        left = funnel.read
        steps = [FunnelStep("read", "read", 0, 0, left.documents, left.bytes)]
        for kind, label, lost in losses:
            left = Count(left.documents - lost.documents, left.bytes - lost.bytes)
            if lost != Count():
                steps.append(FunnelStep(kind, label, lost.documents, lost.bytes, left.documents, left.bytes))
        return [*steps, FunnelStep("kept", "kept", 0, 0, funnel.kept.documents, funnel.kept.bytes)]


def block_checksums(manifest: Manifest, card: DatasetCard | None) -> FileInfo | None:
    """Return size and hashes of blocks.bin from the index, else from the card of these shards, else None.

    Older versions recorded them in the card only. The index has priority because it is always read, whereas
    a store may fail to show the card.
    """
    if manifest.blocks is not None or card is None:
        return manifest.blocks
    is_own = card.data.get("fingerprint") == manifest.fingerprint
    return card.file(BLOCKS_NAME) if is_own and BLOCKS_NAME in _mapping(card.data.get("files")) else None


def listed_files(files: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Any], bytes | None]:
    """Return (the card's `files`, the bytes of files.json) for `files`, {name: size and hashes}.

    files.json is None if the card lists all files. blocks.bin always stays in the card, because opening a
    dataset reads the card but not files.json.
    """
    if len(files) <= MOST_LISTED:
        return files, None
    kept = {BLOCKS_NAME: files[BLOCKS_NAME]} if BLOCKS_NAME in files else {}
    others = {name: entry for name, entry in files.items() if name not in kept}
    table = json.dumps(others, sort_keys=True, ensure_ascii=False, indent=0).encode() + b"\n"
    return {**kept, FILES_NAME: {"bytes": len(table), **hash_bytes(table, ["xxh3_128"])}}, table


def _mapping(stated: object) -> Mapping[str, Any]:
    return stated if isinstance(stated, Mapping) else {}


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # imported late: slow, and not needed to open a dataset

    return TypeAdapter(kind)


def _checked(kind: Any, data: object, key: str, where: str) -> Any:
    """Convert plain data, the card's value at `key`, to `kind`. Raises ShardError that names a wrong key."""
    try:
        return _adapter(kind).validate_json(json.dumps(data), strict=True)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if errors := getattr(error, "errors", None):
            [first, *_] = errors(include_url=False)
            problem = f"{'.'.join(map(str, (key, *first['loc'])))}: {first['msg']}"
        raise ShardError(where, f"is not in the form that `shardkit build` writes: {problem}") from error
