"""Finds the values that a rule would compare for kept documents, to be shown beside those it dropped.

With `annotate: true` the build wrote them: they are read from `annotations/`, of at most `_GROUPS` row
groups, evenly spaced. Otherwise the build has none, and the filter judges the texts of `_SAMPLED` documents
again, as the dataset has them. A dataset may come from anyone, so only filters that judge by the text alone
run: none with a model, a list, code or an endpoint, and none that edits texts, which are edited already.

Both work in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.outputs import document_ids
from shardkit.datasets.provenance.text import read_rows
from shardkit.errors import ShardkitError
from shardkit.settings import ANNOTATIONS_FOLDER
from shardkit.tools.explore.background import WAIT_SECONDS, Background
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.summary import Values
from shardkit.writers.filters.base import Filter
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA

_GROUPS = 48  # row groups of annotations that are read: 1.5 million documents
_SAMPLED = 1000  # documents that are judged again
_FILES = 4  # of provenance from which these are drawn
_BLOCKS = 20  # places all over a text dataset from which these are drawn
_TO_SPARE = 3  # as a document may have several pieces
_AT_ONCE = 50  # documents judged between two reports of progress
_FIRST = pa.schema([("dropped", pa.string())])


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Values of `sampled` of the `documents` that pass all filters; `how` says where they come from.

    If there are none, `how` says why, and how to get them.
    """

    values: Values
    sampled: int
    documents: int
    how: str

    @property
    def one_in(self) -> float:
        """The number of documents for which one of the sample stands."""
        return self.documents / self.sampled if self.sampled else 0.0


class KeptRules:
    """Finds the values of kept documents in the background: of a rule, or of all rules of a filter."""

    def __init__(self, explored: Explored) -> None:
        self._explored = explored
        self._annotations = ParquetFolder(explored.dataset, ANNOTATIONS_FOLDER, _FIRST)
        self._works: dict[str, Background[Mapping[str, KeptValues]]] = {}
        self._lock = Lock()
        self.wait_seconds: float | None = WAIT_SECONDS
        """How long `find` waits for the values; None: until they are there."""

    def find(self, rule: str, *, waits: bool = True) -> tuple[KeptValues | None, float]:
        """Return the values for a rule, "<filter>/<rule>", or None, and the share of work that is done.

        With `waits` false, a page has waited for other work already, and does not wait again.
        """
        is_annotated = bool(self._annotations.names)
        key = rule if is_annotated else rule.partition("/")[0]
        with self._lock:
            if key not in self._works:
                self._works[key] = Background(partial(self._annotated if is_annotated else self._judged, key))
            work = self._works[key]
        found = work.wait(self.wait_seconds if waits else 0)
        if found is None:
            return None, work.share
        return found.get(rule) or found.get("") or _nothing(f"{rule} compares no value."), 1.0

    def _annotated(self, rule: str, report: Callable[[float], None]) -> Mapping[str, KeptValues]:
        return {rule: _annotated(self._annotations, rule, report)}

    def _judged(self, name: str, report: Callable[[float], None]) -> Mapping[str, KeptValues]:
        return _judged(self._explored, name, report)


def _nothing(why: str) -> KeptValues:
    return KeptValues(Values(), 0, 0, why)


def _annotated(folder: ParquetFolder, rule: str, report: Callable[[float], None]) -> KeptValues:
    """Read the values of the documents that pass all filters; of many row groups, evenly spaced ones."""
    groups = list(folder.groups())
    step = max(1.0, len(groups) / _GROUPS)
    chosen = [groups[int(n * step)] for n in range(min(len(groups), _GROUPS))]
    values, read, passed = Values(), 0, 0

    def column(job: tuple[int, int]) -> tuple[int, pa.Table | None]:
        file, group = job
        rows = folder.footer(file)[0].row_group(group).num_rows
        if rule not in folder.footer(file)[1].names:
            return rows, None
        with folder.open(file) as opened:
            table = opened.read_row_group(group, columns=["dropped", rule], use_threads=False)
        return rows, table.filter(pa.array(table.column("dropped").is_null().to_numpy())).select([rule])

    for number, (rows, table) in enumerate(folder.run(column, iter(chosen))):
        read += rows
        if table is not None:
            passed += table.num_rows
            _add(values, table.column(rule).combine_chunks())
        report((number + 1) / len(chosen))
    if not values.documents:
        return _nothing("The annotations have no values of this rule.")
    lines = folder.lines() if len(chosen) < len(groups) else read
    documents = round(passed * lines / read)
    how = "Of documents that all filters kept: the values that the build annotated"
    if len(chosen) < len(groups):
        how += f", of {passed:,} documents in {len(chosen)} of {len(groups):,} parts of the table"
    return KeptValues(values, passed, documents, f"{how}.")


def _add(values: Values, column: pa.Array) -> None:
    if pa.types.is_string(column.type):
        values.documents += len(column)
        for entry in column.drop_null().value_counts().to_pylist():
            values.labels[entry["values"]] += entry["counts"]
    else:
        values.add(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _judged(explored: Explored, name: str, report: Callable[[float], None]) -> Mapping[str, KeptValues]:
    """Judge a sample of the kept documents by a filter; return the values by rule, or the reason as ""."""
    remedy = "Build with `annotate: true` to see the values of kept documents, too."
    card = explored.card
    if explored.dataset.shards is not None:
        return {"": _nothing(f"The dataset is not on this machine. {remedy}")}
    config = _settings(name, {} if card is None or not card.has("recipe") else card.recipe)
    if card is None or config is None:
        return {"": _nothing(f"{name} judges by more than the text as it was kept. {remedy}")}
    chain, found, judged = FilterChain([(name, config)], annotate=True), dict[str, Values](), 0
    try:
        for texts, share in _texts(explored):
            annotations = chain.apply(_documents(texts)).annotations
            for rule, compared in annotations.items():
                _add(found.setdefault(rule, Values()), pa.array(compared))
            judged += len(texts)
            report(share)
    except ShardkitError as error:
        return {"": _nothing(f"The texts of kept documents cannot be judged: {error}. {remedy}")}
    if not judged:
        needs_tokenizer = explored.dataset.token_column is not None and explored.decoder is None
        why = "give --tokenizer" if needs_tokenizer else "they are neither rows of tokens nor texts"
        return {"": _nothing(f"The texts of kept documents cannot be read: {why}. {remedy}")}
    kept = max(judged, card.funnel.kept.documents)
    some = "all" if judged == kept else f"a random sample of {judged:,}"
    how = f"Of kept documents: estimated from {some}, which {name} judged again just now, as they are stored."
    return {rule: KeptValues(values, judged, kept, how) for rule, values in found.items()}


def _settings(name: str, recipe: Mapping[str, Any]) -> Any:
    """Return the settings of a filter of a recipe if it judges by the text alone; otherwise None."""
    listed = [one for key in ("filters", "steps") for one in recipe.get(key) or () if isinstance(one, dict)]
    entries = [one for one in listed if name in one]
    if len(entries) != 1 or len(entries[0]) != 1:  # with `by_language`, or twice
        return None
    try:
        [(_, config)] = FilterEntry.model_validate(entries[0]).filters()
    except ValidationError:
        return None
    return config if isinstance(config, Filter) and not config.files() and not config.is_costly else None


def _documents(texts: list[str]) -> pa.RecordBatch:
    count = len(texts)
    columns = {
        "document_id": pa.array([number.to_bytes(16, "big") for number in range(count)], pa.binary(16)),
        "source": pa.array([0] * count, pa.int32()),
        "file": pa.array([""] * count, pa.string()),
        "record": pa.array(range(count), pa.int64()),
        "text": pa.array(texts, pa.large_string()),
    }
    nulls = pa.nulls(count, pa.string())
    return pa.RecordBatch.from_arrays(
        [columns.get(name, nulls) for name in DOCUMENT_SCHEMA.names], schema=DOCUMENT_SCHEMA
    )


def _texts(explored: Explored) -> Iterator[tuple[list[str], float]]:
    """Yield texts of kept documents and the share of the sample that is done; nothing if it has no texts."""
    dataset = explored.dataset
    if dataset.token_column is None:
        if any(column.name == "text" for column in dataset.columns):
            step = max(1, len(dataset) // _BLOCKS)
            for first in range(0, len(dataset), step):
                rows = range(first, min(first + _SAMPLED // _BLOCKS, first + step, len(dataset)))
                yield [str(dataset[row]["text"]) for row in rows], (first + step) / len(dataset)
        return
    if explored.decoder is None or not explored.provenance.names:
        return
    folder = explored.provenance
    step = max(1, len(folder.names) // _FILES)
    files = range(0, len(folder.names), step)[:_FILES]
    for number, file in enumerate(files):
        tokens = _drawn_tokens(explored, file, _SAMPLED // len(files))
        for at in range(0, len(tokens), _AT_ONCE):
            texts = [explored.decoder.text(one) for one in tokens[at : at + _AT_ONCE]]
            yield texts, (number + (at + len(texts)) / len(tokens)) / len(files)


def _drawn_tokens(explored: Explored, file: int, count: int) -> list[Any]:
    """Return the tokens of the documents with the lowest ids, which are hashes, in a file of provenance."""
    columns = ["shard", "row", "token_start", "token_end", "document_id", "document_start"]
    footer, _ = explored.provenance.footer(file)
    if not footer.num_rows:
        return []
    # With some to spare, so many ids are looked at as documents are drawn.
    bound = np.uint64(min((1 << 64) - 1, int((1 << 64) * _TO_SPARE * count / footer.num_rows)))
    parts = []
    with explored.provenance.open(file) as opened:
        for group in range(footer.num_row_groups):
            part = opened.read_row_group(group, columns=columns, use_threads=False)
            is_low = document_ids(part).view(">u8")[::2] <= bound
            parts.append(part.filter(pa.array(is_low)))
    table = pa.concat_tables(parts)
    ids = document_ids(table)
    chosen = np.flatnonzero(np.isin(ids, np.unique(ids)[:count]))
    table, ids = table.take(pa.array(chosen)), ids[chosen]
    shards, within, starts, ends, begins = (
        table.column(name).to_numpy() for name in columns if name != "document_id"
    )
    rows = explored.dataset.manifest.shard_starts[shards] + within
    stored = dict(read_rows(explored.dataset, rows.tolist()))
    found: dict[bytes, list[Any]] = {}
    reached: dict[bytes, int] = {}
    for n in np.lexsort((begins, ids)).tolist():
        key = ids[n].item()
        if begins[n] == reached.get(key, 0):  # copies of a repeated document begin again
            found.setdefault(key, []).append(stored[int(rows[n])][starts[n] : ends[n]])
            reached[key] = int(begins[n]) + int(ends[n] - starts[n])
    return [np.concatenate(some) for some in found.values()]
