"""Annotations hold what every filter thought of every document, and tell what other thresholds would keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError, ShardkitError
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.bounds import LengthFilter
from shardkit.writers.filters.c4 import C4QualityEditor
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.gopher import GopherQualityFilter
from shardkit.writers.rows.annotations import AnnotationFile, Bounds, thresholds
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.ledger import Count
from support.documents import document_batch

WORDS = ["house. Then", "river.", "the", "of", "and", "with", "house", "garden", "#", "...", "1234", "•"]
WORDS += ["wonderfully", "\n", "- "]
STEPS: list[tuple[str, FilterSettings]] = [
    ("length", LengthFilter(min_words=5, max_chars=200)),
    ("gopher_quality", GopherQualityFilter(min_doc_words=8, max_symbol_word_ratio=0.2)),
]


def documents(count: int, first: int = 0, seed: int = 1) -> pa.RecordBatch:
    random = np.random.default_rng(seed + first)
    texts = [" ".join(random.choice(WORDS, random.integers(0, 40))) for _ in range(count)]
    return document_batch(texts, records=range(first, first + count))


def annotate(
    folder: Path, steps: list[tuple[str, FilterSettings]], *batches: pa.RecordBatch
) -> list[Filtered]:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    chain = FilterChain(steps, annotate=True)
    number = len(list((folder / "annotations").iterdir()))
    with AnnotationFile(folder / "annotations" / f"part-{number:05d}.parquet") as file:
        made = [chain.apply(batch) for batch in batches]
        for batch, filtered in zip(batches, made, strict=True):
            file.write(batch, filtered)
    return made


def kept_by(steps: list[tuple[str, FilterSettings]], *batches: pa.RecordBatch) -> Count:
    kept = [FilterChain(steps).apply(batch) for batch in batches]
    ids = [one for filtered in kept for one in filtered.kept.column("document_id").to_pylist()]
    texts = [text for batch in batches for text in batch.column("text").to_pylist()]
    read = dict(zip((i for b in batches for i in b.column("document_id").to_pylist()), texts, strict=True))
    return Count(len(ids), sum(len(read[one].encode()) for one in ids))


def test_every_document_has_its_values_and_all_rules_that_it_fails(tmp_path: Path) -> None:
    batch = documents(200)
    [filtered] = annotate(tmp_path, STEPS, batch)
    table = pq.read_table(tmp_path / "annotations" / "part-00000.parquet")
    for name in ("document_id", "source", "file", "record"):
        assert table[name].to_pylist() == batch.column(name).to_pylist()
    texts = batch.column("text").to_pylist()
    assert table["bytes"].to_pylist() == [len(text.encode()) for text in texts]
    assert table["length/too_few_words"].to_pylist() == [len(text.split()) for text in texts]
    dropped = table["dropped"].to_pylist()
    assert {reason: Count(dropped.count(reason), 0) for reason in set(dropped) - {None}} == {
        reason: Count(count.documents, 0) for reason, count in filtered.dropped.items()
    }
    for failed, reason, text in zip(table["failed"].to_pylist(), dropped, texts, strict=True):
        assert reason == (failed[0] if failed else None)
        assert ("length/too_few_words" in failed) == (len(text.split()) < 5)
    assert any(len(failed) > 2 for failed in table["failed"].to_pylist())


def test_annotating_changes_nothing_else() -> None:
    batch = documents(300)
    plain, annotated = (FilterChain(STEPS, annotate=flag).apply(batch) for flag in (False, True))
    assert plain.kept.equals(annotated.kept)
    assert (plain.dropped, plain.excerpts, plain.alone) == (
        annotated.dropped,
        annotated.excerpts,
        annotated.alone,
    )


@pytest.mark.parametrize(
    ("least_words", "symbols"), [(0, 0.2), (12, 0.2), (8, 0.05), (0, 1.0), (30, 0.0), (8, 0.2)]
)
def test_other_thresholds_keep_what_a_build_with_them_keeps(
    tmp_path: Path, least_words: int, symbols: float
) -> None:
    batches = documents(150), documents(100, 150)
    annotate(tmp_path, STEPS, batches[0])
    annotate(tmp_path, STEPS, batches[1])
    annotate(tmp_path, STEPS)  # a split without documents
    config = GopherQualityFilter(min_doc_words=least_words, max_symbol_word_ratio=symbols)
    names = "gopher_short_doc", "gopher_too_many_hashes", "gopher_too_many_ellipsis"
    limits = (least_words, None), (None, symbols), (None, symbols)
    bounds = {f"gopher_quality/{name}": limit for name, limit in zip(names, limits, strict=True)}
    outcome = thresholds(tmp_path, bounds)
    assert outcome.read.documents == 250
    assert outcome.kept == kept_by(STEPS, *batches)
    assert outcome.would_keep == kept_by([STEPS[0], ("gopher_quality", config)], *batches)
    assert thresholds(tmp_path, {}).would_keep == outcome.kept


@pytest.mark.extended
def test_texts_are_judged_as_editors_leave_them_also_those_dropped_before(tmp_path: Path) -> None:
    def steps(length: int, words: int) -> list[tuple[str, FilterSettings]]:
        c4 = C4QualityEditor(min_words_per_line=4, min_num_sentences=2, filter_no_terminal_punct=False)
        gopher = GopherQualityFilter(min_doc_words=words, max_symbol_word_ratio=None, min_stop_words=None)
        return [("length", LengthFilter(min_words=length)), ("c4_quality", c4), ("gopher_quality", gopher)]

    batch = documents(300)
    [filtered] = annotate(tmp_path, steps(25, 20), batch)
    plain = FilterChain(steps(25, 20)).apply(batch)
    assert (plain.dropped, plain.cut, plain.excerpts) == (filtered.dropped, filtered.cut, filtered.excerpts)
    assert plain.kept.equals(filtered.kept)
    assert sum(plain.cut.values()) > 0
    bounds: dict[str, Bounds] = {
        "length/too_few_words": (5, None),
        "gopher_quality/gopher_short_doc": (10, None),
    }
    outcome = thresholds(tmp_path, bounds)
    assert outcome.would_keep == kept_by(steps(5, 10), batch)
    assert outcome.would_keep.documents > outcome.kept.documents > 0


def test_labels_are_chosen_and_numbers_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    batch = documents(4)
    with AnnotationFile(tmp_path / "annotations" / "part-00000.parquet") as file:
        filtered = Filtered(batch)
        filtered.annotations["language/label"] = np.array(["en", "de", None, "fr"], np.object_)
        filtered.annotations["language/score"] = np.array([0.1, 0.9, np.nan, 0.5])
        file.write(batch, filtered)
    assert thresholds(tmp_path, {"language/label": {"en", "fr"}}).would_keep.documents == 2
    assert thresholds(tmp_path, {"language/score": (0.5, None)}).would_keep.documents == 3  # NaN passes
    both = thresholds(tmp_path, {"language/label": {"en", "fr"}, "language/score": (0.5, 0.5)})
    assert both.would_keep.documents == 1
    assert {name: count.documents for name, count in both.failed.items()} == {
        "language/label": 2,
        "language/score": 2,
    }
    wrong: list[tuple[dict[str, Bounds], str]] = [
        ({"language/label": (0, 1)}, "a set of labels"),
        ({"language/score": {"en"}}, r"\(least, greatest\)"),
        ({"language/scores": (0, 1)}, "has no values of rule 'language/scores'; rules: language/label, lang"),
    ]
    for bounds, message in wrong:
        with pytest.raises(ShardkitError, match=message):
            thresholds(tmp_path, bounds)
    with pytest.raises(ShardkitError, match="annotate: true"):
        thresholds(tmp_path / "annotations", {})


def test_a_rule_whose_values_change_their_kind_is_named(tmp_path: Path) -> None:
    batch = documents(2)
    with AnnotationFile(tmp_path / "a.parquet") as file:
        for values in (np.array([1.0, 2.0]), np.array(["a", "b"])):
            filtered = Filtered(batch)
            filtered.annotations["user/score"] = values
            if values.dtype.kind == "f":
                file.write(batch, filtered)
                continue
            with pytest.raises(BuildError, match="user/score: double, user/score: string: differs"):
                file.write(batch, filtered)
