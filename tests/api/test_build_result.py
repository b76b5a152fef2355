"""What a build returns says what came of the documents, where the dataset is, and what to do next."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import shardkit as sk
from support.small_build import make_corpus


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> sk.BuildResult:
    folder = tmp_path_factory.mktemp("result") / "a <b> folder"
    return sk.build(make_corpus(folder, 80), workers=1, progress=False)


def test_a_result_tells_the_funnel_in_the_order_of_the_pipeline(result: sk.BuildResult) -> None:
    lines = repr(result).splitlines()
    assert lines[0] == f"Dataset {result.location}"
    assert [line.split()[0] for line in lines[1:4]] == ["read", "length", "exact_duplicate"]
    dropped = result.funnel.dropped
    assert lines[2].split()[1] == f"-{dropped['length/too_few_words'].documents}"
    assert re.fullmatch(r"\(\d+\.\d%\)", lines[2].split()[2])
    assert lines[3].split()[1] == f"-{dropped['exact_duplicate'].documents}"
    assert len(lines) <= 16
    facts = dict(line.strip().split("  ", 1) for line in lines[1:-2])
    assert facts["rows"].split()[:5] == [f"{result.samples},", "each", "of", "64", "tokens,"]
    steps = facts["time"].split("; ")[1].split(", ")
    assert len(steps) == 3
    assert any(step.startswith("read and filter ") for step in steps)
    assert facts["report"].strip() == f"{result.location}/report.html"
    assert Path(facts["report"].strip()).is_file()
    assert "<b>" not in result._repr_html_()
    assert "&lt;b&gt;" in result._repr_html_()


def test_a_result_opens_its_dataset(result: sk.BuildResult) -> None:
    with result.open() as dataset:
        assert (len(dataset), dataset.fingerprint) == (result.samples, result.fingerprint)


def test_a_build_that_had_nothing_to_do_tells_the_same_funnel(result: sk.BuildResult) -> None:
    again = sk.build(Path(result.location).parent / "recipe.yaml", workers=1, progress=False)
    assert again.up_to_date
    assert again.steps == result.steps
    assert "up to date: nothing to do" in repr(again)
    assert json.loads(json.dumps(again.to_dict()))["steps"] == [asdict(step) for step in result.steps]
