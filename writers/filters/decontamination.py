"""Decontamination: drop, cut or mark documents that contain a run of words of an evaluation set.

With `questions`, documents are judged by questions, answers and passages instead (`questions.py`).

A document overlaps an item if both contain the same `ngram` consecutive normalized words (13, as for GPT-3),
or if it contains all words of a shorter item; items of fewer than `min_item_words` words are ignored. Words
are normalized as for near-duplicate removal (`kernels/words.py`): lower case, without punctuation.

64-bit hashes find candidates fast, and comparing the words confirms them, so no document counts as
contaminated by a chance collision. If two n-grams of the evaluation sets share a hash, only the first is
stored: an overlap is missed with probability (number of n-grams) / 2^64.

With `cut`, only the overlap and a margin on both sides are removed, as for GPT-3 (Brown et al. 2020, appendix
C). Pieces between cuts are kept if they are long enough; a document with too many pieces is dropped.

Every overlap is reported: after `judge` or `edit`, `take_rows` returns the spans of the documents, which the
build writes to a file next to the dataset.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardkit.errors import RecipeError
from shardkit.files import FileVersion
from shardkit.settings import Listed, StrictModel
from shardkit.writers.filters.base import Edit, FilterSettings, Rule, above, version_of
from shardkit.writers.filters.evaluations import (
    WORDS,
    EvaluationConfig,
    EvaluationRecord,
    field_value,
    joined,
    plain_text,
    read_records,
    report_rows,
)
from shardkit.writers.filters.questions import QuestionFilter, QuestionsConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch


_OF_RUNS = ("ngram", "min_item_words", "min_matches")  # settings that must not be given with `questions`
_JOINT = "\n\n"  # separator between the remaining pieces of a cut document
_BITS_PER_KEY = 16  # filter bits per stored hash; one of 16 hashes that are not stored passes the filter


class CutConfig(StrictModel):
    """Settings for cutting overlaps out of a document. Characters are code points."""

    margin: int = Field(default=200, ge=0, description="Characters also cut on each side of an overlap.")
    min_piece: int = Field(default=200, ge=1, description="Minimum characters of a piece that is kept.")
    max_pieces: int = Field(default=10, ge=1, description="Documents with more pieces are dropped.")


class DecontaminationConfig(FilterSettings):
    """Settings of `decontamination`: the evaluation sets, and what counts as an overlap with them."""

    evaluations: Listed[EvaluationConfig] = Field(min_length=1, description="Files of evaluation items.")
    ngram: int = Field(default=13, ge=1, le=64, description="Number of equal words in a row in an overlap.")
    min_item_words: int = Field(
        default=8, ge=1, description="Shorter items are ignored; items of up to ngram words match as a whole."
    )
    min_matches: int = Field(
        default=1, ge=1, description="Minimum overlapping n-grams in a document that is dropped or cut."
    )
    action: Literal["drop", "mark"] = Field(
        default="drop", description="drop: drop documents with overlaps; mark: only report the overlaps."
    )
    cut: CutConfig | None = Field(
        default=None,
        description="Cut overlaps out instead of dropping documents; {} uses the values for GPT-3.",
        examples=[{"margin": 200, "min_piece": 200, "max_pieces": 10}],
    )
    questions: QuestionsConfig | None = Field(
        default=None,
        description="Instead of runs of words, find questions with their answers and passages, as in decon.",
        examples=[{"threshold": 0.8, "long_question": 20}],
    )

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `cut` and `questions` if None, as in old recipes, and keys that `questions` replaces."""
        left_out = set(_OF_RUNS) if self.questions is not None else set()
        left_out |= {key for key in ("cut", "questions") if getattr(self, key) is None}
        return {key: value for key, value in handler(self).items() if key not in left_out}

    @model_validator(mode="after")
    def _either(self) -> Self:
        if self.cut is not None and self.action == "mark":
            raise ValueError("cut: has no effect with `action: mark`; leave out one of the two")
        if self.questions is None:
            if roles := [role for one in self.evaluations for role in one.roles()]:
                raise ValueError(
                    f"evaluations: {roles[0]} needs `questions`; add `questions: {{}}`, or use fields instead"
                )
            return self
        if self.cut is not None:
            raise ValueError(
                "cut: does not work with `questions`, which finds no exact bounds; leave out one of the two"
            )
        if given := [key for key in _OF_RUNS if key in self.model_fields_set]:
            raise ValueError(f"{given[0]}: no effect with `questions`; set it in `questions` or leave it out")
        if any(one.fields != ("text",) for one in self.evaluations):
            raise ValueError(
                "evaluations: fields has no effect with `questions`; name question, answer and passage"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [one.name or one.path for one in self.evaluations]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two evaluations have the same name among {', '.join(names)}; set `name` of one"
            )
        return self

    @property
    def may_edit(self) -> bool:
        """See FilterSettings.may_edit."""
        return self.cut is not None

    def build(self, folder: Path) -> DecontaminationFilter | DecontaminationEditor | QuestionFilter:
        """See FilterSettings.build."""
        if self.questions is not None:
            return QuestionFilter(self.questions, self.evaluations, folder, drops=self.action == "drop")
        found = DecontaminationFilter(self, folder)
        return found if self.cut is None else DecontaminationEditor(self, self.cut, found)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return tuple(one.path for one in self.evaluations)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A span of words that a document shares with an item: words begin to end - 1 of the document.

    `item_begin`: index of the first shared word in the item.
    """

    evaluation: str
    item: int  # line of the item in its file, from 0
    begin: int
    end: int
    item_begin: int


class DecontaminationFilter:
    """Drops or marks documents that overlap an evaluation set. Raises RecipeError for a bad file."""

    reasons = ("overlap", "item")
    side_file = "decontamination.jsonl"

    def __init__(self, config: DecontaminationConfig, folder: Path) -> None:
        from shardkit.writers.kernels.words import normalized_words

        self._config = config
        self._items, self._tables = _load(config, folder)
        self._words = lru_cache(maxsize=256)(lambda item: normalized_words(self._items[item].text))
        self._rows: list[dict[str, Any]] = []

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Values: number of overlapping n-grams; first item, "<evaluation>:<line>"."""
        rows, texts = batch.wanted_texts()
        counts = np.zeros(len(batch), np.int64)
        first = np.full(len(batch), "", np.object_)
        self._rows = []
        for at, matches, overlaps in self.overlaps(texts):
            number = int(rows[at])
            counts[number] = matches
            first[number] = f"{overlaps[0].evaluation}:{overlaps[0].item}"
            self._rows += _rows(batch, number, overlaps)
        drops = self._config.action == "drop"
        return [
            Rule(
                "overlap",
                counts >= self._config.min_matches if drops else None,
                counts,
                self._config.min_matches,
                first,
            ),
            Rule("item", None, first),
        ]

    def take_rows(self) -> list[dict[str, Any]]:
        """Return and clear the overlaps that the last `judge` found. See SideOutput.take_rows."""
        rows, self._rows = self._rows, []
        return rows

    def overlaps(self, texts: pa.LargeStringArray) -> Iterator[tuple[int, int, list[Overlap]]]:
        """Yield (index, number of overlapping n-grams, spans) of each text that overlaps an item."""
        from shardkit.writers.kernels.hash_tables import find_matches
        from shardkit.writers.kernels.shingles import Ngrams, shingle_batch
        from shardkit.writers.kernels.words import normalized_words

        matches: dict[int, list[tuple[int, int, int, int]]] = {}
        for table in self._tables:
            hashes, offsets = shingle_batch(texts, Ngrams(table.ngram))
            candidates = find_matches(hashes, table.bits, table.keys, table.places)
            owners = np.searchsorted(offsets, candidates[:, 0], side="right") - 1
            candidates[:, 0] -= offsets[owners]
            for text in np.unique(owners).tolist():
                words = normalized_words(texts[text].as_py())
                found = self._confirmed(words, candidates[owners == text], table)
                matches.setdefault(text, []).extend(found)
        for text, found in sorted(matches.items()):
            if found:
                yield text, len(found), self._spans(sorted(found))

    def _confirmed(
        self, words: Sequence[str], candidates: npt.NDArray[np.int64], table: HashTable
    ) -> list[tuple[int, int, int, int]]:
        """Return (begin, length, item, begin in item) of the candidates whose words equal the item's words.

        `candidates`: pairs of a word index in the document and an n-gram number in the table.
        """
        found = []
        for begin, number in candidates.tolist():
            item, item_begin = table.place(number)
            theirs = self._words(item)[item_begin : item_begin + table.ngram]
            if words[begin : begin + table.ngram] == theirs:
                found.append((begin, table.ngram, item, item_begin))
        return found

    def _spans(self, found: Sequence[tuple[int, int, int, int]]) -> list[Overlap]:
        """Merge n-grams that overlap or adjoin, at the same distance in document and item, into spans."""
        spans: list[Overlap] = []
        for begin, length, number, item_begin in found:
            item, last = self._items[number], spans[-1] if spans else None
            same = last is not None and (last.evaluation, last.item) == (item.evaluation, item.record)
            if last and same and begin - last.begin == item_begin - last.item_begin and begin <= last.end:
                spans[-1] = Overlap(last.evaluation, last.item, last.begin, begin + length, last.item_begin)
            else:
                spans.append(Overlap(item.evaluation, item.record, begin, begin + length, item_begin))
        return spans


class DecontaminationEditor:
    """Cuts overlaps with an evaluation set out of documents."""

    reasons = ("nothing_left", "too_many_pieces", "item")
    edits = ("overlap",)
    side_file = DecontaminationFilter.side_file

    def __init__(self, config: DecontaminationConfig, cut: CutConfig, found: DecontaminationFilter) -> None:
        self._least, self._cut, self._found = config.min_matches, cut, found
        self._rows: list[dict[str, Any]] = []

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit. Cut texts are in Unicode form NFC. Values: number of pieces; first item."""
        import pyarrow as pa

        pieces = np.ones(len(batch), np.int64)
        first = np.full(len(batch), "", np.object_)
        nothing = np.zeros(len(batch), np.bool_)
        rows, texts = batch.wanted_texts()
        new: dict[int, str] = {}
        self._rows = []
        for at, matches, overlaps in self._found.overlaps(texts):
            number = int(rows[at])
            self._rows += _rows(batch, number, overlaps)
            if matches < self._least:
                continue
            first[number] = f"{overlaps[0].evaluation}:{overlaps[0].item}"
            left, pieces[number] = cut_out(texts[at].as_py(), overlaps, self._cut)
            nothing[number] = not left
            if left and pieces[number] <= self._cut.max_pieces:
                new[number] = left
        edited = [new.get(row, text) for row, text in enumerate(batch.texts.to_pylist())] if new else None
        made = batch.texts if edited is None else pa.array(edited, pa.large_string())
        cut = np.zeros(len(batch), np.int64)
        for number in new:
            cut[number] = batch.sizes[number] - len(new[number].encode())
        rules = [
            Rule("nothing_left", nothing, labels=first),
            replace(above("too_many_pieces", pieces, self._cut.max_pieces), labels=first),
            Rule("item", None, first),
        ]
        return Edit(made, rules, {"overlap": cut})

    def take_rows(self) -> list[dict[str, Any]]:
        """Return and clear the overlaps that the last `edit` found. See SideOutput.take_rows."""
        rows, self._rows = self._rows, []
        return rows


def cut_out(text: str, overlaps: Sequence[Overlap], cut: CutConfig) -> tuple[str, int]:
    """Cut overlaps out of a text; return the kept pieces, joined, in Unicode form NFC, and their number."""
    text = unicodedata.normalize("NFC", text)
    edges = [match.span() for match in WORDS.finditer(text)]
    spans = sorted((edges[one.begin][0], edges[one.end - 1][1]) for one in overlaps)
    pieces, start = [], 0
    for begin, end in spans:
        pieces.append(text[start : max(start, begin - cut.margin)])
        start = max(start, end + cut.margin)
    pieces.append(text[start:])
    kept = [piece for piece in pieces if len(piece) >= cut.min_piece]
    return _JOINT.join(kept), len(kept)


def _load(config: DecontaminationConfig, folder: Path) -> tuple[list[EvaluationItem], list[HashTable]]:
    versions = [version_of(folder / path, "decontamination.evaluations") for path in config.files()]
    return _load_cached(config, folder, tuple(versions))


@lru_cache(maxsize=2)
def _load_cached(
    config: DecontaminationConfig, folder: Path, _versions: tuple[FileVersion, ...]
) -> tuple[list[EvaluationItem], list[HashTable]]:
    """Load items and tables; the process's next task reuses them if the files have not changed."""
    items = read_items(config, folder)
    return items, make_tables(items, config)


def _rows(batch: TextBatch, number: int, overlaps: Sequence[Overlap]) -> Iterator[dict[str, Any]]:
    return report_rows(batch, number, ((one.begin, one.end, asdict(one)) for one in overlaps))


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """One evaluation item: the name of its set, its line in the file (from 0), and its text."""

    evaluation: str
    record: int
    text: str


@dataclass(frozen=True, slots=True)
class HashTable:
    """A hash table of the n-grams of `ngram` words of some items; n-grams are numbered item by item.

    `bits` is a Bloom filter, which rejects most hashes that are not in the table. keys[slot] is the hash of
    n-gram number places[slot] (-1: empty slot). N-gram number g belongs to item items[i], and begins at the
    item's word g - first[i], where i is the last index with first[i] <= g. Of equal n-grams, the first is
    stored.
    """

    ngram: int
    bits: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    def place(self, ngram: int) -> tuple[int, int]:
        """Return the item of n-gram number `ngram`, and the index of the item's word at which it begins."""
        at = int(np.searchsorted(self.first, ngram, side="right")) - 1
        return int(self.items[at]), ngram - int(self.first[at])


def read_items(config: DecontaminationConfig, folder: Path) -> list[EvaluationItem]:
    """Read all items. Raises RecipeError if a file or a line cannot be read."""
    return [
        _item(record, one) for one in config.evaluations for record in read_records(one, folder / one.path)
    ]


def _item(record: EvaluationRecord, config: EvaluationConfig) -> EvaluationItem:
    text = record.content
    if not isinstance(text, str):
        texts = [joined(field_value(record.content, field)) for field in config.fields]
        if all(text is None for text in texts):
            raise RecipeError(
                f"{record.where} has no text under {', '.join(config.fields)}; "
                "set fields to the names of text fields in your file"
            )
        text = plain_text("\n".join(filter(None, texts)))
    return EvaluationItem(config.label, record.number, text)


def make_tables(items: Sequence[EvaluationItem], config: DecontaminationConfig) -> list[HashTable]:
    """Make one table of n-grams of `config.ngram` words, and one for items of each shorter length."""
    import pyarrow as pa

    from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

    texts = pa.array([item.text for item in items], pa.large_string())
    lengths = np.diff(shingle_batch(texts, Ngrams(1)).offsets)
    tables = []
    for size in range(min(config.min_item_words, config.ngram), config.ngram + 1):
        chosen = lengths >= size if size == config.ngram else lengths == size
        numbers = np.flatnonzero(chosen & (lengths >= config.min_item_words))
        if len(numbers):
            tables.append(_table(texts.take(pa.array(numbers)), size, numbers))
    return tables


def _table(texts: pa.LargeStringArray, size: int, numbers: npt.NDArray[np.int64]) -> HashTable:
    from shardkit.writers.kernels.hash_tables import fill_places
    from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

    hashes, offsets = shingle_batch(texts, Ngrams(size))
    slots = 1 << (2 * len(hashes)).bit_length()
    bits = np.zeros(max(1, slots * _BITS_PER_KEY // 128), np.uint64)
    keys, places = np.zeros(slots, np.uint64), np.full(slots, -1, np.int64)
    fill_places(hashes, bits, keys, places)
    return HashTable(size, bits, keys, places, numbers, offsets[:-1])
