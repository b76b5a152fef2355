"""A pass of filters over the documents of a split: the files that it writes, and its counts.

A task writes these files into its folder:
  documents.arrow   kept documents in their order (Arrow IPC file, DOCUMENT_SCHEMA, zstd)
  keys.run          KEYS of the texts, one row per kept document, if exact dedup follows before another pass
  url_keys.run      KEYS of the URLs, one row per kept document with a URL, if URL dedup follows
  languages.npy     with a language filter: the language of each kept document (languages.py)
  buckets.npy       with a buckets filter: the scores of each kept document (labels.py)
  dropped.parquet   with filters: the documents that they drop, with the reason (rows/dropped_file.py)
and the .jsonl files that filters report. A task holds one batch and one run of keys in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from operator import or_
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.signatures import word_keys
from shardkit.writers.dedup.urls import URL_KEYS, Tracking, url_keys
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import RecipeKey
from shardkit.writers.execution.resources import Resources
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import FilterPass, GlobalStep
from shardkit.writers.rows.documents import DOCUMENT_OPTIONS, DOCUMENTS_FILE, content_ranks, text_digests
from shardkit.writers.rows.dropped_file import DROPPED_FILE, DroppedFile
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.funnel import FilterCounts
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages.flow import Filtering
from shardkit.writers.stages.id_tables import IdTable
from shardkit.writers.stages.labels import BUCKETS_FILE, BucketFile
from shardkit.writers.stages.languages import LANGUAGES_FILE, LanguageFile

KEYS_MEMORY_BYTES = 48 << 20  # memory for sorting keys; a sorted run takes a third of it


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The settings of one pass of filters.

    `exact_text` is "raw", or the version of the normalization for keys of texts; None: the pass writes no
    keys of texts. `url_parameters` is None if it writes no keys of URLs. `seed` selects the documents that
    filters sample for counts and excerpts; None without filters. With `annotate`, the value of every filter
    for every document is written.
    """

    filters: FilterPass
    exact_text: Annotated[str | None, RecipeKey("dedup.exact.text")]
    url_parameters: Annotated[Sequence[str] | None, RecipeKey("dedup.url.drop_parameters")]
    seed: int | None
    annotate: bool

    @classmethod
    def of(cls, recipe: Recipe, number: int = 0) -> PassSettings:
        """Return the settings of the pass at index `number` of `recipe.moves`; by default the first pass."""
        moves = recipe.moves
        filters = moves[number]
        assert not isinstance(filters, GlobalStep)
        until = takewhile(lambda move: isinstance(move, GlobalStep), moves[number + 1 :])
        asked = {move.name: move.settings for move in until if isinstance(move, GlobalStep)}
        # The first pass always writes keys of texts, so that adding dedup.exact later does not repeat it.
        text = "raw" if number == 0 else None
        if "exact" in asked:
            text = normalization_version() if asked["exact"].text == "normalized" else "raw"
        urls = asked["url"].drop_parameters if "url" in asked else None
        annotate = recipe.annotate and (number == 0 or bool(filters))  # each document as read has a line
        return cls(filters, text, urls, recipe.seed if filters else None, annotate)

    def chain(
        self,
        filter_files: Mapping[str, str],
        filter_folder: Artifact,
        scores: Sequence[IdTable],
        *,
        labels: Sequence[str] | None = None,
    ) -> FilterChain:
        """Open the filters of the pass; `labels` are as in `FilterChain`.

        `filter_files` has the digests of the filters' files by path; relative paths start at `filter_folder`.
        """
        for name in filter_files:
            if not Path(name).is_absolute():
                (filter_folder / name).local()
        return FilterChain(
            self.filters,
            filter_folder.path,
            annotate=self.annotate,
            seed=self.seed or 0,
            lookups=[table.open() for table in scores],
            labels=labels,
        )

    @property
    def resources(self) -> Resources:
        """The resources that a task with these filters needs."""
        return reduce(or_, (config.resources for _, config in self.filters), Resources())

    def scores_of(self, recipe: Recipe, tables: Sequence[IdTable]) -> list[IdTable]:
        """Return the tables of this pass's `scores` filters; `tables` has those of all passes in order."""
        configs = [config for _, config in recipe.filter_chain() if isinstance(config, ScoresConfig)]
        own = {id(config) for _, config in self.filters}
        return [table for config, table in zip(configs, tables, strict=True) if id(config) in own]


class PassFiles:
    """Writes the files of a pass into `folder` and counts documents; `schema` is the documents' schema."""

    def __init__(self, folder: Path, settings: PassSettings, chain: FilterChain, schema: pa.Schema) -> None:
        self._counts, self._costs = FilterCounts.of_rules(chain.reasons, chain.edits), chain.costs
        self._stack = ExitStack()
        enter = self._stack.enter_context
        self._keys = enter(_KeyFiles(folder, settings))
        self._dropped = enter(DroppedFile(folder / DROPPED_FILE)) if settings.filters else None
        self._languages = enter(LanguageFile(folder / LANGUAGES_FILE)) if chain.has_languages else None
        scored = [config for _, config in settings.filters if isinstance(config, BucketsConfig)]
        self._buckets = None
        if scored:
            assert settings.seed is not None
            self._buckets = enter(BucketFile(folder / BUCKETS_FILE, len(scored[0].scores), settings.seed))
        self._sides = {name: enter((folder / name).open("wb")) for name in chain.side_files}
        file = enter(pa.OSFile(str(folder / DOCUMENTS_FILE), "wb"))
        self._documents = enter(pa.ipc.new_file(file, schema, options=DOCUMENT_OPTIONS))

    def write(self, filtered: Filtered, ledger: Ledger) -> None:
        """Write the kept and dropped documents of a batch, and count them in the ledger."""
        _book(filtered, ledger)
        self._counts.add(filtered)
        for name, rows in filtered.side_rows.items():
            self._sides[name].writelines(orjson.dumps(row) + b"\n" for row in rows)
        if self._dropped is not None:
            for one in filtered.removed:
                self._dropped.write(one)
        kept = filtered.kept
        if not kept.num_rows:
            return
        self._documents.write_batch(kept)
        self._keys.write(kept)
        if self._languages is not None:
            assert filtered.languages is not None
            self._languages.write(filtered.languages)
        if self._buckets is not None:
            assert filtered.scores is not None
            self._buckets.write(kept, filtered.scores)

    def result(self, ledger: Ledger) -> Filtering:
        """Return the counts of all documents written so far."""
        labels = None if self._languages is None else self._languages.labels
        return Filtering(ledger, self._counts, labels, self._keys.urls, self._costs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


class _KeyFiles:
    """Writes keys of documents' texts and URLs, if they are needed; `urls` counts documents with a URL."""

    def __init__(self, folder: Path, settings: PassSettings) -> None:
        self.urls = self._rows = 0
        self._normalized = settings.exact_text not in (None, "raw")
        self._stack, memory_bytes = ExitStack(), KEYS_MEMORY_BYTES
        self._texts: RunWriter | None = None
        if settings.exact_text is not None:
            texts = RunWriter(folder / KEYS.file, KEYS, memory_bytes=memory_bytes)
            self._texts = self._stack.enter_context(texts)
        self._urls: RunWriter | None = None
        if settings.url_parameters is not None:
            self._tracking = Tracking.of(settings.url_parameters)
            urls = RunWriter(folder / URL_KEYS.file, URL_KEYS, memory_bytes=memory_bytes)
            self._urls = self._stack.enter_context(urls)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the keys of the next documents."""
        if self._texts is None and self._urls is None:
            return
        keys = exact_keys(batch, self._normalized, first_row=self._rows)
        self._rows += len(keys)
        if self._texts is not None:
            self._texts.write(keys)
        if self._urls is not None:
            keys = url_keys(keys, batch.column("url"), self._tracking)
            self._urls.write(keys)
            self.urls += len(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _book(filtered: Filtered, ledger: Ledger) -> None:
    """Count kept documents, dropped documents and cut text of a batch in the ledger."""
    for reason, count in filtered.dropped.items():
        ledger.drop(reason, count.documents, count.bytes)
    for reason, size in filtered.cut.items():
        if size:
            ledger.drop(reason, 0, size)
    kept = filtered.kept
    ledger.kept += Count(kept.num_rows, int(np.diff(text_offsets(kept.column("text"))).sum()))


def exact_keys(
    batch: pa.RecordBatch, normalized: bool = False, *, first_row: int = 0
) -> npt.NDArray[np.void]:
    """Return rows of KEYS, keyed by xxh3-128 of each document's UTF-8 text, or of its words if `normalized`.

    Each row also has the source, the size, the row in the split and, as `id`, the content rank. A text
    without words is keyed by its text even if `normalized`, so it equals only the same text.
    """
    texts = batch.column("text")
    keys = np.empty(len(texts), KEYS.dtype)
    hashes = digests = text_digests(texts)
    if normalized:
        words, some = word_keys(texts)
        hashes = np.where(some[:, None], words, digests)
    keys["key"], keys["low"] = hashes.view(">u8").T
    keys["id"] = content_ranks(digests, batch.column("document_id")).view(">u8")
    keys["row"] = np.arange(first_row, first_row + len(texts))
    keys["split"] = -1  # set by the exchange when it reads the run
    keys["source"] = batch.column("source").to_numpy()
    keys["bytes"] = np.diff(text_offsets(texts))
    return keys
