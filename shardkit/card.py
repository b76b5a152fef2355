"""The card of a dataset, `dataset.json`: what the dataset says of itself.

`DatasetCard` is its only reader. Opening a dataset parses the JSON and checks nothing else: cards of
conversions, of other versions and of other tools have only some of what builds write, and keys that this
version does not know stay in `data`. What a card says is read in two ways:

    lenient   `tokenizer`, `source_labels`: None or empty where the card does not state it
              soundly, so that any dataset can be opened and trained on
    checked   `tokens`, `funnel`, `inputs` and all else that builds write: by pydantic, at the first read;
              ShardError names the key that is wrong, and a damaged section harms only its readers

The bytes of a build's card are JSON with sorted keys: the same facts are the same bytes. It lists the files
beside the shards; where these are more than MOST_LISTED, files.json lists them, and the card only that one.
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
MAX_CARD_BYTES = 64 << 20  # of those that older versions made for 500,000 files
MAX_FILES_BYTES = 1 << 30  # eight million files
MOST_LISTED = 1000
_OTHERS = ("split", "output")  # reasons of documents that other datasets of a build have
_DUPLICATES = ("url_duplicate", "exact_duplicate", "duplicate_lines", "near_duplicate")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Count:
    """A number of documents, and of bytes of text in them."""

    documents: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.documents + other.documents, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer of a dataset, and `path`, where the recipe says that it is."""

    file: str | None = None
    digest: str | None = None
    eos: str | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class FunnelCounts:
    """What became of records: read = kept + dropped (by rule) + quarantined (by error)."""

    read: Count
    kept: Count
    dropped: dict[str, Count]
    quarantined: dict[str, Count]


@dataclass(frozen=True, slots=True)
class LanguageCounts:
    """Documents that were kept, and tokens in them."""

    documents: int = 0
    tokens: int = 0

    def __add__(self, other: LanguageCounts) -> LanguageCounts:
        return LanguageCounts(self.documents + other.documents, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class InputFacts:
    """An input of the recipe; `languages` is None if no filter determines languages."""

    source: str
    files: int
    bytes: int
    digest: str
    funnel: FunnelCounts
    tokens: int = 0  # cards of the first versions lack this and `languages`
    languages: dict[str, LanguageCounts] | None = None


@dataclass(frozen=True, slots=True)
class ExcerptFacts:
    """The beginning of a document as it was when a rule dropped it."""

    file: str
    record: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts(Count):
    """What the rule "<filter>/<rule>" dropped first; `alone`: how many of the sampled documents fail it."""

    rule: str
    alone: int
    excerpts: list[ExcerptFacts]


@dataclass(frozen=True, slots=True)
class EditFacts:
    """Bytes that "<filter>/<edit>" cut out of texts; negative where they grew."""

    edit: str
    bytes: int


@dataclass(frozen=True, slots=True)
class CounterFacts:
    """What "<filter>/<name>" counted, such as redacted addresses."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class FilterFacts:
    """Rules in the order in which they were tried; all judged `sampled` documents, one in `one_in`.

    `languages` are documents by language and by the rule that dropped them, "" for those that stayed; {}
    unless the recipe has settings by language.
    """

    sampled: int
    one_in: int
    rules: list[RuleFacts]
    cut: list[EditFacts]
    counts: list[CounterFacts]
    languages: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NearFacts:
    """How near-duplicates were found. `against` are names of dedup indexes, `indexes` their digests."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoss(Count):
    """What a stage of duplicate removal took."""

    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoss(Count):
    """What the first stage was given of an input, and what all stages removed of it, by reason."""

    source: str
    removed: dict[str, Count]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """How many documents that stayed stand for "1", "2", "3-10" ... documents."""

    copies: str
    groups: int


@dataclass(frozen=True, slots=True)
class DedupFacts:
    """What duplicate removal did, by stage in the order in which they ran."""

    near: NearFacts | None
    stages: list[StageLoss]
    sources: list[SourceLoss]
    groups: list[GroupFacts]
    largest_group: int


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """How scores became labels, which are the `field` of documents' metadata.

    A score is in the bin that is the number of its `edges` that it reaches; bins are combined by `combine`,
    "max" or "mean", and `labels` are the least combined bin of each, null: the bin is the label. `sampled` of
    `documents` gave the edges; 0 of 0: the recipe did.
    """

    field: str
    combine: str
    labels: dict[str, float] | None
    edges: dict[str, list[float]]
    sampled: int
    documents: int


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """The parts of a split: this dataset is `part`, "train" being what is left of the others.

    `documents` are those of each part; `proposed` were drawn for it, of which `alike` are like another
    document, and so stay in train.
    """

    part: str
    documents: dict[str, int]
    proposed: dict[str, int]
    alike: dict[str, int]
    similarity: float


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """What a step lost, and what it left: documents and bytes of text.

    `kind` is "read", "quarantined", "dropped" or "kept". Editors lose bytes of documents that stay, and may
    add some: then `lost_bytes` is negative.
    """

    kind: str
    label: str
    lost_documents: int
    lost_bytes: int
    documents: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Bin:
    """How many values lie from `low` to `high`, both included, and what they add up to."""

    low: int
    high: int
    count: int
    sum: int

    @property
    def label(self) -> str:
        """ "0", "1", "2-3", "1,024-2,047"."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


@dataclass(slots=True)
class Histogram:
    """`counts[b]` values of b bits each, which add up to `sums[b]`; neither ends in a bin without values.

    Bin 0 holds the value 0, bin b the values from 2^(b-1) to 2^b - 1. So no range has to be known before, 64
    bins hold anything, counts and sums are exact, and those of parts add up.
    """

    counts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> Histogram:
        """The histogram of integers [n] from 0; their sum is below 2^53."""
        bits = np.frexp(values.astype(np.float64))[1]  # the exponent of a whole number is its bits; 0 has 0
        sums = np.bincount(bits, values).astype(np.int64)
        return cls(np.bincount(bits).tolist(), sums.tolist())

    def add(self, other: Histogram) -> None:
        """Add what another part counted."""
        self.counts = [a + b for a, b in zip_longest(self.counts, other.counts, fillvalue=0)]
        self.sums = [a + b for a, b in zip_longest(self.sums, other.sums, fillvalue=0)]

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def sum(self) -> int:
        """The sum of all values."""
        return sum(self.sums)

    def bins(self) -> list[Bin]:
        """From the first to the last bin that holds a value."""
        first = next((number for number, count in enumerate(self.counts) if count), 0)
        pairs = list(enumerate(zip(self.counts, self.sums, strict=True)))[first:]
        return [Bin(1 << b - 1 if b else 0, (1 << b) - 1, count, total) for b, (count, total) in pairs]

    def to_dict(self) -> dict[str, list[int]]:
        """Plain data."""
        return {"counts": self.counts, "sums": self.sums}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """The inverse of `to_dict`."""
        return cls(list(data["counts"]), list(data["sums"]))


class _Stated(Generic[_T]):
    """What builds write under a key of this name, checked at each read."""

    def __init__(self, kind: type[_T] | UnionType) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, card: DatasetCard, owner: type) -> _T:
        if self._name not in card.data:
            raise ShardError(card.where, f"has no {self._name!r}, which `shardkit build` writes")
        found: _T = _checked(self._kind, card.data[self._name], self._name, card.where)
        return found


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """A card; `data` is all that it says, as plain data. `where` is the file, for errors."""

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
    recipe = _Stated(dict[str, Any])  # without the keys that decide no byte
    recipe_digest = _Stated(str)
    inputs = _Stated(list[InputFacts])
    funnel = _Stated(FunnelCounts)
    dedup = _Stated[DedupFacts | None](DedupFacts | None)
    filters = _Stated[FilterFacts | None](FilterFacts | None)
    filter_files = _Stated(dict[str, str])  # digests of word lists and models
    packing = _Stated(dict[str, int])
    histograms = _Stated(dict[str, Histogram])  # "lengths" of documents, "row_padding", "row_pieces"
    split = _Stated(SplitFacts)
    buckets = _Stated(BucketFacts)

    @classmethod
    def read(cls, file: Path) -> DatasetCard | None:
        """The card in a file; None if there is no such file, ShardError if it cannot be read."""
        if not file.is_file():
            return None
        try:
            with file.open("rb") as opened:
                return cls.parse(str(file), opened.read(MAX_CARD_BYTES + 1))
        except OSError as error:
            raise ShardError(file, f"cannot be read: {error}") from error

    @classmethod
    def parse(cls, where: str, text: bytes) -> DatasetCard:
        """The card in the bytes of a file; ShardError if it is no JSON object, or too large."""
        if len(text) > MAX_CARD_BYTES:
            raise ShardError(where, f"a dataset's card is larger than {MAX_CARD_BYTES:,} bytes")
        try:
            data = load_json(text)
        except (ValueError, RecursionError) as error:
            raise ShardError(where, f"cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise ShardError(where, "a dataset's card must be a JSON object")
        return cls(data, where)

    def to_bytes(self) -> bytes:
        """The card as builds store it."""
        return json.dumps(self.data, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    def has(self, *keys: str) -> bool:
        """Whether the card states all of these, and none as null or empty."""
        return all(self.data.get(key) not in (None, "", [], {}) for key in keys)

    def check_fingerprint(self, fingerprint: str) -> None:
        """ShardError if the card states another one, and so is the card of other shards."""
        stated = self.data.get("fingerprint", fingerprint)
        if stated != fingerprint:
            problem = f"is the card of another dataset: fingerprint {stated}, index {fingerprint}"
            raise ShardError(self.where, problem)

    @property
    def tokenizer(self) -> TokenizerFacts:
        """The tokenizer, as far as the card states it soundly."""
        kinds = {"file": str, "digest": str, "eos": str, "eos_id": int, "bos_id": int}
        stated, recipe = _mapping(self.data.get("tokenizer")), _mapping(self.data.get("recipe"))
        facts: dict[str, Any] = {k: stated[k] for k, kind in kinds.items() if type(stated.get(k)) is kind}
        path = _mapping(recipe.get("tokenizer")).get("path")
        return TokenizerFacts(**facts, path=path if isinstance(path, str) else None)

    @property
    def source_labels(self) -> list[str]:
        """The recipe's labels of its inputs, by number."""
        inputs = self.data.get("inputs")
        return [
            str(_mapping(entry).get("source", number))
            for number, entry in enumerate(inputs if isinstance(inputs, list) else ())
        ]

    @property
    def files_table(self) -> FileInfo | None:
        """files.json, if the card leaves the list of its files to it."""
        return self.file(FILES_NAME) if FILES_NAME in self.file_names else None

    def with_files(self, table: bytes) -> DatasetCard:
        """The card with the files that its files.json lists; ShardError if that is not the one it states."""
        stated = self.files_table
        where = f"{self.where.removesuffix(CARD_NAME)}{FILES_NAME}"
        if stated is None or (stated.bytes, stated.hashes) != (len(table), hash_bytes(table, stated.hashes)):
            raise ShardError(where, "is damaged, or of another dataset: its hash is not the one in the card")
        try:
            listed = load_json(table)
        except (ValueError, RecursionError) as error:
            raise ShardError(where, f"cannot be read: {error}") from error
        if not isinstance(listed, dict) or not listed.keys().isdisjoint(self.file_names):
            raise ShardError(where, "must map names that the card does not have to sizes and hashes")
        return DatasetCard({**self.data, "files": {**self.data["files"], **listed}}, self.where)

    @property
    def file_names(self) -> list[str]:
        """The files beside the shards: provenance, report, quarantine."""
        files = self.data.get("files", {})
        if not isinstance(files, Mapping):
            raise ShardError(self.where, "`files` must map names to sizes and hashes")
        return list(files)

    def file(self, name: str) -> FileInfo:
        """Size and hashes of one of `file_names`; ShardError if they are not sound."""
        return stated_file(name, self.data["files"][name], self.where)

    def languages(self) -> dict[str, LanguageCounts]:
        """Counts of all inputs by language, most tokens first; {} if no filter determined languages."""
        total: dict[str, LanguageCounts] = {}
        for each in self.inputs:
            for label, counts in (each.languages or {}).items():
                total[label] = total.get(label, LanguageCounts()) + counts
        return dict(sorted(total.items(), key=lambda item: (-item[1].tokens, item[0])))

    def funnel_steps(self) -> list[FunnelStep]:
        """The funnel as steps in the order in which a build takes them; those that lost nothing are left out.

            read -> quarantined -> lost while reading -> each filter -> duplicates by kind
                 -> other parts of the split -> empty -> kept

        Rules of one filter are one step: which of them took how much is in `filters`.
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
    """Return blocks.bin as the index states it, or the card of these shards; None if neither does.

    Older versions state it in the card only, and a store that hides the card once would hide it, too.
    """
    if manifest.blocks is not None or card is None:
        return manifest.blocks
    is_own = card.data.get("fingerprint") == manifest.fingerprint
    return card.file(BLOCKS_NAME) if is_own and BLOCKS_NAME in _mapping(card.data.get("files")) else None


def listed_files(files: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Any], bytes | None]:
    """(`files` of a card for {name: size and hashes}, files.json or None if the card has them all).

    blocks.bin stays in the card, which is read when a dataset is opened; files.json is not.
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
    from pydantic import TypeAdapter  # slow to import, and not needed to open a dataset

    return TypeAdapter(kind)


def _checked(kind: Any, data: object, key: str, where: str) -> Any:
    """Plain data as `kind`; ShardError names the key that is wrong."""
    try:
        return _adapter(kind).validate_json(json.dumps(data), strict=True)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if errors := getattr(error, "errors", None):
            [first, *_] = errors(include_url=False)
            problem = f"{'.'.join(map(str, (key, *first['loc'])))}: {first['msg']}"
        raise ShardError(where, f"is not as `shardkit build` writes it: {problem}") from error
