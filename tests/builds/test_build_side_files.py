"""What filters tell beside the report, and the files that decide what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import BuildError
from shardkit.writers import build
from support.small_build import make_corpus, text_of

RECIPE = """\
inputs: [{path: "plain-*.jsonl"}]
filters: [{decontamination: {evaluations: [{path: evaluation.jsonl}], ngram: 5, min_item_words: 5}}]
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out}
"""


@pytest.mark.usefixtures("inline_builds")
def test_overlaps_with_evaluation_sets_are_published_and_a_changed_set_is_another_build(
    tmp_path: Path,
) -> None:
    recipe = make_corpus(tmp_path, documents=80, recipe=RECIPE)
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": text_of(7)}) + "\n")
    result = build(recipe, progress=False)
    rows = [json.loads(line) for line in (result.output / "decontamination.jsonl").read_text().splitlines()]
    found = {(row["file"], row["record"]) for row in rows}
    assert len(found) == result.funnel.dropped["decontamination/overlap"].documents > 0
    card = json.loads((result.output / "dataset.json").read_text())
    assert "decontamination.jsonl" in card["files"]
    assert build(recipe, progress=False).up_to_date
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": text_of(8)}) + "\n")
    with pytest.raises(BuildError, match="made with other lists or models of its filters"):
        build(recipe, progress=False)
