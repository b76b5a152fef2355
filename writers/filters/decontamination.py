"""Decontamination: documents that hold a run of words of an evaluation set.

A document overlaps an item if `ngram` normalized words in a row (13, as for GPT-3) are the same, or all words
of a shorter item. Hashes of 64 bits find candidates, at the speed of hashing; the words themselves confirm
them, so that nothing is called contaminated by chance. Of n-grams of the evaluation sets that share a hash
the first is known: an overlap is missed with a probability of their number / 2^64.

Every overlap is told: after `judge`, `take_rows` gives the spans of the documents that were looked at, which
belong into a file beside the dataset.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.filters.decontamination_settings import DecontaminationConfig
from shardkit.writers.filters.evaluation_items import (
    EvaluationItem,
    HashTable,
    find_matches,
    make_tables,
    read_items,
)
from shardkit.writers.filters.rules import Rule
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.words import normalized_words

__all__ = ["DecontaminationFilter", "Overlap"]

_WORDS = re.compile(r"\w+")
_EXCERPT = 400  # characters of a span that are told


@dataclass(frozen=True, slots=True)
class Overlap:
    """Words begin to end - 1 of a document are those of an item from its word `item_begin` on."""

    evaluation: str
    item: int  # its line in the file, from 0
    begin: int
    end: int
    item_begin: int


class DecontaminationFilter:
    """Drops documents that overlap an evaluation set, or marks them. Raises RecipeError for a bad file."""

    reasons = ("overlap", "item")
    side_file = "decontamination.jsonl"

    def __init__(self, config: DecontaminationConfig, folder: Path | None = None) -> None:
        self._config = config
        self._items, self._tables = _load(config, folder or Path())
        self._words = lru_cache(maxsize=256)(lambda item: normalized_words(self._items[item].text))
        self._rows: list[dict[str, Any]] = []

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Values: n-grams that overlap, and "<evaluation>:<line>" of the first item."""
        numbers = np.flatnonzero(batch.wanted)
        texts = batch.texts if len(numbers) == len(batch) else batch.texts.take(pa.array(numbers))
        counts = np.zeros(len(batch), np.int64)
        first = np.full(len(batch), "", np.object_)
        self._rows = []
        for at, matches, overlaps in self._overlaps(texts):
            number = int(numbers[at])
            counts[number] = matches
            first[number] = f"{overlaps[0].evaluation}:{overlaps[0].item}"
            self._rows += _rows(batch, number, overlaps)
        drops = self._config.action == "drop"
        return [
            Rule("overlap", counts >= self._config.min_matches if drops else None, counts),
            Rule("item", None, first),
        ]

    def take_rows(self) -> list[dict[str, Any]]:
        """The overlaps that the last `judge` found, as plain data, and forgets them."""
        rows, self._rows = self._rows, []
        return rows

    def _overlaps(self, texts: pa.LargeStringArray) -> Iterator[tuple[int, int, list[Overlap]]]:
        """(index, n-grams, spans) of the texts that overlap."""
        matches: dict[int, list[tuple[int, int, int, int]]] = {}
        for table in self._tables:
            hashes, offsets = shingle_batch(texts, MinHashConfig(ngram=table.ngram))
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
        """(begin, length, item, begin in the item) of n-grams whose words, too, are the item's."""
        found = []
        for begin, number in candidates.tolist():
            item, item_begin = table.place(number)
            theirs = self._words(item)[item_begin : item_begin + table.ngram]
            if words[begin : begin + table.ngram] == theirs:
                found.append((begin, table.ngram, item, item_begin))
        return found

    def _spans(self, found: Sequence[tuple[int, int, int, int]]) -> list[Overlap]:
        """n-grams that continue each other in the document and in the item as one span."""
        spans: list[Overlap] = []
        for begin, length, number, item_begin in found:
            item, last = self._items[number], spans[-1] if spans else None
            same = last is not None and (last.evaluation, last.item) == (item.evaluation, item.record)
            if last and same and begin - last.begin == item_begin - last.item_begin and begin <= last.end:
                spans[-1] = Overlap(last.evaluation, last.item, last.begin, begin + length, last.item_begin)
            else:
                spans.append(Overlap(item.evaluation, item.record, begin, begin + length, item_begin))
        return spans


def _load(config: DecontaminationConfig, folder: Path) -> tuple[list[EvaluationItem], list[HashTable]]:
    """Items and tables, kept for the process's next task as long as the files stay the same."""
    states = []
    for path in config.files():
        if (folder / path).exists():
            state = (folder / path).stat()
            states.append((state.st_size, state.st_mtime_ns))
    return _load_kept(config, folder, tuple(states))


@lru_cache(maxsize=2)
def _load_kept(
    config: DecontaminationConfig, folder: Path, _states: tuple[tuple[int, int], ...]
) -> tuple[list[EvaluationItem], list[HashTable]]:
    items = read_items(config, folder)
    return items, make_tables(items, config)


def _rows(batch: TextBatch, number: int, overlaps: Sequence[Overlap]) -> Iterator[dict[str, Any]]:
    """Where the document is from, the span in words, and its text in normalization form C."""
    where: dict[str, Any] = {"document": number}
    if batch.columns is not None:
        columns = {name: batch.columns.column(name)[number].as_py() for name in ("file", "record")}
        where = {"document_id": batch.columns.column("document_id")[number].as_py().hex(), **columns}
    text = unicodedata.normalize("NFC", batch.texts[number].as_py())
    edges = [match.span() for match in _WORDS.finditer(text)]
    for overlap in overlaps:
        begin, end = edges[overlap.begin][0], edges[overlap.end - 1][1]
        yield where | asdict(overlap) | {"text": text[begin : min(end, begin + _EXCERPT)]}
