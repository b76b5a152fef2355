"""Quality buckets: bins of several scores, combined, as labels that outputs are routed by."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import shardkit
from shardkit.card import DatasetCard
from shardkit.errors import RecipeError
from shardkit.writers import build
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.fasttext import ClassifierConfig
from shardkit.writers.stages.labels import Buckets
from support.filter_runs import text_batch
from support.small_build import train_bpe
from support.small_models import model_bytes

COUNT = 100


def text_of(number: int) -> str:
    return f"document {number} has the words of its own"


def scores_of(number: int) -> tuple[float, float]:
    """Two scores without ties, in orders of their own."""
    return number * 37 % 101 / 101, number * 61 % 103 / 103


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """100 documents in two files, five of them twice, and two scores for each."""
    for part in range(2):
        numbers = [*range(part * 50, part * 50 + 50), *(range(5) if part else ())]
        lines = [json.dumps({"text": text_of(n), "id": n, "kind": f"k{n % 2}"}) for n in numbers]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    a, b = zip(*map(scores_of, range(COUNT)), strict=True)
    pq.write_table(pa.table({"id": range(COUNT), "a": a, "b": b}), tmp_path / "scores.parquet")
    train_bpe([text_of(n) for n in range(20)]).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def recipe_in(folder: Path, **buckets: Any) -> dict[str, Any]:
    joined = {"path": str(folder / "scores.parquet"), "key": "id", "document": "id"}
    given = {"scores": [{"column": "a"}, {"column": "b"}], "field": "quality", "bins": 10}
    given |= {"labels": {"high": 9, "medium": 5, "low": 0}}
    return {
        "inputs": [{"path": str(folder / "*.jsonl"), "base": str(folder), "metadata": ["kind"]}],
        "filters": [{"scores": joined | {"columns": {"a": None, "b": None}}}, {"buckets": given | buckets}],
        "dedup": {"exact": True},
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": "<|endoftext|>"},
        "outputs": [{"path": str(folder / "text"), "format": "parquet"}],
        "pack": {"sequence_length": 64},
    }


def run(recipe: dict[str, Any]) -> shardkit.BuildResult:
    return build(recipe, workers=1, progress=False)


def labels_in(folder: Path) -> dict[int, str]:
    rows = pq.read_table(sorted((folder / "text").glob("text-*.parquet"))).to_pylist()
    return {int(row["id"]): json.loads(row["metadata"])["quality"] for row in rows}


def card_of(folder: Path) -> dict[str, Any]:
    card = DatasetCard.read(folder / "dataset.json")
    assert card is not None
    return dict(card.data)


def plain_label(number: int) -> str:
    """Bins are ranks among all 100 documents, divided by ten."""
    ranks = [sorted(scores_of(n)[k] for n in range(COUNT)).index(scores_of(number)[k]) for k in (0, 1)]
    best = max(rank // 10 for rank in ranks)
    return "high" if best >= 9 else "medium" if best >= 5 else "low"


def test_percentile_buckets_are_the_ranks_of_the_corpus_without_its_duplicates(
    folder: Path, inline_builds: None
) -> None:
    run(recipe_in(folder))
    assert labels_in(folder) == {n: plain_label(n) for n in range(COUNT)}
    facts = card_of(folder / "text")["buckets"]
    assert (facts["sampled"], facts["documents"]) == (COUNT, COUNT)
    assert {name: len(edges) for name, edges in facts["edges"].items()} == {"a": 9, "b": 9}
    assert facts["labels"] == {"high": 9, "medium": 5, "low": 0}
    report = (folder / "text" / "report.html").read_text()
    assert "Edges are percentiles of 100 of 100 documents" in report
    assert "high from bin 9, medium from bin 5, low from bin 0" in report


@pytest.mark.extended
def test_labels_follow_documents_when_lines_of_others_are_cut(folder: Path, inline_builds: None) -> None:
    """Documents of others' lines vanish, so that rows before and after the cut differ."""
    recipe = recipe_in(folder) | {"dedup": {"exact": True, "lines": {"min_characters": 1}}}
    joined = [
        {"text": f"{text_of(n)}\n{text_of(n + 1)}", "id": n + 50, "kind": "k"} for n in range(10, 20, 2)
    ]
    file = folder / "0.jsonl"
    file.write_text("\n".join([*map(json.dumps, joined), file.read_text()]))
    made = run(recipe)
    rows = pq.read_table(sorted((folder / "text").glob("text-*.parquet"))).to_pylist()
    facts = card_of(folder / "text")["buckets"]
    assert facts["documents"] == len(rows) == made.funnel.kept.documents
    assert made.funnel.dropped["duplicate_lines"].documents > 0
    for row in rows:
        scores = zip(facts["edges"].values(), scores_of(int(row["id"])), strict=True)
        best = max(sum(edge <= score for edge in edges) for edges, score in scores)
        label = "high" if best >= 9 else "medium" if best >= 5 else "low"
        assert json.loads(row["metadata"])["quality"] == label


def test_outputs_are_routed_by_the_label_which_is_in_the_provenance(
    folder: Path, inline_builds: None
) -> None:
    recipe = recipe_in(folder)
    recipe["outputs"] += [
        {"path": str(folder / "high"), "where": {"quality": "high"}},
        {"path": str(folder / "rest"), "where": {"quality": ["medium", "low"]}},
    ]
    run(recipe)
    wanted = Counter(plain_label(n) for n in range(COUNT))
    found = []
    for name, labels in (("high", {"high"}), ("rest", {"medium", "low"})):
        rows = [
            row
            for file in (folder / name / "provenance").iterdir()
            for row in pq.read_table(file).to_pylist()
        ]
        stated = {row["document_id"]: json.loads(row["metadata"]) for row in rows}
        assert {one["quality"] for one in stated.values()} == labels
        assert all(set(one) == {"kind", "quality"} for one in stated.values())
        funnel = card_of(folder / name)["funnel"]
        assert funnel["kept"]["documents"] == len(stated) == sum(wanted[label] for label in labels)
        assert funnel["dropped"]["output/elsewhere"]["documents"] == COUNT - len(stated)
        found += list(stated)
    assert len(set(found)) == len(found) == COUNT


def test_bins_by_given_thresholds_and_their_mean(folder: Path, inline_builds: None) -> None:
    scores = [{"column": "a", "thresholds": [0.25, 0.5]}, {"column": "b", "thresholds": 0.5}]
    run(recipe_in(folder, scores=scores, combine="mean", labels={"high": 1.5, "some": 0.5, "none": 0}))
    expected = {}
    for number in range(COUNT):
        a, b = scores_of(number)
        mean = ((a >= 0.25) + (a >= 0.5) + (b >= 0.5)) / 2
        expected[number] = "high" if mean >= 1.5 else "some" if mean >= 0.5 else "none"
    assert labels_in(folder) == expected
    assert card_of(folder / "text")["buckets"]["edges"] == {"a": [0.25, 0.5], "b": [0.5]}
    assert "The recipe gives the edges." in (folder / "text" / "report.html").read_text()


def test_models_of_the_ensemble_score_as_the_classifier_does_and_annotations_have_the_scores(
    folder: Path, inline_builds: None
) -> None:
    (folder / "model.bin").write_bytes(model_bytes())
    scores = [{"model": str(folder / "model.bin"), "label": "good"}, {"column": "a"}]
    run(recipe_in(folder, scores=scores, labels=None) | {"annotate": True})
    rows = pq.read_table(sorted((folder / "text").glob("text-*.parquet"))).to_pylist()
    classifier = ClassifierConfig(model=str(folder / "model.bin"), label="good").build(folder)
    [rule] = classifier.judge(text_batch([row["text"] for row in rows]))
    assert rule.values is not None
    assert [row["filters"]["buckets/model.good"] for row in rows] == rule.values.tolist()
    edges = card_of(folder / "text")["buckets"]["edges"]
    for row in rows:
        bins = [sum(edge <= row["filters"][f"buckets/{name}"] for edge in of) for name, of in edges.items()]
        assert json.loads(row["metadata"])["quality"] == str(max(bins))


def test_a_sample_gives_nearly_the_same_edges_whatever_the_order(folder: Path, inline_builds: None) -> None:
    run(recipe_in(folder, fit_documents=60))
    facts = card_of(folder / "text")["buckets"]
    assert (facts["sampled"], facts["documents"]) == (60, COUNT)
    assert all(abs(edge - (n + 1) / 10) < 0.15 for n, edge in enumerate(facts["edges"]["a"]))


def test_equal_scores_share_the_highest_bin_of_theirs_and_the_lowest_score_is_in_bin_0(
    folder: Path, inline_builds: None
) -> None:
    a = [0.0] * 70 + [0.5] * 10 + [1.0] * 20
    pq.write_table(pa.table({"id": range(COUNT), "a": a, "b": a}), folder / "scores.parquet")
    run(recipe_in(folder, scores={"column": "a"}, labels=None))
    assert labels_in(folder) == {n: "0" if n < 70 else "7" if n < 80 else "9" for n in range(COUNT)}


@given(
    st.lists(st.tuples(st.floats(0, 1) | st.just(float("nan")), st.integers(0, 3)), min_size=1, max_size=50),
    st.sampled_from(["max", "mean"]),
)
def test_labels_are_those_of_plain_python(rows: list[tuple[float, int]], combine: str) -> None:
    config = BucketsConfig.model_validate(
        {
            "scores": [{"column": "a"}, {"column": "b"}],
            "combine": combine,
            "labels": {"x": 1.5, "y": 0, "z": 3},
        }
    )
    edges = [[0.1, 0.5, 0.5, 0.9], [1.0, 2.0]]
    expected = []
    for row in rows:
        bins = [sum(edge <= value for edge in of) for of, value in zip(edges, row, strict=True)]
        combined = max(bins) if combine == "max" else sum(bins) / 2
        expected.append("z" if combined >= 3 else "x" if combined >= 1.5 else "y")
    assert Buckets(config, edges).labels(np.array(rows, np.float64)) == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scores": [{"model": "m.bin"}]}, "give `model` and `label`, or the `column`"),
        ({"scores": [{"column": "a", "model": "m.bin", "label": "x"}]}, "give `model` and `label`, or the"),
        ({"scores": [{"column": "a"}, {"column": "a"}]}, "two scores have the same name: a, a"),
        ({"scores": [{"column": "a", "thresholds": 1}, {"column": "b"}]}, "thresholds to all scores or to"),
        ({"scores": [{"column": "a", "thresholds": [1, 1]}]}, "thresholds must ascend"),
        ({"scores": [{"column": "a"}], "labels": {"high": 1}}, "the lowest must begin at bin 0"),
        ({"scores": [{"column": "a"}], "labels": {"x": 20, "y": 0}}, "the highest is 19"),
    ],
)
def test_buckets_that_cannot_be_meant_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        BucketsConfig.model_validate(settings)


def test_recipes_with_buckets_of_nothing_are_refused(folder: Path) -> None:
    recipe = recipe_in(folder)
    joined, buckets = recipe["filters"]
    for changes, problem in (
        ({"filters": [buckets, joined]}, "no `scores`, `ask` or `python` before it has the column 'a'"),
        ({"filters": [joined, buckets, buckets]}, "a recipe may have only one `buckets` filter"),
        ({"filters": [joined, joined]}, "two `scores` filters have a column 'a'"),
        ({"filters": recipe_in(folder, field="kind")["filters"]}, "documents already have a field 'kind'"),
        (
            {"outputs": [{"path": "x", "where": {"bucket": "high"}}]},
            "no input keeps a field 'bucket'",
        ),
    ):
        with pytest.raises(RecipeError, match=problem):
            run(recipe | changes)
