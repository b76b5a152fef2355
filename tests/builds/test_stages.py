"""A stage is told in one file: no string elsewhere has its name, and the steps of builds list all stages."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import shardkit.writers
from shardkit.writers.execution.stage import Stage, base_name
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.stages.graph import MAKING, OVER_ALL, stage_needs, stages_of
from shardkit.writers.stages.needs import Corpus, Shape

ROOT = Path(__file__).parents[2]
# Names of stages that are ordinary words, too: of recipes, cards, verbs, fields and folders.
WORDS = {
    *(
        "amounts",
        "bands",
        "buckets",
        "candidates",
        "clean",
        "documents",
        "duplicates",
        "exact",
        "files",
        "index",
        "lines",
        "near",
    ),
    *("pack", "parts", "provenance", "scores", "split", "text", "tokenizer", "upload", "url", "verify"),
}
SEMANTIC = {"embed": {"model": "model.safetensors", "tokenizer": "words.json"}}
EVERYTHING = {
    "dedup": {"url": {}, "exact": {}, "lines": {}, "near": {}, "semantic": SEMANTIC},
    "filters": [
        {"scores": {"path": "scores.jsonl", "key": "id", "columns": {"quality": {"min": 0.1}}}},
        {"buckets": {"scores": [{"column": "quality"}]}},
    ],
    "amounts": {"input-0": {"documents": 1000}},
    "split": {"parts": {"val": 10}},
    "outputs": [{"path": "rows"}, {"path": "texts", "format": "parquet"}],
}


def every_stage() -> dict[str, list[str]]:
    """The modules of writers that have each stage, by its name."""
    found = defaultdict(list)
    for info in pkgutil.walk_packages(shardkit.writers.__path__, "shardkit.writers."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Stage) and value.work.__module__ == info.name:
                found[value.name].append(info.name)
    return found


def strings() -> list[tuple[str, str]]:
    """(module, string) of all constants of the package."""
    found = []
    for root, package in (("shardkit", "shardkit"), ("writers", "shardkit.writers")):
        for path in sorted((ROOT / root).rglob("*.py")):
            name = ".".join((package, *path.relative_to(ROOT / root).with_suffix("").parts))
            if root == "shardkit" and name.startswith(("shardkit.writers.", "shardkit.loaders.")):
                continue  # the links to the folders beside
            constants = (
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            )
            found += [(name, node.value) for node in constants if isinstance(node.value, str)]
    return found


def test_no_string_outside_of_its_file_names_a_stage() -> None:
    stages = every_stage()
    assert len(stages) > 30
    told = [(module, text) for module, text in strings() if text in stages and module not in stages[text]]
    assert {text for _, text in told} <= WORDS, told


def test_names_have_no_dash_as_parts_of_stages_do() -> None:
    for name in every_stage():
        assert base_name(name) == name or base_name(name) in every_stage()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    content: dict[str, Any] = {
        "seed": 1,
        "inputs": [{"path": "a.jsonl", "url": "url", "metadata": ["quality"]}],
        "tokenizer": {"path": "tokenizer.json", "eos": "<eos>"},
        "pack": {"sequence_length": 8},
    }
    return recipe_from_mapping(content | EVERYTHING, folder=tmp_path)


def test_each_stage_that_a_recipe_asks_for_has_a_title_and_states_its_needs(recipe: Recipe) -> None:
    stages = stages_of(recipe)
    assert len({stage.name for stage in stages}) == len(stages) > 30
    assert all(stage.title for stage in stages)
    corpus = Corpus(
        splits=900,
        documents=10**6,
        text_bytes=10**9,
        tokens=10**8,
        steps=("url", "exact", "lines", "near", "semantic"),
        lines=10**6,
        is_sent=True,
        shape=Shape.of(recipe),
    )
    stated = {base_name(one.stage) for one in stage_needs(corpus)}
    beside = {"tokenizer"}  # which reads no document
    assert {stage.name for stage in stages} - beside <= stated


def test_steps_that_a_recipe_does_not_ask_for_state_nothing() -> None:
    corpus = Corpus(splits=9, documents=10**6, text_bytes=10**9, tokens=10**8, steps=())
    stated = [base_name(one.stage) for one in stage_needs(corpus)]
    assert sorted(set(stated)) == sorted(
        ["clean", "duplicates", "pack", "parity", "provenance", "side_files", "tokenize"]
    )
    assert (len(OVER_ALL), len(MAKING)) == (6, 7)
