"""The languages of documents, from the filter that found them to the card, columns and outputs of a build."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from shardkit import open_dataset
from shardkit.writers import build
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.train_classifier import TrainingSettings, train_classifier
from support.filter_runs import documents
from support.small_build import EOS, make_corpus

pytestmark = [pytest.mark.usefixtures("inline_builds"), pytest.mark.extended]

LANGUAGES = 400


def text_of(number: int) -> str:
    return f"in language w{number} one says w{number}a and w{number}b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in each of many languages, and a model that knows them."""
    pytest.importorskip("floret", reason="pip install 'shardkit[classifier]'")
    made = tmp_path_factory.mktemp("languages")
    shutil.copy(make_corpus(made / "small", 40).with_name("tokenizer.json"), made)
    spoken = [{"text": text_of(n), "label": f"l{n:03d}_Latn"} for n in range(LANGUAGES)] * 4
    (made / "spoken.jsonl").write_text("".join(json.dumps(one) + "\n" for one in spoken))
    settings = TrainingSettings(epochs=40, dimensions=32, word_ngrams=1, buckets=1, held_out=0)
    train_classifier(made / "spoken.jsonl", made / "model.bin", settings=settings)
    texts = [{"text": text_of(n)} for n in range(LANGUAGES)]
    (made / "texts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    return made


def recipe(output: dict[str, Any]) -> dict[str, Any]:
    return {
        "inputs": "texts.jsonl",
        "filters": [{"language": {"model": "model.bin", "threshold": 0.0}}],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "output": output,
    }


def build_in(folder: Path, output: dict[str, Any]) -> Path:
    path = folder / f"{output['path']}.yaml"
    path.write_text(yaml.safe_dump(recipe(output)))
    return build(path, workers=1, progress=False).output


def labels_of(folder: Path) -> dict[str, str]:
    """The language of each text, as the filter says."""
    texts = [text_of(n) for n in range(LANGUAGES)]
    steps = recipe_from_mapping(recipe({"path": "x"}), folder=folder).filter_chain()
    found = FilterChain(steps, folder).apply(documents(texts)).languages
    assert found is not None
    return dict(zip(texts, found.tolist(), strict=True))


def test_a_build_counts_more_languages_than_a_byte_can_number(folder: Path) -> None:
    labels = labels_of(folder)
    assert len(set(labels.values())) > 256
    with open_dataset(build_in(folder, {"path": "tokens"})) as dataset:
        assert dataset.card is not None
        found = dataset.card.languages()
    assert {label: counts.documents for label, counts in found.items()} == Counter(labels.values())


def test_each_document_of_a_dataset_of_text_has_the_language_that_the_filter_found(folder: Path) -> None:
    output = build_in(folder, {"path": "text", "format": "parquet"})
    rows = [row for file in sorted(output.rglob("*.parquet")) for row in _rows(file)]
    assert dict(rows) == labels_of(folder)


def _rows(file: Path) -> list[tuple[str, str]]:
    table = pq.read_table(file)
    if not {"text", "language"} <= set(table.column_names):
        return []
    return list(zip(table.column("text").to_pylist(), table.column("language").to_pylist(), strict=True))
