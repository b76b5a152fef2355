"""Steps over all documents in a recipe's `steps`: samples, repeated schemes, labels, and what comes last."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import shardkit
from shardkit.errors import RecipeError
from shardkit.hashing import keyed_hashes
from shardkit.writers import BuildResult, build
from shardkit.writers.estimate import rehearse
from shardkit.writers.index_build import build_dedup_index
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import load_recipe, recipe_from_mapping
from shardkit.writers.stages.inputs import BuildInputs
from support.small_build import EOS, text_of, train_bpe, tree

pytestmark = pytest.mark.usefixtures("inline_builds")

SEED = 17
OWN = """
import pathlib

def score(document):
    document.metadata["score"] = sum(map(ord, document.text)) % 100
    return True

def seen(document):
    with pathlib.Path(__file__).with_name("seen.jsonl").open("a") as file:
        file.write(repr(document.text) + "\\n")
    return True

def high(document):
    return document.metadata["bucket"] == "high"
"""
SCORE: dict[str, Any] = {"python": {"file": "own.py", "function": "score", "columns": ["score"]}}
HIGH: dict[str, Any] = {"python": {"file": "own.py", "function": "high"}}
LENGTH: dict[str, Any] = {"length": {"min_words": 4}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sources of 90 documents: equal and similar texts, with lines that many of them share."""
    rng = random.Random(3)
    long = [" ".join(f"word{rng.randrange(400)}" for _ in range(120)) for _ in range(20)]
    line = "a long line that stands at the end of many documents"
    for source in "ab":
        texts = [text_of(rng.randrange(200)) for _ in range(50)]
        texts += [f"{rng.choice(long)} {text_of(n)}" for n in range(20)]
        texts += [f"{rng.choice(long)}\n{line}" for _ in range(20)]
        rows = [{"text": text, "kind": f"k{n % 3}"} for n, text in enumerate(texts)]
        for part in range(2):
            lines = [json.dumps(row) + "\n" for row in rows[part::2]]
            (tmp_path / f"{source}-{part}.jsonl").write_text("".join(lines))
    (tmp_path / "own.py").write_text(OWN)
    train_bpe(long).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_recipe(folder: Path, name: str, **keys: Any) -> Path:
    recipe = {
        "inputs": [{"path": f"{one}-*.jsonl", "source": one, "metadata": ["kind"]} for one in "ab"],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": name,
        "memory": "256MiB",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe | keys))
    return folder / f"{name}.yaml"


def run(folder: Path, name: str, **keys: Any) -> BuildResult:
    return build(write_recipe(folder, name, **keys), progress=False)


def rows_of(folder: Path, name: str, **keys: Any) -> list[dict[str, Any]]:
    """The documents that a build leaves, as its text output has them."""
    run(folder, name, **keys, output={"path": name, "format": "jsonl"})
    files = sorted((folder / name).glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if "text" in row]


def table(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / name / kind).to_pylist() if (folder / name / kind).exists() else []


def numbers_of(folder: Path, name: str) -> Counter[str]:
    return Counter(row["reason"] for row in table(folder, name, "duplicates"))


def test_a_sample_takes_the_documents_with_the_lowest_hashes(folder: Path) -> None:
    result = run(folder, "out", steps=[{"sample": {"documents": 40}}, LENGTH])
    kept = {(row["source"], row["document_id"]) for row in table(folder, "out", "provenance")}
    lost = [row for row in table(folder, "out", "duplicates") if row["reason"] == "not_sampled"]
    assert len(lost) == 100
    dropped = {(row["source"], row["document_id"]) for row in table(folder, "out", "dropped")}
    assert all(row["kept_document_id"] is None for row in lost)
    for source in range(2):
        taken = [id for of, id in kept | dropped if of == source]
        beyond = [row["document_id"] for row in lost if row["source"] == source]
        hashes = [keyed_hashes(ids, SEED, "sample 1") for ids in (taken, beyond)]
        assert len(taken) == 40
        assert max(hashes[0]) < min(hashes[1])
    assert result.funnel.dropped["not_sampled"].documents == 100
    first, then = result.costs
    assert (first.step, first.documents, first.dropped, then.documents) == ("sample", 180, 100, 80)
    card = shardkit.open(folder / "out").card
    assert card is not None
    assert [(one.source, one.sample, one.taken.documents) for one in card.amounts] == [
        ("a", 1, 40),
        ("b", 1, 40),
    ]
    assert [step.label for step in card.funnel_steps()][-2] == "not_sampled"
    assert "sample 1" in (folder / "out" / "report.html").read_text()


def test_samples_in_a_row_are_independent_and_add_up(folder: Path) -> None:
    steps = [
        {"sample": "50%"},
        {"sample": {"share": 0.5}},
        LENGTH,
        {"sample": {"documents": 5, "sources": ["b"]}},
    ]
    result = run(folder, "out", steps=steps, amounts={"a": {"documents": 4}})
    taken = [cost.documents - cost.dropped for cost in result.costs]
    assert 60 < taken[0] < 120
    assert 25 < taken[1] < 65, "the second half of a half is a quarter"
    lost = numbers_of(folder, "out")
    assert lost["not_sampled"] == 180 - taken[1] + result.costs[3].dropped
    assert result.funnel.kept.documents == 9
    assert lost["amount"] + 9 == taken[3]


def test_a_filter_behind_a_sample_reads_nothing_else(folder: Path) -> None:
    seen = {"python": {"file": "own.py", "function": "seen"}}
    steps = [SCORE, "exact", {"sample": {"documents": 3, "by": "score"}}, {"sample": {"tokens": 200}}, seen]
    rows = rows_of(folder, "text", steps=steps[:3])
    most = Counter(row["metadata"]["score"] for row in rows)
    assert max(most.values()) <= 6, "three of each source"
    result = run(folder, "out", steps=steps)
    left = result.funnel.kept.documents
    assert len((folder / "seen.jsonl").read_text().splitlines()) <= left + 10
    card = shardkit.open(folder / "out").card
    assert card is not None
    assert 400 <= card.tokens < 1200, "at most a document of each source more than 200 tokens"


def rebuilt(folder: Path, first: list[Any], later: list[Any]) -> list[str]:
    """The texts that `later` leaves of the texts that `first` leaves, in two builds."""
    rows = rows_of(folder, "first", steps=first)
    for source in "ab":
        lines = [json.dumps(row) + "\n" for row in rows if row["source"] == source]
        (folder / f"again-{source}.jsonl").write_text("".join(lines))
    inputs = [{"path": f"again-{one}.jsonl", "source": one} for one in "ab"]
    return sorted(row["text"] for row in rows_of(folder, "second", steps=later, inputs=inputs))


LINES, NEAR = {"lines": {"min_characters": 30}}, {"near": {"similarity": 0.9, "small_shingles": 0}}
LOOSE = {"near": {"similarity": 0.6, "containment": 0.8, "small_shingles": 0}}


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ([NEAR], [LOOSE]),
        ([NEAR, LINES], [NEAR]),
        ([LINES, LENGTH], [{"lines": {"min_characters": 10, "keep": 2}}, "exact"]),
        ([LINES], [LINES, LOOSE, LENGTH, LOOSE]),
        (["exact", NEAR, "exact"], [{"exact": {"text": "normalized"}}, LINES]),
    ],
)
def test_steps_in_one_build_leave_what_two_builds_leave(
    folder: Path, first: list[Any], later: list[Any]
) -> None:
    one = sorted(row["text"] for row in rows_of(folder, "one", steps=[*first, *later]))
    assert one == rebuilt(folder, first, later)


def test_each_near_is_told_and_verified_by_its_own_settings(folder: Path) -> None:
    result = run(folder, "out", steps=[NEAR, "exact", LOOSE])
    card = shardkit.open(folder / "out").card
    assert card is not None
    assert card.dedup is not None
    assert card.dedup.near is not None
    assert [one.similarity for one in card.dedup.earlier_near] == [0.9]
    assert (card.dedup.near.similarity, card.dedup.near.containment) == (0.6, 0.8)
    removed = [row for row in table(folder, "out", "duplicates") if row["reason"] == "near_duplicate"]
    assert len(removed) == sum(cost.dropped for cost in result.costs if cost.step == "near") > 10
    assert {stage.stage for stage in result.stages} >= {"near", "near-2", "signatures-2", "near_removed-2"}
    inputs = BuildInputs.of(recipe := load_recipe(folder / "out.yaml"), scan_inputs(recipe))
    assert rehearse(inputs, workers=1).output > 0


BUCKETS: dict[str, Any] = {
    "buckets": {"scores": [{"column": "score"}], "bins": 4, "labels": {"low": 0, "high": 3}}
}


def test_labels_of_buckets_are_fields_for_later_steps(folder: Path) -> None:
    rows = rows_of(folder, "all", steps=[SCORE, BUCKETS, "exact"])
    scores = np.sort([row["metadata"]["score"] for row in rows])
    edge = scores[3 * len(scores) // 4]
    high = sorted(row["text"] for row in rows if row["metadata"]["score"] >= edge)
    found = rows_of(folder, "high", steps=[SCORE, BUCKETS, "exact", HIGH, "exact", LENGTH])
    assert {row["metadata"]["bucket"] for row in found} == {"high"}
    assert sorted(row["text"] for row in found) == [text for text in high if len(text.split()) >= 4]
    sampled = rows_of(
        folder, "some", steps=[SCORE, BUCKETS, "exact", {"sample": {"documents": 6, "by": "bucket"}}, LENGTH]
    )
    counts = Counter((row["source"], row["metadata"]["bucket"]) for row in sampled)
    assert max(counts.values()) == 6
    assert len(counts) == 4
    card = shardkit.open(folder / "some").card
    assert card is not None
    assert card.buckets.edges["score"][2] == edge
    assert {value for one in card.amounts for value in one.values} == {"high", "low"}


def test_clusters_are_fields_for_later_steps(folder: Path) -> None:
    pytest.importorskip("faiss")
    own = """
import numpy as np

def embed(texts):
    return np.array([[len(text) % 7 + 1, len(text) % 5, 1] for text in texts], np.float32)

def even(document):
    return document.metadata["cluster"] % 2 == 0
"""
    (folder / "own.py").write_text(own)
    embed = {"file": "own.py", "function": "embed"}
    semantic = {"semantic": {"embed": embed, "similarity": 1.0, "clusters": 4, "field": "cluster"}}
    even = {"python": {"file": "own.py", "function": "even"}}
    scores = [{"column": "cluster", "thresholds": [2]}]
    buckets = {"buckets": {"scores": scores, "labels": {"low": 0, "up": 1}}}
    last = {"sample": {"documents": 1, "by": "cluster", "sources": ["a"]}}
    every = rows_of(folder, "all", steps=["exact", semantic])
    wanted = sorted(row["text"] for row in every if row["metadata"]["cluster"] % 2 == 0)
    found = rows_of(folder, "some", steps=["exact", semantic, even, buckets])
    assert sorted(row["text"] for row in found) == wanted
    labels = {(row["metadata"]["cluster"], row["metadata"]["bucket"]) for row in found}
    assert labels == {(0, "low"), (2, "up")}
    sampled = rows_of(folder, "one", steps=["exact", semantic, last, even])
    assert sorted(row["metadata"]["cluster"] for row in sampled if row["source"] == "a") == [0, 2]


def test_group_and_split_as_steps_give_the_bytes_of_their_keys(folder: Path) -> None:
    steps = [LENGTH, "exact", NEAR]
    split, group = {"validation": {"a": "10%"}}, {"by": "kind"}
    run(folder, "keys", steps=steps, split=split)
    run(folder, "steps", steps=[*steps, {"split": split}])
    assert tree(folder / "steps") == tree(folder / "keys")
    run(folder, "group", filters=[LENGTH], dedup={"exact": True, **NEAR}, group=group)
    run(folder, "groups", steps=[*steps, {"group": "kind"}])
    assert tree(folder / "groups") == tree(folder / "group")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"steps": [{"split": {"validation": 9}}, "exact"]},
            "exact cannot come after split: a document that a",
        ),
        ({"steps": [{"split": {"validation": 9}}, {"group": "kind"}]}, "group cannot come after split"),
        ({"steps": [{"group": "kind"}, "exact"]}, "exact cannot come after group: documents are joined when"),
        ({"steps": [{"group": "kind"}, LENGTH]}, "length cannot come after group"),
        ({"steps": [{"split": {"validation": 9}}], "split": {"validation": 8}}, "split: `steps` has it, too"),
        ({"steps": [{"group": "no"}]}, "group: no input keeps a field 'no'"),
        ({"steps": ["exact", "url"]}, "url must come before exact; only filters may precede it"),
        ({"steps": [{"sample": "10%"}, "url"]}, "url must come before sample"),
        ({"steps": ["url", LENGTH, "url"]}, "url is listed twice; its keys are computed for all"),
        ({"steps": ["sample"]}, r"steps\[0\]: there is no step 'sample'"),
        ({"steps": [{"sample": {}}]}, "give share, documents, tokens or at_most; leave out the step"),
        ({"steps": [{"sample": {"share": 0.5, "documents": 3}}]}, "give share or documents, not both"),
        ({"steps": [{"sample": {"documents": 3, "repeat": 2}}]}, "sample.repeat: unknown key"),
        ({"steps": [{"sample": 12}]}, "write a share between 0 and 1, such as 25% or 0.25, not 12"),
        (
            {"steps": [{"sample": {"documents": 3, "sources": ["c"]}}]},
            "there is no source 'c'; sources: a, b",
        ),
        ({"steps": [{"sample": {"documents": 3, "by": "no"}}]}, "sample.by: no input keeps a field 'no'"),
        (
            {"steps": [{"sample": {"documents": 3, "by": "score"}}, SCORE]},
            "'score' is found by a step behind",
        ),
        ({"steps": [{"sample": {"documents": 3, "by": "language"}}]}, "languages are known only with"),
        (
            {"steps": [{"sample": {"tokens": 3}}], "output": {"path": "o", "format": "jsonl"}},
            "sample.tokens: no output has tokens",
        ),
        ({"filters": [{"sample": "10%"}]}, "filters"),
        ({"dedup": {"sample": "10%"}}, "dedup.sample: unknown key"),
    ],
)
def test_mistakes_are_named_with_their_place(folder: Path, keys: dict[str, Any], message: str) -> None:
    recipe = yaml.safe_load(write_recipe(folder, "out").read_text())
    with pytest.raises(RecipeError, match=message):
        recipe_from_mapping(recipe | keys, folder=folder)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([NEAR, LENGTH], "length comes after near, but an index has the documents that near leaves"),
        ([NEAR, "exact"], "exact comes after near"),
        ([NEAR, {"sample": "10%"}], "sample comes after near"),
        ([{"sample": {"tokens": 10}}, NEAR], "sample.tokens: an index has no tokens"),
    ],
)
def test_an_index_has_what_near_leaves(folder: Path, steps: list[Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_dedup_index(write_recipe(folder, "out", steps=steps), folder / "index", progress=False)


def test_an_index_is_of_the_last_near_and_each_near_has_its_own(folder: Path) -> None:
    path = write_recipe(folder, "first", steps=[LENGTH, "exact", NEAR])
    build_dedup_index(path, folder / "one", progress=False)
    again = write_recipe(folder, "again", steps=[NEAR, LENGTH, LOOSE])
    build_dedup_index(again, folder / "two", progress=False)
    against = {"near": {**LOOSE["near"], "against": ["two"]}}
    both = [{"near": {**NEAR["near"], "against": ["one"]}}, against]
    fresh = {"text": "words that no index has " + " ".join(map(text_of, range(900, 904)))}
    with (folder / "a-0.jsonl").open("a") as file:
        file.write(json.dumps(fresh) + "\n")
    rows = rows_of(folder, "out", steps=[LENGTH, *both], inputs=[{"path": "a-0.jsonl", "source": "a"}])
    assert [row["text"] for row in rows] == [fresh["text"]], "all others are in the index"
    card = shardkit.open(folder / "out").card
    assert card is not None
    assert card.dedup is not None
    assert card.dedup.near is not None
    assert [one.against for one in (*card.dedup.earlier_near, card.dedup.near)] == [["one"], ["two"]]
    repeated = rows_of(folder, "out", steps=[LENGTH, *both], inputs=[{"path": "a-0.jsonl", "source": "a"}])
    assert repeated == rows, "the same indexes are known by the card"
