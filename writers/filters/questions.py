"""Decontamination by questions: find documents that repeat a question together with its answer or passage.

The method follows decon (https://github.com/allenai/decon, doc/simple-details.md), which cleaned the data of
OLMo 3. An item has a question, and may have an answer and a passage. Words are normalized as for
near-duplicate removal. An n-gram's weight is its inverse document frequency ln((N + 1) / df), where N is the
number of distinct questions (or answers, or passages) and df is how many of them contain the n-gram. With
`unit: auto` each character of a script without spaces is a word.

1. A cluster is a stretch of the document that begins and ends with n-grams of a question (`ngram` words) and
   has at most `max_misses` other n-grams in a row (`kernels/question_clusters.py`).
2. O_q, the question's overlap: the weight of its distinct n-grams in the cluster, divided by the weight of
   all its distinct n-grams.
3. O_a, the answer's overlap: the same ratio for the answer's trigrams in the words after the cluster,
   `answer_window` of them, or twice as many as the answer has if that is more. An answer of fewer than three
   words is one n-gram.
4. O_p, the passage's overlap: the same ratio for the passage's 4-grams in the words on both sides of the
   cluster, on each side as many as the passage has, plus 100.
5. S = w_q O_q + w_a O_a + w_p O_p. The weights are 0.7, 0.2, 0.1; 0.75, 0.25 without a passage; 0.85, 0.15
   without an answer; 1 for a question alone. A question of Q < 20 distinct n-grams keeps the fraction
   1/2 + Q/40 of its weight; the rest is divided equally between the other parts. Then, if there is a passage,
   an answer of A < 4 words keeps the fraction 1/2 + A/8 of its weight; the rest goes to the passage.
6. If the question has at least `long_question` words, S is at least O_q: it counts without its answer.
7. If S < 1, and the item has fewer than 40 words, S is multiplied by threshold / T, where T falls from 1 at
   15 words to the threshold at 40 words: short items must match perfectly.

A document contains the item if O_q >= 1/2 and S >= `threshold`. Differences: decon counts tokens of
cl100k_base instead of words, samples n-grams instead of looking up all, and does not have step 6.

Weights are integers (billionths), so sums do not depend on the order of items, and overlaps and scores are
rounded to six decimals. Equal questions are one question with several answers, so repeated items do not
change scores. n-grams are compared by 64-bit hashes: a score needs many n-grams, so chance collisions of
hashes cannot produce one. Clusters that cannot reach the threshold with any answer are not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.errors import RecipeError
from shardkit.files import FileVersion
from shardkit.settings import Ratio, StrictModel
from shardkit.writers.filters.base import Rule, version_of
from shardkit.writers.filters.evaluations import (
    EvaluationConfig,
    EvaluationRecord,
    field_value,
    joined,
    plain_text,
    read_records,
    report_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch
    from shardkit.writers.kernels.question_clusters import QuestionGrams
    from shardkit.writers.kernels.shingles import Ngrams


_ANSWER_NGRAM, _PASSAGE_NGRAM = 3, 4
_PASSAGE_DISTANCE = 100  # maximum number of words between a question and its passage
_FULL_QUESTION, _FULL_ANSWER = 20, 4  # distinct n-grams of a question, words of an answer, for full weight
_PERFECT_WORDS, _ENOUGH_WORDS = 15, 40  # words of items in step 7; decon uses 20 and 50 tokens
_LEAST_OVERLAP = 0.5  # minimum overlap of a question
_UNIT = 10**9  # the integer that represents a weight of 1
_DECIMALS = 6  # overlaps and scores are rounded to this many decimals, so that 1/2 is exactly 1/2
_BITS_PER_KEY = 16  # filter bits per stored hash


class QuestionsConfig(StrictModel):
    """Settings of `questions`: how questions are found, and when a document contains one."""

    threshold: Ratio = Field(
        default=0.8, gt=0, description="Minimum score at which a document contains an item."
    )
    ngram: int = Field(default=4, ge=1, le=64, description="Number of words in an n-gram of a question.")
    unit: Literal["words", "auto"] = Field(
        default="words",
        description="words, or auto, in which each Chinese, Japanese, Thai, Lao, Khmer or Burmese character "
        "is a word.",
    )
    min_item_words: int = Field(
        default=15,
        ge=1,
        description="Items with fewer words in question, answer and passage together are ignored, and so "
        "are questions of fewer than `ngram` words.",
    )
    max_misses: int = Field(
        default=11, ge=0, description="Maximum number of other n-grams in a row in a repeated question."
    )
    long_question: int | None = Field(
        default=20,
        ge=1,
        description="Questions of at least this many words count without their answer; null: never, as in "
        "decon.",
    )
    answer_window: int = Field(
        default=50, ge=1, description="Number of words after a question in which its answer is searched."
    )


@dataclass(frozen=True, slots=True)
class Item:
    """An evaluation item: indexes of its question, answer and passage (-1: none) among the distinct texts.

    `evaluation`: name of its evaluation set. `record`: line or row of the item in its file, from 0.
    """

    question: int
    answer: int
    passage: int
    evaluation: str
    record: int


@dataclass(frozen=True, slots=True)
class QuestionMatch:
    """A place where a document contains an item: words begin to end - 1 repeat the item's question.

    `score` is S; `question`, `answer` and `passage` are overlaps, None if the item has no such part.
    """

    evaluation: str
    item: int  # line or row of the item in its file, from 0
    begin: int
    end: int
    score: float
    question: float
    answer: float | None
    passage: float | None


class QuestionFilter:
    """Drops or marks documents that contain an item. Raises RecipeError for a bad file."""

    reasons = ("question", "item")
    side_file = "decontamination.jsonl"

    def __init__(
        self, config: QuestionsConfig, evaluations: Sequence[EvaluationConfig], folder: Path, *, drops: bool
    ) -> None:
        versions = [version_of(folder / one.path, "decontamination.evaluations") for one in evaluations]
        self._config, self._drops = config, drops
        self._index = _load(config, tuple(evaluations), folder, tuple(versions))
        self._rows: list[dict[str, Any]] = []

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Values: the best score; the item with this score, "<evaluation>:<line>"."""
        from shardkit.writers.kernels.shingles import UNIT_PATTERNS

        rows, texts = batch.wanted_texts()
        scores = np.zeros(len(batch), np.float64)
        items = np.full(len(batch), "", np.object_)
        self._rows = []
        for at, matches in self._index.matches(texts):
            number, best = int(rows[at]), max(matches, key=lambda match: match.score)
            scores[number], items[number] = best.score, f"{best.evaluation}:{best.item}"
            spans = ((one.begin, one.end, asdict(one)) for one in matches)
            self._rows += report_rows(batch, number, spans, UNIT_PATTERNS[self._config.unit])
        threshold = self._config.threshold
        return [
            Rule("question", scores >= threshold if self._drops else None, scores, threshold, items),
            Rule("item", None, items),
        ]

    def take_rows(self) -> list[dict[str, Any]]:
        """Return and clear the items that the last `judge` found. See SideOutput.take_rows."""
        rows, self._rows = self._rows, []
        return rows


class Grams(NamedTuple):
    """Word counts and distinct n-grams of n texts. Text i has words[i] words.

    Its n-grams have the hashes[offsets[i]:offsets[i + 1]], ascending, and `weights` in the same order.
    """

    words: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    weights: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def overlap(self, number: int, others: npt.NDArray[np.uint64]) -> float:
        """Return the overlap of text `number`: the weight of its n-grams in `others` / weight of all."""
        chosen = slice(self.offsets[number], self.offsets[number + 1])
        hashes, weights = self.hashes[chosen], self.weights[chosen]
        if not len(hashes):
            return 0.0
        places = np.searchsorted(hashes, others) % len(hashes)
        is_there = np.zeros(len(hashes), np.bool_)
        is_there[places[hashes[places] == others]] = True
        return round(int(weights[is_there].sum()) / int(weights.sum()), _DECIMALS)


@dataclass(frozen=True, slots=True)
class _Seeds:
    """A hash table (`kernels/hash_tables.py`) of the n-grams that can start a cluster: see `_seeds`."""

    bits: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]


class QuestionIndex:
    """An index of evaluation items, which finds the texts that contain an item."""

    def __init__(
        self,
        config: QuestionsConfig,
        items: Sequence[Item],
        questions: Grams,
        answers: Grams,
        passages: Grams,
    ) -> None:
        self._config = config
        self._questions, self._answers, self._passages = questions, answers, passages
        self._items: list[list[Item]] = [[] for _ in questions.words]
        needs = np.full(len(questions.words), np.inf)
        for item in items:
            self._items[item.question].append(item)
            needs[item.question] = min(needs[item.question], self._need(item))
        self._totals = np.add.reduceat(questions.weights, questions.offsets[:-1]) if len(needs) else needs
        wanted = np.floor((needs - 10**-_DECIMALS) * self._totals).astype(np.int64)
        self._seeds, self._grams = _seeds(questions, self._totals.astype(np.int64), wanted)

    def _sizes(self, item: Item) -> _Sizes:
        grams = self._questions.offsets
        return _Sizes(
            int(grams[item.question + 1] - grams[item.question]),
            int(self._questions.words[item.question]),
            None if item.answer < 0 else int(self._answers.words[item.answer]),
            None if item.passage < 0 else int(self._passages.words[item.passage]),
        )

    def _need(self, item: Item) -> float:
        """Return the minimum overlap of the item's question at which its score can reach the threshold."""
        sizes = self._sizes(item)
        least = _required(sizes.total, self._config.threshold)
        share = _shares(sizes)[0]
        # The overlap needed if answer and passage match fully. It is at most `least`, which is needed by a
        # long question without them.
        return max(_LEAST_OVERLAP, 1 - (1 - least) / share)

    def matches(self, texts: pa.LargeStringArray) -> Iterable[tuple[int, list[QuestionMatch]]]:
        """Yield (index, matches in text order) of each text that contains an item."""
        from shardkit.writers.kernels.hash_tables import find_matches
        from shardkit.writers.kernels.question_clusters import find_clusters
        from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

        if not self._items:
            return
        hashes, offsets = shingle_batch(texts, Ngrams(self._config.ngram, self._config.unit))
        hits = find_matches(hashes, self._seeds.bits, self._seeds.keys, self._seeds.places)
        clusters = find_clusters(hashes, offsets, hits, self._grams, self._config.max_misses)
        for text in np.unique(clusters[:, 0]).tolist():
            document = _Document(texts.slice(text, 1), self._config.unit)
            found = []
            for _, question, begin, end, weight in clusters[clusters[:, 0] == text].tolist():
                first, last = begin - int(offsets[text]), end - int(offsets[text])
                found += self._best(document, question, first, last + self._config.ngram - 1, weight)
            if found:
                yield text, sorted(found, key=lambda match: (match.begin, match.end, match.evaluation))

    def _best(
        self, document: _Document, question: int, begin: int, end: int, weight: int
    ) -> list[QuestionMatch]:
        """Return a list with the best match among the items of a question found in words begin to end - 1.

        `weight`: weight of the question's n-grams found there. The list is empty if no score reaches the
        threshold. Of items with equal scores, the first is the best.
        """
        best: QuestionMatch | None = None
        overlap = round(weight / int(self._totals[question]), _DECIMALS)
        for item in self._items[question]:
            answer = passage = None
            if item.answer >= 0:
                words = int(self._answers.words[item.answer])
                stop = end + max(self._config.answer_window, 2 * words)
                near = document.grams(min(words, _ANSWER_NGRAM), end, stop)
                answer = self._answers.overlap(item.answer, near)
            if item.passage >= 0:
                words = int(self._passages.words[item.passage])
                size, reach = min(words, _PASSAGE_NGRAM), words + _PASSAGE_DISTANCE
                around = document.grams(size, begin - reach, begin), document.grams(size, end, end + reach)
                passage = self._passages.overlap(item.passage, np.concatenate(around))
            score = item_score(self._config, self._sizes(item), overlap, answer, passage)
            if score >= self._config.threshold and (best is None or score > best.score):
                where = (item.evaluation, item.record, begin, end)
                best = QuestionMatch(*where, score, overlap, answer, passage)
        return [] if best is None else [best]


class _Sizes(NamedTuple):
    """Sizes of an item: distinct n-grams of its question; words of question, answer, passage (None: none)."""

    grams: int
    question: int
    answer: int | None
    passage: int | None

    @property
    def total(self) -> int:
        return self.question + (self.answer or 0) + (self.passage or 0)


class _Document:
    """The hashes of a text's n-grams, computed on first use and cached by the size of the n-grams."""

    def __init__(self, text: pa.LargeStringArray, unit: str) -> None:
        self._text, self._unit = text, unit
        self._hashes: dict[int, npt.NDArray[np.uint64]] = {}

    def grams(self, size: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
        """Return the hashes of the n-grams of `size` words in the words begin to end - 1."""
        from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

        if size < 1:
            return np.zeros(0, np.uint64)
        if size not in self._hashes:
            self._hashes[size] = shingle_batch(self._text, Ngrams(size, self._unit)).hashes
        return self._hashes[size][max(0, begin) : max(0, end - size + 1)]


def _required(words: int, threshold: float) -> float:
    """Return T of step 7: the score before step 7 that an item of this many words needs."""
    part = (words - _PERFECT_WORDS) / (_ENOUGH_WORDS - _PERFECT_WORDS)
    return 1 - (1 - threshold) * min(1.0, max(0.0, part))


def _shares(sizes: _Sizes) -> tuple[float, float, float]:
    """Return the weights of question, answer and passage, by step 5."""
    sure = 0.5 + 0.5 * min(1.0, sizes.grams / _FULL_QUESTION)
    if sizes.answer is None and sizes.passage is None:
        return 1.0, 0.0, 0.0
    if sizes.passage is None:
        return 0.75 * sure, 1 - 0.75 * sure, 0.0
    if sizes.answer is None:
        return 0.85 * sure, 0.0, 1 - 0.85 * sure
    moved = 0.7 * (1 - sure) / 2
    answer = (0.2 + moved) * (0.5 + 0.5 * min(1.0, sizes.answer / _FULL_ANSWER))
    return 0.7 * sure, answer, 1 - 0.7 * sure - answer


def item_score(
    config: QuestionsConfig, sizes: _Sizes, question: float, answer: float | None, passage: float | None
) -> float:
    """Return an item's score S by steps 5 to 7, from the overlaps of its parts (None: no such part)."""
    if question < _LEAST_OVERLAP:
        return 0.0
    if question == 1 and answer in (1, None) and passage in (1, None):
        return 1.0
    shares = _shares(sizes)
    score = shares[0] * question + shares[1] * (answer or 0.0) + shares[2] * (passage or 0.0)
    if config.long_question is not None and sizes.question >= config.long_question:
        score = max(score, question)
    if score < 1:
        score *= config.threshold / _required(sizes.total, config.threshold)
    return round(min(1.0, score), _DECIMALS)


@lru_cache(maxsize=2)
def _load(
    config: QuestionsConfig,
    evaluations: tuple[EvaluationConfig, ...],
    folder: Path,
    _versions: tuple[FileVersion, ...],
) -> QuestionIndex:
    """Build the index; the process's next task reuses it if the files have not changed."""
    from shardkit.writers.kernels.shingles import Ngrams

    files = [_read(one, folder / one.path) for one in evaluations]
    parts = [part for file in files for part in file]
    columns = [
        _Column(list(texts), config.unit)
        for texts in ([p.question for p in parts], [p.answer for p in parts], [p.passage for p in parts])
    ]
    words = [column.words for column in columns]
    kept = (words[0] >= config.ngram) & (sum(words) >= config.min_item_words)
    _refuse_unused(config, [folder / one.path for one in evaluations], [len(file) for file in files], kept)
    numbers = [column.keep(kept) for column in columns]
    items: dict[tuple[int, int, int], Item] = {}
    for row, question, answer, passage in zip(np.flatnonzero(kept).tolist(), *numbers, strict=True):
        item = Item(question, answer, passage, parts[row].evaluation, parts[row].record)
        items.setdefault((question, answer, passage), item)
    grams = [
        _grams(column.texts, Ngrams(ngram, config.unit))
        for column, ngram in zip(columns, (config.ngram, _ANSWER_NGRAM, _PASSAGE_NGRAM), strict=True)
    ]
    return QuestionIndex(config, list(items.values()), *grams)


def _refuse_unused(
    config: QuestionsConfig, paths: Sequence[Path], sizes: Sequence[int], kept: npt.NDArray[np.bool_]
) -> None:
    """Raise RecipeError if all items of a file are too short."""
    start = 0
    for path, size in zip(paths, sizes, strict=True):
        if size and not kept[start : start + size].any():
            raise RecipeError(
                f"decontamination: {path}: all items ({size:,}) are too short; lower "
                f"questions.min_item_words, which is {config.min_item_words}, or set questions.unit to auto "
                "for text without spaces"
            )
        start += size


class _Parts(NamedTuple):
    """The texts of one item: the question and passage of a record, and one of the record's answers."""

    evaluation: str
    record: int
    question: str
    answer: str | None
    passage: str | None


def _read(config: EvaluationConfig, path: Path) -> list[_Parts]:
    parts = [part for record in read_records(config, path) for part in _parts(record, config)]
    for role in config.roles():
        if parts and all(getattr(part, role) is None for part in parts):
            raise RecipeError(
                f"decontamination: {path}: no record has a text under {getattr(config, role)}; set {role} "
                "to a field of your file, or leave it out"
            )
    return parts


def _parts(record: EvaluationRecord, config: EvaluationConfig) -> list[_Parts]:
    if isinstance(record.content, str):
        raise RecipeError(
            f"{record.where} is plain text; `questions` needs the fields of JSON lines or Parquet"
        )
    name = config.question or "question"
    question = joined(field_value(record.content, name))
    if question is None:
        raise RecipeError(f"{record.where} has no text under {name}; set question to a field of your file")
    passage = joined(field_value(record.content, config.passage or "passage"))
    answers = field_value(record.content, config.answer or "answer")
    texts = [_answer(one) for one in (answers if isinstance(answers, list) else [answers])]
    _refuse_index(record, answers, texts[0] if texts else None)
    no_answer: list[str | None] = [None]
    return [
        _Parts(
            config.label,
            record.number,
            plain_text(question),
            answer,
            plain_text(passage) if passage else None,
        )
        for answer in [text for text in texts if text] or no_answer
    ]


def _refuse_index(record: EvaluationRecord, answers: object, text: str | None) -> None:
    """Raise RecipeError if an answer is only the number or letter of a choice, not the answer's text."""
    if isinstance(answers, list) or text is None or len(text.strip()) > 1:
        return
    for name in ("choices", "options", "choices.text", "options.text"):
        if isinstance(field_value(record.content, name), list):
            first = name.split(".")[0]
            raise RecipeError(
                f"{record.where} has the answer {text} and a list of {first}; set answer to {name}, so that "
                "any of these counts, or to a field with the answer's text"
            )


def _answer(value: object) -> str | None:
    """Return an answer as text if it is a string, number or boolean; None for other values."""
    if isinstance(value, bool):
        return str(value).lower()
    return plain_text(str(value)) if isinstance(value, str | int | float) else None


class _Column:
    """The distinct texts of one kind, such as answers, and for each row the number of its text or -1."""

    def __init__(self, texts: Sequence[str | None], unit: str) -> None:
        from shardkit.writers.kernels.shingles import Ngrams, shingle_batch

        hashes, edges = shingle_batch(_array([text or "" for text in texts]), Ngrams(1, unit))
        numbers: dict[bytes, int] = {}
        self.texts: list[str] = []
        self._of = np.full(len(texts), -1, np.int64)
        for at, text in enumerate(texts):
            if text is not None:
                key = hashes[edges[at] : edges[at + 1]].tobytes()
                self._of[at] = numbers.setdefault(key, len(self.texts))
                if self._of[at] == len(self.texts):
                    self.texts.append(text)
        self.words = np.diff(edges)  # number of words in each row's text; 0 for None

    def keep(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """Keep the texts of chosen rows only; return the new number of each chosen row's text, or -1."""
        of = self._of[chosen]
        used = np.unique(of[of >= 0])
        self.texts = [self.texts[number] for number in used.tolist()]
        return [int(number) for number in np.where(of < 0, -1, np.searchsorted(used, of))]


def _array(texts: Sequence[str]) -> pa.LargeStringArray:
    import pyarrow as pa

    return pa.array(texts, pa.large_string())


def _grams(texts: Sequence[str], config: Ngrams) -> Grams:
    """Return the distinct n-grams of each of distinct texts, with weights by inverse document frequency.

    A text that is shorter than an n-gram has one n-gram, all its words.
    """
    from shardkit.writers.kernels.shingles import shingle_batch

    hashes, edges = shingle_batch(_array(texts), config)
    owners = np.repeat(np.arange(len(texts)), np.diff(edges))
    order = np.lexsort((hashes, owners))
    hashes, owners = hashes[order], owners[order]
    is_new = np.ones(len(hashes), np.bool_)
    is_new[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    hashes, owners = hashes[is_new], owners[is_new]
    _, which, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    frequencies, of = np.unique(counts, return_inverse=True)
    weights = [max(1, round(_UNIT * math.log((len(texts) + 1) / df))) for df in frequencies.tolist()]
    return Grams(
        np.diff(shingle_batch(_array(texts), config._replace(ngram=1)).offsets),
        hashes,
        np.array(weights, np.int64)[of][which] if len(hashes) else np.zeros(0, np.int64),
        np.searchsorted(owners, np.arange(len(texts) + 1)).astype(np.int64),
    )


def _seeds(
    grams: Grams, totals: npt.NDArray[np.int64], needs: npt.NDArray[np.int64]
) -> tuple[_Seeds, QuestionGrams]:
    """Return each question's seeds: its heaviest n-grams, which together weigh more than total minus need.

    A cluster that reaches the needed weight contains at least one of them. Arguments: n-grams of the
    questions, and for each question its total weight and the weight needed.
    """
    from shardkit.writers.kernels.hash_tables import fill_places
    from shardkit.writers.kernels.question_clusters import QuestionGrams

    owners = np.repeat(np.arange(len(needs)), np.diff(grams.offsets))
    order = np.lexsort((grams.hashes, -grams.weights, owners))
    weights = grams.weights[order]  # still one question after the other, so grams.offsets apply
    before = np.cumsum(weights) - weights
    before -= before[grams.offsets[:-1]][owners] if len(needs) else 0
    chosen = order[before <= (totals - needs)[owners]]
    seeds, which = np.unique(grams.hashes[chosen], return_inverse=True)
    by_seed = np.lexsort((owners[chosen], which))
    slots = 1 << (2 * len(seeds) + 1).bit_length()
    bits = np.zeros(max(1, slots * _BITS_PER_KEY // 128), np.uint64)
    keys, places = np.zeros(slots, np.uint64), np.full(slots, -1, np.int64)
    fill_places(seeds, bits, keys, places)
    offsets = np.searchsorted(which[by_seed], np.arange(len(seeds) + 1)).astype(np.int64)
    return _Seeds(bits, keys, places), QuestionGrams(
        grams.hashes, grams.weights, grams.offsets, needs, owners[chosen][by_seed], offsets
    )
