"""Run the filters of a recipe in order: the first rule that a document fails drops it; editors rewrite texts.

Later filters skip a dropped document, unless the build writes annotations: then every rule judges every
document, as edited by all previous editors. On a sample of documents, the failures of each rule are also
counted independently of the other rules. A filter whose settings say that it `is_costly` is never given
dropped documents: its failures in the sample are counted among those that reach it, and later rules judge the
sample as if it had edited nothing. Bytes are conserved: a document's original size equals the bytes that
editors cut plus its size when it was kept or dropped; `_run` asserts this for every edit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Count
from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import keyed_hashes
from shardkit.writers.filters.base import (
    Edit,
    Editor,
    Filter,
    FilterSettings,
    Paid,
    Rule,
    SideOutput,
    first_failing,
)
from shardkit.writers.filters.batch import TextBatch
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.by_language import ByLanguage, FilterByLanguage
from shardkit.writers.filters.fasttext import LanguageConfig, LanguageFilter, unknown_languages
from shardkit.writers.filters.gopher import GopherQualityFilter
from shardkit.writers.filters.scores import REFUSED, ScoreLookup, ScoresConfig, ScoresFilter
from shardkit.writers.rows.filtered import (
    EXCERPT_CHARACTERS,
    EXCERPTS,
    SAMPLE,
    Dropped,
    Excerpt,
    FilterCost,
    Filtered,
)


@dataclass(frozen=True)
class _Step:
    name: str
    work: Filter | Editor
    is_costly: bool = False


class FilterChain:
    """The filters of a recipe, built once per process and applied to many batches.

    `folder` is the base of the recipe's relative paths. `annotate` keeps the values of all rules. `seed` is
    the seed of the hash that selects the sample of documents. `lookups` has one score lookup per `scores`
    filter, in order. `labels`: labels of a language filter that ran in an earlier pass; None if none did.
    """

    def __init__(
        self,
        steps: Sequence[tuple[str, FilterSettings]],
        folder: Path | None = None,
        *,
        annotate: bool = False,
        seed: int = 0,
        lookups: Sequence[ScoreLookup] = (),
        labels: Sequence[str] | None = None,
    ) -> None:
        left = iter(lookups)
        self._steps = [
            _Step(name, ScoresFilter(config, next(left)))
            if isinstance(config, ScoresConfig) and lookups
            else _Step(name, config.build(folder or Path()), config.is_costly)
            for name, config in steps
        ]
        self._scores = [config for _, config in steps if isinstance(config, ScoresConfig)]
        self._annotate, self._seed = annotate, seed
        self.costs = {step.name: FilterCost() for step in self._steps}  # of all batches so far
        self.reasons = tuple(f"{step.name}/{reason}" for step in self._steps for reason in step.work.reasons)
        editors = [(step.name, step.work) for step in self._steps if isinstance(step.work, Editor)]
        self.edits = tuple(f"{name}/{edit}" for name, editor in editors for edit in editor.edits)
        self._sides = [step.work for step in self._steps if isinstance(step.work, SideOutput)]
        self.side_files = tuple(sorted({work.side_file for work in self._sides}))
        gopher = [config for _, config in steps if isinstance(config, GopherQualityFilter)]
        self._stop_words = gopher[0].stop_words if gopher else ()
        self._language = next((name for name, config in steps if isinstance(config, LanguageConfig)), None)
        self._buckets = next((name for name, config in steps if isinstance(config, BucketsConfig)), None)
        self._differs = any(isinstance(config, ByLanguage) for _, config in steps)
        if labels is None:  # otherwise the language filter is in an earlier pass, not in this chain
            self._check_languages()

    def _check_languages(self) -> None:
        """Raise RecipeError if a `by_language` key is not a label of the language filter."""
        labels: tuple[str, ...] | None = None
        for step in self._steps:
            if isinstance(step.work, LanguageFilter):
                labels = step.work.labels
            if not isinstance(step.work, FilterByLanguage):
                continue
            if labels is None:
                raise RecipeError(f"{step.name}.by_language: needs a language filter before it")
            if unknown := set(step.work.languages) - set(labels):
                problem = unknown_languages(unknown, "the model of the language filter", labels)
                raise RecipeError(f"{step.name}.by_language: {problem}")

    def apply(self, documents: pa.RecordBatch, languages: npt.NDArray[np.object_] | None = None) -> Filtered:
        """Run all filters on a batch of DOCUMENT_SCHEMA. `languages`: object[n], found by an earlier pass."""
        result = Filtered(documents, np.ones(documents.num_rows, np.bool_))
        if not self._steps or not documents.num_rows:
            return result
        batch = TextBatch(documents, stop_words=self._stop_words)
        batch.languages = languages
        hashes = keyed_hashes(documents.column("document_id").to_pylist(), self._seed, "filter sample")
        codes = self._codes(batch, result, hashes)
        self._refuse_missing(result)
        for work in self._sides:
            result.side_rows.setdefault(work.side_file, []).extend(work.take_rows())
        if self._annotate:
            dropped = [self.reasons[code - 1] if code else None for code in codes.tolist()]
            result.annotations["dropped"] = np.array(dropped, np.object_)
        self._sample(documents, hashes, languages, batch.scores, result)
        for work in self._sides:
            work.take_rows()  # discard rows found in the sample, whose documents were all judged above
        result.kept, result.stays = batch.documents, codes == 0
        if codes.any():
            result.kept = result.kept.filter(pa.array(result.stays))
        known = languages if result.languages is None else result.languages
        if self._differs and known is not None:
            result.by_language = self._counts(codes, known)
        if result.languages is not None:
            result.languages = result.languages[codes == 0]
        if result.scores is not None:
            result.scores = result.scores[codes == 0]
        return result

    def _counts(
        self, codes: npt.NDArray[np.int64], labels: npt.NDArray[np.object_]
    ) -> dict[str, Counter[str]]:
        """Count kept ("") and dropped documents by language and reason, for `Filtered.by_language`.

        Documents that were dropped before the language filter are left out.
        """
        named = (number for number, step in enumerate(self._steps) if step.name == self._language)
        first = next(named, 0)
        before = sum(len(step.work.reasons) for step in self._steps[:first])
        names = ("", *self.reasons)
        counts: dict[str, Counter[str]] = {}
        for code, label in zip(codes.tolist(), labels.tolist(), strict=True):
            if not 1 <= code <= before:
                counts.setdefault(label, Counter())[names[code]] += 1
        return counts

    @property
    def has_languages(self) -> bool:
        """Whether a filter identifies the language of each document."""
        return self._language is not None

    def _codes(
        self, batch: TextBatch, result: Filtered, hashes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Run all filters on a batch, whose texts they edit in place; add dropped documents to `result`.

        Return int64[n], 0 for documents that pass all rules, else 1 + the index of the reason in `reasons`.
        """
        codes = np.zeros(len(batch), np.int64)
        first = 0
        for step in self._steps:
            alive = codes == 0
            is_for_all = self._annotate and not step.is_costly
            batch.wanted = np.ones(len(batch), np.bool_) if is_for_all else alive
            began = time.thread_time()
            rules, edit = self._run(step, batch)
            judged, seconds = int(alive.sum()), time.thread_time() - began
            if edit is not None:
                _book(result.cut, step.name, edit.cut, alive)
                _book(result.counts, step.name, edit.counts, alive)
            found = np.where(alive, first_failing(rules, len(batch)), 0)
            for number in np.unique(found[found > 0]).tolist():
                chosen = np.flatnonzero(found == number)
                codes[chosen] = first + number
                _drop(result, self.reasons[first + number - 1], rules[number - 1], batch, chosen, hashes)
            spent = dict(step.work.take_spent()) if isinstance(step.work, Paid) else {}
            self.costs[step.name].add(FilterCost(judged, judged - int((codes == 0).sum()), seconds, spent))
            if step.is_costly:
                sampled = alive & (hashes % np.uint64(SAMPLE) == 0)
                _count_alone(result, step.name, rules, sampled)
            first += len(step.work.reasons)
            if step.name == self._language:
                result.languages = batch.languages
            if step.name == self._buckets:
                result.scores = np.stack([np.asarray(rule.values) for rule in rules], axis=1)
            if self._annotate:
                _annotate(result, step.name, rules)
        return codes

    def _refuse_missing(self, result: Filtered) -> None:
        """Raise BuildError if a document has no scores and the recipe sets `missing: refuse`."""
        lost = [one for one in result.removed if one.rule == f"scores/{REFUSED}"]
        if not lost:
            return
        config, first = next(one for one in self._scores if one.missing == "refuse"), lost[0]
        row = int(first.rows[0])
        file, record, own = (
            first.documents.column(name)[row].as_py() for name in ("file", "record", config.document)
        )
        raise BuildError(
            f"{file}: record {record:,}: filters: scores: no row of {', '.join(config.path)} has all scores "
            f"of its {config.document} {own.hex() if isinstance(own, bytes) else own!r}; add them, or set "
            f"`missing` to drop or keep"
        )

    def _sample(
        self,
        documents: pa.RecordBatch,
        hashes: npt.NDArray[np.uint64],
        languages: npt.NDArray[np.object_] | None,
        scores: Mapping[str, npt.NDArray[np.float64]],
        result: Filtered,
    ) -> None:
        """Count each rule's failures in a sample of documents chosen by hash, regardless of other rules."""
        chosen = np.flatnonzero(hashes % np.uint64(SAMPLE) == 0)
        result.sampled = len(chosen)
        if not len(chosen):
            return
        batch = TextBatch(documents.take(pa.array(chosen)), stop_words=self._stop_words)
        batch.languages = None if languages is None else languages[chosen]
        batch.scores = {name: values[chosen] for name, values in scores.items()}  # those that are paid for
        for step in self._steps:
            if not step.is_costly:
                rules, _ = self._run(step, batch)
                _count_alone(result, step.name, rules, batch.wanted)

    def _run(self, step: _Step, batch: TextBatch) -> tuple[Sequence[Rule], Edit | None]:
        """Run a step on a batch; if it is the language filter, store its labels in `batch.languages`."""
        rules, edit = _run(step, batch)
        if step.name == self._language:
            [batch.languages] = [rule.values for rule in rules if rule.name == "label"]
        return rules, edit


def _run(step: _Step, batch: TextBatch) -> tuple[Sequence[Rule], Edit | None]:
    """Run a step on a batch. An editor may change texts of dropped documents, too: nothing reads them."""
    if not isinstance(step.work, Editor):
        rules = step.work.judge(batch)
        assert tuple(rule.name for rule in rules) == tuple(step.work.reasons), step.name
        return rules, None
    edit = step.work.edit(batch)
    before, chosen = batch.sizes, batch.wanted
    batch.set_texts(edit.texts)
    cut = sum(edit.cut.values(), np.zeros(len(batch), np.int64))
    assert np.array_equal((before - batch.sizes)[chosen], cut[chosen]), f"{step.name}: wrong counts of bytes"
    return edit.rules, edit


def _book(
    totals: dict[str, int],
    name: str,
    counts: Mapping[str, npt.NDArray[np.int64]],
    alive: npt.NDArray[np.bool_],
) -> None:
    for reason, values in counts.items():
        key = f"{name}/{reason}"
        totals[key] = totals.get(key, 0) + int(values[alive].sum())


def _drop(
    result: Filtered,
    reason: str,
    rule: Rule,
    batch: TextBatch,
    chosen: npt.NDArray[np.int64],
    hashes: npt.NDArray[np.uint64],
) -> None:
    """Add dropped documents to `result`: the rows, their counts and current sizes, and some excerpts."""
    before = result.dropped.get(reason, Count())
    result.dropped[reason] = before + Count(len(chosen), int(batch.sizes[chosen].sum()))
    documents = batch.documents
    values = None if rule.values is None else rule.values[chosen]
    bound = rule.bound[chosen] if isinstance(rule.bound, np.ndarray) else rule.bound
    labels = None if rule.labels is None else rule.labels[chosen]
    result.removed.append(Dropped(reason, documents, chosen, hashes[chosen], values, bound, labels))
    files, records = documents.column("file"), documents.column("record")
    shown = [
        Excerpt(int(hashes[row]), files[row].as_py(), records[row].as_py(), _beginning(batch, row))
        for row in chosen[np.argsort(hashes[chosen], kind="stable")[:EXCERPTS]].tolist()
    ]
    result.excerpts[reason] = sorted([*result.excerpts.get(reason, ()), *shown])[:EXCERPTS]


def _count_alone(result: Filtered, name: str, rules: Sequence[Rule], sampled: npt.NDArray[np.bool_]) -> None:
    """Count the failures of each rule in the sampled documents."""
    for rule in rules:
        if rule.fails is not None and (count := int((rule.fails & sampled).sum())):
            result.alone[f"{name}/{rule.name}"] = count


def _beginning(batch: TextBatch, row: int) -> str:
    start = int(batch.offsets[row])
    # A character takes at most four bytes in UTF-8.
    end = min(int(batch.offsets[row + 1]), start + 4 * EXCERPT_CHARACTERS)
    return batch.data[start:end].tobytes().decode(errors="ignore")[:EXCERPT_CHARACTERS]


def _annotate(result: Filtered, name: str, rules: Sequence[Rule]) -> None:
    for rule in rules:
        key = f"{name}/{rule.name}"
        if rule.values is not None:
            result.annotations[key] = rule.values
        if rule.fails is not None:
            before = result.failed.get(key)
            result.failed[key] = rule.fails if before is None else before | rule.fails
